"""Preemption in the vLLM worker on timelines worked out by hand: victims, queue, progress, cap.

Every step takes 1 s and computes at most 16 tokens; a block holds 4 tokens. "Held" is
prompt_processed + decode_tokens_generated, the work score; the coming step of a decode needs
ceil((held + 1) / 4) blocks (DESIGN §2.1).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from opal_gym.sim.decision import STOP, Decision, DecisionKind, Policy
from tests.driving import BASELINE, Script, exported, play, simulate, watch

both_modes = pytest.mark.parametrize("stepwise", [False, True])

PAIR = [(0, 8, 6), (0, 4, 6)]
"""With a pool of 5 blocks:

time  r0 held, needs  r1 held, needs
0     0, 3            0, 2             both are admitted: 5 blocks
1     9, 3            5, 2
3     11, 3           7, 2
4     12, 4           8, 3             short of 2, each of them lacks one
"""


# ----------------------------------------------------------------------------------- victims


@both_modes
@pytest.mark.parametrize(
    ("rebuild_on", "rebuilds"),
    [
        # 0, 1 (prefill ends), 4 (short), 5 (after the eviction), 6 (r0), 7 (prefill end), 12 (r1)
        ("change", 7),
        # 0, 4, 5, 6, 12
        ("completion", 5),
    ],
)
def test_the_request_with_the_least_work_done_is_evicted_and_starts_over(
    stepwise: bool, rebuild_on: str, rebuilds: int
) -> None:
    """`PAIR`, pool 5: at 4 r1 (8 tokens held) goes for r0 (12).

    4 – 5   r0 holds 13, 4 blocks; nobody is admitted in a rebuild that evicted
    5 – 6   r0 token 6, complete; 1 block is free and r1 needs 2
    6 – 7   r1 prefills again: its token 1 is made again, and 2, 3, 4 until 10
    10 – 12 r1's tokens 5 and 6 are new
    """
    policy = Script()
    simulation = simulate(
        PAIR,
        stepwise=stepwise,
        policy=policy,
        num_gpu_blocks_override=5,
        rebuild_on=rebuild_on,
    )
    seen = watch(simulation, [3.5, 4.5, 5.5, 6.5])
    records = play(simulation)
    assert policy.ids("PREEMPT") == [(4.0, (1, 0))]
    assert records[0]["token_times"] == [1, 2, 3, 4, 5, 6]
    assert records[0]["preemptions"] == records[0]["recomputed_tokens"] == 0
    assert records[1]["token_times"] == [1, 2, 3, 4, 11, 12]
    assert records[1]["preemptions"] == 1
    # 4 prompt tokens and the outputs 1 … 4.
    assert records[1]["recomputed_tokens"] == 8
    # Nothing that happened once is moved by the eviction; the gap grows.
    assert records[1]["gpu_start_time"] == records[1]["request_ready_time"] == 0
    assert records[1]["first_token_time"] == 1
    assert records[1]["max_gap"] == 7
    assert records[1]["decode_done_time"] == 12
    stamps = exported(simulation)[1]["scheduler_timestamps"]
    assert stamps == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
    assert simulation.worker.rebuild_id == rebuilds
    assert simulation.worker.gpu_busy_time == 12
    assert [state.queue for state in seen.values()] == [[], [1], [1], []]
    assert [state.phases[1] for state in seen.values()] == [
        "DECODE",
        "WAITING",
        "READY",
        "PREFILL_CHUNKED",
    ]
    if stepwise:
        assert [state.free for state in seen.values()] == [0, 1, 1, 3]


@both_modes
def test_the_victim_need_not_be_the_one_that_lacks_a_block(stepwise: bool) -> None:
    """r0 (7, 4), r1 (5, 3), pool 4. At 1 r0 holds 8 and needs a third block; r1 holds 6 and needs
    none, but has done less.

    1 – 4  r0 alone, complete at 4; 1 block is free at 2, r1 needs ceil(6 / 4) = 2
    4 – 7  r1: token 1 again at 5, tokens 2 and 3
    """
    simulation = simulate([(0, 7, 4), (0, 5, 3)], stepwise=stepwise, num_gpu_blocks_override=4)
    records = play(simulation)
    assert records[0]["token_times"] == [1, 2, 3, 4]
    assert records[1]["token_times"] == [1, 6, 7]
    assert records[1]["recomputed_tokens"] == 6


LONG_PROMPT = [(0, 8, 16), (0.5, 28, 2)]
"""With a pool of 8 blocks:

time  r0 held, needs  r1 processed, needs
1     9, 3            0, 4 (15 tokens)         r1 is admitted
2     10, 3           15, 8 (13 tokens + 1)    short of 3, all of them for r1
"""


@both_modes
def test_a_decode_can_be_evicted_for_a_prefill(stepwise: bool) -> None:
    """`LONG_PROMPT`: at 2 r0 (10 held) goes for r1 (15), which lacks the blocks.

    2 – 4   r1: token 1 at 3, token 2 at 4, complete
    4 – 20  r0 again: tokens 1 and 2 are made again at 5 and 6, token k at k + 4
    """
    simulation = simulate(LONG_PROMPT, stepwise=stepwise, num_gpu_blocks_override=8)
    records = play(simulation)
    assert records[1]["token_times"] == [3, 4]
    assert records[0]["token_times"] == [1, 2, *range(7, 21)]
    assert records[0]["recomputed_tokens"] == 10


def test_at_equal_work_the_later_arrival_is_evicted() -> None:
    """r0 (4, 2) runs until 2; r1 (0.2, 6, 8) and r2 (0.4, 6, 8) are admitted at 1. Pool 6.

    time  r0 held, needs   r1 and r2 held, needs (each)
    1     5, 2             0, 2                            6 blocks
    3     –                8, 3                            6 blocks
    7     –                12, 4                           short of 2
    """
    policy = Script()
    simulation = simulate(
        [(0, 4, 2), (0.2, 6, 8), (0.4, 6, 8)], policy=policy, num_gpu_blocks_override=6
    )
    records = play(simulation)
    assert policy.ids("PREEMPT") == [(7.0, (2, 1))]
    assert [records[i]["preemptions"] for i in range(3)] == [0, 0, 1]


def test_at_equal_work_and_arrival_the_greater_id_is_evicted() -> None:
    """r0 and r1 (4, 5) at 0, pool 4: at 4 both hold 8 and need a third block."""
    policy = Script()
    simulation = simulate([(0, 4, 5), (0, 4, 5)], policy=policy, num_gpu_blocks_override=4)
    play(simulation)
    assert policy.ids("PREEMPT") == [(4.0, (1, 0))]


# ------------------------------------------------------------------------------------- queue


def test_evicted_requests_stand_at_the_front_the_older_nearer_the_head() -> None:
    """r0 (2, 20), r1 (0.5, 2, 20), r2 (0.6, 40, 2), three slots, pool 11; r3 waits from 2.2 on.

    time  r0 held, needs  r1 held, needs  r2 processed, needs
    1     3, 1            0, 1            0, 4 (13 tokens)
    2     4, 2            3, 1            13, 7 (14)
    3     5, 2            4, 2            27, 11 (13, + 1)      short of 4, 1 free

    At 3 r1 goes (4 held; frees 1), which is not enough, and then r0 (5 held; frees 2).
    """
    policy = Script()
    simulation = simulate(
        [(0, 2, 20), (0.5, 2, 20), (0.6, 40, 2), (2.2, 2, 2)],
        policy=policy,
        max_num_seqs=3,
        num_gpu_blocks_override=11,
    )
    seen = watch(simulation, [2.5, 3.5, 4.5, 5.5])
    records = play(simulation)
    assert policy.ids("PREEMPT")[:2] == [(3.0, (1, 0, 2)), (3.0, (0, 2))]
    assert [state.queue for state in seen.values()] == [[3], [0, 1, 3], [0, 1, 3], []]
    assert records[2]["token_times"] == [4, 5]


def test_an_evicted_request_stands_before_those_that_never_ran() -> None:
    """`PAIR`, pool 5, and r2 (0.5, 4, 1) that finds no room: r1, evicted at 4, passes it."""
    simulation = simulate([*PAIR, (0.5, 4, 1)], num_gpu_blocks_override=5)
    seen = watch(simulation, [3.5, 4.5])
    play(simulation)
    assert [state.queue for state in seen.values()] == [[2], [1, 2]]


def test_nobody_is_admitted_in_a_rebuild_that_evicted() -> None:
    """`PAIR`, pool 5. At 4 r1 goes, r0 takes one of its 2 blocks and 1 is left; r2 (3.5, 3, 1)
    needs 1 and is there, but is not asked about before 5. The policy puts it before r1. (The first
    two answers admit r0 and r1 at 0.)"""
    policy = Script(admit=[BASELINE, BASELINE, 2])
    simulation = simulate([*PAIR, (3.5, 3, 1)], policy=policy, num_gpu_blocks_override=5)
    records = play(simulation)
    assert [question.kind for question in policy.asked if question.time == 4.0] == [
        "CHUNK",
        "PREEMPT",
    ]
    assert records[2]["gpu_start_time"] == 5


# --------------------------------------------------------------------------- token accounting


@both_modes
def test_a_token_is_delivered_once_and_ttft_is_never_reset(stepwise: bool) -> None:
    """r0 (3, 13), r1 (3, 8) at 0, pool 4; at time t both hold 3 + t.

    5   both hold 8 and need a third block: r1 goes (tokens 1 … 5 delivered), r0 takes 1 of 2
    6   1 block is free: r1 is back, holds 4 at 7 and needs a second: evicted
    8   1 block is free: r1 is back, holds 4 at 9 and needs a second, r0 (12) a fourth: evicted
    13  r0 holds 16, complete; r1 runs alone: tokens 1 … 5 again by 18, 6, 7, 8 at 19, 20, 21
    """
    simulation = simulate([(0, 3, 13), (0, 3, 8)], stepwise=stepwise, num_gpu_blocks_override=4)
    records = play(simulation)
    assert records[0]["token_times"] == list(range(1, 14))
    assert records[1]["token_times"] == [1, 2, 3, 4, 5, 19, 20, 21]
    assert records[1]["first_token_time"] == 1
    assert records[1]["max_gap"] == 14
    assert records[1]["preemptions"] == 3
    assert records[1]["recomputed_tokens"] == 8 + 4 + 4


@both_modes
def test_ttft_of_a_request_evicted_before_its_first_token_is_that_of_its_later_life(
    stepwise: bool,
) -> None:
    """`PAIR` without a first token at prefill end, pool 4.

    0  r0 needs 2 (8 tokens), r1 needs 1 (4 tokens)
    1  r0 holds 8, needs 3; r1 holds 4, needs 2: short; r1 goes, 1 block stays free
    2  r1 is back, holds 4 at 3 and needs a second block, 0 are free: evicted
    4  r1 is back, at 5 it holds 4 and r0 12: r0 takes the block of r1
    7  r0 complete (token k at k + 1); r1 prefills until 8: tokens at 9 … 14
    """
    simulation = simulate(
        PAIR,
        stepwise=stepwise,
        num_gpu_blocks_override=4,
        first_token_at_prefill_end=False,
    )
    records = play(simulation)
    assert records[0]["token_times"] == [2, 3, 4, 5, 6, 7]
    assert records[1]["token_times"] == [9, 10, 11, 12, 13, 14]
    assert records[1]["first_token_time"] == 9
    assert records[1]["gpu_start_time"] == 0
    assert records[1]["recomputed_tokens"] == 12
    assert records[1]["preemptions"] == 3


# ---------------------------------------------------------------------------- cap and progress


@both_modes
def test_a_request_evicted_three_times_is_no_candidate_any_more(stepwise: bool) -> None:
    """`LONG_PROMPT`, pool 8, with a policy that evicts r1.

    2, 4, 6  r1 (15 processed) wants 4 more blocks: evicted. r0 holds 10, 12, 14.
    3, 5, 7  r1 is back: 15 tokens, 4 blocks
    8        r0 holds 16, needs 5; r1 is at the cap: r0 must go, and there is nothing to ask
    8 – 10   r1: tokens at 9, 10
    10 – 26  r0: tokens 1 … 8 again by 18, 9 … 16 at 19 … 26
    """
    policy = Script(preempt=[1, 1, 1])
    simulation = simulate(LONG_PROMPT, stepwise=stepwise, policy=policy, num_gpu_blocks_override=8)
    records = play(simulation)
    assert policy.ids("PREEMPT") == [(2.0, (0, 1)), (4.0, (0, 1)), (6.0, (0, 1))]
    assert records[1]["token_times"] == [9, 10]
    assert records[1]["preemptions"] == 3
    assert records[1]["recomputed_tokens"] == 45
    assert records[0]["token_times"] == [*range(1, 9), *range(19, 27)]
    assert records[0]["preemptions"] == 1


@both_modes
def test_when_all_are_at_the_cap_the_latest_arrived_goes_whatever_it_has_done(
    stepwise: bool,
) -> None:
    """r0 (3, 9), r1 (0.5, 3, 9), pool 3. The policy evicts r1, r0, r1, r0, r1 in turn.

    A victim of time t comes back at t + 1 with 1 block and holds 4 at t + 2; the survivor holds 6
    then, with 2 blocks: short again.

    time  r0, r1 held  evicted
    2     5, 4         r1
    4     7, 4         r0
    6     4, 6         r1
    8     6, 4         r0
    10    4, 6         r1, its third
    12    6, 4         r0, the only one below the cap: not asked
    14    4, 6         r1: both are at the cap, r1 arrived last, though it has done more
    16    6, 4         r1
    18    8, 4         r1, r0 takes its block
    22    12           r0 complete
    22 –               r1 alone
    """
    policy = Script(preempt=[1, 0, 1, 0, 1])
    simulation = simulate(
        [(0, 3, 9), (0.5, 3, 9)], stepwise=stepwise, policy=policy, num_gpu_blocks_override=3
    )
    records = play(simulation)
    assert policy.ids("PREEMPT") == [
        (2.0, (1, 0)),
        (4.0, (1, 0)),
        (6.0, (0, 1)),
        (8.0, (1, 0)),
        (10.0, (0, 1)),
    ]
    assert records[0]["preemptions"] == 3
    assert records[1]["preemptions"] == 6
    # r0: tokens 1 … 4 by 4; its last life begins at 13.
    assert records[0]["token_times"] == [1, 2, 3, 4, 18, 19, 20, 21, 22]
    assert records[0]["recomputed_tokens"] == 7 + 6 + 6
    # r1: token 1 at 2; tokens 2 and 3 in its second life, from 3; its last life begins at 22.
    assert records[1]["token_times"] == [2, 5, 6, 26, 27, 28, 29, 30, 31]
    assert records[1]["recomputed_tokens"] == 4 + 6 + 6 + 6 + 4 + 4


@pytest.mark.parametrize("rebuild_on", ["change", "completion"])
@pytest.mark.parametrize("pick", [0, -1])
def test_every_request_completes_whoever_is_evicted(rebuild_on: str, pick: int) -> None:
    """A pool that any one request fills, and a policy that always takes the first or the last."""

    class Extreme(Policy):
        def choose(self, decision: Decision) -> int:
            if decision.kind is DecisionKind.PREEMPT:
                return range(decision.num_candidates)[pick]
            return decision.baseline

    requests = [(0.5 * i, 3 + i % 4, 13 - i % 4) for i in range(12)]
    simulation = simulate(
        requests, policy=Extreme(), num_gpu_blocks_override=4, rebuild_on=rebuild_on
    )
    records = play(simulation)
    assert len(records) == 12
    for record in records.values():
        times = record["token_times"]
        assert len(times) == record["output_tokens"]
        assert all(earlier < later for earlier, later in pairwise(times))
    assert simulation.worker.pool.free == 4


# -------------------------------------------------------------------------------- protection


@both_modes
@pytest.mark.parametrize(
    ("predicted", "order", "victim"),
    [
        # 4 of 4 predicted tokens made: protected, so the one with more work goes
        ([6, 4], (0, 1), 0),
        # 4 of 5: not within 5 %
        ([6, 5], (1, 0), 1),
        # both are protected: a preference, not a law
        ([4, 4], (1, 0), 1),
        # nothing is known (`none`): no protection
        ([0, 0], (1, 0), 1),
    ],
)
def test_nearly_finished_requests_are_evicted_last(
    stepwise: bool, predicted: list[int], order: tuple[int, int], victim: int
) -> None:
    """`PAIR`, pool 5, at 4: r0 holds 12 and r1 8, both have made 4 tokens; true outputs are 6."""
    policy = Script()
    simulation = simulate(
        PAIR,
        stepwise=stepwise,
        policy=policy,
        predicted=predicted,
        num_gpu_blocks_override=5,
    )
    records = play(simulation)
    assert policy.ids("PREEMPT")[0] == (4.0, order)
    assert [records[i]["preemptions"] for i in range(2)] == [1 - victim, victim]
    if victim == 0:
        # r1 holds 9, 10 (3 blocks) and completes at 6; r0 starts over and needs 3 of 5 blocks.
        assert records[1]["token_times"] == [1, 2, 3, 4, 5, 6]
        assert records[0]["token_times"] == [1, 2, 3, 4, 11, 12]
        assert records[0]["recomputed_tokens"] == 12


@pytest.mark.parametrize(("predicted", "order"), [(21, (0, 1)), (22, (1, 0))])
def test_nearly_finished_begins_at_95_percent_of_the_prediction(
    predicted: int, order: tuple[int, int]
) -> None:
    """r0 (8, 30), r1 (4, 30), pool 14. At 20 r0 holds 28 and needs 8, r1 holds 24 and needs 7:
    short of 1. r1 has made 20 tokens: 0.95 · 21 = 19.95, 0.95 · 22 = 20.9."""
    policy = Script()
    simulation = simulate(
        [(0, 8, 30), (0, 4, 30)],
        policy=policy,
        predicted=[30, predicted],
        num_gpu_blocks_override=14,
    )
    play(simulation)
    assert policy.ids("PREEMPT")[0] == (20.0, order)


def test_a_policy_may_evict_a_nearly_finished_request() -> None:
    policy = Script(preempt=[1])
    simulation = simulate(PAIR, policy=policy, predicted=[6, 4], num_gpu_blocks_override=5)
    records = play(simulation)
    assert records[1]["preemptions"] == 1


def test_preempted_and_stopped_requests_finish_all_the_same() -> None:
    """`PAIR`, pool 5: r1, stopped at every question, runs when the batch is empty."""
    policy = Script(admit=[BASELINE, BASELINE, *[STOP] * 20])
    simulation = simulate(PAIR, policy=policy, num_gpu_blocks_override=5)
    records: dict[int, Any] = play(simulation)
    assert records[1]["token_times"] == [1, 2, 3, 4, 11, 12]
