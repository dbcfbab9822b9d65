"""The router: hands requests to workers and takes finished ones back."""

from __future__ import annotations

from typing import Protocol

from opal_gym.sim.request import LLMRequest


class Worker(Protocol):
    """What a router knows of a worker."""

    def queue_work(self, request: LLMRequest) -> None:
        """Takes a request."""


class Router:
    """Sends requests to the workers in turn (`RoundRobin`).

    Attributes:
        finished_requests: How many requests the workers have handed back.
    """

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.finished_requests = 0
        self._next = 0

    def route(self, request: LLMRequest) -> None:
        """Sends a request to the next worker."""
        self.workers[self._next].queue_work(request)
        self._next = (self._next + 1) % len(self.workers)

    def collect(self, request: LLMRequest) -> None:
        """Takes a finished request from a worker."""
        self.finished_requests += 1
