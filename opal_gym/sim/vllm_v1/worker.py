"""The worker under the engine profile `vllm_v1`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from opal_gym.sim.gpu_model import Chunk
from opal_gym.sim.questions import StepPlan
from opal_gym.sim.request import RequestPhase, VLLMSchedulerRequest, by_age, note_first
from opal_gym.sim.span import Span
from opal_gym.sim.table import DELIVERED, ORIGIN_STEP
from opal_gym.sim.vllm_v1.admission import Admission
from opal_gym.sim.vllm_v1.batch import RunningBatch
from opal_gym.sim.vllm_v1.batch_builder import V1BatchBuilder
from opal_gym.sim.vllm_v1.blocks import VLLMBlockPool
from opal_gym.sim.vllm_v1.invariants import check_v1_worker
from opal_gym.sim.vllm_v1.queue import V1WaitingQueue
from opal_gym.sim.vllm_v1.request import V1Request
from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler

Process = Generator[simpy.Event, Any, None]

STALEMATE_EVICTIONS = 1000
"""So many evictions in a row without a new token, and the oldest running request is protected.

vLLM can evict in a circle for ever: requests that arrived together evict each other under
`priority`, and one that runs alone evicts itself for blocks that parked requests hold.
"""


class LLMWorkerVLLMV1(LLMWorkerVLLMScheduler):
    """A worker that schedules as vLLM 0.33.0 does, every step.

    A step is skipped only in a batch of decodes, whose next step changes nothing: without an
    arrival, a completion or an ended load, free blocks only become fewer, so that nobody who did
    not fit will. Where fewer cached blocks could make somebody fit, a step that takes one is not
    skipped either.
    """

    pool: VLLMBlockPool
    batch: RunningBatch
    waiting_requests: V1WaitingQueue

    def _make_engine(self, blocks: int) -> None:
        self.request_type = V1Request
        self.pool = VLLMBlockPool(self.env, blocks)
        self.batch = RunningBatch(self.block_size, self.steps)
        self.waiting_requests = V1WaitingQueue(self.params.policy)
        self._builder = V1BatchBuilder(self)
        self._fruitless_evictions = 0
        self._protected: V1Request | None = None
        # vLLM counts block 0, which it never hands out.
        self.watermark_blocks = int(self.params.watermark * (blocks + 1))

    # ------------------------------------------------------------------- the step

    @property
    def is_pure_decode(self) -> bool:
        """Whether every running request makes a token in every step."""
        return not self.batch.prefill_requests

    @property
    def prefills(self) -> list[V1Request]:
        """Running requests with more than one token left to compute, in admission order."""
        running = self.batch.prefill_requests.values()
        return [
            request for request in running if isinstance(request, V1Request) and request.rest > 1
        ]

    @property
    def _spare_blocks(self) -> int:
        """Blocks that steps of a batch of decodes may take without asking again.

        Where the loss of a cached block could let somebody in, only those without content.
        """
        params = self.params
        loss_lets_nobody_in = (
            params.scheduler_reserve_full_isl
            and params.chunked_prefill
            and not self._engine.enabled
        )
        if loss_lets_nobody_in or not (self.waiting_requests and self.slots_free):
            return self.pool.free
        return self.pool.empty

    def _span_steps(self, plan: StepPlan) -> int:
        """Only a batch of decodes runs more than one step unasked."""
        if plan.chunks:
            return 1
        return super()._span_steps(plan)

    def _load(self, plan: StepPlan) -> tuple[list[Chunk], int, int]:
        """Prefills are requests with more than one token left to compute."""
        chunks: list[Chunk] = []
        decodes, context = self.batch.decode_tokens, self.batch.decode_context
        for request, tokens in plan.chunks:
            assert isinstance(request, V1Request)
            if request.rest > 1:
                chunks.append((request.prompt_processed, tokens))
            else:
                decodes += 1
                context += request.known_tokens
        return chunks, decodes, context

    def _update_request_states_and_stats(self, span: Span) -> None:
        super()._update_request_states_and_stats(span)
        if self.batch.decode_requests:
            self._fruitless_evictions = 0
        # What a prefill's step leaves of the budget, or publishes, can let somebody in.
        self._rebuild_due |= bool(span.plan.chunks)

    # ------------------------------------------------------------------- blocks

    def take_blocks_of_step(self, request: V1Request, blocks: int, held: int) -> None:
        """Takes a running request's blocks for the coming step, after which it holds `held`."""
        self.pool.allocate(blocks)
        if request.in_lockstep:
            request.scheduled_step = self.steps.count + 1
        else:
            self._take_blocks(request, blocks, held)

    def _publish_blocks(self, request: VLLMSchedulerRequest, prompt_tokens: int) -> None:
        """Full blocks get their content, where prefix caching is on."""
        if self.params.enable_prefix_caching:
            assert isinstance(request, V1Request)
            contents = request.unseen_contents(prompt_tokens)
            request.held_hashes += map(self.pool.cache, contents)

    def cached_blocks(self, request: V1Request) -> list[int]:
        """Numbers of the GPU blocks that hold a waiting request's beginning."""
        if not self.params.enable_prefix_caching:
            return []
        return self.pool.find(request.reusable_contents)

    def reserved_blocks(self) -> int:
        """Blocks that prefills under way and remote loads still need for what is known."""
        prefills = self.batch.prefill_requests.values()
        return sum(map(self._blocks_to_come, [*prefills, *self.waiting_requests.parked]))

    def _blocks_to_come(self, request: VLLMSchedulerRequest) -> int:
        assert isinstance(request, V1Request)
        return max(0, self._blocks_lacking(request, request.known_tokens))

    def _preempt_request(self, request: VLLMSchedulerRequest) -> None:
        assert isinstance(request, V1Request)
        if request.in_lockstep:
            # What it generated becomes reusable: nobody could have found it before.
            self._publish_blocks(request, request.tokens_scheduled)
        super()._preempt_request(request)
        self._fruitless_evictions += 1

    def _retire(self, request: VLLMSchedulerRequest) -> None:
        self._publish_blocks(request, request.tokens_held)
        super()._retire(request)

    def take_back_blocks(self) -> bool:
        """The youngest waiting holder of a loaded prefix gives its blocks back; False: none is."""
        if not self._holders:
            return False
        request = max(self._holders.values(), key=by_age)
        self.waiting_requests.remove(request)
        self.give_back_youngest()
        self.waiting_requests.push_front(request)
        return True

    # ------------------------------------------------------------------- admission

    def admit(self, admission: Admission) -> None:
        """Moves a waiting request to the batch, with its first chunk."""
        request = admission.request
        if request.parked:
            self._promote(request)
        else:
            self._share(request, admission.cached)
        note_first(request.llm_request.stats, "start_processing_time", self.env.now)
        self.add_to_batch(request, admission.tokens, admission.blocks)

    def _share(self, request: V1Request, cached: list[int]) -> None:
        """Holds the cached blocks of a request's beginning."""
        if cached:
            self.pool.acquire(cached)
            request.take_cached(cached)

    # ------------------------------------------------------------------- remote loads

    def remote_tokens(self, request: V1Request) -> int:
        """Tokens in whole blocks that a load from the KV cache would bring; 0: none."""
        if not self._engine.enabled:
            return 0
        hash_ids = request.llm_request.hash_ids
        tokens = self._engine.lookup(hash_ids, request.prompt_tokens)
        return min(tokens, request.known_tokens - 1) // self.block_size * self.block_size

    def issue_remote_load(self, admission: Admission) -> None:
        """Takes a request's blocks and starts to move what is not on the GPU to them."""
        request, now = admission.request, self.env.now
        self._share(request, admission.cached)
        first = request.prompt_processed
        self.pool.allocate(admission.blocks)
        request.take_blocks(admission.blocks)
        request.start_fetch(admission.computed)
        self.waiting_requests.park(request)
        self._fetching += 1
        self.kvc_fetch_blocks_in_flight += admission.blocks
        note_first(request.llm_request.stats, "start_processing_time", now)
        self._log(
            "Request %s: initiating async KVC retrieve for %d tokens, allocated %d blocks",
            request.request_id,
            admission.computed,
            admission.blocks,
        )
        transfer = self.remote_load(request, range(first, admission.computed))
        self.env.process(self._async_kvc_retrieve(request, admission.blocks, transfer))

    def remote_load(self, request: V1Request, tokens: range) -> Process:
        """Moves tokens of a request's prompt to the GPU."""
        hash_ids = request.llm_request.hash_ids
        return self._engine.retrieve(hash_ids, tokens, request.prompt_tokens)

    def _end_fetch(self, request: VLLMSchedulerRequest) -> None:
        """Loaded blocks are published when the scheduler sees them (`promote_next`)."""
        request.fetched()

    def promote_next(self) -> None:
        """The scheduler looks at the first request whose load has ended."""
        for request in self.waiting_requests.parked:
            if request.phase is RequestPhase.READY:
                self._promote(request)
                return

    def _promote(self, request: V1Request) -> None:
        if not request.promoted:
            self._publish_blocks(request, request.prompt_processed)
            request.promote()

    # ------------------------------------------------------------------- observing

    @property
    def protected(self) -> V1Request | None:
        """The running request that nobody may evict any more, after a stalemate."""
        if self._protected is not None and self._protected.request_id not in self.batch.running:
            self._protected = None
        if self._protected is None and self._fruitless_evictions >= STALEMATE_EVICTIONS:
            self._protected = min(self.batch, key=by_age)
        return self._protected

    def victims(self) -> list[V1Request]:
        """Running requests in the order in which vLLM would evict them."""
        running = [request for request in self.batch if request is not self.protected]
        if self.params.policy == "fcfs":
            return running[::-1]
        return sorted(
            running,
            key=lambda request: (request.llm_request.priority, request.arrival_time),
            reverse=True,
        )

    def tokens_generated(self, data: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that requests have generated, by their table rows; evictions do not take them."""
        generated: NDArray[np.float64] = np.maximum(
            data[:, DELIVERED], self.steps.count - data[:, ORIGIN_STEP]
        )
        return generated

    def _waiting_chunks(self, tokens: int) -> list[Chunk]:
        """Chunks of the running prefills, then of the queue's head, up to `tokens` tokens."""
        slots = self.params.max_num_seqs - len(self.batch)
        runnable = [
            request
            for request in self.waiting_requests.window(self.window_size)
            if request.phase is not RequestPhase.FETCH_KVC
        ]
        chunks: list[Chunk] = []
        for request in [*self.prefills, *runnable[:slots]]:
            if tokens <= 0:
                break
            chunks.append((request.prompt_processed, request.rest))
            tokens -= request.rest
        return chunks

    def check_invariants(self) -> None:
        """Where `simulation.check_invariants` asks for them.

        Raises:
            AssertionError: An invariant is violated.
        """
        if self._check:
            check_v1_worker(self)
