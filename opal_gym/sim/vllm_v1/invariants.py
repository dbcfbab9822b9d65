"""Invariants of a worker under `vllm_v1`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opal_gym.sim.invariants import _check_blocks, _check_limits, _check_table
from opal_gym.sim.request import RequestPhase, by_age
from opal_gym.sim.vllm_v1.request import V1Request

if TYPE_CHECKING:
    from opal_gym.sim.vllm_v1.worker import LLMWorkerVLLMV1

PARKED_PHASES = {RequestPhase.FETCH_KVC, RequestPhase.READY}
WAITING_PHASES = {RequestPhase.WAITING}


def check_v1_worker(worker: LLMWorkerVLLMV1) -> None:
    """Checks a worker between two events.

    Raises:
        AssertionError: An invariant is violated; the message says which, with its numbers.
    """
    _check_blocks(worker)
    _check_limits(worker)
    _check_table(worker)
    _check_batch(worker)
    _check_queue(worker)


def _check_batch(worker: LLMWorkerVLLMV1) -> None:
    batch = worker.batch
    groups = [*batch.decode_requests, *batch.prefill_requests]
    assert sorted(groups) == sorted(batch.running), f"{groups} != running {list(batch.running)}"
    admissions = [request.admission for request in batch]
    assert admissions == sorted(admissions), f"running is not in admission order: {admissions}"
    for request in batch:
        assert isinstance(request, V1Request)
        lockstep = request.request_id in batch.decode_requests
        assert request.in_lockstep == lockstep, f"request {request.request_id} is out of step"
        held = request.allocated_blocks * worker.block_size
        assert request.tokens_held <= held, f"{request.tokens_held} tokens in blocks for {held}"
    context = sum(r.known_tokens for r in batch.running.values() if r.in_lockstep)
    assert batch.decode_context == context, f"context {batch.decode_context} != {context}"


def _check_queue(worker: LLMWorkerVLLMV1) -> None:
    queue = worker.waiting_requests
    if queue:
        first, oldest = min(queue, key=by_age).request_id, queue.oldest().request_id
        assert oldest == first, f"oldest request {oldest} != {first}"
    for request in queue:
        assert request.parked == (request.allocated_blocks > 0), f"{request.request_id} parked"
        allowed = PARKED_PHASES if request.parked else WAITING_PHASES
        assert request.phase in allowed, f"{request.phase} in the waiting queue"
    assert worker.kvc_ready_count == len(queue.parked), "parked requests"
    fetching = [request for request in queue if request.phase is RequestPhase.FETCH_KVC]
    in_flight = sum(request.allocated_blocks - len(request.held_hashes) for request in fetching)
    assert worker.kvc_fetch_blocks_in_flight == in_flight, "blocks of loads in flight"
    prompts = sum(request.prompt_tokens for request in queue)
    assert queue.prompt_tokens == prompts, "prompt tokens of the queue"
