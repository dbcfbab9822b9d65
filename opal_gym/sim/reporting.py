"""A worker's messages to the router."""

from __future__ import annotations

from collections.abc import Generator, Sized
from typing import Protocol

import simpy

from opal_gym.config import Config
from opal_gym.sim.clock import SimEnvironment
from opal_gym.sim.kvcache import KVEvent
from opal_gym.sim.router import InfraUpdate, Router


class ReportingWorker(Protocol):
    """What load updates are about."""

    @property
    def waiting_requests(self) -> Sized:
        """Requests that wait."""

    @property
    def running_requests(self) -> Sized:
        """Requests that run."""

    @property
    def total_gpu_blocks(self) -> int:
        """KV blocks."""

    @property
    def free_gpu_blocks(self) -> int:
        """KV blocks that are free now."""

    @property
    def gpu_busy_time_now(self) -> float:
        """Seconds in which the GPU computed until now, s."""


class Reporter:
    """Sends a worker's load updates and KV-cache events to the router.

    Load updates are sent once a period as long as the worker has work, and once more when it has
    none left; an idle worker is not woken for them, and a finished simulation is not kept alive. A
    router with only one worker has nothing to choose, and is told nothing.
    """

    def __init__(self, env: SimEnvironment, config: Config, router: Router, worker_id: int) -> None:
        params = config.worker.worker_params
        self._env = env
        self._silent = config.simulation.num_workers == 1
        self._period = params.periodic_infra_update_time
        self._coalesce_time = params.kvcevent_coalesce_time
        self._router = router
        self._worker_id = worker_id
        self._updating = False
        self._events: list[KVEvent] = []

    def work_arrived(self, worker: ReportingWorker) -> None:
        """The worker has work: the updates begin, unless they are under way."""
        if not (self._updating or self._silent):
            self._updating = True
            self._env.process(self._periodic_infra_updates(worker))

    def _periodic_infra_updates(
        self, worker: ReportingWorker
    ) -> Generator[simpy.Event, None, None]:
        while self._updating:
            busy_before = worker.gpu_busy_time_now
            yield self._env.timeout(self._period)
            update = InfraUpdate(
                load=len(worker.running_requests) + len(worker.waiting_requests),
                queue_occupancy=len(worker.waiting_requests),
                kv_memory_used=1 - worker.free_gpu_blocks / worker.total_gpu_blocks,
                gpu_utilisation=(worker.gpu_busy_time_now - busy_before) / self._period,
            )
            self._router.receive_update(self._worker_id, update)
            self._updating = update.load > 0

    def kv_event(self, event: KVEvent) -> None:
        """A chunk came or left; events of `kvcevent_coalesce_time` make one message."""
        if self._silent:
            return
        if not self._events:
            flush = self._env.timeout(self._coalesce_time)
            assert flush.callbacks is not None
            flush.callbacks.append(self._flush)
        self._events.append(event)

    def _flush(self, _: simpy.Event) -> None:
        self._router.receive_kv_events(self._worker_id, self._events)
        self._events = []
