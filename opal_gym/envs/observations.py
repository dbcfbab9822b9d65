"""Observations: the pending decision, scaled into Boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from opal_gym.sim.candidates import FEATURES
from opal_gym.sim.decision import DecisionKind
from opal_gym.sim.features import Scaler
from opal_gym.sim.gauges import GAUGES, read_gauges
from opal_gym.sim.simulation import Simulation

Observation = dict[str, Any]
"""Float32 arrays by name; typed as Gymnasium types `spaces.Dict`."""

KINDS = tuple(DecisionKind)
_NO_KIND = np.zeros(len(KINDS), np.float32)
_ONE_HOT = dict(zip(KINDS, np.eye(len(KINDS), dtype=np.float32), strict=True))


class ObservationBuilder:
    """Builds observations of at most `max_candidates` candidates.

    Args:
        max_candidates: Rows of the candidate table.
        num_workers: Workers of the simulation.

    Attributes:
        space: `kind` (3,): which kind of decision is pending, one-hot, all 0 if none;
            `worker` (len(GAUGES),): the worker's gauges;
            `candidates` (max_candidates * len(FEATURES),): the candidate table, row-major, zeros
            below the last candidate;
            `others` (len(GAUGES),), with several workers: the mean of the other workers' gauges.
    """

    def __init__(self, max_candidates: int, num_workers: int) -> None:
        self._rows = max_candidates
        self._has_others = num_workers > 1
        self._features = Scaler(FEATURES)
        self._gauges = Scaler(GAUGES)
        boxes: dict[str, spaces.Space[Any]] = {
            "kind": _box(_NO_KIND),
            "worker": _box(self._gauges.low),
            "candidates": _box(np.tile(self._features.low, max_candidates)),
        }
        if num_workers > 1:
            boxes["others"] = _box(self._gauges.low)
        self.space = spaces.Dict(boxes)

    def build(self, simulation: Simulation) -> Observation:
        """A new observation of the pending decision and of the worker that asks it."""
        decision, worker = simulation.pending, simulation.worker
        candidates = np.zeros((self._rows, len(FEATURES)), np.float32)
        if decision is None:
            kind, gauges = _NO_KIND.copy(), read_gauges(worker)
        else:
            kind, gauges = _ONE_HOT[decision.kind].copy(), decision.gauges
            table = decision.candidates
            self._features.scale(table.values, out=candidates[: len(table)])
        observation = {
            "kind": kind,
            "worker": self._scaled(gauges.values),
            "candidates": candidates.reshape(-1),
        }
        if self._has_others:
            others = [read_gauges(other).values for other in simulation.other_workers(worker)]
            observation["others"] = self._scaled(np.mean(others, axis=0))
        return observation

    def _scaled(self, gauges: NDArray[np.float64]) -> NDArray[np.float32]:
        return self._gauges.scale(gauges, out=np.empty(len(GAUGES), np.float32))


def _box(low: NDArray[np.floating]) -> spaces.Box:
    return spaces.Box(low.astype(np.float32), np.ones(len(low), np.float32), dtype=np.float32)
