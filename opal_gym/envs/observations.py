"""Observations: the pending decision, scaled into Boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from opal_gym.sim.candidates import FEATURES, Feature
from opal_gym.sim.decision import Decision, DecisionKind
from opal_gym.sim.gauges import GAUGES, WorkerGauges

Observation = dict[str, Any]
"""Float32 arrays by name; typed as Gymnasium types `spaces.Dict`."""

KINDS = tuple(DecisionKind)


class Scaler:
    """Scales columns of raw values into [low / scale, 1].

    Linear columns are divided by their scale; logarithmic ones become log(1 + x) / log(1 + scale).
    What lies outside is clipped.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self._log = np.array([feature.scaling == "log" for feature in features])
        scale = np.array([feature.scale for feature in features])
        self._divisor = np.where(self._log, np.log1p(scale), scale)
        self.low = np.array([feature.low / feature.scale for feature in features])

    def scale(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Scales `values`, whose last axis is the features; same shape, float32."""
        scaled = values.copy()
        scaled[..., self._log] = np.log1p(scaled[..., self._log])
        scaled /= self._divisor
        np.clip(scaled, self.low, 1.0, out=scaled)
        observed: NDArray[np.float32] = scaled.astype(np.float32)
        return observed


class ObservationBuilder:
    """Builds observations of at most `max_candidates` candidates.

    Attributes:
        space: `kind` (3,): which kind of decision is pending, one-hot, all 0 if none;
            `worker` (len(GAUGES),): the worker's gauges;
            `candidates` (max_candidates * len(FEATURES),): the candidate table, row-major, zeros
            below the last candidate.
    """

    def __init__(self, max_candidates: int) -> None:
        self._rows = max_candidates
        self._features = Scaler(FEATURES)
        self._gauges = Scaler(GAUGES)
        self.space = spaces.Dict(
            {
                "kind": _box(np.zeros(len(KINDS))),
                "worker": _box(self._gauges.low),
                "candidates": _box(np.tile(self._features.low, max_candidates)),
            }
        )

    def build(self, decision: Decision | None, gauges: WorkerGauges) -> Observation:
        """A new observation of the pending decision; None: the episode is over."""
        kind = np.zeros(len(KINDS), np.float32)
        candidates = np.zeros((self._rows, len(FEATURES)), np.float32)
        if decision is not None:
            kind[KINDS.index(decision.kind)] = 1
            table = decision.candidates
            candidates[: len(table)] = self._features.scale(table.values)
        return {
            "kind": kind,
            "worker": self._gauges.scale(gauges.values),
            "candidates": candidates.reshape(-1),
        }


def _box(low: NDArray[np.float64]) -> spaces.Box:
    return spaces.Box(low.astype(np.float32), np.ones(len(low), np.float32), dtype=np.float32)
