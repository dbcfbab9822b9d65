"""When a waiting request may be admitted, and what it takes (vLLM's `Scheduler.schedule`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.request import RequestPhase
from opal_gym.sim.vllm_v1.request import V1Request

if TYPE_CHECKING:
    from opal_gym.sim.vllm_v1.worker import LLMWorkerVLLMV1


@dataclass(slots=True)
class TokenBudget:
    """Tokens that the coming step can still take.

    Attributes:
        total: Of all requests: `max_num_batched_tokens` less what is scheduled.
        prefill: Of requests with more than one token left to compute: the CHUNK decision's budget
            less what is scheduled of them.
        cap: Most tokens of one request: `long_prefill_token_threshold`; 0: no cap.
    """

    total: int
    prefill: int
    cap: int

    def share(self, rest: int) -> int:
        """Tokens of a request with `rest` tokens left to compute."""
        left = self.total if rest == 1 else min(self.total, self.prefill)
        return min(self.capped(rest), left)

    def capped(self, rest: int) -> int:
        """The most that one request may get of `rest` tokens."""
        return min(rest, self.cap) if self.cap else rest

    def take(self, rest: int, tokens: int) -> None:
        """Takes a request's tokens; negative ones are given back."""
        self.total -= tokens
        if rest > 1:
            self.prefill -= tokens


class Admission(NamedTuple):
    """What admitting a waiting request would do now.

    Attributes:
        request: The request.
        cached: Numbers of the blocks of its beginning that are on the GPU already.
        computed: Tokens in KV from which it starts.
        tokens: Tokens that the coming step computes of it; 0: its remote load is issued.
        blocks: Blocks that it takes, beside the cached ones.
    """

    request: V1Request
    cached: list[int]
    computed: int
    tokens: int
    blocks: int


def admission(worker: LLMWorkerVLLMV1, request: V1Request, budget: TokenBudget) -> Admission | None:
    """Looks a waiting request up, and checks whether it fits; None if it does not.

    The whole known sequence must fit into the free blocks (`scheduler_reserve_full_isl`), less the
    watermark where others run; a remote load must leave what the prefills under way still need.
    """
    params, pool, size = worker.params, worker.pool, worker.block_size
    known = request.known_tokens
    if request.parked:
        cached, idle, held = list[int](), 0, request.allocated_blocks
        computed, is_load = min(request.prompt_processed, known - 1), False
    else:
        cached = worker.cached_blocks(request)
        idle, held = pool.idle(cached), len(cached)
        remote = worker.remote_tokens(request)
        computed, is_load = max(held * size, remote), remote > held * size
    tokens = 0
    if not is_load:
        rest = known - computed
        tokens = budget.share(rest)
        if not tokens or (not params.chunked_prefill and tokens < budget.capped(rest)):
            return None
    blocks = blocks_of(computed + tokens, size) - held
    taken = max(0, blocks) + idle
    watermark = worker.watermark_blocks if worker.batch else 0
    free = pool.free - watermark
    if params.scheduler_reserve_full_isl and max(0, blocks_of(known, size) - held) + idle > free:
        return None
    if taken > free - (worker.reserved_blocks() if is_load else 0):
        return None
    return Admission(request, cached, computed, tokens, max(0, blocks))


def may_admit(worker: LLMWorkerVLLMV1, budget: TokenBudget) -> bool:
    """Whether the coming step looks at waiting requests at all."""
    return budget.total > 0 and budget.prefill > 0 and worker.slots_free


def admissible(worker: LLMWorkerVLLMV1, budget: TokenBudget) -> Iterator[tuple[int, Admission]]:
    """The waiting requests that can be admitted now, with their places, in vLLM's order.

    The head has place 0: it is the one that vLLM looks at, and one that does not fit ends its scan.
    """
    waiting = (
        request
        for request in worker.waiting_requests.window(worker.window_size)
        if request.phase is not RequestPhase.FETCH_KVC
    )
    for place, request in enumerate(waiting):
        fit = admission(worker, request, budget)
        if fit is not None:
            yield place, fit
