"""Live requests as rows of one array, so that candidate tables need no loop over requests."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from opal_gym.sim.request import LLMRequest


class Column(IntEnum):
    """Columns of `RequestTable.data`; the first ones never change in a request's life."""

    ARRIVAL_TIME = 0
    PROMPT = 1
    PREDICTED_OUTPUT = 2
    KV_AREA = 3
    WEIGHT = 4
    TTFT_SLO = 5
    TPOT_SLO = 6
    PROCESSED = 7
    BLOCKS = 8
    LOOKUP = 9
    PREEMPTIONS = 10
    ORIGIN_STEP = 11
    STATE = 12
    FIRST_TOKEN_TIME = 13
    DELIVERED = 14


class State(IntEnum):
    """What a table row says about a request's phase."""

    UNLOOKED = 0
    MATCHED = 1
    FETCHING = 2
    READY = 3
    PREFILL = 4
    DECODE = 5


def kv_area(prompt: float, output: float) -> float:
    """Predicted KV area in token·steps: output · (prompt + output / 2)."""
    return output * (prompt + output / 2)


class RequestTable:
    """One row a live request; rows are reused.

    Attributes:
        data: Shape (capacity, len(Column)), float64.
    """

    def __init__(self) -> None:
        self.data = np.zeros((64, len(Column)))
        self._free = list(range(63, -1, -1))

    def add(self, request: LLMRequest) -> int:
        """Gives a request a row; returns its number."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        prompt, predicted, tenant = (
            request.prompt_tokens,
            request.predicted_output_tokens,
            request.tenant,
        )
        self.data[row] = (
            request.arrival_time,
            prompt,
            predicted,
            kv_area(prompt, predicted),
            tenant.weight,
            tenant.ttft_slo_s,
            tenant.tpot_slo_s,
            *(0, 0, 0, 0, 0, State.UNLOOKED),
            np.inf,
            0,
        )
        return row

    def release(self, row: int) -> None:
        """Takes a row back."""
        self._free.append(row)

    def rows(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """The rows `rows`, shape (len(rows), len(Column))."""
        return self.data[rows]

    def _grow(self) -> None:
        capacity = len(self.data)
        self.data = np.concatenate([self.data, np.zeros_like(self.data)])
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))
