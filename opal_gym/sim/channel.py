"""A transfer channel whose bandwidth is shared."""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappop, heappush
from itertools import count
from typing import Any

import simpy

from opal_gym.sim.clock import SimEnvironment


class SharedChannel:
    """At most `concurrency` transfers run, sharing the bandwidth equally; the rest queue.

    Equal shares make all running transfers advance at the same pace, so one number, the bytes that
    a transfer would have moved since the beginning, says when each is done.

    Args:
        env: The simulation.
        bandwidth: Bytes per second, of all transfers together.
        latency_s: Seconds before a transfer's first byte; it takes no bandwidth then.
        concurrency: Transfers that run at once.
    """

    def __init__(
        self, env: SimEnvironment, bandwidth: float, latency_s: float, concurrency: int
    ) -> None:
        self._env = env
        self._bandwidth = bandwidth
        self._latency_s = latency_s
        self._slots = simpy.Resource(env, concurrency)
        self._order = count()
        self._running: list[tuple[float, int, simpy.Event]] = []
        self._pace = 0.0
        self._since = 0.0
        self._next: simpy.Event | None = None

    def transfer(self, num_bytes: float) -> Generator[simpy.Event, Any, None]:
        """Waits for a slot and the latency, then moves `num_bytes`."""
        with self._slots.request() as slot:
            yield slot
            yield self._env.timeout(self._latency_s)
            yield self._start(num_bytes)

    def _start(self, num_bytes: float) -> simpy.Event:
        self._advance()
        done = self._env.event()
        heappush(self._running, (self._pace + num_bytes, next(self._order), done))
        self._plan()
        return done

    def _advance(self) -> None:
        """Brings the pace up to now."""
        now = self._env.now
        if self._running:
            self._pace += (now - self._since) * self._bandwidth / len(self._running)
        self._since = now

    def _plan(self) -> None:
        """Plans the next end of a transfer; an event planned before finds nothing to do."""
        if not self._running:
            return
        rest = max(0.0, self._running[0][0] - self._pace)
        seconds = rest * len(self._running) / self._bandwidth
        self._next = self._env.timeout(seconds)
        assert self._next.callbacks is not None
        self._next.callbacks.append(self._finish)

    def _finish(self, event: simpy.Event) -> None:
        if event is not self._next:
            return
        self._advance()
        self._pace = max(self._pace, self._running[0][0])
        while self._running and self._running[0][0] <= self._pace:
            heappop(self._running)[2].succeed()
        self._plan()
