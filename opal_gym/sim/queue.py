"""The waiting queue: FIFO, with preempted requests in front."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from opal_gym.sim.request import VLLMSchedulerRequest, by_age


class WaitingQueue:
    """Waiting requests in the order in which FIFO serves them.

    Preempted requests stand at the front, older ones nearer the head; then come the others in the
    order of their arrival. Every touch is O(1) (a preempted request: O(log n)).

    Attributes:
        prompt_tokens: Sum of the waiting requests' prompt tokens.
    """

    def __init__(self) -> None:
        self._preempted: list[VLLMSchedulerRequest] = []
        self.prompt_tokens = 0
        self._arrived: OrderedDict[int, VLLMSchedulerRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._arrived)

    def __iter__(self) -> Iterator[VLLMSchedulerRequest]:
        return chain(self._preempted, self._arrived.values())

    def append(self, request: VLLMSchedulerRequest) -> None:
        """Adds an arrival at the end."""
        self._arrived[request.request_id] = request
        self.prompt_tokens += request.prompt_tokens

    def push_front(self, request: VLLMSchedulerRequest) -> None:
        """Adds a preempted request at the front, by its age among the preempted."""
        insort(self._preempted, request, key=by_age)
        self.prompt_tokens += request.prompt_tokens

    def remove(self, request: VLLMSchedulerRequest) -> None:
        """Takes a request out, wherever it stands."""
        self.prompt_tokens -= request.prompt_tokens
        if self._arrived.pop(request.request_id, None) is None:
            del self._preempted[bisect_left(self._preempted, request.order, key=by_age)]

    def window(self, requests: int) -> Iterator[VLLMSchedulerRequest]:
        """The first `requests` requests."""
        return islice(self, requests)

    def oldest(self) -> VLLMSchedulerRequest:
        """The request that arrived first."""
        arrived = next(iter(self._arrived.values()), None)
        if not self._preempted:
            assert arrived is not None
            return arrived
        evicted = self._preempted[0]
        return evicted if arrived is None else min(evicted, arrived, key=by_age)
