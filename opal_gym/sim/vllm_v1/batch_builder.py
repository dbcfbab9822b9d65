"""What the coming step computes under `vllm_v1` (vLLM's `Scheduler.schedule`)."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import simpy

from opal_gym.sim.batch_builder import BatchBuilder
from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.questions import StepPlan
from opal_gym.sim.request import VLLMSchedulerRequest
from opal_gym.sim.vllm_v1.admission import Admission, TokenBudget, may_admit
from opal_gym.sim.vllm_v1.questions import admit_question, chunk_question, preempt_question
from opal_gym.sim.vllm_v1.request import V1Request

if TYPE_CHECKING:
    from opal_gym.sim.vllm_v1.worker import LLMWorkerVLLMV1


class V1BatchBuilder(BatchBuilder):
    """One walk over `running` with the token budget, then admissions from the waiting queues."""

    _worker: LLMWorkerVLLMV1

    def __init__(self, worker: LLMWorkerVLLMV1) -> None:
        super().__init__(worker)
        self._budget = TokenBudget(0, 0, 0)
        self._tokens: dict[V1Request, int] = {}
        self._waits = False

    def build(self) -> Generator[simpy.Event, Any, StepPlan | None]:
        """Schedules one step; its blocks are taken in vLLM's order.

        Returns:
            The step; None where nothing of it runs, and loads or stores under way will end.
        """
        worker, params = self._worker, self._worker.params
        self.made_room = self._waits = False
        self._tokens = {}
        yield from self._choose_chunk_budget(chunk_question(worker))
        # The cap keeps a long prompt from starving others: one that is alone starves nobody.
        is_alone = len(worker.batch) + len(worker.waiting_requests) <= 1
        cap = 0 if is_alone else params.long_prefill_token_threshold
        self._budget = TokenBudget(params.max_num_batched_tokens, self.chunk_budget, cap)
        if worker.is_pure_decode and worker.batch.decode_blocks_needed() <= worker.pool.free:
            worker.pool.allocate(worker.batch.decode_blocks_needed())
            self._budget.total -= len(worker.batch)
        else:
            yield from self._schedule_running()
        # Whoever was evicted would walk back into its blocks.
        if not (self.made_room or self._waits):
            yield from self._admit_waiting()
        is_idle = self._waits or (self.made_room and not worker.batch)
        return None if is_idle and worker.in_flight else self._begin_step()

    def plan_step(self) -> StepPlan:
        """One more step of a batch of decodes."""
        return StepPlan([], [], self._worker.batch.decode_blocks_needed(), 0)

    def _begin_step(self) -> StepPlan:
        """The step as it was scheduled."""
        worker, chunks = self._worker, self._chunks
        if worker.batch:
            worker.steps.scheduled = worker.steps.count + 1
        worker.batch.schedule_prefill(chunks)
        return StepPlan(chunks, [0] * len(chunks), 0, self._budget.prefill)

    @property
    def _chunks(self) -> list[tuple[VLLMSchedulerRequest, int]]:
        """Tokens so far of the requests that are not in lockstep."""
        return [(r, tokens) for r, tokens in self._tokens.items() if not r.in_lockstep]

    # ------------------------------------------------------------------- running

    def _schedule_running(self) -> Generator[simpy.Event, Any, None]:
        """Tokens for the running requests in admission order, while the budget lasts."""
        batch = self._worker.batch
        for request in list(batch.running.values()):
            if request.request_id not in batch.running:
                continue
            # A decode gets its token: what stands before it left some when it was admitted, and
            # asks for no more since.
            tokens = self._budget.share(request.rest)
            assert tokens or not request.in_lockstep
            if tokens:
                yield from self._schedule(request, tokens)

    def _schedule(self, request: V1Request, tokens: int) -> Generator[simpy.Event, Any, None]:
        """Takes a running request's blocks and tokens, evicting others, or itself, for them."""
        worker = self._worker
        held = request.tokens_held + tokens
        blocks = blocks_of(held, worker.block_size) - request.allocated_blocks
        while blocks > worker.pool.free:
            if len(worker.batch) == 1 and request is worker.protected:
                self._waits = not worker.take_back_blocks()
                if self._waits:
                    return
                continue
            victim = yield from self._evict()
            if victim is request:
                return
        worker.take_blocks_of_step(request, blocks, held)
        self._budget.take(request.rest, tokens)
        self._tokens[request] = tokens

    def _evict(self) -> Generator[simpy.Event, Any, V1Request]:
        """Evicts one running request; tokens that the step had for it go back to the budget."""
        self.made_room = True
        victim = yield from self._ask(preempt_question(self._worker))
        assert victim is not None
        self._budget.take(victim.rest, -self._tokens.pop(victim, 0))
        self._worker._preempt_request(victim)
        return victim

    # ------------------------------------------------------------------- waiting

    def _admit_waiting(self) -> Generator[simpy.Event, Any, None]:
        """Admits waiting requests until the policy stops or nobody fits."""
        worker = self._worker
        while worker.waiting_requests and may_admit(worker, self._budget):
            worker.promote_next()
            question = admit_question(worker, self._budget)
            if question is None:
                return
            chosen = yield from self._ask(question)
            if chosen is None:
                return
            self._admit(chosen)

    def _admit(self, admission: Admission) -> None:
        """Puts a request that fits into the batch, or issues its remote load."""
        if admission.tokens == 0:
            self._worker.issue_remote_load(admission)
            return
        self._worker.admit(admission)
        request, tokens = admission.request, admission.tokens
        self._budget.take(request.rest, tokens)
        self._tokens[request] = tokens
        self._worker.batch.schedule_prefill(self._chunks)
