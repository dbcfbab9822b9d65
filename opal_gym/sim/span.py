"""Spans: the steps between two rebuilds, as one SimPy event (DESIGN §6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

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
        taken: Steps whose blocks have been taken from the pool; the first one's are from the start.
    """

    plan: StepPlan
    start: float
    times: NDArray[np.float64]
    steps: int
    boundary: simpy.Event
    taken: int = 1

    def cut(self, env: SimEnvironment) -> None:
        """Ends the span at the next step boundary; its old event will find nothing to do."""
        steps = self.steps_begun(env.now)
        if steps < self.steps:
            old, self.steps = self.boundary, steps
            self.boundary = env.at(self.times.item(steps - 1), BOUNDARY)
            self.boundary.callbacks, old.callbacks = old.callbacks, []

    def steps_begun(self, now: float) -> int:
        """Steps that have begun before `now`."""
        return int(self.times.searchsorted(now)) + 1

    def block_seconds(self, blocks: Sequence[int], now: float) -> float:
        """Blocks·s until `now` of the blocks that the steps after `taken` took when they began."""
        begins = self.times[self.taken - 1 : self.taken - 1 + len(blocks)]
        ages: list[float] = (now - begins).tolist()
        held: float = sum(map(mul, blocks, ages))
        return held
