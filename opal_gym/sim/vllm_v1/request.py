"""A request in `vllm_v1`: an eviction takes its KV, but not the tokens it has generated."""

from __future__ import annotations

import math

from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.request import LLMRequest, RequestPhase, VLLMSchedulerRequest
from opal_gym.sim.steps import StepLog
from opal_gym.sim.table import (
    DELIVERED,
    ORIGIN_STEP,
    PREDICTED_REMAINING,
    PROMPT_REMAINING,
    RequestTable,
)
from opal_gym.sim.vllm_v1.blocks import Content


class V1Request(VLLMSchedulerRequest):
    """A request whose known tokens, prompt and generated, are to be computed.

    While it makes a token in every step (`in_lockstep`), its progress follows from the step
    counter; otherwise `prompt_processed` counts its known tokens in KV. The newest token is known,
    but not in KV until the next step computes it.

    Attributes:
        in_lockstep: Whether it makes a token in every step.
        scheduled_step: Number of the last step for which the walk over `running` gave it blocks.
        parked: Whether it holds blocks while it waits: for its remote load, or since.
        promoted: Whether the scheduler has seen that its load has ended.
        place: Its place in the queue that it waits in.
    """

    __slots__ = (
        "_lockstep_start",
        "in_lockstep",
        "parked",
        "place",
        "promoted",
        "scheduled_step",
    )

    def __init__(
        self, llm_request: LLMRequest, block_size: int, steps: StepLog, table: RequestTable
    ) -> None:
        super().__init__(llm_request, block_size, steps, table)
        self.in_lockstep = False
        self.scheduled_step = 0
        self.parked = False
        self.promoted = False
        self.place: tuple[float, ...] = ()
        self._lockstep_start = 0

    @property
    def decode_tokens_generated(self) -> int:
        """Tokens generated so far; evictions do not take them."""
        return self._steps.count - self.origin_step if self.in_lockstep else self._generated

    @property
    def known_tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.prompt_tokens + self.decode_tokens_generated

    @property
    def tokens_held(self) -> int:
        """Tokens in KV."""
        return self.known_tokens - 1 if self.in_lockstep else self.prompt_processed

    @property
    def rest(self) -> int:
        """Known tokens that are not in KV."""
        return 1 if self.in_lockstep else self.known_tokens - self.prompt_processed

    @property
    def prefilled(self) -> bool:
        """Whether all known tokens are in KV: the step that did it makes the next one."""
        return self.prompt_processed == self.known_tokens

    @property
    def tokens_scheduled(self) -> int:
        """In lockstep: tokens in KV once the steps that are scheduled have ended."""
        steps = max(self._steps.scheduled, self.scheduled_step)
        return self.prompt_tokens + steps - self.origin_step - 1

    @property
    def allocated_blocks(self) -> int:
        """GPU blocks that it holds, the coming step's included once that is scheduled."""
        if self.in_lockstep:
            return blocks_of(self.tokens_scheduled, self._block_size)
        return self._blocks

    def contents(self, first: int, last: int) -> list[Content]:
        """Contents of its blocks `first` … `last - 1`: what no prompt shares is its own."""
        hashes = self.block_hashes
        return [
            hashes[block] if block < len(hashes) else (self.request_id, block)
            for block in range(first, last)
        ]

    @property
    def reusable_contents(self) -> list[Content]:
        """Contents of the blocks that it may find cached: its last token is always computed."""
        return self.contents(0, (self.known_tokens - 1) // self._block_size)

    def unseen_contents(self, tokens: int) -> list[Content]:
        """Contents of the full blocks among its first `tokens` tokens, each once."""
        seen, self._seen_blocks = self._seen_blocks, tokens // self._block_size
        return self.contents(seen, self._seen_blocks)

    def start_decode(self, generated: int) -> None:
        """→ lockstep with `generated` tokens."""
        super().start_decode(generated)
        self.in_lockstep = True
        self._lockstep_start = self._steps.count

    def leave_decode(self) -> None:
        """Leaves the lockstep: its progress, blocks and token times are noted."""
        stats, held = self.llm_request.stats, self.tokens_held
        generated = self.decode_tokens_generated
        self._blocks = self.allocated_blocks
        self._generated = generated
        self.in_lockstep = False
        self.finish_step = -1
        self._process(held)
        self._set(ORIGIN_STEP, math.inf)
        stats.note_steps(self._lockstep_start, self._steps.count - self._lockstep_start)
        new = generated - self.delivered_tokens
        stats.token_runs.append((self.origin_step + self.delivered_tokens, new))
        self.delivered_tokens = generated
        self._set(DELIVERED, generated)
        self._note_pace(generated)

    def reset_progress(self) -> None:
        """→ WAITING with nothing in KV; what it has generated stays known."""
        self.phase = RequestPhase.WAITING
        self.prefix_tokens = 0
        self.parked = self.promoted = False
        self._process(0)
        self._set(PREDICTED_REMAINING, self.predicted_remaining)

    def _process(self, tokens: int) -> None:
        """Its first `tokens` known tokens are in KV; the others are its prefill's rest."""
        self.prompt_processed = tokens
        self._set(PROMPT_REMAINING, self.prompt_tokens + self._generated - tokens)

    def _start_from(self, tokens: int, blocks: int) -> None:
        """The seed's note of a waiting request's match; here it is looked up when it is decided."""

    def promote(self) -> None:
        """Its remote load has ended and the scheduler has seen it; one token is left to compute."""
        self.promoted = True
        self._process(min(self.prompt_processed, self.known_tokens - 1))
