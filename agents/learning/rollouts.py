"""Rollouts: what happened in whole episodes in which decisions were sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.learning.inputs import CONTEXT, Inputs, inputs_of
from opal_gym.config import Config, RewardTerm
from opal_gym.envs.rewards import RewardTerms, WeightedReward
from opal_gym.sim.candidates import FEATURES
from opal_gym.sim.decision import STOP, Decision, DecisionKind, Policy
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import Workload

Chooser = Callable[[Decision, Inputs], "tuple[int, float]"]
"""Answers a decision: the choice, n for STOP, and the logarithm of its probability."""


@dataclass(frozen=True)
class Rollout:
    """The decisions of one episode, D of them, and what they cost.

    Attributes:
        context: Shape (D, CONTEXT).
        rows: The candidates of all decisions one below the other.
        num_candidates: Of each decision, shape (D,).
        stop_allowed: Shape (D,).
        choice: Shape (D,); num_candidates for STOP.
        log_prob: Logarithm of the choice's probability, shape (D,).
        time: When each was asked, s, and the episode's end, shape (D + 1,).
        reward: What was earned until the next was asked, or the episode ended, shape (D,).
        score: Sum of all rewards, those before the first decision among them.
    """

    context: NDArray[np.float32]
    rows: NDArray[np.float32]
    num_candidates: NDArray[np.int64]
    stop_allowed: NDArray[np.bool_]
    choice: NDArray[np.int64]
    log_prob: NDArray[np.float32]
    time: NDArray[np.float64]
    reward: NDArray[np.float64]
    score: float


def episode_score(
    config: Config, workload: Workload, policy: Policy, reward: Mapping[RewardTerm, float]
) -> float:
    """Sum of an episode's rewards, with a policy that answers all decisions in process."""
    simulation = Simulation(config, workload, policy, horizon_s=config.env.horizon_s)
    terms = RewardTerms(simulation)
    simulation.run()
    return WeightedReward(reward)(terms.step())


def rollout(
    config: Config,
    workload: Workload,
    choose: Chooser,
    kinds: tuple[DecisionKind, ...],
    reward: Mapping[RewardTerm, float],
) -> Rollout:
    """Runs one episode; `choose` answers the decisions of `kinds`, the baseline the others."""
    simulation = Simulation(config, workload, outside=kinds, horizon_s=config.env.horizon_s)
    terms, weighted = RewardTerms(simulation), WeightedReward(reward)
    seen: list[Inputs] = []
    stops: list[bool] = []
    answers: list[tuple[int, float]] = []
    times: list[float] = []
    rewards: list[float] = []
    while (decision := simulation.advance()) is not None:
        rewards.append(weighted(terms.step()))
        times.append(simulation.env.now)
        inputs = inputs_of(decision)
        choice, log_prob = choose(decision, inputs)
        seen.append(inputs)
        stops.append(decision.stop_allowed)
        answers.append((choice, log_prob))
        simulation.answer(STOP if choice == decision.num_candidates else choice)
    rewards.append(weighted(terms.step()))
    times.append(simulation.env.now)
    return Rollout(
        context=np.array([each.context for each in seen], np.float32).reshape(-1, CONTEXT),
        rows=np.concatenate([np.empty((0, len(FEATURES)), np.float32), *(e.rows for e in seen)]),
        num_candidates=np.array([len(each.rows) for each in seen], np.int64),
        stop_allowed=np.array(stops, np.bool_),
        choice=np.array([choice for choice, _ in answers], np.int64),
        log_prob=np.array([log_prob for _, log_prob in answers], np.float32),
        time=np.array(times),
        reward=np.array(rewards[1:]),
        score=float(np.sum(rewards)),
    )
