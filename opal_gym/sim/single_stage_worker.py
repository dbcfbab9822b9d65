"""The seed's `worker_single_stage.py`: one request at a time, FIFO, prefill at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from opal_gym.config import Config
from opal_gym.sim.clock import SimEnvironment
from opal_gym.sim.gpu_model import GPUModel
from opal_gym.sim.kvcache import OpalKVCacheEngine
from opal_gym.sim.ledger import Ledger
from opal_gym.sim.reporting import Reporter
from opal_gym.sim.request import LLMRequest
from opal_gym.sim.router import Router
from opal_gym.sim.steps import StepLog
from opal_gym.sim.vllm_worker import rejection_reason

Process = Generator[simpy.Event, Any, None]


class LLMWorkerSingleStage:
    """A worker without batching (seed, "Comparison with worker_single_stage.py").

    Each request has the GPU for itself: its KV-cache prefix is fetched, its prompt is prefilled in
    one step, then one step makes each token. It waits for work on a queue, without polling.

    Attributes:
        steps: End times of all engine steps.
        gpu_busy_time: Seconds in which the GPU computed.
    """

    def __init__(
        self,
        env: SimEnvironment,
        config: Config,
        gpu_model: GPUModel,
        engine: OpalKVCacheEngine,
        ledger: Ledger,
        router: Router,
        reporter: Reporter,
        worker_id: int = 0,
    ) -> None:
        self.steps = StepLog()
        self.gpu_busy_time = 0.0
        self.worker_id = worker_id
        self._env = env
        self._config = config
        self._params = config.worker.vllm_params
        self._gpu = gpu_model
        self._engine = engine
        self._ledger = ledger
        self._router = router
        self._reporter = reporter
        self._queue: simpy.Store = simpy.Store(env)
        self._running: list[LLMRequest] = []
        self._computing_since: float | None = None
        env.process(self._serve())

    def queue_work(self, request: LLMRequest) -> None:
        """Takes a request from the router."""
        request.stats.worker_arrival_time = self._env.now
        reason = rejection_reason(
            request.prompt_tokens + request.output_tokens,
            self._config.max_model_len,
            self._config.total_gpu_blocks,
            self._params.block_size,
        )
        if reason:
            self._ledger.rejected(request, reason)
            return
        request.stats.steps = self.steps
        self._ledger.arrived(request)
        self._queue.put(request)
        self._reporter.work_arrived(self)

    @property
    def waiting_requests(self) -> list[LLMRequest]:
        """The queue."""
        requests: list[LLMRequest] = self._queue.items
        return requests

    @property
    def running_requests(self) -> list[LLMRequest]:
        """The request that is served, if any."""
        return self._running

    @property
    def total_gpu_blocks(self) -> int:
        """KV blocks of the pool."""
        return self._config.total_gpu_blocks

    @property
    def free_gpu_blocks(self) -> int:
        """All: blocks are not tracked, as one request is never short of them."""
        return self.total_gpu_blocks

    @property
    def gpu_busy_time_now(self) -> float:
        """Seconds in which the GPU computed until now, s."""
        since = self._computing_since
        return self.gpu_busy_time + (0.0 if since is None else self._env.now - since)

    def kv_block_seconds(self) -> float:
        """Blocks of the KV pool are not tracked."""
        return 0.0

    def _serve(self) -> Process:
        while True:
            request: LLMRequest = yield self._queue.get()
            self._running.append(request)
            yield from self._run(request)
            self._running.clear()

    def _run(self, request: LLMRequest) -> Process:
        stats = request.stats
        stats.start_processing_time = self._env.now
        hit = min(
            self._engine.lookup(request.hash_ids, request.prompt_tokens), request.prompt_tokens - 1
        )
        if hit:
            yield from self._engine.retrieve(request.hash_ids, range(hit), request.prompt_tokens)
        stats.prefix_hit_tokens = hit
        stats.request_ready_time = stats.gpu_start_time = self._env.now
        self._computing_since = self._env.now
        yield from self._compute(request, hit)
        stats.decode_done_time = self._env.now
        self.gpu_busy_time, self._computing_since = self.gpu_busy_time_now, None
        self._ledger.completed(request, self.worker_id)
        transfer = self._engine.store(request.hash_ids, request.prompt_tokens)
        if transfer is not None:
            self._env.process(transfer)
        self._router.collect(request)

    def _compute(self, request: LLMRequest, hit: int) -> Process:
        """Prefill, then one decode step a token; the first token counts when it is made."""
        prompt, first_step = request.prompt_tokens, self.steps.count
        at_prefill_end = int(self._params.first_token_at_prefill_end)
        prefill = self._gpu.batch_latency([(hit, prompt - hit)], 0, 0)
        decodes = request.output_tokens - at_prefill_end
        times = [self._env.now + prefill]
        if decodes:
            latencies = self._gpu.span_latencies([], 1, prompt + at_prefill_end, decodes)
            times = np.cumsum(np.concatenate(([times[0]], latencies))).tolist()
        tokens = range(1 - at_prefill_end, len(times))
        yield self._env.at(times[tokens.start])
        request.stats.first_token_time = self._env.now
        self._ledger.first_token(request)
        yield self._env.at(times[-1])
        self.steps.extend(np.array(times))
        request.stats.token_runs.append((first_step + tokens.start, len(tokens)))
        request.stats.note_steps(first_step, len(times))
