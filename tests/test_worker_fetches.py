"""The vLLM worker fetches prefixes from a KV cache, on timelines worked out by hand.

Every step takes 1 s and computes at most 16 tokens; GPU blocks and hash blocks hold 4 tokens. One
hash block moves in `block_s` (1 s unless given), one transfer at a time. What is `resident` is
there long before the first request.
"""

from __future__ import annotations

from typing import Any

import pytest

from opal_gym.sim.decision import STOP
from tests.driving import Script, kv_cache, play, simulate, watch

both_modes = pytest.mark.parametrize("stepwise", [False, True])


# ------------------------------------------------------------------------------------- fetches


@both_modes
@pytest.mark.parametrize(
    ("rebuild_on", "rebuilds"),
    [
        # 10 (arrival), 12 (READY), 13 (prefill end), 14 (completion), 15 (release)
        ("change", 5),
        ("completion", 4),
    ],
)
def test_a_prefix_match_is_fetched_and_the_rest_is_prefilled(
    stepwise: bool, rebuild_on: str, rebuilds: int
) -> None:
    """Prompt 12 of hash blocks 1, 2, 3, of which 1 and 2 are resident; output 2.

    10 – 12  fetch of 8 tokens to 2 GPU blocks
    12 – 13  prefill of 4, token 1: 13 held, 4 blocks
    13 – 14  token 2: 14 held, 4 blocks; complete
    14 – 15  store of block 3; the 4 blocks come back at 15
    """
    simulation = simulate(
        [(10, 12, 2)],
        stepwise=stepwise,
        rebuild_on=rebuild_on,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(1, 2, 3)],
    )
    seen = watch(simulation, [10.5, 11.5, 12.5, 13.5, 14.5, 15.5])
    record = play(simulation)[0]
    assert record["start_processing_time"] == 10
    assert record["request_ready_time"] == record["gpu_start_time"] == 12
    assert record["token_times"] == [13, 14]
    assert record["decode_done_time"] == 14
    assert record["prefix_hit_tokens"] == 8
    assert record["recomputed_tokens"] == 0
    assert [state.free for state in seen.values()] == [98, 98, 96, 96, 96, 100]
    assert [state.fetching for state in seen.values()] == [2, 2, 0, 0, 0, 0]
    assert [state.phases.get(0) for state in seen.values()] == [
        "FETCH_KVC",
        "FETCH_KVC",
        "PREFILL_CHUNKED",
        "DECODE",
        None,
        None,
    ]
    assert seen[12.5].tokens == {0: 4}
    assert seen[14.5].storing == [0]
    assert [state.handed_back for state in seen.values()] == [0, 0, 0, 0, 0, 1]
    assert simulation.worker.rebuild_id == rebuilds


def test_without_a_match_a_request_is_ready_at_its_lookup() -> None:
    simulation = simulate([(10, 12, 2)], overrides=kv_cache(), hash_ids=[(1, 2, 3)])
    record = play(simulation)[0]
    assert record["request_ready_time"] == record["start_processing_time"] == 10
    assert record["token_times"] == [11, 12]
    assert record["prefix_hit_tokens"] == 0


def test_a_full_match_is_cut_so_that_one_token_is_computed() -> None:
    """Prompt 8, all resident: 7 tokens are fetched to 2 blocks, 1 is computed."""
    simulation = simulate([(10, 8, 2)], overrides=kv_cache(), resident=(1, 2), hash_ids=[(1, 2)])
    seen = watch(simulation, [10.5, 12.5])
    record = play(simulation)[0]
    assert record["prefix_hit_tokens"] == 7
    assert record["token_times"] == [13, 14]
    assert seen[10.5].blocks == {0: 2}
    assert seen[12.5].tokens == {0: 1}
    assert seen[12.5].blocks == {0: 3}


@both_modes
@pytest.mark.parametrize(("rebuild_on", "start"), [("change", 12), ("completion", 18)])
def test_a_ready_request_is_a_rebuild_under_change_only(
    stepwise: bool, rebuild_on: str, start: float
) -> None:
    """r0 (10, 4, 8) runs until 18; r1's fetch of 8 tokens ends at 12."""
    simulation = simulate(
        [(10, 4, 8), (10, 12, 2)],
        stepwise=stepwise,
        rebuild_on=rebuild_on,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(), (1, 2, 3)],
    )
    records = play(simulation)
    assert records[0]["token_times"] == list(range(11, 19))
    assert records[1]["request_ready_time"] == 12
    assert records[1]["gpu_start_time"] == start
    assert records[1]["token_times"] == [start + 1, start + 2]


# ---------------------------------------------------------------------------------- rate limit

TWO_MATCHES: dict[str, Any] = {
    "overrides": kv_cache(),
    "resident": (1, 2),
    "hash_ids": [(1, 2, 3), (1, 2, 4), ()],
}


@both_modes
def test_rate_limited_requests_are_passed_over_and_fetched_later(stepwise: bool) -> None:
    """r0 and r1 (12, 2) with 8 resident tokens each, r2 (4, 4) without, at 10; one fetch at a time.

    10 – 12  r0's fetch; r1 stays WAITING; r2 passes both and runs from 10 to 14
    12 – 14  r0 runs, and counts no longer: r1's fetch
    14 – 16  r1 runs
    """
    simulation = simulate(
        [(10, 12, 2), (10, 12, 2), (10, 4, 4)],
        stepwise=stepwise,
        max_kvc_ready_requests=1,
        **TWO_MATCHES,
    )
    seen = watch(simulation, [10.5, 11.5, 12.5, 13.5])
    records = play(simulation)
    assert records[0]["token_times"] == [13, 14]
    assert records[1]["token_times"] == [15, 16]
    assert records[2]["token_times"] == [11, 12, 13, 14]
    assert records[1]["start_processing_time"] == 10
    assert records[1]["request_ready_time"] == 14
    assert [state.phases[1] for state in seen.values()] == [
        "WAITING",
        "WAITING",
        "FETCH_KVC",
        "FETCH_KVC",
    ]


def test_a_ready_request_with_fetched_blocks_counts_towards_the_rate_limit() -> None:
    """One slot, one fetch. r0 (9, 4, 8) runs until 17; r1 is fetched from 10 to 12 (a fetch takes
    no slot) and holds its blocks until 17; only then is r2 fetched, until 19, when r1 is done."""
    simulation = simulate(
        [(9, 4, 8), (10, 12, 2), (10, 12, 2)],
        max_num_seqs=1,
        max_kvc_ready_requests=1,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(), (1, 2, 3), (1, 2, 4)],
    )
    seen = watch(simulation, [11.5, 14.5, 17.5])
    records = play(simulation)
    assert [state.phases[1] for state in seen.values()] == ["FETCH_KVC", "READY", "PREFILL_CHUNKED"]
    assert [state.phases[2] for state in seen.values()] == ["WAITING", "WAITING", "FETCH_KVC"]
    assert records[1]["token_times"] == [18, 19]
    assert records[2]["gpu_start_time"] == 19
    assert records[2]["token_times"] == [20, 21]


def test_up_to_the_limit_fetches_are_issued_together() -> None:
    simulation = simulate(
        [(10, 12, 2), (10, 12, 2), (10, 4, 4)], max_kvc_ready_requests=2, **TWO_MATCHES
    )
    seen = watch(simulation, [10.5])
    play(simulation)
    assert seen[10.5].phases == {0: "FETCH_KVC", 1: "FETCH_KVC", 2: "PREFILL_CHUNKED"}
    assert seen[10.5].fetching == 4


def test_a_stopped_fetch_is_not_asked_about_until_something_changes() -> None:
    """r0 (9, 4, 8) runs until 17; r1 could be fetched at 10; the STOP holds until 17."""
    policy = Script(admit=[STOP])
    simulation = simulate(
        [(9, 4, 8), (10, 12, 2)],
        policy=policy,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(), (1, 2, 3)],
    )
    records = play(simulation)
    asked = [question for question in policy.ids("ADMIT") if question[0] < 17]
    assert asked == [(10.0, (1,))]
    assert records[1]["request_ready_time"] == 19


# ----------------------------------------------------------------------------------- lookups


def test_issuing_a_fetch_looks_again_and_takes_blocks_for_what_is_resident_then() -> None:
    """The cache holds 2 blocks, the GPU 4. r0 (10, 8, 4; hash 8), r1 (10.5, 13, 2; 1, 2, 3).

    11       r1 matches 8 tokens; 2 blocks are needed and 1 is free (r0 holds 3)
    14       r0 completes; its store evicts block 2, the tail of the chain, and ends at 15
    15 – 16  r1's fetch: 4 tokens, 1 block
    16 – 18  r1: 9 tokens and token 1, token 2
    """
    simulation = simulate(
        [(10, 8, 4), (10.5, 13, 2)],
        num_gpu_blocks_override=4,
        overrides=kv_cache(blocks=2),
        resident=(1, 2),
        hash_ids=[(8,), (1, 2, 3)],
    )
    seen = watch(simulation, [14.5, 15.5, 16.5])
    records = play(simulation)
    assert records[0]["token_times"] == [11, 12, 13, 14]
    assert [state.phases[1] for state in seen.values()] == [
        "WAITING",
        "FETCH_KVC",
        "PREFILL_CHUNKED",
    ]
    assert seen[15.5].blocks == {1: 1}
    assert seen[15.5].free == 3
    assert seen[16.5].tokens == {1: 9}
    assert records[1]["prefix_hit_tokens"] == 4
    assert records[1]["token_times"] == [17, 18]


def test_a_match_that_has_vanished_makes_the_request_ready_in_the_same_rebuild() -> None:
    """As above, but r0's store of hash blocks 8 and 9 (until 16) evicts both of r1's."""
    simulation = simulate(
        [(10, 8, 4), (10.5, 13, 2)],
        num_gpu_blocks_override=4,
        overrides=kv_cache(blocks=2),
        resident=(1, 2),
        hash_ids=[(8, 9), (1, 2, 3)],
    )
    records = play(simulation)
    assert records[1]["request_ready_time"] == records[1]["gpu_start_time"] == 16
    assert records[1]["token_times"] == [17, 18]
    assert records[1]["prefix_hit_tokens"] == 0


def test_blocks_of_a_fetch_in_flight_are_pinned_in_the_cache() -> None:
    """2 s a block, room for 2. r1's fetch of blocks 1 and 2 lasts from 10 to 14; r0 completes at 12
    and its store of block 8 finds nothing to evict: skipped, counted, GPU blocks back at once."""
    simulation = simulate(
        [(10, 4, 2), (10, 12, 2)],
        overrides=kv_cache(block_s=2, blocks=2),
        resident=(1, 2),
        hash_ids=[(8,), (1, 2, 3)],
    )
    seen = watch(simulation, [11.5, 12.5])
    records = play(simulation)
    assert [state.stores_skipped for state in seen.values()] == [0, 1]
    assert seen[12.5].free == 98
    assert records[1]["prefix_hit_tokens"] == 8
    assert records[1]["gpu_start_time"] == 14


SECOND_LIFE: dict[str, Any] = {
    "requests": [(0, 4, 2), (0, 6, 14), (0, 5, 12)],
    "num_gpu_blocks_override": 8,
    "overrides": kv_cache(block_s=0.25),
    "hash_ids": [(1,), (), (1,)],
}
"""Nothing is resident. r0 completes at 2, and block 1 is stored by 2.25.

time  r1 held, needs  r2 held, needs
3     9, 3            8, 3
7     13, 4           12, 4
10    16, 5           15, 4    short of 1: r2 goes
11                             r2 is looked up again: block 1 is fetched, until 11.25
12    18, 5           4, 2     r2 is back: 1 prompt token, token 1 again at 13
14    20, complete
24                             r2: token 10 again at 22, 11 and 12 at 23, 24
"""


@both_modes
def test_after_a_preemption_the_lookup_is_done_again(stepwise: bool) -> None:
    simulation = simulate(stepwise=stepwise, **SECOND_LIFE)
    seen = watch(simulation, [10.5, 11.1, 11.5, 12.5])
    records = play(simulation)
    assert [state.phases[2] for state in seen.values()] == [
        "WAITING",
        "FETCH_KVC",
        "READY",
        "PREFILL_CHUNKED",
    ]
    assert seen[12.5].tokens == {1: 1, 2: 1}
    assert records[1]["token_times"] == list(range(1, 15))
    assert records[2]["token_times"] == [*range(1, 11), 23, 24]
    assert records[2]["preemptions"] == 1
    assert records[2]["prefix_hit_tokens"] == 4
    assert records[2]["request_ready_time"] == 0


def test_only_tokens_that_are_computed_again_count_as_recomputed() -> None:
    """`SECOND_LIFE`: r2 lost 15 tokens; 4 of them come from the cache, so that 1 prompt token and
    10 output tokens are made again (DESIGN §2.6: "tokens made again after a preemption")."""
    records = play(simulate(**SECOND_LIFE))
    assert records[2]["recomputed_tokens"] == 11


@both_modes
def test_a_fetched_prefix_is_no_recomputed_work(stepwise: bool) -> None:
    """r0 (9, 12, 14), r1 (10, 12, 6) with 8 resident tokens, pool 9. At time t r0 holds t + 3.

    10 – 12  r1's fetch, 2 blocks
    12       r1 is admitted: 4 blocks; it holds 13 at 13
    16       r1 holds 16 and needs 5, r0 holds 19 with 5: short; r1 goes
    17 – 19  fetched again; at 19 r0 holds 22 with 6 blocks, 1 is free and r1 needs 2
    23       r0 complete; r1 prefills 4 and makes tokens 1 … 4 again, 5 and 6 at 28, 29
    """
    simulation = simulate(
        [(9, 12, 14), (10, 12, 6)],
        stepwise=stepwise,
        num_gpu_blocks_override=9,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(), (1, 2, 3)],
    )
    records = play(simulation)
    assert records[0]["token_times"] == list(range(10, 24))
    assert records[1]["token_times"] == [13, 14, 15, 16, 28, 29]
    assert records[1]["preemptions"] == 1
    assert records[1]["recomputed_tokens"] == 4 + 4
