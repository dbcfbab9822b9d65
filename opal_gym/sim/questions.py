"""The three questions of a rebuild: who is asked about, in which order (DESIGN §3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.candidates import FEATURES, INDEX, CandidateTable
from opal_gym.sim.decision import STOP, Decision, DecisionKind
from opal_gym.sim.gauges import read_gauges
from opal_gym.sim.request import MAX_PREEMPTIONS, RequestPhase, VLLMSchedulerRequest
from opal_gym.sim.table import (
    ADMISSION,
    DELIVERED,
    FIRST_TOKEN_TIME,
    PREDICTED_OUTPUT,
    PREDICTED_REMAINING,
    PREEMPTIONS,
    PROMPT,
    PROMPT_REMAINING,
    REQUEST_ID,
    TPOT_SLACK,
    TPOT_SLO,
    TTFT_SLACK,
    WAITING_TIME,
    remaining_output,
)

if TYPE_CHECKING:
    from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler

T = TypeVar("T")

BLOCKS_NEEDED = INDEX["blocks_needed"]
PREDICTED_PEAK_KV = INDEX["predicted_peak_kv"]
SLACKS = slice(TTFT_SLACK, TPOT_SLACK + 1)
"""Two neighbouring columns."""


@dataclass(slots=True)
class StepPlan:
    """What the coming step computes: the decodes, and these prefill chunks.

    Attributes:
        chunks: Prefilling requests with their tokens.
        blocks: Blocks that each chunk needs.
        decode_blocks: Blocks that the decodes need.
        tokens_left: Prefill tokens that the step could still take.
    """

    chunks: list[tuple[VLLMSchedulerRequest, int]]
    blocks: list[int]
    decode_blocks: int
    tokens_left: int

    @property
    def total_blocks(self) -> int:
        """Blocks that the step needs."""
        return self.decode_blocks + sum(self.blocks)


class Question(Generic[T]):
    """What a decision is about: the options that its candidates stand for.

    The baseline takes the first option, or none: the others are found when they are asked for.

    Args:
        worker: Who asks.
        kind: What is decided.
        first: The first option.
        find: Finds all options.
        table: Builds the candidate table of all options.
        baseline: The baseline's answer.
        stop_allowed: Whether STOP is a legal answer.
    """

    __slots__ = (
        "_baseline",
        "_find",
        "_kind",
        "_options",
        "_stop_allowed",
        "_table",
        "_worker",
        "first",
    )

    def __init__(
        self,
        worker: LLMWorkerVLLMScheduler,
        kind: DecisionKind,
        first: T,
        find: Callable[[], Sequence[T]],
        table: Callable[[Sequence[T]], CandidateTable],
        baseline: int = 0,
        stop_allowed: bool = False,
    ) -> None:
        self._worker = worker
        self._kind = kind
        self.first = first
        self._find = find
        self._table = table
        self._baseline = baseline
        self._stop_allowed = stop_allowed
        self._options: Sequence[T] | None = None

    @property
    def options(self) -> Sequence[T]:
        """All options, candidate by candidate."""
        if self._options is None:
            self._options = self._find()
        return self._options

    @property
    def has_one_answer(self) -> bool:
        """Whether nothing is left to decide."""
        return not self._stop_allowed and len(self.options) == 1

    def decision(self) -> Decision:
        """The decision that a policy answers."""
        worker = self._worker
        return Decision(
            self._kind,
            rebuild_id=worker.rebuild_id,
            worker_id=worker.worker_id,
            time=worker.env.now,
            stop_allowed=self._stop_allowed,
            baseline=self._baseline,
            num_candidates=lambda: len(self.options),
            candidates=lambda: self._table(self.options),
            gauges=lambda: read_gauges(worker),
        )

    def chosen(self, answer: int) -> T:
        """What a candidate's index stands for."""
        return self.options[answer] if answer else self.first


# --------------------------------------------------------------------------------- CHUNK


def chunk_question(worker: LLMWorkerVLLMScheduler) -> Question[int] | None:
    """CHUNK: how many prefill tokens a step may take until the next rebuild.

    Asked where a prefill is running, or a slot is free and a request not in FETCH_KVC waits;
    unless every budget gives the same coming step and nobody waits.
    """
    budgets = worker.chunk_budgets
    prefills = worker.batch.prefill_requests.values()
    waits = worker.somebody_waits
    if not worker.params.chunked_prefill or not (prefills or (worker.slots_free and waits)):
        return None
    left = worker.params.max_num_batched_tokens - worker.batch.decode_tokens
    rest = sum(request.prompt_tokens - request.prompt_processed for request in prefills)
    if not waits and min(rest, left, budgets[0]) == min(rest, left, budgets[-1]):
        return None
    return chunk_question_of(worker)


def chunk_question_of(worker: LLMWorkerVLLMScheduler) -> Question[int]:
    """CHUNK with all of a worker's budgets."""
    budgets = worker.chunk_budgets
    return Question(
        worker, DecisionKind.CHUNK, budgets[0], lambda: budgets, partial(_chunk_table, worker)
    )


def _chunk_table(worker: LLMWorkerVLLMScheduler, budgets: Sequence[int]) -> CandidateTable:
    values = np.zeros((len(budgets), len(FEATURES)))
    values[:, INDEX["present"]] = 1
    values[:, INDEX["budget_tokens"]] = budgets
    values[:, INDEX["step_time"]] = worker.predicted_step_times(budgets)
    return CandidateTable(values, np.full(len(budgets), -1))


# ------------------------------------------------------------------------------- PREEMPT


def preempt_question(
    worker: LLMWorkerVLLMScheduler,
) -> Question[VLLMSchedulerRequest] | None:
    """PREEMPT: who is evicted; None where nobody in the batch is below the cap.

    Least work done first, nearly finished ones last; ties: later arrivals first. Of more than the
    table holds: the first half so, then those with the longest predicted remaining output.
    """
    batch = worker.batch
    data = worker.table.data.take(batch.rows, axis=0)
    generated = worker.tokens_generated(data)
    held = data[:, PROMPT] - data[:, PROMPT_REMAINING] + generated
    running = Running.of(data, generated, held)
    keys = (-data[:, REQUEST_ID], -data[:, WAITING_TIME], running.held, running.nearly_finished)
    order = np.lexsort(keys)
    order = order[data[order, PREEMPTIONS] < MAX_PREEMPTIONS]
    if not len(order):
        return None
    rows = first_half_then(
        order.tolist(), worker.max_candidates, lambda row: -running.remaining[row]
    )
    victims = [batch.members[row] for row in rows]
    return Question(
        worker,
        DecisionKind.PREEMPT,
        victims[0],
        lambda: victims,
        lambda _: preempt_table(worker, running.take(rows)),
    )


def preempt_table(worker: LLMWorkerVLLMScheduler, running: Running) -> CandidateTable:
    """The candidate table of running requests."""
    data, generated = running.data, running.generated
    made = np.maximum(np.maximum(1, generated), data[:, DELIVERED])
    data[:, TPOT_SLACK] = data[:, FIRST_TOKEN_TIME] + data[:, TPOT_SLO] * made
    values = request_features(worker, data)
    values[:, INDEX["work_lost"]] = running.held
    freed = np.ceil(running.held / worker.block_size)
    values[:, INDEX["blocks_freed"]] = freed / worker.pool.total
    values[:, INDEX["admission_rank"]] = data[:, ADMISSION].argsort().argsort()
    values[:, INDEX["nearly_finished"]] = running.nearly_finished
    values[:, PREDICTED_REMAINING] = running.remaining
    return CandidateTable(values, data[:, REQUEST_ID].astype(np.int64))


class Running(NamedTuple):
    """Requests of the batch as columns, n rows.

    Attributes:
        data: Their rows of the request table, shape (n, COLUMNS).
        generated: Tokens generated since the last (re)start, shape (n,).
        held: Tokens in KV: the seed's work score, shape (n,).
        remaining: Output tokens still to come, as predicted; at least 1; shape (n,).
        nearly_finished: Whether 95 % of the predicted output is made (seed, "Preemption
            Strategy"), shape (n,).
    """

    data: NDArray[np.float64]
    generated: NDArray[np.float64]
    held: NDArray[np.float64]
    remaining: NDArray[np.float64]
    nearly_finished: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        data: NDArray[np.float64],
        generated: NDArray[np.float64],
        held: NDArray[np.float64],
    ) -> Running:
        """Adds the columns that follow from these."""
        predicted = data[:, PREDICTED_OUTPUT]
        nearly_finished = (predicted > 0) & (generated >= 0.95 * predicted)
        return cls(data, generated, held, remaining_output(data, generated), nearly_finished)

    def take(self, rows: Sequence[int]) -> Running:
        """Some of the rows, in this order."""
        return Running(
            self.data[rows],
            self.generated[rows],
            self.held[rows],
            self.remaining[rows],
            self.nearly_finished[rows],
        )


# --------------------------------------------------------------------------------- ADMIT


Fitting = tuple[int, VLLMSchedulerRequest, int, bool]
"""A waiting request that fits now: its place in the queue, the request, the blocks that its first
chunk or its fetch needs, and whether FIFO's walk comes so far."""


def admit_question(
    worker: LLMWorkerVLLMScheduler, plan: StepPlan, window: Sequence[VLLMSchedulerRequest]
) -> Question[Fitting] | None:
    """ADMIT: who of the waiting requests is admitted next; None where nobody fits.

    Candidates stand in queue order. Of more than the table holds: the first half so, then those of
    the rest with the smallest predicted KV area, also in queue order.
    """
    fitting = fits(worker, plan, window)
    first = next(fitting, None)
    if first is None:
        return None

    def candidates() -> list[Fitting]:
        chosen = first_half_then(
            [first, *fitting], worker.max_candidates, lambda fit: fit[1].kv_area
        )
        # Tuples compare by place first: sorting restores the queue's order.
        return sorted(chosen)

    stop_allowed = worker.in_flight > 0 or len(worker.batch) > 0
    return Question(
        worker,
        DecisionKind.ADMIT,
        first,
        candidates,
        partial(_admit_table, worker),
        baseline=0 if first[3] or not stop_allowed else STOP,
        stop_allowed=stop_allowed,
    )


def fits(
    worker: LLMWorkerVLLMScheduler, plan: StepPlan, window: Sequence[VLLMSchedulerRequest]
) -> Iterator[Fitting]:
    """Which waiting requests fit, in queue order.

    A READY request fits if there is a slot, a prefill token left in the coming step (all of its
    prompt's rest without chunked prefill), and blocks for its first chunk. One with a prefix match
    fits if the rate limit allows a fetch and blocks for the whole match are free. FIFO's walk
    passes over requests that are being fetched, are rate-limited, or lack a slot or tokens; the
    first one that lacks blocks ends it.
    """
    params, free, block_size = worker.params, worker.pool.free, worker.block_size
    chunked, end_token = params.chunked_prefill, int(params.first_token_at_prefill_end)
    slots_free, may_fetch = worker.slots_free, worker._can_issue_kvc_fetch()
    left = plan.tokens_left
    walked = True
    for place, request in enumerate(window):
        phase, start = request.phase, request.start_tokens
        is_fetch = phase is RequestPhase.WAITING
        if phase is RequestPhase.FETCH_KVC or (is_fetch and not may_fetch):
            continue
        if is_fetch:
            held = request.kvc_lookup or 0
        elif request.prompt_tokens - start <= left:
            held = request.prompt_tokens + end_token
        elif left and chunked:
            held = start + left
        else:
            continue
        blocks = -(-held // block_size) - request.start_blocks
        if blocks > free:
            walked = False
        elif is_fetch or slots_free:
            yield place, request, blocks, walked


def _admit_table(worker: LLMWorkerVLLMScheduler, candidates: Sequence[Fitting]) -> CandidateTable:
    data = worker.table.data.take([fit[1].row for fit in candidates], axis=0)
    values, pool = request_features(worker, data), worker.pool.total
    values[:, BLOCKS_NEEDED] = [fit[2] / pool for fit in candidates]
    peaks = worker.peak_kv().with_candidates(data[:, PROMPT], data[:, PREDICTED_REMAINING])
    np.divide(peaks, pool * worker.block_size, out=values[:, PREDICTED_PEAK_KV])
    return CandidateTable(values, data[:, REQUEST_ID].astype(np.int64))


# ---------------------------------------------------------------------------- in common


def request_features(
    worker: LLMWorkerVLLMScheduler, data: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The features in rows of the request table, absolute times made durations, in place."""
    values, now = data[:, : len(FEATURES)], worker.env.now
    waiting, slacks = values[:, WAITING_TIME], values[:, SLACKS]
    np.subtract(now, waiting, out=waiting)
    np.subtract(slacks, now, out=slacks)
    return values


def first_half_then(
    ordered: Sequence[T], table_size: int, rest_key: Callable[[T], float]
) -> Sequence[T]:
    """The first `table_size`, or the first half and the rest's smallest by key."""
    if len(ordered) <= table_size:
        return ordered
    half = (table_size + 1) // 2
    return [*ordered[:half], *nsmallest(table_size - half, ordered[half:], key=rest_key)]
