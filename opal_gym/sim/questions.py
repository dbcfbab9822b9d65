"""The three questions of a rebuild: who is asked about, in which order (DESIGN §3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.candidates import (
    CandidateTable,
    admit_table,
    chunk_table,
    generated_tokens,
    nearly_finished,
    preempt_table,
)
from opal_gym.sim.decision import STOP, Decision, DecisionKind
from opal_gym.sim.gauges import read_gauges
from opal_gym.sim.request import MAX_PREEMPTIONS, VLLMSchedulerRequest
from opal_gym.sim.table import Column, RequestTable, State

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


class Window:
    """The waiting requests that one rebuild scans, in queue order.

    Attributes:
        requests: The requests.
        rows: Their rows of the request table, shape (len(requests),).
    """

    def __init__(self, requests: list[VLLMSchedulerRequest]) -> None:
        self.requests = requests
        self.rows = np.fromiter((request.row for request in requests), np.intp, len(requests))

    def remove(self, request: VLLMSchedulerRequest) -> None:
        """Takes an admitted request out."""
        place = self.requests.index(request)
        del self.requests[place]
        self.rows = np.delete(self.rows, place)

    def has_ready(self, table: RequestTable) -> bool:
        """Whether a request is READY."""
        return bool(np.any(table.data[self.rows, Column.STATE] == State.READY))


@dataclass(frozen=True)
class Question(Generic[T]):
    """A decision with the options that its answers stand for, candidate by candidate."""

    decision: Decision
    options: Sequence[T]

    @property
    def has_one_answer(self) -> bool:
        """Whether nothing is left to decide."""
        return len(self.options) == 1 and not self.decision.stop_allowed


def chunk_question(worker: LLMWorkerVLLMScheduler) -> Question[int] | None:
    """CHUNK: how many prefill tokens a step may take until the next rebuild.

    Asked where a prefill is running, or a slot is free and a request not in FETCH_KVC waits;
    unless every budget gives the same coming step and nobody waits.
    """
    budgets = worker.params.chunk_choices
    prefills = worker.batch.prefill_requests.values()
    waits = worker.somebody_waits
    if not worker.params.chunked_prefill or not (prefills or (worker.slots_free and waits)):
        return None
    left = worker.params.max_num_batched_tokens - worker.batch.decode_tokens
    rest = sum(request.prompt_tokens - request.prompt_processed for request in prefills)
    if not waits and min(rest, left, budgets[0]) == min(rest, left, budgets[-1]):
        return None
    return _question(
        worker,
        DecisionKind.CHUNK,
        budgets,
        table=lambda: chunk_table(worker, budgets),
        baseline=0,
    )


def preempt_question(
    worker: LLMWorkerVLLMScheduler,
) -> Question[VLLMSchedulerRequest] | None:
    """PREEMPT: who is evicted; None where nobody in the batch is below the cap.

    Least work done first, nearly finished ones last; ties: later arrivals first. Of more than the
    table holds: the first half so, then those with the longest predicted remaining output.
    """
    running = [request for request in worker.batch if request.preemption_count < MAX_PREEMPTIONS]
    if not running:
        return None
    rows = np.fromiter((request.row for request in running), np.intp, len(running))
    ids = np.array([request.request_id for request in running])
    data = worker.table.data[rows]
    generated = generated_tokens(worker, data)
    work = data[:, Column.PROCESSED] + generated
    arrival = data[:, Column.ARRIVAL_TIME]
    order = np.lexsort((-ids, -arrival, work, nearly_finished(worker, data)))
    remaining = np.maximum(1, data[:, Column.PREDICTED_OUTPUT] - generated)
    places = _first_half_then(order, worker.max_candidates, -remaining)
    return _question(
        worker,
        DecisionKind.PREEMPT,
        [running[place] for place in places],
        table=lambda: preempt_table(worker, rows[places], ids[places]),
        baseline=0,
    )


def admit_question(
    worker: LLMWorkerVLLMScheduler, plan: StepPlan, window: Window
) -> Question[VLLMSchedulerRequest] | None:
    """ADMIT: who of the waiting requests is admitted next; None where nobody fits.

    Candidates stand in queue order. Of more than the table holds: the first half so, then those of
    the rest with the smallest predicted KV area, also in queue order.
    """
    if not window.requests:
        return None
    fit = fits(worker, plan, window)
    fitting = np.flatnonzero(fit.mask)
    if not len(fitting):
        return None
    rows = window.rows
    areas = worker.table.data[rows[fitting], Column.KV_AREA]
    chosen = np.sort(_first_half_then(np.arange(len(fitting)), worker.max_candidates, areas))
    places = fitting[chosen]
    options = [window.requests[place] for place in places]
    stop_allowed = bool(worker.batch) or worker.in_flight > 0
    # FIFO's walk ends at the first request that it does not pass over.
    walk_ends_before = stop_allowed and not fit.mask[int(np.argmin(fit.passed_over))]
    return _question(
        worker,
        DecisionKind.ADMIT,
        options,
        table=lambda: admit_table(
            worker,
            rows[places],
            np.array([request.request_id for request in options]),
            fit.blocks[places],
        ),
        baseline=STOP if walk_ends_before else 0,
        stop_allowed=stop_allowed,
    )


@dataclass(frozen=True)
class Fit:
    """Which requests of a window fit now; arrays of shape (n,).

    Attributes:
        mask: Whether it fits.
        blocks: Blocks that its first chunk or its fetch needs.
        passed_over: Whether FIFO passes it over: it is being fetched, or rate-limited.
    """

    mask: NDArray[np.bool_]
    blocks: NDArray[np.float64]
    passed_over: NDArray[np.bool_]


def fits(worker: LLMWorkerVLLMScheduler, plan: StepPlan, window: Window) -> Fit:
    """Which waiting requests fit.

    A READY request fits if there is a slot, a prefill token left in the coming step (all of its
    prompt's rest without chunked prefill), and blocks for its first chunk. One with a prefix match
    fits if the rate limit allows a fetch and blocks for the whole match are free.
    """
    data = worker.table.data[window.rows]
    state, prompt = data[:, Column.STATE], data[:, Column.PROMPT]
    processed, match = data[:, Column.PROCESSED], data[:, Column.LOOKUP]
    free, params = worker.pool.free, worker.params
    rest = prompt - processed
    chunk = np.minimum(rest, plan.tokens_left)
    if not params.chunked_prefill:
        chunk[chunk < rest] = 0
    held = tokens_after_chunk(processed, chunk, prompt, params.first_token_at_prefill_end)
    matched, may_fetch = state == State.MATCHED, worker._can_issue_kvc_fetch()
    blocks = np.where(
        matched,
        blocks_of(match, worker.block_size),
        blocks_of(held, worker.block_size) - data[:, Column.BLOCKS],
    )
    can_run = (state == State.READY) & (chunk > 0) & worker.slots_free
    mask = (can_run | (matched & may_fetch)) & (blocks <= free)
    return Fit(mask, blocks, (state == State.FETCHING) | (matched & (not may_fetch)))


def tokens_after_chunk(processed: Any, chunk: Any, prompt: Any, first_token_at_end: bool) -> Any:
    """Tokens in KV after a prefill step; the one that ends the prefill may make a token.

    Works on numbers and on arrays alike.
    """
    return processed + chunk + (first_token_at_end & (processed + chunk == prompt))


def _first_half_then(
    order: NDArray[np.intp], table_size: int, rest_key: NDArray[np.float64]
) -> NDArray[np.intp]:
    """The first `table_size` of `order`, or its first half and the rest's smallest by key."""
    if len(order) <= table_size:
        return order
    half = (table_size + 1) // 2
    rest = order[half:]
    best = rest[np.argsort(rest_key[rest], kind="stable")[: table_size - half]]
    return np.concatenate((order[:half], best))


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
