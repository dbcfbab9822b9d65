"""Live requests as rows of one array, so that candidate tables need no loop over requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.candidates import FEATURES, INDEX

if TYPE_CHECKING:
    from opal_gym.sim.request import LLMRequest

ARRIVAL_TIME = len(FEATURES)
TTFT_SLO = ARRIVAL_TIME + 1
TPOT_SLO = ARRIVAL_TIME + 2
ORIGIN_STEP = ARRIVAL_TIME + 3
"""While decoding: the step count at which nothing was generated; infinite otherwise."""
FIRST_TOKEN_TIME = ARRIVAL_TIME + 4
"""When the first output token was made; infinite before."""
DELIVERED = ARRIVAL_TIME + 5
COLUMNS = ARRIVAL_TIME + 6

PRESENT = INDEX["present"]
PROMPT = INDEX["prompt_tokens"]
PROMPT_REMAINING = INDEX["prompt_remaining"]
PREDICTED_OUTPUT = INDEX["predicted_output_tokens"]
PREDICTED_REMAINING = INDEX["predicted_remaining"]
KV_AREA = INDEX["predicted_kv_area"]
PREFIX_HIT = INDEX["prefix_hit_tokens"]
IS_FETCH = INDEX["is_fetch"]
PREEMPTIONS = INDEX["preemptions"]
WEIGHT = INDEX["weight"]


def kv_area(prompt: float, output: float) -> float:
    """Predicted KV area in token·steps: output · (prompt + output / 2)."""
    return output * (prompt + output / 2)


class RequestTable:
    """One row a live request; rows are reused.

    The first columns are the features of a candidate table, as far as they follow from the request
    alone; those that depend on the moment are 0 here. Then come the columns named above.

    Attributes:
        data: Shape (capacity, COLUMNS), float64.
    """

    def __init__(self) -> None:
        self.data = np.zeros((64, COLUMNS))
        self._free = list(range(63, -1, -1))

    def add(self, request: LLMRequest) -> int:
        """Gives a request a row; returns its number."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        prompt, predicted = request.prompt_tokens, request.predicted_output_tokens
        data = self.data[row]
        data[:] = 0
        data[PRESENT] = 1
        data[PROMPT] = data[PROMPT_REMAINING] = prompt
        data[PREDICTED_OUTPUT] = predicted
        data[PREDICTED_REMAINING] = max(1, predicted)
        data[KV_AREA] = kv_area(prompt, predicted)
        data[WEIGHT] = request.tenant.weight
        data[ARRIVAL_TIME] = request.arrival_time
        data[TTFT_SLO] = request.tenant.ttft_slo_s
        data[TPOT_SLO] = request.tenant.tpot_slo_s
        data[ORIGIN_STEP] = data[FIRST_TOKEN_TIME] = np.inf
        return row

    def release(self, row: int) -> None:
        """Takes a row back."""
        self._free.append(row)

    def _grow(self) -> None:
        capacity = len(self.data)
        self.data = np.concatenate([self.data, np.zeros_like(self.data)])
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))


class RowSet:
    """A set of rows as an array; adding and removing cost O(1)."""

    def __init__(self) -> None:
        self._rows = np.empty(64, np.intp)
        self._place: dict[int, int] = {}

    @property
    def rows(self) -> NDArray[np.intp]:
        """The rows, in no particular but reproducible order."""
        return self._rows[: len(self._place)]

    def add(self, row: int) -> None:
        """Adds a row."""
        place = len(self._place)
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[place] = row
        self._place[row] = place

    def remove(self, row: int) -> None:
        """Removes a row; the last one takes its place."""
        last = int(self._rows[len(self._place) - 1])
        place = self._place[last] = self._place[row]
        self._rows[place] = last
        del self._place[row]
