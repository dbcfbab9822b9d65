"""The vLLM worker: an interrupt-driven scheduler with a persistent batch (the seed's page)."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from itertools import chain, islice
from operator import add, sub
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from opal_gym.config import Config
from opal_gym.sim.batch import BatchMetadata
from opal_gym.sim.batch_builder import BatchBuilder, OpalBatchBuilder
from opal_gym.sim.blocks import BlockPool, blocks_of
from opal_gym.sim.clock import BOUNDARY, SimEnvironment
from opal_gym.sim.decision import DecisionMaker
from opal_gym.sim.gauges import EventRate
from opal_gym.sim.gpu_model import Chunk, GPUModel
from opal_gym.sim.invariants import check_worker
from opal_gym.sim.kvcache import OpalKVCacheEngine
from opal_gym.sim.ledger import Ledger
from opal_gym.sim.peak import PeakKV
from opal_gym.sim.questions import StepPlan
from opal_gym.sim.queue import WaitingQueue
from opal_gym.sim.reporting import Reporter
from opal_gym.sim.request import LLMRequest, RequestPhase, VLLMSchedulerRequest, by_age, note_first
from opal_gym.sim.router import Router
from opal_gym.sim.span import MAX_SPAN_STEPS, Span
from opal_gym.sim.steps import StepLog
from opal_gym.sim.table import ORIGIN_STEP, PROMPT, RequestTable, remaining_output
from opal_gym.sim.timeseries import TimeSeries

logger = logging.getLogger(__name__)

Process = Generator[simpy.Event, Any, None]


class LLMWorkerVLLMScheduler:
    """One simulated vLLM worker (seed, "LLMWorkerVLLMScheduler").

    Attributes:
        waiting_requests: The waiting queue.
        batch: The persistent batch.
        completed_requests: Completed requests whose KV store is under way, by id.
        pool: The GPU's KV blocks.
        steps: End times of all engine steps.
        kvc_fetch_blocks_in_flight: Blocks that hold KV under way from the cache.
        gpu_busy_time: Seconds in which the GPU computed.
        rebuild_id: Rebuilds so far.
        spans: Spans so far.
    """

    def __init__(
        self,
        env: SimEnvironment,
        config: Config,
        gpu_model: GPUModel,
        engine: OpalKVCacheEngine,
        decision_maker: DecisionMaker,
        ledger: Ledger,
        router: Router,
        reporter: Reporter,
        time_series: TimeSeries | None = None,
        worker_id: int = 0,
        *,
        closed_loop: bool = False,
    ) -> None:
        self.env = env
        self.worker_id = worker_id
        self.params = config.worker.vllm_params
        self.block_size = self.params.block_size
        self.steps = StepLog()
        self.table = RequestTable()
        self._make_engine(config.total_gpu_blocks)
        self.completed_requests: dict[int, VLLMSchedulerRequest] = {}
        self.kvc_fetch_blocks_in_flight = 0
        self.gpu_busy_time = 0.0
        self.rebuild_id = 0
        self.spans = 0
        self.last_step_s = 0.0
        self.arrival_rate = EventRate()
        self.preemption_rate = EventRate()
        self._peak_moment = (-1, -1, -1)
        self._peak = PeakKV(np.empty(0), np.empty(0))
        self._max_model_len = config.max_model_len
        self._hash_block_tokens = config.kvc.hash_block_tokens
        self.max_candidates = config.env.max_candidates
        self.chunk_budgets = self.params.chunk_choices[: self.max_candidates]
        self.window_size = max(self.params.lookahead_reqs, self.max_candidates)
        self._check = config.simulation.check_invariants
        self._max_span = 1 if config.simulation.step_by_step else MAX_SPAN_STEPS
        self._gpu = gpu_model
        self._engine = engine
        self.decision_maker = decision_maker
        self._ledger = ledger
        self._router = router
        self._reporter = reporter
        self._time_series = time_series
        self._closed_loop = closed_loop
        self._worker_local_queue: deque[LLMRequest] = deque()
        self._check_new_requests_idle = False
        self._scheduler_busy = True
        self._fetching = 0
        self._unlooked = 0
        self._holders: dict[int, VLLMSchedulerRequest] = {}
        self._no_first_token: list[VLLMSchedulerRequest] = []
        self._rebuild_due = False
        self._span: Span | None = None
        self._intake = env.process(self._check_new_requests())
        self._scheduler = env.process(self._vllm_scheduling_loop())

    def _make_engine(self, blocks: int) -> None:
        """The parts that make the scheduler's rules, with a pool of `blocks` blocks."""
        self.request_type: type[VLLMSchedulerRequest] = VLLMSchedulerRequest
        self.pool = BlockPool(self.env, blocks)
        self.batch = BatchMetadata(self.block_size, self.steps)
        self.waiting_requests = WaitingQueue()
        self._builder: BatchBuilder = OpalBatchBuilder(self)

    # ------------------------------------------------------------------ intake

    def queue_work(self, request: LLMRequest) -> None:
        """Takes a request from the router (seed, "Interrupt-Driven Design")."""
        self._worker_local_queue.append(request)
        if self._check_new_requests_idle:
            self._check_new_requests_idle = False
            self._intake.interrupt()

    def _check_new_requests(self) -> Process:
        """Intake loop: sleeps until `queue_work` interrupts it."""
        while True:
            while self._worker_local_queue:
                self._receive(self._worker_local_queue.popleft())
            self._check_new_requests_idle = True
            yield from self._sleep()

    def _receive(self, llm_request: LLMRequest) -> None:
        llm_request.stats.worker_arrival_time = self.env.now
        reason = rejection_reason(
            llm_request.prompt_tokens + llm_request.output_tokens,
            self._max_model_len,
            self.pool.total,
            self.block_size,
            self.params.unwritten_tokens,
        )
        if reason:
            self._log("Request %s rejected: %s", llm_request.request_id, reason)
            self._ledger.rejected(llm_request, reason)
            return
        llm_request.stats.steps = self.steps
        request = self.request_type(llm_request, self.block_size, self.steps, self.table)
        self.waiting_requests.append(request)
        self._reporter.work_arrived(self)
        if self.params.enable_prefix_caching:
            request.block_hashes = self._prompt_block_hashes(llm_request)
        self._unlooked += 1
        self.arrival_rate.count(self.env.now)
        self._ledger.arrived(llm_request)
        self._log("New request %s added to waiting queue (phase: WAITING)", request.request_id)
        self._sample()
        # A batch that waits for blocks alone cannot take anybody in.
        if self._scheduler_busy or not self.batch:
            self._notify(always=not self.batch)

    def _prompt_block_hashes(self, request: LLMRequest) -> list[int]:
        """Hashes of the full GPU blocks of a prompt."""
        parts = self._hash_block_tokens // self.block_size
        hashed = min(request.prompt_tokens, len(request.hash_ids) * self._hash_block_tokens)
        return [
            request.hash_ids[block // parts] * parts + block % parts
            for block in range(hashed // self.block_size)
        ]

    def _notify(self, *, always: bool) -> None:
        """Something happened: a rebuild is due if it can change anything (DESIGN §2).

        Args:
            always: Whether it causes a rebuild under either `rebuild_on`; otherwise only under
                `change`.
        """
        if not (always or self.params.rebuild_on == "change"):
            return
        self._rebuild_due = True
        if not self._scheduler_busy:
            self._scheduler_busy = True
            self._scheduler.interrupt()
        else:
            self._cut_span()

    def _sleep(self) -> Process:
        """Sleeps until interrupted; a fresh event leaves nothing behind in SimPy's heap."""
        try:
            yield self.env.event()
        except simpy.Interrupt:
            return

    # --------------------------------------------------------------- scheduler

    def _vllm_scheduling_loop(self) -> Process:
        """Main loop: sleeps when idle, makes one atomic scheduler step after another otherwise."""
        while True:
            worked = yield from self._scheduler_step()
            if not worked:
                if not self._rebuild_due:
                    self._scheduler_busy = False
                    yield from self._sleep()
                # All that happens at this instant is seen by the rebuild.
                yield self.env.at(self.env.now, BOUNDARY)

    def _scheduler_step(self) -> Generator[simpy.Event, Any, bool]:
        """One iteration: (re)build the batch, run it to the next boundary, advance the states.

        Returns:
            Whether the batch ran; if not, there is nothing to do until something happens.
        """
        plan = None if self._rebuild_due else self._builder.plan_step()
        if plan is None or self._asks_for_rebuild(plan):
            plan = yield from self._build_batch()
        else:
            self.schedule(plan)
        self.check_invariants()
        self._sample()
        if plan is None or not self.batch:
            return False
        self._span = self._start_span(plan)
        span = yield from self._finish_span()
        self._update_request_states_and_stats(span)
        completed = self._move_completed_requests()
        self._handle_completed_requests(completed)
        if completed and self._closed_loop:
            # A session's next turn may arrive at this very instant; the rebuild sees it.
            yield self.env.at(self.env.now, BOUNDARY)
        self.check_invariants()
        return True

    def _asks_for_rebuild(self, plan: StepPlan) -> bool:
        """Memory is short, or tokens that the last admissions lacked are left over."""
        return plan.total_blocks > self._spare_blocks or (
            self.params.rebuild_on == "change"
            and self._builder.short_of_tokens
            and plan.tokens_left > 0
        )

    # ---------------------------------------------------------- batch building

    def _build_batch(self) -> Generator[simpy.Event, Any, StepPlan | None]:
        """Rebuilds the batch in four phases (seed, "Batch Creation Logic"; DESIGN §2).

        Returns:
            The coming step, or None where the batch's only request waits for blocks.
        """
        self.rebuild_id += 1
        self._rebuild_due = False
        plan = yield from self._builder.build()
        # Whoever just gave up blocks would walk back into them: look again at the next boundary.
        self._rebuild_due |= self._builder.made_room and plan is not None
        return plan

    def schedule(self, plan: StepPlan) -> None:
        """Takes the coming step's blocks and tokens."""
        self.pool.allocate(plan.total_blocks)
        for (request, tokens), blocks in zip(plan.chunks, plan.blocks, strict=True):
            self._take_blocks(request, blocks, request.prompt_processed + tokens)
        self.steps.scheduled = self.steps.count + 1
        self.batch.schedule_prefill(plan.chunks)  # to which admissions add theirs

    def add_to_batch(self, request: VLLMSchedulerRequest, tokens: int, blocks: int) -> None:
        """Moves a READY request from the queue to the batch; its first chunk is in the plan."""
        self.pool.allocate(blocks)
        self._take_blocks(request, blocks, request.prompt_processed + tokens)
        self.waiting_requests.remove(request)
        self._holders.pop(request.request_id, None)
        self.batch.add_prefill(request)
        note_first(request.llm_request.stats, "request_ready_time", self.env.now)
        note_first(request.llm_request.stats, "gpu_start_time", self.env.now)
        self._log(
            "Added READY request %s: tokens=%d, blocks_needed=%d, free_blocks=%d/%d",
            request.request_id,
            tokens,
            blocks,
            self.pool.free,
            self.pool.total,
        )

    def _take_blocks(self, request: VLLMSchedulerRequest, blocks: int, prompt_tokens: int) -> None:
        """Blocks for a chunk up to `prompt_tokens`; full ones are published at once, as in vLLM."""
        request.take_blocks(blocks)
        self._publish_blocks(request, prompt_tokens)

    def _publish_blocks(self, request: VLLMSchedulerRequest, prompt_tokens: int) -> None:
        """Lets others share the full blocks among a prompt's first `prompt_tokens` tokens."""
        for block_hash in request.unseen_blocks(prompt_tokens):
            if self.pool.publish(block_hash):
                request.held_hashes.append(block_hash)

    # -------------------------------------------------------------------- preemption

    def _preempt_request(self, request: VLLMSchedulerRequest) -> None:
        """Evicts a request: blocks freed, progress lost, front of the queue (seed, "Phase 3")."""
        work_score = request.tokens_held
        self.batch.remove(request)
        request.preempted()
        freed = self._release_blocks(request)
        self._unlooked += 1
        self.waiting_requests.push_front(request)
        self.preemption_rate.count(self.env.now)
        self._ledger.preempted(request.llm_request)
        self._log(
            "PREEMPTED request %s: freed %d blocks (work_score=%d, preemption_count=%d)",
            request.request_id,
            freed,
            work_score,
            request.preemption_count,
        )

    def give_back_youngest(self) -> None:
        """The youngest waiting holder of a fetched prefix gives its blocks back."""
        request = max(self._holders.values(), key=by_age)
        del self._holders[request.request_id]
        request.reset_progress()
        freed = self._release_blocks(request)
        self._unlooked += 1
        self._log("Request %s: gave back %d fetched blocks", request.request_id, freed)

    def _release_blocks(self, request: VLLMSchedulerRequest) -> int:
        blocks, hashes = request.give_blocks()
        self.pool.release(blocks, hashes)
        return blocks

    # ------------------------------------------------------------- KV-cache lookup and fetch

    def scan_waiting(self) -> list[VLLMSchedulerRequest]:
        """The head of the queue; those without a KV-cache lookup get one."""
        requests = list(self.waiting_requests.window(self.window_size))
        if self._unlooked:
            for request in requests:
                if request.kvc_lookup is None:
                    self._look_up(request)
        self.match_on_gpu(requests)
        return requests

    def match_on_gpu(self, requests: Iterable[VLLMSchedulerRequest]) -> None:
        """Looks for waiting prompts' beginnings in GPU blocks, where prefix caching is on."""
        if not self.params.enable_prefix_caching:
            return
        for request in requests:
            if not request.allocated_blocks:
                request.matched_on_gpu(*self.pool.match(request.reusable_hashes))

    def take_cached_prefix(self, request: VLLMSchedulerRequest) -> None:
        """Shares the GPU blocks that hold the beginning of a request's prompt."""
        if request.allocated_blocks or not request.block_hashes:
            return
        hits, _ = self.pool.match(request.reusable_hashes)
        self.pool.acquire(request.block_hashes[:hits])
        request.take_cached(request.block_hashes[:hits])

    def _look_up(self, request: VLLMSchedulerRequest) -> None:
        """Looks a request's prefix up; the last prompt token is always computed."""
        stats = request.llm_request.stats
        note_first(stats, "start_processing_time", self.env.now)
        match = self._engine.lookup(request.llm_request.hash_ids, request.prompt_tokens)
        self.note_match(request, min(match, request.prompt_tokens - 1))

    def note_match(self, request: VLLMSchedulerRequest, tokens: int) -> None:
        """Caches a lookup's result in tokens; 0 makes the request READY."""
        if request.kvc_lookup is None:
            self._unlooked -= 1
        request.looked_up(tokens)
        if not tokens:
            note_first(request.llm_request.stats, "request_ready_time", self.env.now)
            self._log("Request %s: no prefix match, now READY", request.request_id)

    @property
    def kvc_ready_count(self) -> int:
        """Waiting requests in FETCH_KVC, or READY with blocks (seed, "KVC Fetch Rate-Limiting")."""
        return self._fetching + len(self._holders)

    def _can_issue_kvc_fetch(self) -> bool:
        """Whether the rate limit allows one more fetch."""
        return self.kvc_ready_count < self.params.max_kvc_ready_requests

    def note_blocked_fetches(self, window: Iterable[VLLMSchedulerRequest]) -> None:
        """Logs that the rate limit keeps a match waiting."""
        if self._can_issue_kvc_fetch():
            return
        if any(request.phase is RequestPhase.WAITING for request in window):
            self._log(
                "KVC fetch blocked: %d KVC-ready requests in waiting queue >= %d",
                self.kvc_ready_count,
                self.params.max_kvc_ready_requests,
            )

    def issue_kvc_fetch(self, request: VLLMSchedulerRequest) -> None:
        """Looks again, takes blocks for what is resident now, and starts to move exactly that."""
        hash_ids = request.llm_request.hash_ids
        cached, in_use = self.pool.match(request.reusable_hashes)
        tokens = min(
            self._engine.lookup(hash_ids, request.prompt_tokens),
            request.prompt_tokens - 1,
            (self.pool.free + in_use) * self.block_size,
        )
        if tokens <= cached * self.block_size:
            self.note_match(request, 0)
            return
        self.take_cached_prefix(request)
        blocks = blocks_of(tokens, self.block_size) - cached
        self.pool.allocate(blocks)
        request.take_blocks(blocks)
        request.start_fetch(tokens)
        self._fetching += 1
        self.kvc_fetch_blocks_in_flight += blocks
        self._log(
            "Request %s: initiating async KVC retrieve for %d tokens, allocated %d blocks",
            request.request_id,
            tokens,
            blocks,
        )
        moved = range(cached * self.block_size, tokens)
        transfer = self._engine.retrieve(hash_ids, moved, request.prompt_tokens)
        self.env.process(self._async_kvc_retrieve(request, blocks, transfer))

    def _async_kvc_retrieve(
        self, request: VLLMSchedulerRequest, blocks: int, transfer: Process
    ) -> Process:
        """Waits for the transfer to `blocks` blocks, then the request is READY."""
        yield from transfer
        self._catch_up()
        self._fetching -= 1
        self.kvc_fetch_blocks_in_flight -= blocks
        self._holders[request.request_id] = request
        self._end_fetch(request)
        note_first(request.llm_request.stats, "request_ready_time", self.env.now)
        self._log("Fetched KVC tokens %d for Request %s", request.prefix_tokens, request.request_id)
        self._sample()
        # An idle scheduler, with an empty batch or one that waits for blocks, waits for this.
        self._notify(always=not self._scheduler_busy or not self.batch)

    def _end_fetch(self, request: VLLMSchedulerRequest) -> None:
        request.fetched()
        self._publish_blocks(request, request.prefix_tokens)

    # -------------------------------------------------------------- running the batch

    def _start_span(self, plan: StepPlan) -> Span:
        """Advances the batch by as many steps as provably need no rebuild, in one event."""
        self.spans += 1
        steps = self._span_steps(plan)
        now = self.env.now
        if steps == 1:
            times = np.array([now + self._calculate_batch_time(plan)])
        else:
            times = self._gpu.span_latencies(*self._load(plan), steps)
            # The running sum starts at the current time, so that it equals step-by-step addition.
            times[0] += now
            times.cumsum(out=times)
        return Span(plan, now, times, steps, self.env.at(times.item(-1), BOUNDARY))

    def _calculate_batch_time(self, plan: StepPlan) -> float:
        """Seconds of the coming step (seed, "Timing Calculation")."""
        return self._gpu.batch_latency(*self._load(plan))

    def _load(self, plan: StepPlan) -> tuple[list[Chunk], int, int]:
        """The coming step as the GPU model takes it: chunks, decodes, their summed context."""
        chunks = [(request.prompt_processed, tokens) for request, tokens in plan.chunks]
        return chunks, self.batch.decode_tokens, self.batch.decode_context

    def _span_steps(self, plan: StepPlan) -> int:
        """Steps until a completion, a prefill's end or a lack of blocks.

        A step that makes a first token, one that several prefills share, and one whose end is a
        rebuild anyway stand alone.
        """
        limit = 1 if self._rebuild_due or self._no_first_token else self._max_span
        to_completion = self.batch.steps_to_completion()
        if to_completion is not None:
            limit = min(limit, to_completion)
        if plan.chunks:
            request, tokens = plan.chunks[0]
            rest = request.prompt_tokens - request.prompt_processed
            limit = min(limit, (rest - 1) // tokens if len(plan.chunks) == 1 else 1)
        spare = self._spare_blocks
        if limit <= 1 or self._later_blocks(plan, limit) <= spare:
            return max(1, limit)
        steps = range(1, limit + 1)
        return bisect_right(steps, spare, key=lambda k: self._later_blocks(plan, k))

    @property
    def _spare_blocks(self) -> int:
        """Blocks that steps may take without a rebuild."""
        return self.pool.free

    def _later_blocks(self, plan: StepPlan, steps: int) -> int:
        """Blocks that the steps 2 … `steps` of a span take."""
        blocks = self.batch.later_decode_blocks(steps)
        for request, tokens in plan.chunks:
            first = request.prompt_processed + tokens
            last = first + tokens * (steps - 1)
            blocks += blocks_of(last, self.block_size) - blocks_of(first, self.block_size)
        return blocks

    def _cut_span(self) -> None:
        """A rebuild is due: the span under way ends at the next boundary."""
        if self._span is not None:
            self._span.cut(self.env)

    def _finish_span(self) -> Generator[simpy.Event, Any, Span]:
        """Waits for the end of the span under way."""
        span = self._span
        assert span is not None
        while not span.boundary.processed:
            try:
                yield span.boundary
            except simpy.Interrupt:
                logger.warning(
                    "Scheduler interrupted during work - unexpected while busy",
                    extra={"sim_time": self.env.now},
                )
        self._span = None
        return span

    def _update_request_states_and_stats(self, span: Span) -> None:
        """Advances all requests of the batch by the span's steps; ended prefills start decoding."""
        first, steps = self.steps.count, span.steps
        self._take_later_blocks(span, steps)
        self.steps.extend(span.times[:steps])
        self.steps.scheduled = self.steps.count
        self.gpu_busy_time += self.env.now - span.start
        begun = span.start if steps == 1 else span.times.item(steps - 2)
        self.last_step_s = self.env.now - begun
        if self._no_first_token:
            self._note_first_tokens(self._no_first_token)
            self._no_first_token = []
        self.batch.schedule_prefill([])
        for request, tokens in span.plan.chunks:
            request.prefill(tokens * steps, first, steps)
            if request.prefilled:
                self._end_prefill(request)

    def _catch_up(self) -> None:
        """The pool is about to change in a span: its steps so far take their blocks before."""
        if self._span is not None:
            self._take_later_blocks(self._span, self._span.steps_begun(self.env.now))

    def _take_later_blocks(self, span: Span, steps: int) -> None:
        """Takes the blocks of a span's first `steps` steps, which nobody else could take."""
        if steps == span.taken:
            return
        blocks = self._blocks_by_step(span.plan, steps)[span.taken - 1 :]
        self.pool.charge(span.block_seconds(blocks, self.env.now))
        first, span.taken = span.taken + 1, steps
        if not span.plan.chunks:
            self.pool.allocate(sum(blocks))
            return
        # What a step publishes can be reused by the next one.
        ((request, tokens),) = span.plan.chunks
        for step, taken in enumerate(blocks, first):
            self.pool.allocate(taken)
            held = request.prompt_processed + tokens * step
            self._take_blocks(request, self._blocks_lacking(request, held), held)

    def _blocks_by_step(self, plan: StepPlan, steps: int) -> list[int]:
        """Blocks that each of the steps 2 … `steps` of a span takes."""
        taken = self.batch.later_decode_blocks_by_step(steps)
        for request, tokens in plan.chunks:
            first = request.prompt_processed + tokens
            ends = range(first, first + steps * tokens, tokens)
            blocks = [blocks_of(end, self.block_size) for end in ends]
            taken = list(map(add, taken, map(sub, blocks[1:], blocks)))
        return taken

    def _blocks_lacking(self, request: VLLMSchedulerRequest, tokens: int) -> int:
        return blocks_of(tokens, self.block_size) - request.allocated_blocks

    def _end_prefill(self, request: VLLMSchedulerRequest) -> None:
        self._log("Request %s: prefill complete, transitioning to DECODE", request.request_id)
        has_token = self.params.first_token_at_prefill_end
        self.batch.start_decode(request, generated=request.decode_tokens_generated + has_token)
        if math.isnan(request.llm_request.stats.first_token_time):
            if has_token:
                self._note_first_tokens([request])
            else:
                self._no_first_token.append(request)
        if self.params.rebuild_on == "change":
            self._rebuild_due = True

    def _note_first_tokens(self, requests: Iterable[VLLMSchedulerRequest]) -> None:
        for request in requests:
            if request.phase is RequestPhase.DECODE:
                request.first_token(self.env.now)
                self._ledger.first_token(request.llm_request)

    def _move_completed_requests(self) -> list[VLLMSchedulerRequest]:
        """Takes requests that have made all their tokens out of the batch."""
        completed = self.batch.completed()
        for request in completed:
            self.batch.remove(request)
            request.complete()
            request.llm_request.stats.decode_done_time = self.env.now
            self.completed_requests[request.request_id] = request
        return completed

    def _handle_completed_requests(self, completed: list[VLLMSchedulerRequest]) -> None:
        """Stores their KV beside the batch, after which their blocks are released."""
        for request in completed:
            self._rebuild_due = True
            self._ledger.completed(request.llm_request, self.worker_id)
            transfer = self._engine.store(request.llm_request.hash_ids, request.prompt_tokens)
            if transfer is None:
                self._retire(request)
            else:
                self.env.process(self._store_kvc(request, transfer))

    def _store_kvc(self, request: VLLMSchedulerRequest, transfer: Process) -> Process:
        yield from transfer
        self._catch_up()
        self._retire(request)
        self._notify(always=True)

    def _retire(self, request: VLLMSchedulerRequest) -> None:
        """Releases a completed request's blocks and hands it to the router."""
        del self.completed_requests[request.request_id]
        freed = self._release_blocks(request)
        self.table.release(request.row)
        self._log(
            "Request %s: released %d blocks after saving KVC store", request.request_id, freed
        )
        self._log(
            "Request %s retired on worker.%d: prefill=%d tokens, decode=%d tokens",
            request.request_id,
            self.worker_id,
            request.prompt_tokens,
            request.llm_request.output_tokens,
        )
        self._sample()
        self._router.collect(request.llm_request)

    # ------------------------------------------------------------------- observing

    @property
    def chunk_budget(self) -> int:
        """Prefill tokens per step until the next rebuild."""
        return self._builder.chunk_budget

    @property
    def in_flight(self) -> int:
        """Fetches and stores under way, which will end by themselves."""
        return self._fetching + len(self.completed_requests)

    def kv_block_seconds(self) -> float:
        """Integral of the held KV blocks over time so far, blocks·s."""
        span, held = self._span, self.pool.block_seconds()
        if span is None:
            return held
        blocks = self._blocks_by_step(span.plan, span.steps_begun(self.env.now))
        return held + span.block_seconds(blocks[span.taken - 1 :], self.env.now)

    @property
    def running_requests(self) -> list[VLLMSchedulerRequest]:
        """The requests of the batch, decodes first."""
        return list(self.batch)

    @property
    def total_gpu_blocks(self) -> int:
        """KV blocks of the pool."""
        return self.pool.total

    @property
    def free_gpu_blocks(self) -> int:
        """Free blocks now: those that the steps under way have taken are gone."""
        span = self._span
        if span is None:
            return self.pool.free
        begun = self._later_blocks(span.plan, span.steps_begun(self.env.now))
        return self.pool.free - (begun - self._later_blocks(span.plan, span.taken))

    @property
    def gpu_busy_time_now(self) -> float:
        """Seconds in which the GPU computed until now, s."""
        current = 0.0 if self._span is None else self.env.now - self._span.start
        return self.gpu_busy_time + current

    @property
    def slots_free(self) -> bool:
        """Whether the batch can take one more sequence."""
        return len(self.batch) < self.params.max_num_seqs

    @property
    def somebody_waits(self) -> bool:
        """Whether a request waits that is not being fetched."""
        return len(self.waiting_requests) > self._fetching

    def peak_kv(self) -> PeakKV:
        """Predicted peak of the batch's KV memory."""
        moment = (self.rebuild_id, self.steps.count, len(self.batch))
        if moment != self._peak_moment:
            data = self.table.data.take(self.batch.rows, axis=0)
            generated = self.tokens_generated(data)
            remaining = remaining_output(data, generated)
            self._peak = PeakKV(data[:, PROMPT] + generated, remaining)
            self._peak_moment = moment
        return self._peak

    def tokens_generated(self, data: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that requests have generated since the last (re)start, by their table rows."""
        generated: NDArray[np.float64] = np.maximum(0.0, self.steps.count - data[:, ORIGIN_STEP])
        return generated

    def predicted_step_times(self, budgets: Sequence[int]) -> list[float]:
        """Seconds of the coming step if prefills, then the queue's head, fill each budget."""
        decodes, context = self.batch.decode_tokens, self.batch.decode_context
        most = self.params.max_num_batched_tokens - decodes
        chunks = self._waiting_chunks(min(max(budgets), most))
        tokens = sum(new for _, new in chunks)
        fills = [min(budget, most, tokens) for budget in budgets]
        times = {
            fill: self._gpu.batch_latency(first_tokens(chunks, fill), decodes, context)
            for fill in dict.fromkeys(fills)
        }
        return [times[fill] for fill in fills]

    def _waiting_chunks(self, tokens: int) -> list[Chunk]:
        """Chunks of the running prefills, then of the queue's head, up to `tokens` tokens."""
        slots = self.params.max_num_seqs - len(self.batch)
        runnable = (
            request
            for request in self.waiting_requests.window(self.window_size)
            if request.phase is not RequestPhase.FETCH_KVC
        )
        chunks: list[Chunk] = []
        for request in chain(self.batch.prefill_requests.values(), islice(runnable, slots)):
            if tokens <= 0:
                break
            rest = request.prompt_tokens - request.prompt_processed
            chunks.append((request.prompt_processed, rest))
            tokens -= rest
        return chunks

    def check_invariants(self) -> None:
        """The seed's "Invariant Checks", where `simulation.check_invariants` asks for them.

        Raises:
            AssertionError: An invariant is violated.
        """
        if self._check:
            check_worker(self)

    def _sample(self) -> None:
        """Adds a sample to the time series, where one is kept."""
        if self._time_series is not None:
            self._time_series.add(
                self.env.now,
                self.worker_id,
                len(self.waiting_requests),
                len(self.batch),
                len(self.completed_requests),
                self.free_gpu_blocks,
                self.kvc_fetch_blocks_in_flight,
                self.gpu_busy_time_now,
            )

    def _log(self, message: str, *args: object) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(message, *args, extra={"sim_time": self.env.now})


def first_tokens(chunks: Sequence[Chunk], tokens: int) -> list[Chunk]:
    """The first `tokens` new tokens of a sequence of chunks."""
    taken: list[Chunk] = []
    for cached, new in chunks:
        if not tokens:
            break
        taken.append((cached, min(new, tokens)))
        tokens -= taken[-1][1]
    return taken


def rejection_reason(
    tokens: int, max_model_len: int, total_blocks: int, block_size: int, unwritten: int = 0
) -> str | None:
    """Why a request of `tokens` prompt + output tokens can never run; None if it can.

    `unwritten`: how many of them never need a place in KV.
    """
    if tokens > max_model_len:
        return f"{tokens} tokens exceed max_model_len = {max_model_len}"
    if blocks_of(tokens - unwritten, block_size) > total_blocks:
        return f"{tokens} tokens exceed the pool of {total_blocks} blocks"
    return None
