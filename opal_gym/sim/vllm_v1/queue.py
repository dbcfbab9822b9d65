"""The waiting queues of `vllm_v1`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, count, islice
from typing import Literal

from opal_gym.sim.queue import WaitingQueue
from opal_gym.sim.request import VLLMSchedulerRequest, by_age
from opal_gym.sim.vllm_v1.request import V1Request


class V1WaitingQueue(WaitingQueue):
    """vLLM's two waiting queues: requests that hold blocks stand before those that hold none.

    Policy `fcfs`: arrivals at the end, preempted requests at the front, the last one first.
    Policy `priority`: by (priority, arrival, id), wherever a request comes from.

    Attributes:
        prompt_tokens: Sum of the waiting requests' prompt tokens.
    """

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        super().__init__()
        self._policy = policy
        self._waiting: list[V1Request] = []
        self._parked: list[V1Request] = []
        self._ages: list[VLLMSchedulerRequest] = []
        self._back, self._front = count(1), count(-1, -1)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._parked)

    def __iter__(self) -> Iterator[V1Request]:
        return chain(self._parked, self._waiting)

    def append(self, request: VLLMSchedulerRequest) -> None:
        """Adds an arrival."""
        self._join(request, next(self._back))

    def push_front(self, request: VLLMSchedulerRequest) -> None:
        """Adds a request that gave up its blocks."""
        self._join(request, next(self._front))

    def park(self, request: V1Request) -> None:
        """A waiting request took blocks for its remote load."""
        self._delete(self._waiting, request)
        request.parked = True
        self._insert(self._parked, request, next(self._back))

    def remove(self, request: VLLMSchedulerRequest) -> None:
        """Takes a request out, wherever it stands."""
        assert isinstance(request, V1Request)
        self.prompt_tokens -= request.prompt_tokens
        del self._ages[bisect_left(self._ages, request.order, key=by_age)]
        self._delete(self._parked if request.parked else self._waiting, request)
        request.parked = False

    @property
    def parked(self) -> list[V1Request]:
        """Requests that hold blocks: their remote load is under way or has ended."""
        return self._parked

    def window(self, requests: int) -> Iterator[V1Request]:
        """Those that hold blocks, then the first `requests` of the others."""
        return chain(self._parked, islice(self._waiting, requests))

    def oldest(self) -> VLLMSchedulerRequest:
        """The request that arrived first."""
        return self._ages[0]

    def _join(self, request: VLLMSchedulerRequest, place: int) -> None:
        self.prompt_tokens += request.prompt_tokens
        insort(self._ages, request, key=by_age)
        self._insert(self._waiting, request, place)

    def _insert(self, queue: list[V1Request], request: VLLMSchedulerRequest, place: int) -> None:
        assert isinstance(request, V1Request)
        priority = request.llm_request.priority
        request.place = (
            (place,)
            if self._policy == "fcfs"
            else (priority, request.arrival_time, request.request_id)
        )
        insort(queue, request, key=_place)

    def _delete(self, queue: list[V1Request], request: V1Request) -> None:
        del queue[bisect_left(queue, request.place, key=_place)]


def _place(request: V1Request) -> tuple[float, ...]:
    return request.place
