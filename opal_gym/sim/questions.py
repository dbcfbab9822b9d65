"""The three questions of a rebuild: who is asked about, in which order (DESIGN §3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A decision with the options that its answers stand for, candidate by candidate."""

    decision: Decision
    options: Sequence[T]

    @property
    def has_one_answer(self) -> bool:
        """Whether nothing is left to decide."""
        return len(self.options) == 1 and not self.decision.stop_allowed


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
    return _question(
        worker, DecisionKind.CHUNK, budgets, table=lambda: _chunk_table(worker), baseline=0
    )


def _chunk_table(worker: LLMWorkerVLLMScheduler) -> CandidateTable:
    budgets = worker.chunk_budgets
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
    rows = _first_half_then(
        order.tolist(), worker.max_candidates, lambda row: -running.remaining[row]
    )
    return _question(
        worker,
        DecisionKind.PREEMPT,
        [batch.members[row] for row in rows],
        table=lambda: _preempt_table(worker, running.take(rows)),
        baseline=0,
    )


def _preempt_table(worker: LLMWorkerVLLMScheduler, running: Running) -> CandidateTable:
    data, generated = running.data, running.generated
    made = np.maximum(np.maximum(1, generated), data[:, DELIVERED])
    data[:, TPOT_SLACK] = data[:, FIRST_TOKEN_TIME] + data[:, TPOT_SLO] * made
    values = _request_features(worker, data)
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


Fitting = tuple[int, VLLMSchedulerRequest, int]
"""A waiting request that fits now: its place in the queue, the request, the blocks that its first
chunk or its fetch needs."""


def admit_question(
    worker: LLMWorkerVLLMScheduler, plan: StepPlan, window: Sequence[VLLMSchedulerRequest]
) -> Question[VLLMSchedulerRequest] | None:
    """ADMIT: who of the waiting requests is admitted next; None where nobody fits.

    Candidates stand in queue order. Of more than the table holds: the first half so, then those of
    the rest with the smallest predicted KV area, also in queue order.
    """
    fitting, walk_reaches = fits(worker, plan, window)
    if not fitting:
        return None
    # Tuples compare by place first: sorting restores the queue's order.
    chosen = sorted(_first_half_then(fitting, worker.max_candidates, lambda fit: fit[1].kv_area))
    stop_allowed = bool(worker.batch) or worker.in_flight > 0
    return _question(
        worker,
        DecisionKind.ADMIT,
        [request for _, request, _ in chosen],
        table=lambda: _admit_table(worker, chosen),
        baseline=0 if walk_reaches or not stop_allowed else STOP,
        stop_allowed=stop_allowed,
    )


def fits(
    worker: LLMWorkerVLLMScheduler, plan: StepPlan, window: Sequence[VLLMSchedulerRequest]
) -> tuple[list[Fitting], bool]:
    """Which waiting requests fit, in queue order.

    A READY request fits if there is a slot, a prefill token left in the coming step (all of its
    prompt's rest without chunked prefill), and blocks for its first chunk. One with a prefix match
    fits if the rate limit allows a fetch and blocks for the whole match are free.

    Returns:
        Those that fit; and whether FIFO's walk reaches the first of them. It passes over requests
        that are being fetched, are rate-limited, or lack a slot or tokens; the first one that
        lacks blocks ends it.
    """
    params, free, block_size = worker.params, worker.pool.free, worker.block_size
    chunked, end_token = params.chunked_prefill, int(params.first_token_at_prefill_end)
    slots_free, may_fetch = worker.slots_free, worker._can_issue_kvc_fetch()
    left = plan.tokens_left
    fitting: list[Fitting] = []
    walk_ended = walk_reaches = False
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
            walk_ended = True
        elif is_fetch or slots_free:
            walk_reaches |= not (fitting or walk_ended)
            fitting.append((place, request, blocks))
    return fitting, walk_reaches


def _admit_table(worker: LLMWorkerVLLMScheduler, candidates: Sequence[Fitting]) -> CandidateTable:
    data = worker.table.data.take([request.row for _, request, _ in candidates], axis=0)
    values, pool = _request_features(worker, data), worker.pool.total
    values[:, BLOCKS_NEEDED] = [blocks / pool for _, _, blocks in candidates]
    peaks = worker.peak_kv().with_candidates(data[:, PROMPT], data[:, PREDICTED_REMAINING])
    np.divide(peaks, pool * worker.block_size, out=values[:, PREDICTED_PEAK_KV])
    return CandidateTable(values, data[:, REQUEST_ID].astype(np.int64))


# ---------------------------------------------------------------------------- in common


def _request_features(
    worker: LLMWorkerVLLMScheduler, data: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The features in rows of the request table, absolute times made durations, in place."""
    values, now = data[:, : len(FEATURES)], worker.env.now
    waiting, slacks = values[:, WAITING_TIME], values[:, SLACKS]
    np.subtract(now, waiting, out=waiting)
    np.subtract(slacks, now, out=slacks)
    return values


def _first_half_then(
    ordered: Sequence[T], table_size: int, rest_key: Callable[[T], float]
) -> Sequence[T]:
    """The first `table_size`, or the first half and the rest's smallest by key."""
    if len(ordered) <= table_size:
        return ordered
    half = (table_size + 1) // 2
    return [*ordered[:half], *nsmallest(table_size - half, ordered[half:], key=rest_key)]


def _question(
    worker: LLMWorkerVLLMScheduler,
    kind: DecisionKind,
    options: Sequence[T],
    *,
    table: Callable[[], CandidateTable],
    baseline: int,
    stop_allowed: bool = False,
) -> Question[T]:
    decision = Decision(
        kind,
        rebuild_id=worker.rebuild_id,
        worker_id=worker.worker_id,
        time=worker.env.now,
        num_candidates=len(options),
        stop_allowed=stop_allowed,
        baseline=baseline,
        candidates=table,
        gauges=lambda: read_gauges(worker),
    )
    return Question(decision, options)
