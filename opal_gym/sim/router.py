"""The router: hands requests to workers, knowing only what their messages told it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from opal_gym.config import Config
from opal_gym.sim.kvcache import KVEvent, prompt_chunks
from opal_gym.sim.request import LLMRequest


class InfraUpdate(NamedTuple):
    """A worker's periodic message to the router (seed, `_periodic_infra_updates`).

    Attributes:
        load: Requests that are running or waiting.
        queue_occupancy: Requests that are waiting.
        kv_memory_used: Share of the KV blocks that are held.
        gpu_utilisation: Share of the period in which the GPU computed.
    """

    load: int = 0
    queue_occupancy: int = 0
    kv_memory_used: float = 0.0
    gpu_utilisation: float = 0.0


class Worker(Protocol):
    """What a router needs of a worker."""

    def queue_work(self, request: LLMRequest) -> None:
        """Takes a request."""


class RoutingPolicy(ABC):
    """Chooses a worker for each request."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @abstractmethod
    def choose(self, request: LLMRequest) -> int:
        """The worker's id."""


class RoundRobin(RoutingPolicy):
    """The workers in turn."""

    _next = -1

    def choose(self, request: LLMRequest) -> int:
        """The next worker."""
        self._next = (self._next + 1) % len(self._router.workers)
        return self._next


class LeastLoaded(RoutingPolicy):
    """The worker that last reported the smallest load; of several, the first."""

    def choose(self, request: LLMRequest) -> int:
        """The least loaded worker, as last reported."""
        loads = [update.load for update in self._router.updates]
        return loads.index(min(loads))


class Random(RoutingPolicy):
    """A worker drawn uniformly, from the router's own random stream."""

    def choose(self, request: LLMRequest) -> int:
        """Any worker."""
        return int(self._router.rng.integers(len(self._router.workers)))


class MaxPrefix(RoutingPolicy):
    """The worker that, by its KV events, holds most of the prompt; of several, the least loaded.

    A worker whose reported load is far above the smallest is left out (`max_load_gap`).
    """

    def choose(self, request: LLMRequest) -> int:
        """The worker with the longest known prefix."""
        router = self._router
        loads = [update.load for update in router.updates]
        limit = min(loads) + (math.inf if router.max_load_gap is None else router.max_load_gap)
        ranks = {
            worker_id: (-router.known_prefix(worker_id, request), load)
            for worker_id, load in enumerate(loads)
            if load < limit
        }
        return min(ranks, key=ranks.__getitem__)


POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.__name__: policy for policy in (RoundRobin, LeastLoaded, Random, MaxPrefix)
}


class Router:
    """Sends requests to workers and takes finished ones back.

    Args:
        config: The simulation's configuration.
        rng: The stream of random routing.

    Attributes:
        workers: The workers, by id.
        updates: Each worker's last load update.
        finished_requests: How many requests the workers have handed back.
        messages: Messages received: load updates and batches of KV events.
    """

    def __init__(self, config: Config, rng: np.random.Generator) -> None:
        self.rng = rng
        self.workers: Sequence[Worker] = ()
        self.updates: list[InfraUpdate] = []
        self.finished_requests = 0
        self.messages = 0
        self.max_load_gap = config.router.max_load_gap
        self._kvc = config.kvc
        self._known_chunks: list[set[int]] = []
        self._policy = POLICIES[config.router.policy](self)

    def connect(self, workers: Sequence[Worker]) -> None:
        """Makes the workers known, of which nothing is known yet."""
        self.workers = workers
        self.updates = [InfraUpdate() for _ in workers]
        self._known_chunks = [set() for _ in workers]

    def route(self, request: LLMRequest) -> None:
        """Sends a request to the worker that the policy chooses."""
        self.workers[self._policy.choose(request)].queue_work(request)

    def collect(self, request: LLMRequest) -> None:
        """Takes a finished request from a worker."""
        self.finished_requests += 1

    def receive_update(self, worker_id: int, update: InfraUpdate) -> None:
        """Takes a worker's load update."""
        self.messages += 1
        self.updates[worker_id] = update

    def receive_kv_events(self, worker_id: int, events: Sequence[KVEvent]) -> None:
        """Takes a batch of a worker's KV-cache events."""
        self.messages += 1
        known = self._known_chunks[worker_id]
        for event in events:
            if event.stored:
                known.add(event.chunk_id)
            else:
                known.discard(event.chunk_id)

    def known_prefix(self, worker_id: int, request: LLMRequest) -> int:
        """Prompt tokens that a worker holds, by its KV events."""
        known, tokens = self._known_chunks[worker_id], 0
        for chunk in prompt_chunks(self._kvc, request.hash_ids, request.prompt_tokens):
            if chunk.chunk_id not in known:
                break
            tokens += chunk.tokens
        return tokens
