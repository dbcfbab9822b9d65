"""The times of a worker's engine steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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

    def _reserve(self, steps: int) -> None:
        if self.count + steps > len(self._times):
            grown = np.empty(max(2 * len(self._times), self.count + steps))
            grown[: self.count] = self._times[: self.count]
            self._times = grown
