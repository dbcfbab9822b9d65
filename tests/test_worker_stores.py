"""The vLLM worker stores KV beside the batch; short batches wait and holders give back.

Every step takes 1 s and computes at most 16 tokens; GPU blocks and hash blocks hold 4 tokens. One
hash block moves in `block_s` (1 s unless given), one transfer at a time. What is `resident` is
there long before the first request.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.driving import Script, kv_cache, play, simulate, watch

both_modes = pytest.mark.parametrize("stepwise", [False, True])


# ------------------------------------------------------------------------------------- stores


@both_modes
def test_the_kv_store_runs_beside_the_batch_and_holds_its_blocks(stepwise: bool) -> None:
    """r0 (8, 2; hashes 1, 2) completes at 2 with 3 blocks and is stored until 4; r1 (4, 6) does not
    wait: it holds 4 + t at time t.

    step   r0      r1              free
    2 – 3  3       7 tokens, 2     95
    3 – 4  3       8, 2            95
    4 – 5  –       9, 3            97
    """
    simulation = simulate(
        [(0, 8, 2), (0, 4, 6)],
        stepwise=stepwise,
        overrides=kv_cache(),
        hash_ids=[(1, 2), ()],
    )
    seen = watch(simulation, [2.5, 3.5, 4.5])
    records = play(simulation)
    assert records[0]["decode_done_time"] == 2
    assert records[1]["token_times"] == [1, 2, 3, 4, 5, 6]
    assert [state.storing for state in seen.values()] == [[0], [0], []]
    assert [state.handed_back for state in seen.values()] == [0, 0, 1]
    if stepwise:
        assert [state.free for state in seen.values()] == [95, 95, 97]


@both_modes
@pytest.mark.parametrize("rebuild_on", ["change", "completion"])
@pytest.mark.parametrize(("block_s", "start"), [(1.0, 4), (1.25, 5)])
def test_the_end_of_a_store_is_a_rebuild_at_the_next_boundary(
    stepwise: bool, rebuild_on: str, block_s: float, start: float
) -> None:
    """As above with pool 8; r0's 3 blocks come back exactly at 4, or at 4.5. r2 (2.2, 12, 1) needs
    4; r1 holds 2 of the 5 others until 4 and 3 from then on."""
    simulation = simulate(
        [(0, 8, 2), (0, 4, 6), (2.2, 12, 1)],
        stepwise=stepwise,
        rebuild_on=rebuild_on,
        num_gpu_blocks_override=8,
        overrides=kv_cache(block_s=block_s),
        hash_ids=[(1, 2), (), ()],
    )
    records = play(simulation)
    assert records[2]["gpu_start_time"] == start
    assert records[2]["token_times"] == [start + 1]
    assert records[1]["token_times"] == [1, 2, 3, 4, 5, 6]


def test_a_stored_prompt_is_a_match_for_the_next_request() -> None:
    """r0 (8, 1; hashes 1, 2) completes at 1, its store ends at 3; r1 with the same prefix matches
    8 of 12 tokens at 5, and is fetched until 7."""
    simulation = simulate(
        [(0, 8, 1), (5, 12, 1)], overrides=kv_cache(), hash_ids=[(1, 2), (1, 2, 3)]
    )
    records = play(simulation)
    assert records[0]["prefix_hit_tokens"] == 0
    assert records[1]["prefix_hit_tokens"] == 8
    assert records[1]["token_times"] == [8]


def test_a_store_without_room_is_skipped_and_counted() -> None:
    """A prompt of 2 hash blocks, a cache of 1."""
    simulation = simulate([(0, 8, 2)], overrides=kv_cache(blocks=1), hash_ids=[(1, 2)])
    seen = watch(simulation, [2.5])
    play(simulation)
    assert seen[2.5].free == 100
    assert seen[2.5].handed_back == 1
    assert simulation.metrics()["stores_skipped"] == 1


# Stores that take no time: a prompt without hash ids, and one that finds no room.
NO_TIME = pytest.mark.parametrize(
    ("cache", "hashes"),
    [
        ({}, ()),
        (kv_cache(), ()),
        (kv_cache(blocks=1), (1, 2)),
    ],
    ids=["no cache", "nothing to store", "no room"],
)


@NO_TIME
def test_blocks_released_at_a_boundary_are_seen_by_its_rebuild(
    cache: dict[str, Any], hashes: tuple[int, ...]
) -> None:
    """r0 (8, 2), r1 (4, 6), pool 7; r2 (0.5, 8, 1) needs 3 blocks. At 2 r0's 3 come back (DESIGN
    §2: "Everything with time ≤ the boundary (block releases, …) is seen by it")."""
    simulation = simulate(
        [(0, 8, 2), (0, 4, 6), (0.5, 8, 1)],
        num_gpu_blocks_override=7,
        overrides=cache,
        hash_ids=[hashes, (), ()],
    )
    records = play(simulation)
    assert records[2]["gpu_start_time"] == 2
    assert records[2]["token_times"] == [3]


@NO_TIME
def test_nobody_is_evicted_for_blocks_that_are_released_at_the_boundary(
    cache: dict[str, Any], hashes: tuple[int, ...]
) -> None:
    """r0 (8, 2), r1 (6, 6), r2 (2, 8), pool 6. At 2 r0 completes and returns 3 blocks; r1 holds 8
    and needs 3, r2 holds 4 and needs 2: 5 of 6."""
    simulation = simulate(
        [(0, 8, 2), (0, 6, 6), (0, 2, 8)],
        num_gpu_blocks_override=6,
        overrides=cache,
        hash_ids=[hashes, (), ()],
    )
    records = play(simulation)
    assert simulation.ledger.preemptions == 0
    assert records[1]["token_times"] == [1, 2, 3, 4, 5, 6]


@NO_TIME
def test_a_completion_and_a_release_at_one_boundary_are_one_rebuild(
    cache: dict[str, Any], hashes: tuple[int, ...]
) -> None:
    """Rebuilds at 0 (arrival), 1 (prefill end), 2 (completion and release)."""
    simulation = simulate([(0, 8, 2)], overrides=cache, hash_ids=[hashes])
    play(simulation)
    assert simulation.worker.rebuild_id == 3


# ------------------------------------------------------- progress: waiting and giving back


@both_modes
def test_a_batch_of_one_waits_for_a_store_under_way(stepwise: bool) -> None:
    """r0 (6, 12), r1 (4, 2), pool 6. r1 completes at 2; its 2 blocks are stored until 12. r0 holds
    6 + t at time t.

    10  r0 holds 16 in 4 blocks and needs a fifth: it waits; r2 (4, 2) arrives at 10.5
    12  the store ends: tokens 11 and 12 at 13, 14
    """
    simulation = simulate(
        [(0, 6, 12), (0, 4, 2), (10.5, 4, 2)],
        stepwise=stepwise,
        num_gpu_blocks_override=6,
        overrides=kv_cache(block_s=10),
        hash_ids=[(), (1,), ()],
    )
    seen = watch(simulation, [11.5])
    records = play(simulation)
    assert records[0]["token_times"] == [*range(1, 11), 13, 14]
    # 0 (arrivals), 1 (prefill ends), 2 (completion), 10 (short); r2's arrival can change nothing.
    assert seen[11.5].rebuilds == 4
    assert records[0]["preemptions"] == 0
    # r2 needs 2 blocks; r0 leaves 1.
    assert records[2]["token_times"] == [15, 16]
    # 0 – 10, 12 – 16
    assert simulation.worker.gpu_busy_time == 14


@both_modes
def test_a_batch_of_one_waits_for_a_fetch_under_way_whose_holder_then_gives_back(
    stepwise: bool,
) -> None:
    """6 s a block. r0 (20, 6, 12), r1 (20, 12, 2) with 8 resident tokens, pool 6.

    20 – 32  r1's fetch to 2 blocks
    30       r0 holds 16 in 4 blocks and needs a fifth: it waits
    32       r1 is READY and gives its blocks back; r0's tokens 11, 12 at 33, 34
    34 – 46  fetched again; r1's tokens at 47, 48
    """
    policy = Script()
    simulation = simulate(
        [(20, 6, 12), (20, 12, 2)],
        stepwise=stepwise,
        policy=policy,
        num_gpu_blocks_override=6,
        overrides=kv_cache(block_s=6),
        resident=(1, 2),
        hash_ids=[(), (1, 2, 3)],
    )
    seen = watch(simulation, [31.5, 32.5])
    records = play(simulation)
    assert records[0]["token_times"] == [*range(21, 31), 33, 34]
    assert records[1]["token_times"] == [47, 48]
    assert [state.phases[1] for state in seen.values()] == ["FETCH_KVC", "WAITING"]
    assert [state.blocks[1] for state in seen.values()] == [2, 0]
    assert records[1]["preemptions"] == records[1]["recomputed_tokens"] == 0
    assert policy.of("PREEMPT") == []


@both_modes
def test_a_ready_holder_gives_back_to_a_batch_of_one_without_a_pause(stepwise: bool) -> None:
    """As above with 1 s a block and arrivals at 10: r1 is READY at 12, but needs 2 blocks more and
    1 is free. At 20 r0 needs a fifth block and nothing is in flight: r1 gives back."""
    simulation = simulate(
        [(10, 6, 12), (10, 12, 2)],
        stepwise=stepwise,
        num_gpu_blocks_override=6,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(), (1, 2, 3)],
    )
    seen = watch(simulation, [19.5, 20.5, 21.5])
    records = play(simulation)
    assert records[0]["token_times"] == list(range(11, 23))
    # Looked up again and fetched from 22 to 24.
    assert records[1]["token_times"] == [25, 26]
    assert [state.blocks[1] for state in seen.values()] == [2, 0, 0]
    assert simulation.ledger.preemptions == 0


def test_holders_give_back_youngest_first_and_no_more_than_needed() -> None:
    """One slot, pool 6: r0 (10, 6, 12) as above; r1 and r2 (8, 1) hold 1 fetched block each. At 20
    r0 needs a fifth block: r2's is enough."""
    simulation = simulate(
        [(10, 6, 12), (10, 8, 1), (10, 8, 1)],
        stepwise=True,
        max_num_seqs=1,
        num_gpu_blocks_override=6,
        overrides=kv_cache(),
        resident=(1,),
        hash_ids=[(), (1, 2), (1, 3)],
    )
    seen = watch(simulation, [19.5, 20.5])
    records = play(simulation)
    assert [state.blocks for state in seen.values()] == [{0: 4, 1: 1, 2: 1}, {0: 5, 1: 1, 2: 0}]
    assert seen[20.5].phases == {0: "DECODE", 1: "READY", 2: "WAITING"}
    assert seen[20.5].queue == [1, 2]
    assert len(records) == 3


@both_modes
def test_holders_give_back_to_an_empty_batch_until_the_oldest_fits(stepwise: bool) -> None:
    """r0 and r1 (10, 12, 2) with 8 resident tokens each, pool 5; both need 4 blocks to start. r2
    (10, 8, 2) has 4 resident tokens, but 2 fetched requests are the limit.

    12  r0 is READY; 1 block is free and it needs 2; r1's fetch is in flight
    14  r1 is READY; nothing is in flight: it gives back 2, r0 is admitted without a question.
        1 block is free and the limit allows r2's fetch, but none is issued in that rebuild
    16  r0 completes (tokens at 15, 16); its blocks come back at 17
    17  r1's second fetch, until 19, and r2's, until 20; r1's tokens at 20, 21
    21  r1's blocks are stored until 22; r2's tokens at 23, 24
    """
    policy = Script()
    simulation = simulate(
        [(10, 12, 2), (10, 12, 2), (10, 8, 2)],
        stepwise=stepwise,
        policy=policy,
        num_gpu_blocks_override=5,
        max_kvc_ready_requests=2,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(1, 2, 3), (1, 2, 4), (1, 9)],
    )
    seen = watch(simulation, [13.5, 14.5])
    records = play(simulation)
    assert [state.phases for state in seen.values()] == [
        {0: "READY", 1: "FETCH_KVC", 2: "WAITING"},
        {0: "PREFILL_CHUNKED", 1: "WAITING", 2: "WAITING"},
    ]
    assert seen[14.5].blocks == {0: 4, 1: 0, 2: 0}
    assert seen[14.5].tokens == {0: 4}
    assert [question for question in policy.of("ADMIT") if question.time in (12, 14)] == []
    assert records[0]["token_times"] == [15, 16]
    assert records[1]["token_times"] == [20, 21]
    assert records[2]["token_times"] == [23, 24]
    assert simulation.ledger.preemptions == 0


def test_with_an_empty_batch_too_no_more_holders_give_back_than_needed() -> None:
    """Three (10, 12, 2) with 8 resident tokens each, pool 6: 2 blocks each, fetched by 12, 14, 16.
    At 16 all of them need 2 more: r2's are enough for r0, which keeps its own; r1 keeps its."""
    simulation = simulate(
        [(10, 12, 2)] * 3,
        num_gpu_blocks_override=6,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(1, 2, 3), (1, 2, 4), (1, 2, 5)],
    )
    seen = watch(simulation, [15.5, 16.5])
    records = play(simulation)
    assert [state.blocks for state in seen.values()] == [{0: 2, 1: 2, 2: 2}, {0: 4, 1: 2, 2: 0}]
    assert seen[16.5].tokens == {0: 4}
    assert records[0]["token_times"] == [17, 18]
    assert len(records) == 3
