"""The times of a worker's engine steps."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

StepRun = tuple[int, int]
"""First step and number of steps of a run of consecutive engine steps."""


class RunLists:
    """Lists of runs, one a request, in two flat arrays: 8 bytes a list and 16 bytes a run."""

    def __init__(self) -> None:
        self._ends = array("q", [0])
        self._numbers = array("q")

    def append(self, runs: Sequence[StepRun]) -> None:
        """Adds a list."""
        for run in runs:
            self._numbers.extend(run)
        self._ends.append(len(self._numbers))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[list[StepRun]]:
        for begin, end in pairwise(self._ends):
            numbers = self._numbers[begin:end]
            yield list(zip(numbers[::2], numbers[1::2], strict=True))


class StepLog:
    """End times of every engine step of one worker, in seconds.

    Requests refer to steps by number, so that a token's timestamp costs nothing: the tokens of a
    decode are made at consecutive steps.

    Attributes:
        count: Steps that have ended.
        scheduled: Steps whose blocks are taken: `count`, or one more while a step runs.
    """

    def __init__(self) -> None:
        self.count = 0
        self.scheduled = 0
        self._times = np.empty(1024)

    def append(self, time: float) -> None:
        """Ends one step at `time`."""
        self._reserve(1)
        self._times[self.count] = time
        self.count += 1

    def extend(self, times: NDArray[np.float64]) -> None:
        """Ends the steps at `times`, shape (k,), in order."""
        self._reserve(len(times))
        self._times[self.count : self.count + len(times)] = times
        self.count += len(times)

    def times(self, first: int, steps: int) -> NDArray[np.float64]:
        """End times of the steps `first` … `first + steps - 1`, shape (steps,)."""
        return self._times[first : first + steps]

    def expand(self, runs: Sequence[StepRun]) -> NDArray[np.float64]:
        """End times of all steps of some runs, in their order, s."""
        if len(runs) == 1:
            return self.times(*runs[0])
        return np.concatenate([np.empty(0), *(self.times(*run) for run in runs)])

    def _reserve(self, steps: int) -> None:
        if self.count + steps > len(self._times):
            grown = np.empty(max(2 * len(self._times), self.count + steps))
            grown[: self.count] = self._times[: self.count]
            self._times = grown
