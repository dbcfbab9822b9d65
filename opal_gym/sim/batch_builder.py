"""The four phases of a batch rebuild (seed, "Batch Creation Logic"; DESIGN §2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

import simpy

from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.decision import STOP
from opal_gym.sim.questions import (
    Question,
    StepPlan,
    admit_question,
    chunk_question,
    fits,
    preempt_question,
)
from opal_gym.sim.request import RequestPhase, VLLMSchedulerRequest, by_age

if TYPE_CHECKING:
    from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler

T = TypeVar("T")


class BatchBuilder(ABC):
    """Decides, by asking, what a worker's coming step computes; engines differ in it.

    Attributes:
        chunk_budget: Prefill tokens per step until the next rebuild.
        made_room: Whether the last rebuild took blocks from somebody.
        short_of_tokens: Whether its admissions ended for want of token budget.
    """

    def __init__(self, worker: LLMWorkerVLLMScheduler) -> None:
        self._worker = worker
        self.chunk_budget = worker.params.max_num_batched_tokens
        self.made_room = False
        self.short_of_tokens = False

    @abstractmethod
    def build(self) -> Generator[simpy.Event, Any, StepPlan | None]:
        """One rebuild.

        Returns:
            The coming step, or None where the batch's only request waits for blocks.
        """

    @abstractmethod
    def plan_step(self) -> StepPlan:
        """The coming step if nothing is rebuilt."""

    def _choose_chunk_budget(
        self, question: Question[int] | None
    ) -> Generator[simpy.Event, Any, None]:
        """Asks CHUNK; all of the budget where it is not asked."""
        budget = None if question is None else (yield from self._ask(question))
        self.chunk_budget = budget or self._worker.params.max_num_batched_tokens

    def _ask(self, question: Question[T]) -> Generator[simpy.Event, Any, T | None]:
        """Asks a question, unless it has only one possible answer.

        Returns:
            The chosen option, or None for STOP.

        Raises:
            ValueError: The policy's answer is not legal.
        """
        if question.has_one_answer:
            return question.first
        decision = question.decision()
        answer = yield from self._worker.decision_maker.ask(decision)
        if not decision.is_legal(answer):
            stop = " or STOP (-1)" if decision.stop_allowed else ""
            raise ValueError(
                f"policy's answer to {decision.kind.name} at {decision.time} s: got {answer!r}; "
                f"allowed: 0 to {decision.num_candidates - 1}{stop}"
            )
        return None if answer == STOP else question.chosen(answer)


class OpalBatchBuilder(BatchBuilder):
    """The seed's rebuild, in four phases."""

    def build(self) -> Generator[simpy.Event, Any, StepPlan | None]:
        """One rebuild.

        Returns:
            The coming step, or None where the batch's only request waits for blocks.
        """
        worker = self._worker
        self.made_room = self.short_of_tokens = False
        yield from self._choose_chunk_budget(chunk_question(worker))
        # Phases 1 and 2: resume the decodes, then the prefills.
        plan = self.plan_step()
        # Phase 3: make room for those that cannot fit.
        while plan.total_blocks > worker.pool.free:
            if len(worker.batch) == 1 and worker.in_flight:
                return None
            yield from self._make_room()
            plan = self.plan_step()
        worker.schedule(plan)
        # Phase 4: admit, unless somebody just gave up blocks: it would walk back into them.
        if not self.made_room:
            yield from self._admit_waiting(plan)
        return plan

    def plan_step(self) -> StepPlan:
        """Phases 1 and 2: a token for each decode, chunks for the prefills while tokens last."""
        worker, batch = self._worker, self._worker.batch
        tokens = min(self.chunk_budget, worker.params.max_num_batched_tokens - batch.decode_tokens)
        plan = StepPlan([], [], batch.decode_blocks_needed(), tokens)
        for request in batch.prefill_requests.values():
            if not plan.tokens_left:
                break
            self._plan_prefill(plan, request)
        return plan

    def _plan_prefill(self, plan: StepPlan, request: VLLMSchedulerRequest) -> None:
        params = self._worker.params
        tokens = request.schedule_prefill_chunk(plan.tokens_left)
        held = request.prompt_processed + tokens
        if held == request.prompt_tokens and params.first_token_at_prefill_end:
            held += 1
        plan.chunks.append((request, tokens))
        plan.blocks.append(blocks_of(held, params.block_size) - request.allocated_blocks)
        plan.tokens_left -= tokens

    def _make_room(self) -> Generator[simpy.Event, Any, None]:
        """Evicts one request; a batch of one has waiting holders give back instead."""
        worker = self._worker
        self.made_room = True
        if len(worker.batch) == 1:
            worker.give_back_youngest()
            return
        question = preempt_question(worker)
        if question is None:
            # All have been evicted often enough: the oldest must advance.
            victim = max(worker.batch, key=by_age)
        else:
            chosen = yield from self._ask(question)
            assert chosen is not None
            victim = chosen
        worker._preempt_request(victim)

    def _admit_waiting(self, plan: StepPlan) -> Generator[simpy.Event, Any, None]:
        """Admits waiting requests until the policy stops or nobody fits."""
        worker = self._worker
        if not worker.waiting_requests:
            return
        window = worker.scan_waiting()
        while question := admit_question(worker, plan, window):
            chosen = yield from self._ask(question)
            if chosen is None:
                return
            self._admit(chosen[1], plan, window)
        worker.note_blocked_fetches(window)
        if worker.waiting_requests and not (worker.batch or worker.in_flight):
            self._force_progress(plan)
            return
        self.short_of_tokens = (
            plan.tokens_left == 0
            and worker.slots_free
            and any(request.phase is RequestPhase.READY for request in window)
        )

    def _admit(
        self, request: VLLMSchedulerRequest, plan: StepPlan, window: list[VLLMSchedulerRequest]
    ) -> None:
        """Admits a request that fits: into the batch, or its fetch is issued."""
        if request.phase is RequestPhase.WAITING:
            self._worker.issue_kvc_fetch(request)
        else:
            self._add_to_batch(request, plan)
            window.remove(request)
        self._worker.match_on_gpu(window)

    def _add_to_batch(self, request: VLLMSchedulerRequest, plan: StepPlan) -> None:
        self._worker.take_cached_prefix(request)
        self._plan_prefill(plan, request)
        self._worker.add_to_batch(request, plan.chunks[-1][1], plan.blocks[-1])

    def _force_progress(self, plan: StepPlan) -> None:
        """Nobody can run: holders give back until the oldest fits, which is then admitted."""
        worker = self._worker
        request = worker.waiting_requests.oldest()
        if request.phase is RequestPhase.WAITING:
            worker.note_match(request, 0)
        while not any(fits(worker, plan, [request])):
            worker.give_back_youngest()
            worker.match_on_gpu([request])
            self.made_room = True
        self._add_to_batch(request, plan)
