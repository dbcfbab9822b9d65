"""Reward terms: differences of totals that sum to what they are named after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import sub

import numpy as np

from opal_gym.config import RewardTerm
from opal_gym.sim.simulation import Simulation, accepted_requests

RewardFunction = Callable[[Mapping[str, float]], float]
"""Maps a step's reward terms by name to the reward."""

TERMS: Mapping[RewardTerm, str] = {
    "latency": "-(1/n) ∫ N dt; sums to minus the mean end-to-end latency, s",
    "slowdown": "the same, each request weighted by weight / unloaded latency, over Σ weight",
    "ttft": "-(1/n) ∫ (requests without a first token) dt; sums to minus the mean TTFT, s",
    "goodput": "weight of completed requests that met their objectives, over Σ weight",
    "throughput": "output tokens of completed requests, over the episode's",
    "preemption": "-(1/n) for each eviction",
}
"""What each term is; n = the episode's requests that are not rejected."""


class WeightedReward:
    """The weighted sum of the named terms; it pickles with an environment.

    Args:
        weights: Weight of each term.
    """

    def __init__(self, weights: Mapping[RewardTerm, float]) -> None:
        self._weights = dict(weights)

    def __call__(self, terms: Mapping[str, float]) -> float:
        """The reward of a step."""
        return sum(weight * terms[name] for name, weight in self._weights.items())


class RewardTerms:
    """The reward terms of one episode."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        workload = simulation.workload
        accepted = accepted_requests(simulation.config, workload)
        weights = np.array([tenant.weight for tenant in workload.tenants])[workload.tenant]
        self._requests = max(1, int(accepted.sum()))
        self._weight = float(weights[accepted].sum()) or 1.0
        self._tokens = max(1, int(workload.output_tokens[accepted].sum()))
        self._last = (0.0,) * len(TERMS)

    def step(self) -> dict[str, float]:
        """What each term earned since the last call."""
        totals = self._totals()
        earned = dict(zip(TERMS, map(sub, totals, self._last), strict=True))
        self._last = totals
        return earned

    def _totals(self) -> tuple[float, ...]:
        """The terms' totals so far, in the order of `TERMS`."""
        ledger, now = self._simulation.ledger, self._simulation.env.now
        return (
            -ledger.in_system.at(now) / self._requests,
            -ledger.slowdown.at(now) / self._weight,
            -ledger.awaiting_token.at(now) / self._requests,
            ledger.good_weight / self._weight,
            ledger.completed_tokens / self._tokens,
            -ledger.preemptions / self._requests,
        )
