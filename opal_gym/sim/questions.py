"""The three questions of a rebuild: who is asked about, in which order (DESIGN §3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.candidates import FEATURES, INDEX, CandidateTable
from opal_gym.sim.decision import STOP, Decision, DecisionKind
from opal_gym.sim.gauges import read_gauges
from opal_gym.sim.request import RequestPhase, VLLMSchedulerRequest
from opal_gym.sim.table import (
    ARRIVAL_TIME,
    DELIVERED,
    FIRST_TOKEN_TIME,
    PREDICTED_REMAINING,
    PROMPT,
    TPOT_SLO,
    TTFT_SLO,
)

if TYPE_CHECKING:
    from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler

T = TypeVar("T")


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
    running = [request for request in worker.batch if request.may_be_preempted]
    if not running:
        return None
    running.sort(key=lambda request: request.order, reverse=True)
    running.sort(key=lambda request: (request.nearly_finished, request.tokens_held))
    options = _first_half_then(
        running, worker.max_candidates, lambda request: -request.predicted_remaining
    )
    return _question(
        worker,
        DecisionKind.PREEMPT,
        options,
        table=lambda: _preempt_table(worker, options),
        baseline=0,
    )


def _preempt_table(
    worker: LLMWorkerVLLMScheduler, options: Sequence[VLLMSchedulerRequest]
) -> CandidateTable:
    _, values = _request_features(worker, options)
    held = np.array([request.tokens_held for request in options])
    values[:, INDEX["work_lost"]] = held
    values[:, INDEX["blocks_freed"]] = blocks_of(held, worker.block_size) / worker.pool.total
    admissions = [request.admission for request in options]
    values[:, INDEX["admission_rank"]] = np.argsort(np.argsort(admissions))
    values[:, INDEX["nearly_finished"]] = [request.nearly_finished for request in options]
    values[:, PREDICTED_REMAINING] = [request.predicted_remaining for request in options]
    return CandidateTable(values, _ids(options))


# --------------------------------------------------------------------------------- ADMIT


class Fitting(NamedTuple):
    """A waiting request that fits now.

    Attributes:
        place: Its place in the queue.
        request: The request.
        blocks: Blocks that its first chunk or its fetch needs.
    """

    place: int
    request: VLLMSchedulerRequest
    blocks: int


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
    chosen = sorted(
        _first_half_then(fitting, worker.max_candidates, lambda fit: fit.request.kv_area)
    )
    stop_allowed = bool(worker.batch) or worker.in_flight > 0
    return _question(
        worker,
        DecisionKind.ADMIT,
        [fit.request for fit in chosen],
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
            fitting.append(Fitting(place, request, blocks))
    return fitting, walk_reaches


def _admit_table(worker: LLMWorkerVLLMScheduler, candidates: Sequence[Fitting]) -> CandidateTable:
    requests = [candidate.request for candidate in candidates]
    data, values = _request_features(worker, requests)
    pool = worker.pool.total
    values[:, INDEX["blocks_needed"]] = [candidate.blocks / pool for candidate in candidates]
    peaks = worker.peak_kv().with_candidates(data[:, PROMPT], data[:, PREDICTED_REMAINING])
    values[:, INDEX["predicted_peak_kv"]] = peaks / (pool * worker.block_size)
    return CandidateTable(values, _ids(requests))


# ---------------------------------------------------------------------------- in common


def _request_features(
    worker: LLMWorkerVLLMScheduler, requests: Sequence[VLLMSchedulerRequest]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows of the request table, and the features in them, with those that depend on the time."""
    data = worker.table.data[[request.row for request in requests]]
    values, now = data[:, : len(FEATURES)], worker.env.now
    waiting = now - data[:, ARRIVAL_TIME]
    values[:, INDEX["waiting_time"]] = waiting
    values[:, INDEX["ttft_slack"]] = data[:, TTFT_SLO] - waiting
    values[:, INDEX["tpot_slack"]] = np.inf
    served = np.flatnonzero(data[:, FIRST_TOKEN_TIME] < np.inf)
    if len(served):
        rows = data[served]
        made = [
            max(1, requests[place].decode_tokens_generated, int(delivered))
            for place, delivered in zip(served.tolist(), rows[:, DELIVERED], strict=True)
        ]
        pace = rows[:, FIRST_TOKEN_TIME] + rows[:, TPOT_SLO] * made - now
        values[served, INDEX["tpot_slack"]] = pace
        values[served, INDEX["ttft_slack"]] = np.inf
    return data, values


def _ids(requests: Sequence[VLLMSchedulerRequest]) -> NDArray[np.int64]:
    return np.array([request.request_id for request in requests])


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
