"""Invariants of a worker (seed, "Invariant Checks")."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from opal_gym.sim.request import RequestPhase

if TYPE_CHECKING:
    from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler


def check_worker(worker: LLMWorkerVLLMScheduler) -> None:
    """Checks a worker between two events.

    Raises:
        AssertionError: An invariant is violated; the message says which, with its numbers.
    """
    _check_blocks(worker)
    _check_limits(worker)
    _check_table(worker)
    _check_batch(worker)
    _check_queue(worker)


def _check_blocks(worker: LLMWorkerVLLMScheduler) -> None:
    pool = worker.pool
    everyone = chain(worker.waiting_requests, worker.batch, worker.completed_requests.values())
    held = sum(request.allocated_blocks for request in everyone)
    held -= pool.shared
    assert pool.total == pool.free + held, f"{pool.total} blocks != {pool.free} free + {held} held"
    assert pool.free >= 0, f"{pool.free} free blocks"


def _check_limits(worker: LLMWorkerVLLMScheduler) -> None:
    batch, params = worker.batch, worker.params
    tokens = sum(batch.request_tokens.values())
    assert batch.total_tokens == tokens, f"batch of {batch.total_tokens} tokens != {tokens}"
    assert tokens <= params.max_num_batched_tokens, f"{tokens} tokens exceed the budget"
    assert len(batch) <= params.max_num_seqs, f"{len(batch)} sequences exceed max_num_seqs"


def _check_table(worker: LLMWorkerVLLMScheduler) -> None:
    rows = worker.table.data[worker.batch.rows]
    noted = worker.tokens_generated(rows).tolist()
    generated = [request.decode_tokens_generated for request in worker.batch.members]
    assert noted == generated, f"the table's generated tokens {noted} != {generated}"


def _check_batch(worker: LLMWorkerVLLMScheduler) -> None:
    batch = worker.batch
    members = {request.request_id for request in batch}
    assert set(batch.request_tokens) <= members, "tokens of a request that left the batch"
    context = sum(
        request.prompt_tokens + request.decode_tokens_generated
        for request in batch.decode_requests.values()
    )
    assert batch.decode_context == context, f"context {batch.decode_context} != {context}"
    for request in batch.decode_requests.values():
        assert request.phase is RequestPhase.DECODE, f"{request.phase} among the decodes"
    for request in batch.prefill_requests.values():
        assert request.phase is RequestPhase.PREFILL_CHUNKED, f"{request.phase} among the prefills"


def _check_queue(worker: LLMWorkerVLLMScheduler) -> None:
    waiting = list(worker.waiting_requests)
    fetching = [request for request in waiting if request.phase is RequestPhase.FETCH_KVC]
    holders = [
        request
        for request in waiting
        if request.phase is RequestPhase.READY and request.allocated_blocks
    ]
    ready = len(fetching) + len(holders)
    assert worker.kvc_ready_count == ready, f"{worker.kvc_ready_count} != {ready} KVC-ready"
    assert ready <= worker.params.max_kvc_ready_requests, f"{ready} KVC-ready requests"
    # What it shares was cached on the GPU; what is under way is published when it is there.
    in_flight = sum(request.allocated_blocks - len(request.held_hashes) for request in fetching)
    assert worker.kvc_fetch_blocks_in_flight == in_flight, "blocks of fetches in flight"
    prompts = sum(request.prompt_tokens for request in waiting)
    assert worker.waiting_requests.prompt_tokens == prompts, "prompt tokens of the queue"
    for request in waiting:
        assert request.phase in (
            RequestPhase.WAITING,
            RequestPhase.FETCH_KVC,
            RequestPhase.READY,
        ), f"{request.phase} in the waiting queue"
