"""Live requests as rows of one array, so that candidate tables need no loop over requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.candidates import FEATURES, INDEX

if TYPE_CHECKING:
    from opal_gym.sim.request import LLMRequest, VLLMSchedulerRequest

REQUEST_ID = len(FEATURES)
TPOT_SLO = REQUEST_ID + 1
ORIGIN_STEP = REQUEST_ID + 2
"""While decoding: the step count at which nothing was generated; infinite otherwise."""
FIRST_TOKEN_TIME = REQUEST_ID + 3
"""When the first output token was made; infinite before."""
DELIVERED = REQUEST_ID + 4
ADMISSION = REQUEST_ID + 5
"""Number of its last admission to the batch."""
COLUMNS = REQUEST_ID + 6

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
WAITING_TIME = INDEX["waiting_time"]
"""In the table: the arrival time."""
TTFT_SLACK = INDEX["ttft_slack"]
"""In the table: the time at which the TTFT objective is missed; infinite once it is met or not."""
TPOT_SLACK = INDEX["tpot_slack"]
"""In the table: while waiting, the time at which the TPOT objective's pace is lost."""


def kv_area(prompt: float, output: float) -> float:
    """Predicted KV area in token·steps: output · (prompt + output / 2)."""
    return output * (prompt + output / 2)


def remaining_output(
    data: NDArray[np.float64], generated: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Output tokens still to come, as predicted; at least 1.

    Args:
        data: Rows of the request table, shape (n, COLUMNS).
        generated: Tokens generated, shape (n,).
    """
    remaining: NDArray[np.float64] = np.maximum(1.0, data[:, PREDICTED_OUTPUT] - generated)
    return remaining


class RequestTable:
    """One row a live request; rows are reused.

    The first columns are the features of a candidate table, as far as they follow from the request
    alone: durations are absolute times here, what else depends on the moment is 0. Then come the
    columns named above.

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
        data = [0.0] * COLUMNS
        data[PRESENT] = 1
        data[PROMPT] = data[PROMPT_REMAINING] = prompt
        data[PREDICTED_OUTPUT] = predicted
        data[PREDICTED_REMAINING] = max(1, predicted)
        data[KV_AREA] = kv_area(prompt, predicted)
        data[WEIGHT] = request.tenant.weight
        data[WAITING_TIME] = request.arrival_time
        data[REQUEST_ID] = request.request_id
        data[TTFT_SLACK] = request.arrival_time + request.tenant.ttft_slo_s
        data[TPOT_SLO] = request.tenant.tpot_slo_s
        data[TPOT_SLACK] = data[ORIGIN_STEP] = data[FIRST_TOKEN_TIME] = math.inf
        self.data[row] = data
        return row

    def release(self, row: int) -> None:
        """Takes a row back."""
        self._free.append(row)

    def _grow(self) -> None:
        capacity = len(self.data)
        self.data = np.concatenate([self.data, np.zeros_like(self.data)])
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))


class Members:
    """A set of requests with their rows as an array; adding and removing cost O(1).

    Attributes:
        requests: The requests, in no particular but reproducible order.
    """

    def __init__(self) -> None:
        self.requests: list[VLLMSchedulerRequest] = []
        self._rows = np.empty(64, np.intp)
        self._place: dict[int, int] = {}

    @property
    def rows(self) -> NDArray[np.intp]:
        """Their rows, in the same order, shape (n,)."""
        return self._rows[: len(self.requests)]

    def add(self, request: VLLMSchedulerRequest) -> None:
        """Adds a request."""
        place = len(self.requests)
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[place] = request.row
        self._place[request.row] = place
        self.requests.append(request)

    def remove(self, request: VLLMSchedulerRequest) -> None:
        """Removes a request; the last one takes its place."""
        last = self.requests.pop()
        place = self._place[last.row] = self._place[request.row]
        self._rows[place] = last.row
        if last is not request:
            self.requests[place] = last
        del self._place[request.row]
