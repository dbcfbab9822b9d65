"""A workload: the requests of one episode, in columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.request import DEFAULT_TENANT, LLMRequest, Tenant

if TYPE_CHECKING:
    from opal_gym.config import LengthInformation

ROWS_AT_ONCE = 1024
"""Rows whose requests are made together."""


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, one row each; n rows.

    Attributes:
        arrival_time: Seconds, not decreasing, shape (n,), float64.
        prompt_tokens: Shape (n,), int64, at least 1.
        output_tokens: True output lengths, shape (n,), int64, at least 1.
        predicted_output_tokens: What schedulers see; 0: nothing; shape (n,), int64.
        tenant: Row of `tenants`, shape (n,), int64.
        priority: vLLM's priority, shape (n,), int64.
        tenants: The tenants.
        hash_ids: Chained hashes of each prompt's blocks; empty: no request has any.
        next_rows: Closed-loop sessions: the row of the next turn, -1: none; shape (n,), int64;
            empty: there are no sessions. Later turns stand after all first ones, with an
            infinite arrival time: they arrive when the turn before has ended, plus the think time.
        think_time: Seconds before each later turn, shape (n,); empty: there are no sessions.
        load: Share of the configured rate at which the requests arrive.
        left_out: Rows of a trace that are not in the workload, by reason.
    """

    arrival_time: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    predicted_output_tokens: NDArray[np.int64]
    tenant: NDArray[np.int64]
    priority: NDArray[np.int64]
    tenants: tuple[Tenant, ...] = (DEFAULT_TENANT,)
    hash_ids: tuple[tuple[int, ...], ...] = ()
    next_rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    think_time: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    load: float = 1.0
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.arrival_time)

    def __iter__(self) -> Iterator[LLMRequest]:
        """Fresh requests, in order of arrival."""
        for begin in range(0, len(self), ROWS_AT_ONCE):
            yield from self.requests(slice(begin, begin + ROWS_AT_ONCE))

    def with_length_information(self, length_information: LengthInformation) -> Workload:
        """The same requests, with what schedulers may see of their output lengths.

        Args:
            length_information: `predicted`: the predictions as they are; `oracle`: the truth;
                `none`: nothing.
        """
        if length_information == "predicted":
            return self
        seen = self.output_tokens if length_information == "oracle" else 0 * self.output_tokens
        return replace(self, predicted_output_tokens=seen)

    def next_turn(self, row: int) -> tuple[LLMRequest, float] | None:
        """The session's turn after row `row` as a fresh request, with its think time in s."""
        if not len(self.next_rows) or self.next_rows[row] < 0:
            return None
        following = int(self.next_rows[row])
        return self.request(following), float(self.think_time[following])

    def request(self, row: int) -> LLMRequest:
        """A fresh request from row `row`, which is also its id."""
        (request,) = self.requests(slice(row, row + 1))
        return request

    def requests(self, rows: slice) -> Iterator[LLMRequest]:
        """Fresh requests from the rows `rows`; a row's number is also its request's id."""
        ids = range(len(self))[rows]
        return map(
            LLMRequest,
            ids,
            # Python's numbers at once: element by element they cost several times as much.
            self.arrival_time[rows].tolist(),
            self.prompt_tokens[rows].tolist(),
            self.output_tokens[rows].tolist(),
            self.predicted_output_tokens[rows].tolist(),
            [self.tenants[tenant] for tenant in self.tenant[rows].tolist()],
            self.priority[rows].tolist(),
            self.hash_ids[rows] if self.hash_ids else [()] * len(ids),
        )
