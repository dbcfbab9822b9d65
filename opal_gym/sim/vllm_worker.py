"""The vLLM worker: an interrupt-driven scheduler with a persistent batch (the seed's page)."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import numpy as np
import simpy
from numpy.typing import NDArray

from opal_gym.config import Config
from opal_gym.sim.batch import BatchMetadata
from opal_gym.sim.blocks import BlockPool, blocks_of
from opal_gym.sim.candidates import generated_tokens
from opal_gym.sim.clock import BOUNDARY, SimEnvironment
from opal_gym.sim.decision import STOP, Decision
from opal_gym.sim.gauges import EventRate
from opal_gym.sim.gpu_model import Chunk, GPUModel
from opal_gym.sim.invariants import check_worker
from opal_gym.sim.kvcache import OpalKVCacheEngine
from opal_gym.sim.peak import PeakKV
from opal_gym.sim.questions import (
    Question,
    StepPlan,
    Window,
    admit_question,
    chunk_question,
    fits,
    preempt_question,
    tokens_after_chunk,
)
from opal_gym.sim.queue import WaitingQueue
from opal_gym.sim.request import LLMRequest, RequestPhase, VLLMSchedulerRequest, by_age, note_first
from opal_gym.sim.steps import StepLog
from opal_gym.sim.table import Column, RequestTable

logger = logging.getLogger(__name__)

Process = Generator[simpy.Event, Any, None]
T = TypeVar("T")

MAX_SPAN_STEPS = 4096
"""A span's arrays stay small; a longer one is several."""
NO_BLOCKS = np.empty(0, np.int64)


class DecisionMaker(Protocol):
    """Whoever answers a worker's decisions."""

    def ask(self, decision: Decision) -> Generator[simpy.Event, int, int]:
        """Yields until the decision is answered; returns the answer."""


class RequestObserver(Protocol):
    """Whoever is told what becomes of requests."""

    def arrived(self, request: LLMRequest) -> None:
        """A request reached the worker and was accepted."""

    def rejected(self, request: LLMRequest, reason: str) -> None:
        """A request reached the worker and can never run."""

    def first_token(self, request: LLMRequest) -> None:
        """A request's first output token was made, now."""

    def preempted(self, request: LLMRequest) -> None:
        """A request was evicted, now."""

    def completed(self, request: LLMRequest, worker_id: int) -> None:
        """A request made its last token, now."""


@dataclass(slots=True)
class Span:
    """Steps between two rebuilds, as one SimPy event.

    Attributes:
        start: When the first step begins, s.
        times: End of each step, shape (k,), s.
        later_blocks: Blocks that steps 2 … k take, cumulated, shape (k - 1,).
        steps: Steps that will be made: k, or fewer once the span is cut.
        boundary: The event at the end of the last of them.
    """

    start: float
    times: NDArray[np.float64]
    later_blocks: NDArray[np.int64]
    steps: int
    boundary: simpy.Event


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
        chunk_budget: Prefill tokens per step until the next rebuild.
    """

    def __init__(
        self,
        env: SimEnvironment,
        config: Config,
        gpu_model: GPUModel,
        engine: OpalKVCacheEngine,
        decision_maker: DecisionMaker,
        observer: RequestObserver,
        output: Callable[[LLMRequest], None],
        worker_id: int = 0,
    ) -> None:
        self.env = env
        self.worker_id = worker_id
        self.params = config.worker.vllm_params
        self.block_size = self.params.block_size
        self.pool = BlockPool(env, config.total_gpu_blocks)
        self.steps = StepLog()
        self.table = RequestTable()
        self.batch = BatchMetadata(self.block_size, self.steps)
        self.waiting_requests = WaitingQueue()
        self.completed_requests: dict[int, VLLMSchedulerRequest] = {}
        self.kvc_fetch_blocks_in_flight = 0
        self.gpu_busy_time = 0.0
        self.rebuild_id = 0
        self.chunk_budget = self.params.max_num_batched_tokens
        self.last_step_s = 0.0
        self.arrival_rate = EventRate()
        self.preemption_rate = EventRate()
        self._max_model_len = config.max_model_len
        self.max_candidates = config.env.max_candidates
        self.window_size = max(self.params.lookahead_reqs, self.max_candidates)
        self._check = config.simulation.check_invariants
        self._max_span = 1 if config.simulation.step_by_step else MAX_SPAN_STEPS
        self._gpu = gpu_model
        self._engine = engine
        self._decision_maker = decision_maker
        self._observer = observer
        self._output = output
        self._worker_local_queue: deque[LLMRequest] = deque()
        self._check_new_requests_idle = False
        self._scheduler_busy = True
        self._fetching = 0
        self._unlooked = 0
        self._holders: dict[int, VLLMSchedulerRequest] = {}
        self._no_first_token: list[VLLMSchedulerRequest] = []
        self._rebuild_due = False
        self._short_of_tokens = False
        self._span: Span | None = None
        self._intake = env.process(self._check_new_requests())
        self._scheduler = env.process(self._vllm_scheduling_loop())

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
        )
        if reason:
            self._log("Request %s rejected: %s", llm_request.request_id, reason)
            self._observer.rejected(llm_request, reason)
            return
        llm_request.stats.steps = self.steps
        request = VLLMSchedulerRequest(llm_request, self.block_size, self.steps, self.table)
        self.waiting_requests.append(request)
        self._unlooked += 1
        self.arrival_rate.count(self.env.now)
        self._observer.arrived(llm_request)
        self._log("New request %s added to waiting queue (phase: WAITING)", request.request_id)
        # A batch that waits for blocks alone cannot take anybody in.
        if self._scheduler_busy or not self.batch:
            self._notify(always=not self.batch)

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
        elif self._span is not None:
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
        plan = None if self._rebuild_due else self._plan_step()
        if plan is None or self._asks_for_rebuild(plan):
            plan = yield from self._build_batch()
        else:
            self._schedule(plan)
        self.check_invariants()
        if plan is None or not self.batch:
            return False
        self._span = self._start_span(plan)
        span = yield from self._finish_span()
        self._update_request_states_and_stats(plan, span)
        self._handle_completed_requests(self._move_completed_requests())
        self.check_invariants()
        return True

    def _asks_for_rebuild(self, plan: StepPlan) -> bool:
        """Memory is short, or tokens that the last admissions lacked are left over."""
        return plan.total_blocks > self.pool.free or (
            self._short_of_tokens and plan.tokens_left > 0
        )

    # ---------------------------------------------------------- batch building

    def _build_batch(self) -> Generator[simpy.Event, Any, StepPlan | None]:
        """Rebuilds the batch in four phases (seed, "Batch Creation Logic"; DESIGN §2).

        Returns:
            The coming step, or None where the batch's only request waits for blocks.
        """
        self.rebuild_id += 1
        self._rebuild_due = False
        self._short_of_tokens = False
        self.chunk_budget = yield from self._choose_chunk_budget()
        # Phases 1 and 2: resume the decodes, then the prefills.
        plan = self._plan_step()
        # Phase 3: make room for those that cannot fit.
        made_room = False
        while plan.total_blocks > self.pool.free:
            if len(self.batch) == 1 and self.in_flight:
                return None
            yield from self._make_room()
            made_room = True
            plan = self._plan_step()
        self._schedule(plan)
        # Phase 4: admit. Whoever just gave up blocks would walk back into them, so look again at
        # the next boundary instead.
        if made_room:
            self._rebuild_due = True
        else:
            yield from self._admit_waiting(plan)
        return plan

    def _choose_chunk_budget(self) -> Generator[simpy.Event, Any, int]:
        """Prefill tokens per step until the next rebuild; all of the budget where not asked."""
        question = chunk_question(self)
        if question is None:
            return self.params.max_num_batched_tokens
        budget = yield from self._ask(question)
        assert budget is not None
        return budget

    def _plan_step(self) -> StepPlan:
        """Phases 1 and 2: a token for each decode, chunks for the prefills while tokens last."""
        tokens = min(
            self.chunk_budget, self.params.max_num_batched_tokens - self.batch.decode_tokens
        )
        plan = StepPlan([], [], self.batch.decode_blocks_needed(), tokens)
        for request in self.batch.prefill_requests.values():
            if not plan.tokens_left:
                break
            self._plan_prefill(plan, request)
        return plan

    def _plan_prefill(self, plan: StepPlan, request: VLLMSchedulerRequest) -> None:
        tokens = self.schedule_prefill_chunk(request, plan.tokens_left)
        held = tokens_after_chunk(
            request.prompt_processed,
            tokens,
            request.prompt_tokens,
            self.params.first_token_at_prefill_end,
        )
        plan.chunks.append((request, tokens))
        plan.blocks.append(blocks_of(held, self.block_size) - request.allocated_blocks)
        plan.tokens_left -= tokens

    def schedule_prefill_chunk(self, request: VLLMSchedulerRequest, tokens_left: int) -> int:
        """Tokens of the next chunk: neither more than the prompt's rest nor than are left."""
        return min(request.prompt_tokens - request.prompt_processed, tokens_left)

    def _schedule(self, plan: StepPlan) -> None:
        """Takes the coming step's blocks and tokens."""
        self.pool.allocate(plan.total_blocks)
        for (request, _), blocks in zip(plan.chunks, plan.blocks, strict=True):
            request.take_blocks(blocks)
        self.steps.scheduled = self.steps.count + 1
        self.batch.schedule_prefill(plan.chunks)

    def _ask(self, question: Question[T]) -> Generator[simpy.Event, Any, T | None]:
        """Asks a question, unless it has only one possible answer.

        Returns:
            The chosen option, or None for STOP.

        Raises:
            ValueError: The policy's answer is not legal.
        """
        decision = question.decision
        if question.has_one_answer:
            return question.options[0]
        answer = yield from self._decision_maker.ask(decision)
        if not decision.is_legal(answer):
            stop = " or STOP (-1)" if decision.stop_allowed else ""
            raise ValueError(
                f"policy's answer to {decision.kind.name} at {decision.time} s: got {answer!r}; "
                f"allowed: 0 to {len(question.options) - 1}{stop}"
            )
        return None if answer == STOP else question.options[answer]

    # -------------------------------------------------------- phase 3: preemption

    def _make_room(self) -> Process:
        """Evicts one request; a batch of one has waiting holders give back instead."""
        if len(self.batch) == 1:
            self._give_back_youngest()
            return
        question = preempt_question(self)
        if question is None:
            # All have been evicted often enough: the oldest must advance.
            victim = max(self.batch, key=by_age)
        else:
            chosen = yield from self._ask(question)
            assert chosen is not None
            victim = chosen
        self._preempt_request(victim)

    def _preempt_request(self, request: VLLMSchedulerRequest) -> None:
        """Evicts a request: blocks freed, progress lost, front of the queue (seed, "Phase 3")."""
        work_score = request.tokens_held
        self.batch.remove(request)
        request.preempted()
        freed = self._release_blocks(request)
        self._unlooked += 1
        self.waiting_requests.push_front(request)
        self.preemption_rate.count(self.env.now)
        self._observer.preempted(request.llm_request)
        self._log(
            "PREEMPTED request %s: freed %d blocks (work_score=%d, preemption_count=%d)",
            request.request_id,
            freed,
            work_score,
            request.preemption_count,
        )

    def _give_back_youngest(self) -> None:
        """The youngest waiting holder of a fetched prefix gives its blocks back."""
        request = max(self._holders.values(), key=by_age)
        del self._holders[request.request_id]
        request.reset_progress()
        freed = self._release_blocks(request)
        self._unlooked += 1
        self._log("Request %s: gave back %d fetched blocks", request.request_id, freed)

    def _release_blocks(self, request: VLLMSchedulerRequest) -> int:
        blocks = request.give_blocks()
        self.pool.release(blocks)
        return blocks

    # --------------------------------------------------------- phase 4: admission

    def _admit_waiting(self, plan: StepPlan) -> Process:
        """Admits waiting requests until the policy stops or nobody fits."""
        window = self._scan_waiting()
        while question := admit_question(self, plan, window):
            request = yield from self._ask(question)
            if request is None:
                return
            self._admit(request, plan, window)
        if not (self.batch or self.in_flight) and self.waiting_requests:
            self._force_progress(plan, window)
        self._short_of_tokens = (
            self.params.rebuild_on == "change"
            and plan.tokens_left == 0
            and self.slots_free
            and window.has_ready(self.table)
        )

    def _scan_waiting(self) -> Window:
        """The head of the queue; those without a KV-cache lookup get one."""
        requests = list(self.waiting_requests.window(self.window_size))
        if self._unlooked:
            for request in requests:
                if request.kvc_lookup is None:
                    self._look_up(request)
        return Window(requests)

    def _look_up(self, request: VLLMSchedulerRequest) -> None:
        """Looks a request's prefix up; the last prompt token is always computed."""
        self._unlooked -= 1
        stats = request.llm_request.stats
        note_first(stats, "start_processing_time", self.env.now)
        match = self._engine.lookup(request.llm_request.hash_ids)
        self._note_match(request, min(match, request.prompt_tokens - 1))

    def _note_match(self, request: VLLMSchedulerRequest, tokens: int) -> None:
        request.looked_up(tokens)
        if not tokens:
            note_first(request.llm_request.stats, "request_ready_time", self.env.now)
            self._log("Request %s: no prefix match, now READY", request.request_id)

    def _admit(self, request: VLLMSchedulerRequest, plan: StepPlan, window: Window) -> None:
        """Admits a request that fits: into the batch, or its fetch is issued."""
        if request.phase is RequestPhase.WAITING:
            self._issue_fetch(request)
            return
        self._add_to_batch(request, plan)
        window.remove(request)

    def _add_to_batch(self, request: VLLMSchedulerRequest, plan: StepPlan) -> None:
        self._plan_prefill(plan, request)
        tokens, blocks = plan.chunks[-1][1], plan.blocks[-1]
        self.pool.allocate(blocks)
        request.take_blocks(blocks)
        self.waiting_requests.remove(request)
        self._holders.pop(request.request_id, None)
        self.batch.add_prefill(request, tokens)
        note_first(request.llm_request.stats, "gpu_start_time", self.env.now)
        self._log(
            "Added READY request %s: tokens=%d, blocks_needed=%d, free_blocks=%d/%d",
            request.request_id,
            tokens,
            blocks,
            self.pool.free,
            self.pool.total,
        )

    def _force_progress(self, plan: StepPlan, window: Window) -> None:
        """Nobody can run: holders give back until the oldest fits, which is then admitted."""
        request = self.waiting_requests.oldest()
        if request.phase is RequestPhase.WAITING:
            self._note_match(request, 0)
        while not fits(self, plan, Window([request])).mask[0]:
            self._give_back_youngest()
        self._add_to_batch(request, plan)
        window.remove(request)

    # ------------------------------------------------------------- KV-cache fetch

    @property
    def kvc_ready_count(self) -> int:
        """Waiting requests in FETCH_KVC, or READY with blocks (seed, "KVC Fetch Rate-Limiting")."""
        return self._fetching + len(self._holders)

    def _can_issue_kvc_fetch(self) -> bool:
        """Whether the rate limit allows one more fetch."""
        return self.kvc_ready_count < self.params.max_kvc_ready_requests

    def _issue_fetch(self, request: VLLMSchedulerRequest) -> None:
        """Looks again, takes blocks for what is resident now, and starts to move exactly that."""
        hash_ids = request.llm_request.hash_ids
        tokens = min(
            self._engine.lookup(hash_ids),
            request.prompt_tokens - 1,
            self.pool.free * self.block_size,
        )
        if not tokens:
            self._note_match(request, 0)
            return
        blocks = blocks_of(tokens, self.block_size)
        self.pool.allocate(blocks)
        request.take_blocks(blocks)
        request.start_fetch(tokens)
        request.llm_request.stats.prefix_hit_tokens = tokens
        self._fetching += 1
        self.kvc_fetch_blocks_in_flight += blocks
        self._log(
            "Request %s: initiating async KVC retrieve for %d tokens, allocated %d blocks",
            request.request_id,
            tokens,
            blocks,
        )
        transfer = self._engine.retrieve(hash_ids, tokens)
        self.env.process(self._async_kvc_retrieve(request, transfer))

    def _async_kvc_retrieve(self, request: VLLMSchedulerRequest, transfer: Process) -> Process:
        """Waits for the transfer, then the request is READY."""
        yield from transfer
        self._fetching -= 1
        self.kvc_fetch_blocks_in_flight -= request.allocated_blocks
        self._holders[request.request_id] = request
        request.fetched()
        note_first(request.llm_request.stats, "request_ready_time", self.env.now)
        self._log("Fetched KVC tokens %d for Request %s", request.prefix_tokens, request.request_id)
        # An idle scheduler, with an empty batch or one that waits for blocks, waits for this.
        self._notify(always=not self._scheduler_busy or not self.batch)

    # -------------------------------------------------------------- running the batch

    def _start_span(self, plan: StepPlan) -> Span:
        """Advances the batch by as many steps as provably need no rebuild, in one event."""
        steps, later_blocks = self._span_steps(plan)
        now = self.env.now
        if steps == 1:
            times = np.array([now + self._calculate_batch_time(plan)])
        else:
            # The running sum starts at the current time, so that it equals step-by-step addition.
            times = np.cumsum(
                np.concatenate(([now], self._gpu.span_latencies(*self._load(plan), steps)))
            )[1:]
        return Span(now, times, later_blocks, steps, self.env.at(float(times[-1]), BOUNDARY))

    def _calculate_batch_time(self, plan: StepPlan) -> float:
        """Seconds of the coming step (seed, "Timing Calculation")."""
        return self._gpu.batch_latency(*self._load(plan))

    def _load(self, plan: StepPlan) -> tuple[list[Chunk], int, int]:
        """The coming step as the GPU model takes it: chunks, decodes, their summed context."""
        chunks = [(request.prompt_processed, tokens) for request, tokens in plan.chunks]
        return chunks, self.batch.decode_tokens, self.batch.decode_context

    def _span_steps(self, plan: StepPlan) -> tuple[int, NDArray[np.int64]]:
        """Steps until a completion, a prefill's end or a lack of blocks; blocks of the later ones.

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
            alone = len(plan.chunks) == 1
            limit = min(limit, (rest - 1) // tokens if alone else 1)
        if limit <= 1:
            return 1, NO_BLOCKS
        later_blocks = np.cumsum(self.batch.decode_blocks_of_span(limit)[1:])
        if plan.chunks:
            held = request.prompt_processed + tokens * np.arange(1, limit + 1)
            later_blocks += np.cumsum(np.diff(blocks_of(held, self.block_size)))
        fitting = int(np.searchsorted(later_blocks, self.pool.free, side="right"))
        return fitting + 1, later_blocks[:fitting]

    def _cut_span(self) -> None:
        """Ends the span under way at the next boundary; its old event will find nothing to do."""
        span = self._span
        assert span is not None
        steps = int(np.searchsorted(span.times, self.env.now)) + 1
        if steps < span.steps:
            old, span.steps = span.boundary, steps
            span.boundary = self.env.at(float(span.times[steps - 1]), BOUNDARY)
            span.boundary.callbacks, old.callbacks = old.callbacks, []

    def _finish_span(self) -> Generator[simpy.Event, Any, Span]:
        """Waits for the end of the span under way."""
        span = self._span
        assert span is not None
        while not span.boundary.processed:
            try:
                yield span.boundary
            except simpy.Interrupt:
                logger.warning("Scheduler interrupted during work - unexpected while busy")
        self._span = None
        return span

    def _update_request_states_and_stats(self, plan: StepPlan, span: Span) -> None:
        """Advances all requests of the batch by the span's steps; ended prefills start decoding."""
        first, steps = self.steps.count, span.steps
        self.steps.extend(span.times[:steps])
        self._take_later_blocks(plan, span)
        self.steps.scheduled = self.steps.count
        self.gpu_busy_time += self.env.now - span.start
        self.last_step_s = (self.env.now - span.start) / steps
        self._note_first_tokens(self._no_first_token)
        self._no_first_token = []
        self.batch.schedule_prefill([])
        for request, tokens in plan.chunks:
            request.prefill(tokens * steps, first, steps)
            if request.prompt_processed == request.prompt_tokens:
                self._end_prefill(request)

    def _take_later_blocks(self, plan: StepPlan, span: Span) -> None:
        """Takes the blocks of the span's later steps, which nobody else could have taken."""
        later = span.later_blocks[: span.steps - 1]
        if not len(later):
            return
        begins = span.times[: span.steps - 1]
        taken = np.diff(later, prepend=0)
        self.pool.charge(float(np.dot(taken, self.env.now - begins)))
        self.pool.allocate(int(later[-1]))
        for request, tokens in plan.chunks:
            held = request.prompt_processed + tokens * span.steps
            request.take_blocks(blocks_of(held, self.block_size) - request.allocated_blocks)

    def _end_prefill(self, request: VLLMSchedulerRequest) -> None:
        self._log("Request %s: prefill complete, transitioning to DECODE", request.request_id)
        has_token = self.params.first_token_at_prefill_end
        self.batch.start_decode(request, generated=int(has_token))
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
                self._observer.first_token(request.llm_request)

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
            self._observer.completed(request.llm_request, self.worker_id)
            if self._engine.enabled:
                self.env.process(self._store_kvc(request))
            else:
                self._retire(request)

    def _store_kvc(self, request: VLLMSchedulerRequest) -> Process:
        yield from self._engine.store(request.llm_request.hash_ids)
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
        self._output(request.llm_request)

    # ------------------------------------------------------------------- observing

    @property
    def in_flight(self) -> int:
        """Fetches and stores under way, which will end by themselves."""
        return self._fetching + len(self.completed_requests)

    @property
    def slots_free(self) -> bool:
        """Whether the batch can take one more sequence."""
        return len(self.batch) < self.params.max_num_seqs

    @property
    def somebody_waits(self) -> bool:
        """Whether a request waits that is not being fetched."""
        return len(self.waiting_requests) > self._fetching

    def running_rows(self) -> NDArray[np.intp]:
        """Rows of the request table of the batch, decodes first, shape (len(batch),)."""
        return np.fromiter((request.row for request in self.batch), np.intp, len(self.batch))

    def peak_kv(self) -> PeakKV:
        """Predicted peak of the batch's KV memory."""
        data = self.table.data[self.running_rows()]
        generated = generated_tokens(self, data)
        return PeakKV(
            data[:, Column.PROMPT] + generated,
            np.maximum(1, data[:, Column.PREDICTED_OUTPUT] - generated),
        )

    def predicted_step_time(self, budget: int) -> float:
        """Seconds of the coming step if prefills, then the queue's head, fill the budget."""
        left = min(budget, self.params.max_num_batched_tokens - self.batch.decode_tokens)
        slots = self.params.max_num_seqs - len(self.batch)
        runnable = (
            request
            for request in self.waiting_requests.window(self.window_size)
            if request.phase is not RequestPhase.FETCH_KVC
        )
        chunks: list[Chunk] = []
        for request in chain(self.batch.prefill_requests.values(), islice(runnable, slots)):
            if not left:
                break
            tokens = self.schedule_prefill_chunk(request, left)
            chunks.append((request.prompt_processed, tokens))
            left -= tokens
        return self._gpu.batch_latency(chunks, self.batch.decode_tokens, self.batch.decode_context)

    def check_invariants(self) -> None:
        """The seed's "Invariant Checks", where `simulation.check_invariants` asks for them.

        Raises:
            AssertionError: An invariant is violated.
        """
        if self._check:
            check_worker(self)

    def _log(self, message: str, *args: object) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(message, *args, extra={"sim_time": self.env.now})


def rejection_reason(
    tokens: int, max_model_len: int, total_blocks: int, block_size: int
) -> str | None:
    """Why a request of `tokens` prompt + output tokens can never run; None if it can."""
    if tokens > max_model_len:
        return f"{tokens} tokens exceed max_model_len = {max_model_len}"
    if blocks_of(tokens, block_size) > total_blocks:
        return f"{tokens} tokens exceed the pool of {total_blocks} blocks"
    return None
