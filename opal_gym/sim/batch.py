"""The persistent batch (seed, "BatchMetadata" and "Persistent Batch Model")."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.request import VLLMSchedulerRequest
from opal_gym.sim.steps import StepLog
from opal_gym.sim.table import RowSet


class BatchMetadata:
    """The requests of the batch and the tokens of the coming step.

    Decodes make one token each step, in lockstep. Their next completion, their context and the
    blocks they need therefore follow from the step counter, and a step costs nothing per decode.

    Attributes:
        prefill_requests: Prefilling requests by id, in admission order.
        decode_requests: Decoding requests by id.
        request_tokens: Tokens scheduled in the coming step, by request id.
    """

    def __init__(self, block_size: int, steps: StepLog) -> None:
        self.prefill_requests: dict[int, VLLMSchedulerRequest] = {}
        self.decode_requests: dict[int, VLLMSchedulerRequest] = {}
        self.request_tokens: dict[int, int] = {}
        self.prefill_tokens = 0
        self._rows = RowSet()
        self._admissions = 0
        self._block_size = block_size
        self._steps = steps
        self._finishes: list[tuple[int, int, VLLMSchedulerRequest]] = []
        # Decodes by the step count, mod block_size, at which their last block is full.
        self._block_classes = [0] * block_size
        self._context_offset = 0

    def __len__(self) -> int:
        return len(self.prefill_requests) + len(self.decode_requests)

    def __iter__(self) -> Iterator[VLLMSchedulerRequest]:
        return chain(self.decode_requests.values(), self.prefill_requests.values())

    @property
    def rows(self) -> NDArray[np.intp]:
        """Rows of the request table, shape (len(self),)."""
        return self._rows.rows

    @property
    def decode_tokens(self) -> int:
        """Decode tokens of the coming step: one for each decode."""
        return len(self.decode_requests)

    @property
    def total_tokens(self) -> int:
        """Tokens of the coming step."""
        return self.decode_tokens + self.prefill_tokens

    @property
    def decode_context(self) -> int:
        """Sum over decodes of prompt + generated tokens."""
        return self._context_offset + len(self.decode_requests) * self._steps.count

    def add_prefill(self, request: VLLMSchedulerRequest, tokens: int) -> None:
        """Adds an admitted request with its first chunk, which the coming step computes."""
        self.prefill_requests[request.request_id] = request
        self.request_tokens[request.request_id] = tokens
        self.prefill_tokens += tokens
        self._rows.add(request.row)
        self._admissions += 1
        request.start_prefill(self._admissions)

    def schedule_prefill(self, chunks: list[tuple[VLLMSchedulerRequest, int]]) -> None:
        """Replaces the coming step's prefill chunks: (request, tokens)."""
        for request_id in self.prefill_requests:
            self.request_tokens.pop(request_id, None)
        for request, tokens in chunks:
            self.request_tokens[request.request_id] = tokens
        self.prefill_tokens = sum(tokens for _, tokens in chunks)

    def start_decode(self, request: VLLMSchedulerRequest, generated: int) -> None:
        """Moves a request whose prefill is complete to the decodes, with `generated` tokens."""
        del self.prefill_requests[request.request_id]
        request.start_decode(generated)
        self.decode_requests[request.request_id] = request
        self.request_tokens[request.request_id] = 1
        offset = request.prompt_tokens - request.origin_step
        self._context_offset += offset
        self._block_classes[self._block_class(offset)] += 1
        finish = request.origin_step + request.llm_request.output_tokens
        heappush(self._finishes, (finish, request.request_id, request))

    def remove(self, request: VLLMSchedulerRequest) -> None:
        """Takes a request out of the batch, its progress and blocks kept."""
        if self.decode_requests.pop(request.request_id, None) is not None:
            offset = request.prompt_tokens - request.origin_step
            self._context_offset -= offset
            self._block_classes[self._block_class(offset)] -= 1
            request.leave_decode()
        else:
            del self.prefill_requests[request.request_id]
        self._rows.remove(request.row)
        self.request_tokens.pop(request.request_id, None)

    def _block_class(self, offset: int) -> int:
        """The step count, mod block_size, at which the last block of a decode is full."""
        return -offset % self._block_size

    def steps_to_completion(self) -> int | None:
        """Steps until the next decode completes, at least 0; None without decodes."""
        finishes = self._finishes
        while finishes and not self._is_current(*finishes[0]):
            heappop(finishes)
        return finishes[0][0] - self._steps.count if finishes else None

    def completed(self) -> list[VLLMSchedulerRequest]:
        """Decodes that have made all their tokens, in order of id."""
        done = []
        while self.steps_to_completion() == 0:
            done.append(heappop(self._finishes)[2])
        return done

    def decode_blocks_needed(self) -> int:
        """Blocks that the decodes' next tokens need (seed, "Phase 1")."""
        return self._block_classes[self._steps.count % self._block_size]

    def later_decode_blocks(self, steps: int) -> int:
        """Blocks that the decodes need in the steps 2 … `steps` from now."""
        rounds, rest = divmod(steps - 1, self._block_size)
        return rounds * len(self.decode_requests) + sum(self._next_classes(rest))

    def later_decode_blocks_by_step(self, steps: int) -> list[int]:
        """The same for each of these steps."""
        rounds, rest = divmod(steps - 1, self._block_size)
        return self._next_classes(self._block_size) * rounds + self._next_classes(rest)

    def _next_classes(self, steps: int) -> list[int]:
        begin = (self._steps.count + 1) % self._block_size
        wrapped = max(0, begin + steps - self._block_size)
        return self._block_classes[begin : begin + steps] + self._block_classes[:wrapped]

    def _is_current(self, finish: int, request_id: int, request: VLLMSchedulerRequest) -> bool:
        """Whether an entry of the heap still holds: preempted requests leave theirs behind."""
        return (
            self.decode_requests.get(request_id) is request
            and request.origin_step + request.llm_request.output_tokens == finish
        )
