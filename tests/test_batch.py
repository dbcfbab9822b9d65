"""The persistent batch's bookkeeping, against what its requests say one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from opal_gym.sim.batch import BatchMetadata
from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.request import LLMRequest, RequestPhase, VLLMSchedulerRequest
from opal_gym.sim.steps import StepLog
from opal_gym.sim.table import RequestTable

BLOCK_SIZE = 4


@dataclass
class Bench:
    """A batch outside any worker."""

    steps: StepLog = field(default_factory=StepLog)
    table: RequestTable = field(default_factory=RequestTable)
    made: int = 0

    def __post_init__(self) -> None:
        self.batch = BatchMetadata(BLOCK_SIZE, self.steps)

    def request(self, prompt: int, output: int) -> VLLMSchedulerRequest:
        """A request that has not begun."""
        llm_request = LLMRequest(self.made, 0.0, prompt, output, output)
        self.made += 1
        return VLLMSchedulerRequest(llm_request, BLOCK_SIZE, self.steps, self.table)

    def decode(self, prompt: int, output: int, generated: int = 0) -> VLLMSchedulerRequest:
        """A request whose prefill has just ended."""
        request = self.request(prompt, output)
        self.batch.add_prefill(request)
        self.end_prefill(request, generated)
        return request

    def end_prefill(self, request: VLLMSchedulerRequest, generated: int = 0) -> None:
        request.prefill(request.prompt_tokens - request.prompt_processed, self.steps.count, 0)
        self.batch.schedule_prefill([])
        self.batch.start_decode(request, generated)

    def step(self, steps: int = 1) -> None:
        """Ends engine steps of 1 s."""
        self.steps.extend(np.arange(steps, dtype=np.float64) + self.steps.count + 1)


def blocks_by_step(batch: BatchMetadata, steps: int) -> list[int]:
    """Blocks that the decodes need in each of the next `steps` steps."""
    assert batch.later_decode_blocks(steps) == sum(batch.later_decode_blocks_by_step(steps))
    return [batch.decode_blocks_needed(), *batch.later_decode_blocks_by_step(steps)]


def test_an_empty_batch_is_falsy_and_needs_nothing() -> None:
    batch = Bench().batch
    assert not batch
    assert batch.total_tokens == batch.decode_context == batch.decode_blocks_needed() == 0
    assert batch.steps_to_completion() is None
    assert batch.completed() == []
    assert blocks_by_step(batch, 3) == [0, 0, 0]


def test_tokens_of_the_coming_step_by_hand() -> None:
    """A chunk of 5 and two decodes: 7 tokens."""
    bench = Bench()
    first, second = bench.decode(4, 9), bench.decode(6, 9)
    prefill = bench.request(20, 3)
    bench.batch.add_prefill(prefill)
    bench.batch.schedule_prefill([(prefill, 5)])
    assert prefill.phase is RequestPhase.PREFILL_CHUNKED
    assert bench.batch.request_tokens == {0: 1, 1: 1, 2: 5}
    assert (bench.batch.decode_tokens, bench.batch.prefill_tokens) == (2, 5)
    assert bench.batch.total_tokens == 7
    assert list(bench.batch) == [first, second, prefill]
    assert len(bench.batch) == 3


def test_a_prefill_without_tokens_stays_in_the_batch() -> None:
    bench = Bench()
    first, second = bench.request(20, 3), bench.request(20, 3)
    bench.batch.add_prefill(first)
    bench.batch.add_prefill(second)
    bench.batch.schedule_prefill([(first, 8)])
    assert bench.batch.request_tokens == {0: 8}
    assert bench.batch.prefill_tokens == 8
    assert len(bench.batch) == 2


def test_an_eviction_leaves_no_tokens_behind() -> None:
    """The seed's Known Issue 4."""
    bench = Bench()
    prefill, decode = bench.request(20, 3), bench.decode(4, 9)
    bench.batch.add_prefill(prefill)
    bench.batch.schedule_prefill([(prefill, 5)])
    for request in (prefill, decode):
        bench.batch.remove(request)
    bench.batch.schedule_prefill([])
    assert bench.batch.request_tokens == {}
    assert not bench.batch
    assert bench.batch.total_tokens == 0


def test_decodes_grow_in_lockstep_by_hand() -> None:
    """Contexts 4 and 6; after 3 steps 7 and 9, together 16."""
    bench = Bench()
    first, second = bench.decode(4, 9), bench.decode(6, 9)
    assert bench.batch.decode_context == 10
    bench.step(3)
    assert bench.batch.decode_context == 16
    assert (first.decode_tokens_generated, second.decode_tokens_generated) == (3, 3)
    late = bench.decode(10, 9, generated=1)
    assert late.tokens_held == 11
    assert bench.batch.decode_context == 27
    bench.batch.remove(first)
    first.complete()
    assert bench.batch.decode_context == 20
    bench.step()
    assert bench.batch.decode_context == 22
    assert first.decode_tokens_generated == 3


def test_blocks_that_decodes_need_by_hand() -> None:
    """Blocks of 4. Held 4: the next token needs a block now; held 6: after two more tokens.

    Held (4, 6), then (5, 7), (6, 8), (7, 9), (8, 10): the steps from these need 1, 0, 1, 0, 1.
    """
    bench = Bench()
    bench.decode(4, 20)
    bench.decode(6, 20)
    assert blocks_by_step(bench.batch, 5) == [1, 0, 1, 0, 1]
    assert bench.batch.decode_blocks_needed() == 1
    bench.step()
    assert bench.batch.decode_blocks_needed() == 0
    assert blocks_by_step(bench.batch, 4) == [0, 1, 0, 1]


def test_steps_to_completion_by_hand() -> None:
    """Outputs of 5 (none made) and 4 (one made): 5 and 3 steps to go."""
    bench = Bench()
    slow, fast = bench.decode(4, 5), bench.decode(4, 4, generated=1)
    assert bench.batch.steps_to_completion() == 3
    bench.step(2)
    assert bench.batch.steps_to_completion() == 1
    assert bench.batch.completed() == []
    bench.step()
    assert bench.batch.steps_to_completion() == 0
    assert bench.batch.completed() == [fast]
    bench.batch.remove(fast)
    assert bench.batch.steps_to_completion() == 2
    bench.step(2)
    assert bench.batch.completed() == [slow]


def test_an_output_of_one_token_is_complete_when_its_prefill_made_it() -> None:
    bench = Bench()
    request = bench.decode(4, 1, generated=1)
    assert bench.batch.steps_to_completion() == 0
    assert bench.batch.completed() == [request]


def test_those_that_complete_together_come_in_order_of_id() -> None:
    bench = Bench()
    requests = [bench.decode(4, 2 + i, generated=i) for i in range(4)]
    bench.step(2)
    assert bench.batch.completed() == requests


def test_an_evicted_decode_no_longer_completes() -> None:
    """Request 0 would end first, is evicted, and begins anew: its first end must not count."""
    bench = Bench()
    evicted, other = bench.decode(4, 3), bench.decode(4, 9)
    bench.step(2)
    bench.batch.remove(evicted)
    evicted.preempted()
    assert bench.batch.steps_to_completion() == 7
    bench.batch.add_prefill(evicted)
    bench.step()
    bench.end_prefill(evicted)
    assert bench.batch.steps_to_completion() == 3
    bench.step(3)
    assert bench.batch.completed() == [evicted]
    bench.batch.remove(evicted)
    bench.step(3)
    assert bench.batch.completed() == [other]


@pytest.mark.parametrize("seed", range(10))
def test_the_sums_are_those_of_the_requests(seed: int) -> None:
    """A random life of a batch, its sums worked out anew after every change."""
    rng = random.Random(seed)
    bench = Bench()
    prefills: list[VLLMSchedulerRequest] = []
    decodes: list[VLLMSchedulerRequest] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.25:
            request = bench.request(rng.randint(1, 30), rng.randint(2, 40))
            bench.batch.add_prefill(request)
            prefills.append(request)
        elif action < 0.45 and prefills:
            request = prefills.pop(rng.randrange(len(prefills)))
            bench.end_prefill(request, generated=rng.randint(0, 1))
            decodes.append(request)
        elif action < 0.55 and decodes:
            request = decodes.pop(rng.randrange(len(decodes)))
            bench.batch.remove(request)
            request.preempted()
        else:
            bench.step(rng.randint(1, bench.batch.steps_to_completion() or 3))
            bench.steps.scheduled = bench.steps.count
            ended = bench.batch.completed()
            made = [r for r in decodes if r.decode_tokens_generated >= r.llm_request.output_tokens]
            assert ended == sorted(made, key=lambda one: one.request_id)
            for request in ended:
                bench.batch.remove(request)
                decodes.remove(request)
        held = [r.prompt_tokens + r.decode_tokens_generated for r in decodes]
        assert bench.batch.decode_context == sum(held)
        span = [
            sum(blocks_of(tokens + k + 1, 4) - blocks_of(tokens + k, 4) for tokens in held)
            for k in range(6)
        ]
        assert blocks_by_step(bench.batch, 6) == span
        assert bench.batch.decode_blocks_needed() == span[0]
        left = [r.llm_request.output_tokens - r.decode_tokens_generated for r in decodes]
        assert bench.batch.steps_to_completion() == (min(left) if left else None)
        assert bench.batch.decode_tokens == len(decodes)
        assert list(bench.batch.prefill_requests.values()) == prefills
