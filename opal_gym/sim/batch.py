"""The persistent batch (seed, "BatchMetadata" and "Persistent Batch Model")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.request import VLLMSchedulerRequest
from opal_gym.sim.steps import StepLog
from opal_gym.sim.table import Members


class BatchMetadata:
    """The requests of the batch and the tokens of the coming step.

    Decodes make one token each step, in lockstep. Their next completion, their context and the
    blocks they need therefore follow from the step counter, and a step costs nothing per decode.

    Attributes:
        prefill_requests: Prefilling requests by id, in admission order.
        decode_requests: Decoding requests by id.
    """

    def __init__(self, block_size: int, steps: StepLog) -> None:
        self.prefill_requests: dict[int, VLLMSchedulerRequest] = {}
        self.decode_requests: dict[int, VLLMSchedulerRequest] = {}
        self._chunks: list[tuple[VLLMSchedulerRequest, int]] = []
        self._members = Members()
        self._admissions = 0
        self._block_size = block_size
        self._steps = steps
        self._finishes: list[tuple[int, int, VLLMSchedulerRequest]] = []
        # Decodes by the step count, mod block_size, at which their last block is full.
        self._block_classes = [0] * block_size
        self._context_offset = 0

    def __len__(self) -> int:
        return len(self._members.requests)

    def __iter__(self) -> Iterator[VLLMSchedulerRequest]:
        return chain(self.decode_requests.values(), self.prefill_requests.values())

    @property
    def rows(self) -> NDArray[np.intp]:
        """Rows of the request table, in the order of `members`, shape (len(self),)."""
        return self._members.rows

    @property
    def members(self) -> Sequence[VLLMSchedulerRequest]:
        """All requests of the batch, in no particular but reproducible order."""
        return self._members.requests

    @property
    def decode_tokens(self) -> int:
        """Decode tokens of the coming step: one for each decode."""
        return len(self.decode_requests)

    @property
    def prefill_tokens(self) -> int:
        """Prefill tokens of the coming step."""
        return sum(tokens for _, tokens in self._chunks)

    @property
    def request_tokens(self) -> dict[int, int]:
        """Tokens scheduled in the coming step, by request id."""
        chunks = {request.request_id: tokens for request, tokens in self._chunks}
        return {**dict.fromkeys(self.decode_requests, 1), **chunks}

    @property
    def total_tokens(self) -> int:
        """Tokens of the coming step."""
        return self.decode_tokens + self.prefill_tokens

    @property
    def decode_context(self) -> int:
        """Sum over decodes of prompt + generated tokens."""
        return self._context_offset + len(self.decode_requests) * self._steps.count

    def add_prefill(self, request: VLLMSchedulerRequest) -> None:
        """Adds an admitted request."""
        self.prefill_requests[request.request_id] = request
        self._members.add(request)
        self._admissions += 1
        request.start_prefill(self._admissions)

    def schedule_prefill(self, chunks: list[tuple[VLLMSchedulerRequest, int]]) -> None:
        """Sets the coming step's prefill chunks (request, tokens), a list that may still grow."""
        self._chunks = chunks

    def start_decode(self, request: VLLMSchedulerRequest, generated: int) -> None:
        """Moves a request whose prefill is complete to the decodes, with `generated` tokens."""
        del self.prefill_requests[request.request_id]
        request.start_decode(generated)
        self.decode_requests[request.request_id] = request
        offset = request.prompt_tokens - request.origin_step
        self._context_offset += offset
        self._block_classes[self._block_class(offset)] += 1
        heappush(self._finishes, (request.finish_step, request.request_id, request))

    def remove(self, request: VLLMSchedulerRequest) -> None:
        """Takes a request out of the batch, its progress and blocks kept."""
        if self.decode_requests.pop(request.request_id, None) is not None:
            offset = request.prompt_tokens - request.origin_step
            self._context_offset -= offset
            self._block_classes[self._block_class(offset)] -= 1
            request.leave_decode()
        else:
            del self.prefill_requests[request.request_id]
        self._members.remove(request)

    def _block_class(self, offset: int) -> int:
        """The step count, mod block_size, at which the last block of a decode is full."""
        return -offset % self._block_size

    def steps_to_completion(self) -> int | None:
        """Steps until the next decode completes, at least 0; None without decodes."""
        finishes = self._finishes
        while finishes:
            finish, _, request = finishes[0]
            if request.finish_step == finish:
                return finish - self._steps.count
            # It was preempted and left this behind.
            heappop(finishes)
        return None

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
