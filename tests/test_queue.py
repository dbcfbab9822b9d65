"""The waiting queue: arrivals in order, preempted requests in front of them."""

from __future__ import annotations

import random

import pytest

from opal_gym.sim.queue import WaitingQueue
from opal_gym.sim.request import LLMRequest, VLLMSchedulerRequest
from opal_gym.sim.steps import StepLog
from opal_gym.sim.table import RequestTable


def make(request_id: int, arrival: float, prompt: int = 1) -> VLLMSchedulerRequest:
    llm_request = LLMRequest(request_id, arrival, prompt, 1, 1)
    return VLLMSchedulerRequest(llm_request, 4, StepLog(), RequestTable())


def ids(queue: WaitingQueue) -> list[int]:
    return [request.request_id for request in queue]


def test_an_empty_queue_is_falsy_and_has_nobody() -> None:
    queue = WaitingQueue()
    assert not queue
    assert ids(queue) == []
    assert queue.prompt_tokens == 0
    assert list(queue.window(5)) == []


def test_arrivals_stand_in_the_order_of_their_arrival() -> None:
    queue = WaitingQueue()
    for request_id in (3, 1, 2):
        queue.append(make(request_id, arrival=0.0))
    assert ids(queue) == [3, 1, 2]
    assert len(queue) == 3


def test_preempted_requests_stand_in_front_the_older_nearer_the_head() -> None:
    """Evicted in the order 5 s, 2 s, 7 s: the head is 2 s, whoever came back last."""
    queue = WaitingQueue()
    queue.append(make(0, arrival=1.0))
    for request_id, arrival in ((1, 5.0), (2, 2.0), (3, 7.0)):
        queue.push_front(make(request_id, arrival))
    queue.append(make(4, arrival=8.0))
    assert ids(queue) == [2, 1, 3, 0, 4]
    assert len(queue) == 5


def test_ids_break_ties_among_the_preempted() -> None:
    queue = WaitingQueue()
    for request_id in (7, 2, 5):
        queue.push_front(make(request_id, arrival=3.0))
    assert ids(queue) == [2, 5, 7]


def test_the_oldest_may_stand_behind_the_preempted() -> None:
    """Request 0 arrived first but was passed over; 1 and 2 ran and came back."""
    queue = WaitingQueue()
    queue.append(make(0, arrival=1.0))
    queue.append(make(3, arrival=4.0))
    queue.push_front(make(2, arrival=3.0))
    queue.push_front(make(1, arrival=2.0))
    assert ids(queue) == [1, 2, 0, 3]
    assert queue.oldest().request_id == 0
    queue.remove(queue.oldest())
    assert queue.oldest().request_id == 1


def test_the_oldest_of_equals_has_the_smaller_id() -> None:
    queue = WaitingQueue()
    queue.append(make(4, arrival=1.0))
    queue.push_front(make(6, arrival=1.0))
    assert queue.oldest().request_id == 4


def test_a_window_is_the_head_across_both_parts() -> None:
    queue = WaitingQueue()
    queue.append(make(0, arrival=1.0))
    queue.append(make(3, arrival=1.5))
    queue.push_front(make(1, arrival=2.0))
    assert [request.request_id for request in queue.window(2)] == [1, 0]
    assert [request.request_id for request in queue.window(9)] == [1, 0, 3]
    assert list(queue.window(0)) == []


def test_anybody_can_be_removed_from_either_part() -> None:
    queue = WaitingQueue()
    arrived = [make(i, arrival=float(i), prompt=10) for i in range(3)]
    preempted = [make(i, arrival=2.5, prompt=100) for i in range(3, 6)]
    for request in arrived:
        queue.append(request)
    for request in preempted:
        queue.push_front(request)
    assert queue.prompt_tokens == 330
    queue.remove(preempted[1])
    queue.remove(arrived[1])
    assert ids(queue) == [3, 5, 0, 2]
    assert queue.prompt_tokens == 220
    assert len(queue) == 4


def test_a_request_that_was_removed_can_come_back_in_front() -> None:
    queue = WaitingQueue()
    first, second = make(0, arrival=0.0), make(1, arrival=1.0)
    queue.append(first)
    queue.append(second)
    queue.remove(second)
    queue.push_front(second)
    assert ids(queue) == [1, 0]
    queue.remove(second)
    assert ids(queue) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_behaves_like_a_sorted_list(seed: int) -> None:
    """Against two plain lists, one sorted anew each time."""
    rng = random.Random(seed)
    queue = WaitingQueue()
    arrived: list[VLLMSchedulerRequest] = []
    preempted: list[VLLMSchedulerRequest] = []
    for request_id in range(120):
        request = make(request_id, arrival=float(request_id // 3), prompt=rng.randint(1, 50))
        queue.append(request)
        arrived.append(request)
        if rng.random() < 0.7:
            leaver = rng.choice(arrived + preempted)
            queue.remove(leaver)
            (arrived if leaver in arrived else preempted).remove(leaver)
            if rng.random() < 0.6:
                queue.push_front(leaver)
                preempted.append(leaver)
                preempted.sort(key=lambda one: (one.arrival_time, one.request_id))
        expected = preempted + arrived
        assert list(queue) == expected
        assert len(queue) == len(expected)
        assert queue.prompt_tokens == sum(one.prompt_tokens for one in expected)
        if expected:
            oldest = min(expected, key=lambda one: (one.arrival_time, one.request_id))
            assert queue.oldest() is oldest
