"""Requests: what a user asked for, and its life in a worker's scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.steps import StepLog
from opal_gym.sim.table import Column, RequestTable, State

MAX_PREEMPTIONS = 3
"""A policy may evict a request this often (seed, "Preemption Strategy")."""


class RequestPhase(Enum):
    """States of a request in a worker (seed, "RequestPhase")."""

    WAITING = "WAITING"
    FETCH_KVC = "FETCH_KVC"
    READY = "READY"
    PREFILL_CHUNKED = "PREFILL_CHUNKED"
    DECODE = "DECODE"
    COMPLETED = "COMPLETED"


@dataclass(frozen=True)
class Tenant:
    """A group of users.

    Attributes:
        name: The tenant's name.
        weight: Weight of its requests in `slowdown` and in weighted goodput.
        ttft_slo_s: Objective for the time to first token, s; infinite: never missed.
        tpot_slo_s: Objective for the time per output token, s; infinite: never missed.
    """

    name: str = "default"
    weight: float = 1.0
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf


DEFAULT_TENANT = Tenant()


class LLMRequestStats:
    """Times and counts of one request (seed, "Per-Request Statistics"), times in seconds.

    `token_runs` and `step_runs` hold (first step, steps) of consecutive engine steps; the worker's
    `StepLog` knows their times.
    """

    __slots__ = (
        "decode_done_time",
        "first_token_time",
        "gpu_start_time",
        "preemptions",
        "prefix_hit_tokens",
        "recomputed_tokens",
        "request_ready_time",
        "start_processing_time",
        "step_runs",
        "steps",
        "token_runs",
        "worker_arrival_time",
    )

    def __init__(self) -> None:
        self.worker_arrival_time = math.nan
        self.start_processing_time = math.nan
        self.request_ready_time = math.nan
        self.gpu_start_time = math.nan
        self.first_token_time = math.nan
        self.decode_done_time = math.nan
        self.prefix_hit_tokens = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.token_runs: list[tuple[int, int]] = []
        self.step_runs: list[tuple[int, int]] = []
        self.steps: StepLog | None = None

    def note_steps(self, first: int, steps: int) -> None:
        """Notes that the request took part in `steps` steps from number `first`."""
        runs = self.step_runs
        if runs and runs[-1][0] + runs[-1][1] >= first:
            runs[-1] = (runs[-1][0], first + steps - runs[-1][0])
        else:
            runs.append((first, steps))

    @property
    def token_times(self) -> NDArray[np.float64]:
        """Times at which each output token was first made, shape (tokens,), s."""
        return self._expand(self.token_runs)

    @property
    def scheduler_timestamps(self) -> NDArray[np.float64]:
        """End times of every step that this request took part in, shape (steps,), s."""
        return self._expand(self.step_runs)

    def _expand(self, runs: list[tuple[int, int]]) -> NDArray[np.float64]:
        if self.steps is None or not runs:
            return np.empty(0)
        if len(runs) == 1:
            return self.steps.times(*runs[0])
        return np.concatenate([self.steps.times(*run) for run in runs])


def note_first(stats: LLMRequestStats, name: str, time: float) -> None:
    """Sets a time that counts when it happens first, whatever a preemption repeats."""
    if math.isnan(getattr(stats, name)):
        setattr(stats, name, time)


@dataclass(slots=True)
class LLMRequest:
    """What a user asked for.

    Attributes:
        request_id: Unique in a workload.
        arrival_time: When it arrives, s of simulated time.
        prompt_tokens: Length of the prompt.
        output_tokens: True length of the output; no scheduler sees it.
        predicted_output_tokens: What schedulers see of it; 0: nothing is known.
        tenant: Whose request it is.
        priority: vLLM's priority; lower is more urgent.
        hash_ids: Chained hashes of the prompt's blocks of `kvc.hash_block_tokens` tokens.
    """

    request_id: int
    arrival_time: float
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: int
    tenant: Tenant = DEFAULT_TENANT
    priority: int = 0
    hash_ids: tuple[int, ...] = ()
    stats: LLMRequestStats = field(default_factory=LLMRequestStats)


class SchedulerRequest:
    """A request as a worker's scheduler sees it."""

    __slots__ = ("arrival_time", "llm_request", "prompt_tokens", "request_id")

    def __init__(self, llm_request: LLMRequest) -> None:
        self.llm_request = llm_request
        self.request_id = llm_request.request_id
        self.arrival_time = llm_request.arrival_time
        self.prompt_tokens = llm_request.prompt_tokens

    @property
    def order(self) -> tuple[float, int]:
        """Sort key by age: arrival time, then id."""
        return self.arrival_time, self.request_id


class VLLMSchedulerRequest(SchedulerRequest):
    """A request in the vLLM scheduler, and its state machine (seed, "Request State Flow").

    All decodes of a batch advance one token a step, in lockstep, so a decoding request keeps only
    the step at which it had generated nothing (`origin_step`); its progress follows from the
    worker's step counter. What candidate tables need is mirrored in a row of the request table.

    Attributes:
        row: Its row of the request table.
        phase: Where it is in its life.
        prompt_processed: Prompt tokens in KV.
        preemption_count: How often it was evicted.
        kvc_lookup: Cached result of the KV-cache lookup in tokens; None: look (again).
        prefix_tokens: Prompt tokens that came from the KV cache since the last (re)start.
        origin_step: While decoding: the step count at which nothing was generated.
        delivered_tokens: Output tokens that the user has; recomputed ones count once.
    """

    __slots__ = (
        "_block_size",
        "_blocks",
        "_generated",
        "_steps",
        "_table",
        "delivered_tokens",
        "kvc_lookup",
        "origin_step",
        "phase",
        "preemption_count",
        "prefix_tokens",
        "prompt_processed",
        "row",
    )

    def __init__(
        self, llm_request: LLMRequest, block_size: int, steps: StepLog, table: RequestTable
    ) -> None:
        super().__init__(llm_request)
        self._block_size = block_size
        self._steps = steps
        self._table = table
        self.row = table.add(llm_request)
        self.phase = RequestPhase.WAITING
        self.prompt_processed = 0
        self.preemption_count = 0
        self.kvc_lookup: int | None = None
        self.prefix_tokens = 0
        self.origin_step = 0
        self.delivered_tokens = 0
        self._generated = 0
        self._blocks = 0

    @property
    def decode_tokens_generated(self) -> int:
        """Tokens generated since the last (re)start."""
        if self.phase is RequestPhase.DECODE:
            return self._steps.count - self.origin_step
        return self._generated

    @property
    def tokens_held(self) -> int:
        """Tokens in KV: the seed's work score."""
        return self.prompt_processed + self.decode_tokens_generated

    @property
    def allocated_blocks(self) -> int:
        """GPU blocks that it holds, the coming step's included once that is scheduled."""
        if self.phase is RequestPhase.DECODE:
            tokens = self.prompt_tokens + self._steps.scheduled - self.origin_step
            return blocks_of(tokens, self._block_size)
        return self._blocks

    def take_blocks(self, blocks: int) -> None:
        """Notes that it holds `blocks` more GPU blocks."""
        self._blocks += blocks
        self._table.data[self.row, Column.BLOCKS] = self._blocks

    def give_blocks(self) -> int:
        """Gives up all its blocks; returns how many."""
        blocks, self._blocks = self._blocks, 0
        self._table.data[self.row, Column.BLOCKS] = 0
        return blocks

    def looked_up(self, tokens: int) -> None:
        """WAITING: caches the lookup's result; without a match the request is READY."""
        self.kvc_lookup = tokens
        self._table.data[self.row, Column.LOOKUP] = tokens
        if tokens:
            self._enter(RequestPhase.WAITING, State.MATCHED)
        else:
            self._enter(RequestPhase.READY, State.READY)

    def start_fetch(self, tokens: int) -> None:
        """WAITING → FETCH_KVC: `tokens` prompt tokens are on their way to its blocks."""
        self._process(tokens)
        self.prefix_tokens = tokens
        self._enter(RequestPhase.FETCH_KVC, State.FETCHING)

    def fetched(self) -> None:
        """FETCH_KVC → READY, with its blocks."""
        self._enter(RequestPhase.READY, State.READY)

    def start_prefill(self) -> None:
        """READY → PREFILL_CHUNKED."""
        self._enter(RequestPhase.PREFILL_CHUNKED, State.PREFILL)

    def prefill(self, tokens: int, first_step: int, steps: int) -> None:
        """PREFILL_CHUNKED: `tokens` more prompt tokens are in KV, computed in `steps` steps."""
        self._process(self.prompt_processed + tokens)
        self.llm_request.stats.note_steps(first_step, steps)

    def start_decode(self, generated: int) -> None:
        """→ DECODE with `generated` tokens (0, or 1 made by the prefill's last step)."""
        self.origin_step = self._steps.count - generated
        self._table.data[self.row, Column.ORIGIN_STEP] = self.origin_step
        self._enter(RequestPhase.DECODE, State.DECODE)

    def leave_decode(self) -> None:
        """Leaves the lockstep of the decodes: its progress, blocks and token times are noted."""
        self._generated = generated = self.decode_tokens_generated
        self._blocks = self.allocated_blocks
        stats, new = self.llm_request.stats, generated - self.delivered_tokens
        stats.note_steps(self.origin_step, generated)
        if new > 0:
            stats.token_runs.append((self.origin_step + self.delivered_tokens, new))
            self.delivered_tokens = generated
            self._table.data[self.row, Column.DELIVERED] = generated

    def complete(self) -> None:
        """→ COMPLETED; its blocks are still held."""
        self.phase = RequestPhase.COMPLETED

    def first_token(self, time: float) -> None:
        """Its first output token was made at `time`, s."""
        self.llm_request.stats.first_token_time = time
        self._table.data[self.row, Column.FIRST_TOKEN_TIME] = time

    def preempted(self) -> None:
        """→ WAITING after an eviction (seed, "Phase 3")."""
        stats = self.llm_request.stats
        stats.recomputed_tokens += self.tokens_held - self.prefix_tokens
        stats.preemptions += 1
        self.preemption_count += 1
        self._table.data[self.row, Column.PREEMPTIONS] = self.preemption_count
        self.reset_progress()

    def reset_progress(self) -> None:
        """→ WAITING with nothing in KV; the lookup will be done again."""
        self._process(0)
        self._generated = 0
        self.prefix_tokens = 0
        self.kvc_lookup = None
        self._enter(RequestPhase.WAITING, State.UNLOOKED)

    def _process(self, tokens: int) -> None:
        self.prompt_processed = tokens
        self._table.data[self.row, Column.PROCESSED] = tokens

    def _enter(self, phase: RequestPhase, state: State) -> None:
        self.phase = phase
        self._table.data[self.row, Column.STATE] = state


def by_age(request: SchedulerRequest) -> tuple[float, int]:
    """Sort key: earlier arrivals first, then smaller ids."""
    return request.order
