"""Spans: the steps between two rebuilds, as one SimPy event (DESIGN §6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import simpy
from numpy.typing import NDArray

from opal_gym.sim.clock import BOUNDARY, SimEnvironment
from opal_gym.sim.questions import StepPlan

MAX_SPAN_STEPS = 4096
"""A span's arrays stay small; a longer one is several."""


@dataclass(slots=True)
class Span:
    """Steps in which the batch does not change.

    Attributes:
        plan: What each of them computes.
        start: When the first step begins, s.
        times: End of each step, shape (k,), s.
        steps: Steps that will be made: k, or fewer once the span is cut.
        boundary: The event at the end of the last of them.
    """

    plan: StepPlan
    start: float
    times: NDArray[np.float64]
    steps: int
    boundary: simpy.Event

    def cut(self, env: SimEnvironment) -> None:
        """Ends the span at the next step boundary; its old event will find nothing to do."""
        steps = self.steps_begun(env.now)
        if steps < self.steps:
            old, self.steps = self.boundary, steps
            self.boundary = env.at(float(self.times[steps - 1]), BOUNDARY)
            self.boundary.callbacks, old.callbacks = old.callbacks, []

    def steps_begun(self, now: float) -> int:
        """Steps that have begun before `now`."""
        return int(self.times.searchsorted(now)) + 1

    def block_seconds(self, taken: NDArray[np.int64], now: float) -> float:
        """Blocks·s until `now` of the blocks that steps 2, 3, … took when they began."""
        return float(taken.dot(now - self.times[: len(taken)]))
