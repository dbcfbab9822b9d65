"""Requests: what a user asked for, and its life in a worker's scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.steps import StepLog, StepRun
from opal_gym.sim.table import (
    ADMISSION,
    DELIVERED,
    FIRST_TOKEN_TIME,
    IS_FETCH,
    ORIGIN_STEP,
    PREEMPTIONS,
    PREFIX_HIT,
    PROMPT_REMAINING,
    TPOT_SLACK,
    TTFT_SLACK,
    RequestTable,
    kv_area,
)

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
        self.token_runs: list[StepRun] = []
        self.step_runs: list[StepRun] = []
        self.steps: StepLog | None = None

    def note_steps(self, first: int, steps: int) -> None:
        """Notes that the request took part in `steps` steps from number `first`."""
        runs = self.step_runs
        if runs and runs[-1][0] + runs[-1][1] >= first:
            runs[-1] = (runs[-1][0], first + steps - runs[-1][0])
        else:
            runs.append((first, steps))


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
        prefix_tokens: Prompt tokens that came from a cache since the last (re)start.
        start_tokens: While waiting: tokens that need no computing if it is admitted now.
        start_blocks: While waiting: blocks for them that need not be taken any more.
        origin_step: While decoding: the step count at which nothing was generated.
        finish_step: While decoding: the step count at which all is generated; -1 otherwise.
        delivered_tokens: Output tokens that the user has; recomputed ones count once.
        kv_area: Predicted KV area, token·steps.
        block_hashes: Hashes of its prompt's full GPU blocks, where prefix caching is on.
        held_hashes: Those of them under which blocks that it holds are published.
    """

    __slots__ = (
        "_block_size",
        "_blocks",
        "_computed",
        "_generated",
        "_seen_blocks",
        "_steps",
        "_table",
        "block_hashes",
        "delivered_tokens",
        "finish_step",
        "held_hashes",
        "kv_area",
        "kvc_lookup",
        "origin_step",
        "phase",
        "preemption_count",
        "prefix_tokens",
        "prompt_processed",
        "row",
        "start_blocks",
        "start_tokens",
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
        self.start_tokens = 0
        self.start_blocks = 0
        self.origin_step = 0
        self.finish_step = -1
        self.delivered_tokens = 0
        self.kv_area = kv_area(self.prompt_tokens, llm_request.predicted_output_tokens)
        self.block_hashes: Sequence[int] = ()
        self.held_hashes: list[int] = []
        self._generated = 0
        self._blocks = 0
        self._seen_blocks = 0
        self._computed: list[range] = []

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
    def prefilled(self) -> bool:
        """Whether its prefill is complete."""
        return self.prompt_processed == self.prompt_tokens

    @property
    def allocated_blocks(self) -> int:
        """GPU blocks that it holds, the coming step's included once that is scheduled."""
        if self.phase is RequestPhase.DECODE:
            tokens = self.prompt_tokens + self._steps.scheduled - self.origin_step
            return blocks_of(tokens, self._block_size)
        return self._blocks

    @property
    def predicted_remaining(self) -> int:
        """Output tokens still to come, as predicted; at least 1."""
        return max(1, self.llm_request.predicted_output_tokens - self.decode_tokens_generated)

    @property
    def admission(self) -> int:
        """Number of its last admission to the batch."""
        return int(self._table.data[self.row, ADMISSION])

    @property
    def may_be_preempted(self) -> bool:
        """Whether a policy may evict it: it is below the cap."""
        return self.preemption_count < MAX_PREEMPTIONS

    def take_blocks(self, blocks: int) -> None:
        """Notes that it holds `blocks` more GPU blocks."""
        self._blocks += blocks

    def give_blocks(self) -> tuple[int, list[int]]:
        """Gives up all its blocks; returns how many, and the hashes of published ones."""
        blocks, hashes = self._blocks, self.held_hashes
        self._blocks = self._seen_blocks = 0
        self.held_hashes = []
        return blocks, hashes

    @property
    def reusable_hashes(self) -> Sequence[int]:
        """Hashes of the blocks that it may find cached: its last token is always computed."""
        return self.block_hashes[: (self.prompt_tokens - 1) // self._block_size]

    def unseen_blocks(self, tokens: int) -> Sequence[int]:
        """Hashes of the full prompt blocks among its first `tokens` tokens, each once."""
        seen, self._seen_blocks = self._seen_blocks, tokens // self._block_size
        return self.block_hashes[seen : self._seen_blocks]

    def matched_on_gpu(self, blocks: int, in_use: int) -> None:
        """Notes how many leading blocks are cached on the GPU, and how many of these in use.

        A KV-cache match that is no longer than that needs no fetch.
        """
        self._start_from(blocks * self._block_size, in_use)
        self._choose_way()

    def take_cached(self, hashes: Sequence[int]) -> None:
        """Holds cached blocks of its prompt's beginning; their tokens need no computing."""
        self.held_hashes = list(hashes)
        self._seen_blocks = len(hashes)
        self.take_blocks(len(hashes))
        self.prefix_tokens = len(hashes) * self._block_size
        self._process(self.prefix_tokens)

    def looked_up(self, tokens: int) -> None:
        """WAITING: caches the lookup's result; without a match the request is READY."""
        self.kvc_lookup = tokens
        self._choose_way()

    def _choose_way(self) -> None:
        """WAITING for a fetch if the KV cache has more than is there already; READY otherwise."""
        is_fetch = (self.kvc_lookup or 0) > self.start_tokens
        self.phase = RequestPhase.WAITING if is_fetch else RequestPhase.READY
        self._set(IS_FETCH, is_fetch)
        self._set(PREFIX_HIT, max(self.kvc_lookup or 0, self.start_tokens))

    def start_fetch(self, tokens: int) -> None:
        """WAITING → FETCH_KVC: `tokens` prompt tokens are on their way to its blocks."""
        self.phase = RequestPhase.FETCH_KVC
        self.prefix_tokens = tokens
        self._process(tokens)
        self._start_from(tokens, self._blocks)
        self._set(IS_FETCH, False)

    def fetched(self) -> None:
        """FETCH_KVC → READY, with its blocks."""
        self.phase = RequestPhase.READY

    def schedule_prefill_chunk(self, tokens_left: int) -> int:
        """Tokens of the next chunk: neither more than the prompt's rest nor than are left."""
        return min(self.prompt_tokens - self.prompt_processed, tokens_left)

    def start_prefill(self, admission: int) -> None:
        """READY → PREFILL_CHUNKED.

        Args:
            admission: Number of its admission to the batch.
        """
        self._set(ADMISSION, admission)
        self.llm_request.stats.prefix_hit_tokens = self.prefix_tokens
        self.phase = RequestPhase.PREFILL_CHUNKED

    def prefill(self, tokens: int, first_step: int, steps: int) -> None:
        """PREFILL_CHUNKED: `tokens` more prompt tokens are in KV, computed in `steps` steps."""
        self._process(self.prompt_processed + tokens)
        self.llm_request.stats.note_steps(first_step, steps)

    def start_decode(self, generated: int) -> None:
        """→ DECODE with `generated` tokens (0, or 1 made by the prefill's last step)."""
        self.phase = RequestPhase.DECODE
        self.origin_step = self._steps.count - generated
        self.finish_step = self.origin_step + self.llm_request.output_tokens
        self._set(ORIGIN_STEP, self.origin_step)

    def leave_decode(self) -> None:
        """Leaves the lockstep of the decodes: its progress, blocks and token times are noted."""
        self._generated = generated = self.decode_tokens_generated
        self._blocks = self.allocated_blocks
        self.finish_step = -1
        self._set(ORIGIN_STEP, math.inf)
        stats, new = self.llm_request.stats, generated - self.delivered_tokens
        stats.note_steps(self.origin_step, generated)
        if new > 0:
            stats.token_runs.append((self.origin_step + self.delivered_tokens, new))
            self.delivered_tokens = generated
            self._set(DELIVERED, generated)
            self._note_pace(generated)

    def complete(self) -> None:
        """→ COMPLETED; its blocks are still held."""
        self._note_computed()
        self.phase = RequestPhase.COMPLETED

    def first_token(self, time: float) -> None:
        """Its first output token was made at `time`, s."""
        self.llm_request.stats.first_token_time = time
        self._set(FIRST_TOKEN_TIME, time)
        self._set(TTFT_SLACK, math.inf)

    def preempted(self) -> None:
        """→ WAITING after an eviction (seed, "Phase 3")."""
        stats = self.llm_request.stats
        self._note_computed()
        stats.preemptions += 1
        self.preemption_count += 1
        self._set(PREEMPTIONS, self.preemption_count)
        self.reset_progress()

    def _note_computed(self) -> None:
        """Counts what was computed since the last (re)start and had been computed before."""
        computed = range(self.prefix_tokens, self.tokens_held)
        before, self._computed = self._computed, [computed]
        for old in before:
            both = range(max(old.start, computed.start), min(old.stop, computed.stop))
            self.llm_request.stats.recomputed_tokens += len(both)
            # What is left of the old range, so that the ranges stay apart.
            self._computed += [range(old.start, min(old.stop, computed.start))]
            self._computed += [range(max(old.start, computed.stop), old.stop)]
        self._computed = [part for part in self._computed if part]

    def reset_progress(self) -> None:
        """→ WAITING with nothing in KV; the lookup will be done again."""
        self.phase = RequestPhase.WAITING
        self.kvc_lookup = None
        self.prefix_tokens = 0
        self._generated = 0
        self._process(0)
        self._start_from(0, 0)

    def _start_from(self, tokens: int, blocks: int) -> None:
        self.start_tokens, self.start_blocks = tokens, blocks
        self._set(PROMPT_REMAINING, self.prompt_tokens - tokens)

    def _note_pace(self, delivered: int) -> None:
        """While it makes no tokens, the TPOT objective's pace is lost at a known time."""
        first, slo = self.llm_request.stats.first_token_time, self.llm_request.tenant.tpot_slo_s
        self._set(TPOT_SLACK, first + delivered * slo)

    def _process(self, tokens: int) -> None:
        self.prompt_processed = tokens
        self._set(PROMPT_REMAINING, self.prompt_tokens - tokens)

    def _set(self, column: int, value: float) -> None:
        self._table.data[self.row, column] = value


def by_age(request: SchedulerRequest) -> tuple[float, int]:
    """Sort key: earlier arrivals first, then smaller ids."""
    return request.order
