"""The GPU prefix cache (`enable_prefix_caching`), on timelines worked out by hand.

Every step takes 1 s; GPU blocks and hash blocks hold 4 tokens; the prefill's last step makes the
first token, so that a prompt of n tokens holds n + 1 after it. One block moves from a tier in 1 s.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from opal_gym.config import ConfigError
from opal_gym.sim.blocks import BlockPool
from opal_gym.sim.clock import SimEnvironment
from opal_gym.sim.policies import FifoLeastWorkPolicy
from opal_gym.sim.simulation import Simulation
from tests.driving import exported, kv_cache, play, simulate, snapshot, watch
from tests.policies import RandomPolicy
from tests.random_cases import KV_BYTES_PER_TOKEN, SeededSource
from tests.tiny import tiny_config, tiny_workload

both_modes = pytest.mark.parametrize("stepwise", [False, True])
BLOCKS = {"kvc.hash_block_tokens": 4}
CACHED: dict[str, Any] = {"enable_prefix_caching": True, "overrides": BLOCKS}


# --------------------------------------------------------------------------------------- the pool


def pool_of(blocks: int) -> BlockPool:
    return BlockPool(SimEnvironment(), blocks)


def hold(pool: BlockPool, *hashes: int) -> None:
    """Takes a block for each hash, with its content."""
    pool.allocate(len(hashes))
    assert all([pool.publish(block_hash) for block_hash in hashes])


def test_freed_blocks_keep_their_content_until_they_are_reused() -> None:
    pool = pool_of(3)
    hold(pool, 1, 2)
    pool.release(2, [1, 2])
    assert (pool.free, pool.match([1, 2, 3])) == (3, (2, 0))
    pool.allocate(1)  # one without content is left
    assert pool.match([1, 2]) == (2, 0)
    pool.allocate(1)  # of a chain the tail goes first
    assert pool.match([1, 2]) == (1, 0)
    pool.allocate(1)
    assert (pool.free, pool.match([1, 2])) == (0, (0, 0))


def test_the_least_recently_freed_block_is_reused_first() -> None:
    """1 and 2 are freed in this order; then 1 is used once more, which makes it the last."""
    pool = pool_of(2)
    hold(pool, 1)
    hold(pool, 2)
    pool.release(1, [1])
    pool.release(1, [2])
    pool.acquire([1])
    pool.release(1, [1])
    pool.allocate(1)
    assert (pool.match([1]), pool.match([2])) == ((1, 0), (0, 0))


def test_blocks_are_counted_once_however_many_hold_them() -> None:
    pool = pool_of(5)
    hold(pool, 1, 2)
    assert pool.free == 3
    pool.acquire([1, 2])
    pool.acquire([1])
    assert (pool.free, pool.shared, pool.match([1, 2])) == (3, 3, (2, 2))
    pool.release(2, [1, 2])
    pool.release(1, [1])
    assert (pool.free, pool.shared, pool.match([1, 2])) == (3, 0, (2, 2))
    pool.release(2, [1, 2])
    assert (pool.free, pool.match([1, 2])) == (5, (2, 0))


def test_an_idle_block_that_is_held_again_is_free_no_longer() -> None:
    pool = pool_of(3)
    hold(pool, 1, 2)
    pool.release(2, [1, 2])
    pool.acquire([1])
    assert (pool.free, pool.match([1, 2])) == (2, (2, 1))


def test_content_is_published_once() -> None:
    """A second block of the same content is its holder's own, and empty when it is freed. Beside
    an idle block it is the other way round: what somebody uses is kept longer."""
    pool = pool_of(3)
    hold(pool, 1)
    pool.allocate(1)
    assert not pool.publish(1)
    pool.release(1)
    assert (pool.free, pool.match([1])) == (2, (1, 1))
    pool.release(1, [1])
    pool.allocate(1)
    assert pool.publish(1)
    assert (pool.free, pool.match([1])) == (2, (1, 1))
    pool.allocate(2)  # the block that was idle is reused
    assert (pool.free, pool.match([1])) == (0, (1, 1))


def test_held_blocks_are_integrated_over_time() -> None:
    """Two blocks from 0 to 3, one of them idle from 1 on and held again from 2: 2 + 1 + 2."""
    env = SimEnvironment()
    pool = BlockPool(env, 5)
    hold(pool, 1, 2)
    for time, change in ((1, lambda: pool.release(1, [2])), (2, lambda: pool.acquire([2]))):
        env.run(until=time)
        change()
    env.run(until=3)
    assert pool.block_seconds() == 5


# ------------------------------------------------------------------------------------------- hits


@both_modes
def test_a_hit_costs_no_transfer_and_no_computation(stepwise: bool) -> None:
    """4 tokens a step. r0 (0, 12, 2) leaves blocks 1, 2, 3 behind; r1 (10, 12, 2; 1, 2, 9) computes
    4 tokens in one step, where it would compute 12 in three."""
    both = {"stepwise": stepwise, "max_num_batched_tokens": 4, "hash_ids": [(1, 2, 3), (1, 2, 9)]}
    requests = [(0, 12, 2), (10, 12, 2)]
    off = play(simulate(requests, overrides=BLOCKS, **both))
    assert (off[1]["token_times"], off[1]["prefix_hit_tokens"]) == ([13, 14], 0)
    simulation = simulate(requests, **CACHED, **both)
    records = play(simulation)
    assert records[0]["token_times"] == [3, 4]
    assert records[1]["token_times"] == [11, 12]
    assert [records[i]["prefix_hit_tokens"] for i in (0, 1)] == [0, 8]
    assert records[1]["request_ready_time"] == records[1]["gpu_start_time"] == 10
    assert simulation.metrics()["prefix_hit_rate"] == 8 / 24


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """The same 8 tokens again: block 2 is there, but its last token must be computed, and a block
    is shared or not. A prompt of 9 with this beginning shares both."""
    records = play(
        simulate(
            [(0, 8, 1), (10, 8, 1), (20, 9, 1)], hash_ids=[(1, 2), (1, 2), (1, 2, 3)], **CACHED
        )
    )
    assert [records[i]["prefix_hit_tokens"] for i in range(3)] == [0, 4, 8]


def test_only_full_blocks_are_shared() -> None:
    """Of a prompt of 11 tokens the first two blocks; a prompt of 12 that goes on alike hits 8."""
    records = play(
        simulate(
            [(0, 11, 1), (10, 12, 1), (20, 3, 1)], hash_ids=[(1, 2, 3), (1, 2, 3), (1,)], **CACHED
        )
    )
    assert [records[i]["prefix_hit_tokens"] for i in range(3)] == [0, 8, 0]


def test_a_hash_block_is_several_gpu_blocks_of_which_some_may_hit() -> None:
    """Hash blocks of 8 tokens, GPU blocks of 4. r0 (12) fills three GPU blocks of hashes 1 and 2;
    r1 (16) has the same hashes and shares all three, r2 (16; 1, 9) the first two."""
    records = play(
        simulate(
            [(0, 12, 1), (10, 16, 1), (20, 16, 1)],
            enable_prefix_caching=True,
            overrides={"kvc.hash_block_tokens": 8},
            hash_ids=[(1, 2), (1, 2), (1, 9)],
        )
    )
    assert [records[i]["prefix_hit_tokens"] for i in range(3)] == [0, 12, 8]


def test_hash_blocks_must_be_whole_gpu_blocks() -> None:
    with pytest.raises(ConfigError, match=r"kvc\.hash_block_tokens: got 6; allowed: a multiple"):
        tiny_config({"kvc.hash_block_tokens": 6}, enable_prefix_caching=True)
    tiny_config({"kvc.hash_block_tokens": 6})


# -------------------------------------------------------------------------------- reference counts


def test_blocks_in_use_are_shared() -> None:
    """r0 (0, 8, 10) holds 8 + t tokens at t; r1 (2, 12, 2) shares blocks 1 and 2 with it.

    step   r0      r1                     free
    2 – 3  11, 3   13 tokens, 4 (2 own)   95
    3 – 4  12, 3   14, 4                  95
    4 – 5  13, 4   –                      96
    """
    simulation = simulate(
        [(0, 8, 10), (2, 12, 2)], stepwise=True, hash_ids=[(1, 2), (1, 2, 3)], **CACHED
    )
    seen = watch(simulation, [2.5, 3.5, 4.5])
    records = play(simulation)
    assert records[1]["token_times"] == [3, 4]
    assert records[1]["prefix_hit_tokens"] == 8
    assert [state.free for state in seen.values()] == [95, 95, 96]
    assert seen[2.5].blocks == {0: 3, 1: 4}
    assert simulation.worker.pool.free == 100


def test_shared_blocks_stay_when_their_first_holder_leaves() -> None:
    """r0 (0, 8, 2) is done at 2; r1 (1, 12, 6), which shares two of its blocks, is done at 7.

    step   r0      r1      free
    1 – 2  10, 3   13, 4   95
    2 – 3  –       14, 4   96
    6 – 7  –       18, 5   95
    """
    simulation = simulate(
        [(0, 8, 2), (1, 12, 6), (9, 13, 1)],
        stepwise=True,
        hash_ids=[(1, 2), (1, 2, 3), (1, 2, 3, 4)],
        **CACHED,
    )
    seen = watch(simulation, [1.5, 2.5, 6.5, 7.5])
    records = play(simulation)
    assert [state.free for state in seen.values()] == [95, 96, 95, 100]
    assert records[2]["prefix_hit_tokens"] == 12


@both_modes
def test_sharing_lets_requests_fit_that_would_not(stepwise: bool) -> None:
    """Pool 6. r0 (0, 12, 3) needs 4 blocks; r1 (1, 12, 3), with 8 tokens in common, needs 2 more
    and not 4: both run, where r1 would wait until 3."""
    both = {
        "stepwise": stepwise,
        "num_gpu_blocks_override": 6,
        "hash_ids": [(1, 2, 3), (1, 2, 4)],
    }
    requests = [(0, 12, 3), (1, 12, 3)]
    assert play(simulate(requests, **CACHED, **both))[1]["token_times"] == [2, 3, 4]
    assert play(simulate(requests, overrides=BLOCKS, **both))[1]["token_times"] == [4, 5, 6]


# ------------------------------------------------------------------------------------------- reuse


@both_modes
def test_the_tail_of_the_least_recently_freed_prompt_is_reused_first(stepwise: bool) -> None:
    """Pool 4. r0 (8, 1) takes 3 blocks and leaves 1, 2 and two empty ones. r1 (5, 8, 1) takes 3:
    the empty ones and block 2. r2 (10, 12, 1) finds block 1 only."""
    records = play(
        simulate(
            [(0, 8, 1), (5, 8, 1), (10, 12, 1)],
            stepwise=stepwise,
            num_gpu_blocks_override=4,
            hash_ids=[(1, 2), (3, 4), (1, 2, 5)],
            **CACHED,
        )
    )
    assert [records[i]["prefix_hit_tokens"] for i in range(3)] == [0, 0, 4]


@both_modes
def test_a_use_makes_a_prompt_the_most_recent(stepwise: bool) -> None:
    """Pool 5; prompts of 5 take two blocks (6 tokens), of which they leave one behind.

    0, 5    r0 leaves block 1, r1 block 2
    10      r2 shares block 1, and leaves it behind block 2
    15      r3 (13, 1) takes 4 blocks: 3 empty ones, and block 2
    20, 25  r4 finds block 1; r5 does not find block 2
    """
    requests = [(0, 5, 1), (5, 5, 1), (10, 5, 1), (15, 13, 1), (20, 5, 1), (25, 5, 1)]
    hash_ids = [(1, 7), (2, 7), (1, 8), (5, 6, 3, 9), (1, 9), (2, 9)]
    records = play(
        simulate(
            requests, stepwise=stepwise, num_gpu_blocks_override=5, hash_ids=hash_ids, **CACHED
        )
    )
    assert [records[i]["prefix_hit_tokens"] for i in range(6)] == [0, 0, 4, 0, 4, 0]


# ------------------------------------------------------------------------------------------- twins


@both_modes
def test_a_twin_in_the_same_step_hits(stepwise: bool) -> None:
    """16 tokens a step: r0 computes 12 and r1 the 4 that are not in r0's blocks, in one step;
    without the cache 4 tokens are left for r1, whose prefill ends at 2."""
    both = {"stepwise": stepwise, "hash_ids": [(1, 2, 3)] * 2}
    requests = [(0, 12, 2), (0, 12, 2)]
    simulation = simulate(requests, **CACHED, **both)
    seen = watch(simulation, [0.5])
    records = play(simulation)
    assert [records[i]["token_times"] for i in (0, 1)] == [[1, 2], [1, 2]]
    assert [records[i]["prefix_hit_tokens"] for i in (0, 1)] == [0, 8]
    assert seen[0.5].tokens == {0: 12, 1: 4}
    assert seen[0.5].free == 100 - 4 - 2
    assert play(simulate(requests, overrides=BLOCKS, **both))[1]["token_times"] == [2, 3]


def test_a_block_that_two_compute_is_published_once() -> None:
    """r0 and r1 have the same 8 tokens: r1 shares block 1 and computes its own block 2. r1 (until
    4) outlives r0 (until 2), whose block 2 is idle then. A third prompt finds both."""
    simulation = simulate(
        [(0, 8, 2), (0, 8, 4), (2.5, 9, 1)], hash_ids=[(1, 2), (1, 2), (1, 2, 3)], **CACHED
    )
    seen = watch(simulation, [0.5, 2.25])
    records = play(simulation)
    assert [records[i]["prefix_hit_tokens"] for i in range(3)] == [0, 4, 8]
    assert seen[0.5].free == 100 - 3 - 2
    # r1 holds 10 tokens in 3 blocks: block 1 and two of its own.
    assert seen[2.25].free == 97
    assert simulation.worker.pool.free == 100


# ------------------------------------------------------------------------------------ preemptions

EVICTED: dict[str, Any] = {
    "requests": [(0, 10, 6), (0, 9, 8)],
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 7,
}
"""r0 holds 10 + t tokens at t, r1 9 + t.

3   r0 holds 13 and needs 4 blocks, r1 holds 12 and needs 4: 8 of 7. r1 goes
4   r1 needs 3 blocks (9 tokens and one more), 3 are free: it is back, and makes token 1 again at 5
6   r0 is done
8   r1's token 4, …, 12: its last
"""


@both_modes
def test_a_preempted_request_finds_its_own_blocks(stepwise: bool) -> None:
    """Of the 12 lost tokens 8 are still in blocks 1 and 2: 1 prompt token and 3 output tokens are
    made again."""
    simulation = simulate(stepwise=stepwise, hash_ids=[(), (1, 2, 3)], **EVICTED, **CACHED)
    seen = watch(simulation, [3.5, 4.5])
    records = play(simulation)
    assert records[0]["token_times"] == [1, 2, 3, 4, 5, 6]
    assert records[1]["token_times"] == [1, 2, 3, 8, 9, 10, 11, 12]
    assert records[1]["preemptions"] == 1
    assert records[1]["recomputed_tokens"] == 4
    assert seen[3.5].blocks == {0: 4, 1: 0}
    assert seen[4.5].tokens == {0: 1, 1: 1}
    assert seen[4.5].blocks == {0: 4, 1: 3}


def test_without_the_cache_all_is_made_again() -> None:
    records = play(simulate(hash_ids=[(), (1, 2, 3)], overrides=BLOCKS, **EVICTED))
    assert records[1]["token_times"] == [1, 2, 3, 8, 9, 10, 11, 12]
    assert records[1]["recomputed_tokens"] == 12


def test_an_eviction_frees_only_what_nobody_else_holds() -> None:
    """r0 and r1 share blocks 1 and 2; pool 7. r0 (0, 10, 12), r1 (0, 9, 12), r2 (0, 4, 12).

    step   r0      r1 (own)   r2      sum
    0 – 1  11, 3   10, 1      5, 2    6
    2 – 3  13, 4   12, 1      7, 2    7
    3 – 4  14, 4   13, 2      8, 2    8: r2 has least (7) and goes: 6
    5 – 6  16, 4   15, 2      –       6
    6 – 7  17, 5   16, 2      –       7
    7 – 8  18, 5   17, 3      –       8: r1 goes, and frees 2 + 0 of its 4 blocks: 5
    """
    simulation = simulate(
        [(0, 10, 12), (0, 9, 12), (0, 4, 12)],
        stepwise=True,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=7,
        hash_ids=[(1, 2), (1, 2, 3), ()],
        **CACHED,
    )
    seen = watch(simulation, [0.5, 2.5, 3.5, 6.5, 7.5])
    records = play(simulation)
    assert [state.free for state in seen.values()] == [1, 0, 1, 0, 2]
    assert seen[7.5].blocks == {0: 5, 1: 0, 2: 0}
    assert len(records) == 3


# ------------------------------------------------------------------------------ fetches from a tier

TIERED: dict[str, Any] = {"enable_prefix_caching": True, "overrides": kv_cache()}


@both_modes
def test_a_fetch_moves_what_the_gpu_does_not_hold(stepwise: bool) -> None:
    """Blocks 1, 2, 3 are in the tier. r0 (10, 9, 1) fetches 1 and 2 from 10 to 12 and is done at
    13. r1 (20, 14, 2) finds them on the GPU and fetches block 3 from 20 to 21."""
    simulation = simulate(
        [(10, 9, 1), (20, 14, 2)],
        stepwise=stepwise,
        resident=(1, 2, 3),
        hash_ids=[(1, 2, 7), (1, 2, 3, 4)],
        **TIERED,
    )
    seen = watch(simulation, [10.5, 20.5, 21.5])
    records = play(simulation)
    assert records[0]["token_times"] == [13]
    assert records[1]["request_ready_time"] == records[1]["gpu_start_time"] == 21
    assert records[1]["token_times"] == [22, 23]
    assert [records[i]["prefix_hit_tokens"] for i in (0, 1)] == [8, 12]
    # Three blocks are held, of which one is under way.
    assert [state.fetching for state in seen.values()] == [2, 1, 0]
    assert [state.free for state in seen.values()] == [98, 97, 96]


@both_modes
def test_a_match_that_the_gpu_holds_is_not_fetched(stepwise: bool) -> None:
    """r1 (20, 9, 1) has all of its tier's match on the GPU, and is READY at once."""
    simulation = simulate(
        [(10, 9, 1), (20, 9, 1)],
        stepwise=stepwise,
        resident=(1, 2),
        hash_ids=[(1, 2, 7), (1, 2, 8)],
        **TIERED,
    )
    records = play(simulation)
    assert records[1]["prefix_hit_tokens"] == 8
    assert records[1]["token_times"] == [21]
    assert records[1]["request_ready_time"] == 20
    assert exported(simulation)[1]["_4_request_ready_time"] == 20


@both_modes
def test_a_fetch_needs_no_room_for_blocks_that_it_shares(stepwise: bool) -> None:
    """Pool 7; blocks 1 to 4 are in the tier. r0 (10, 13, 12) fetches 3 of them until 13 and holds t
    tokens at t. r1 (15, 17, 2) matches 4 blocks, of which r0's 3 are in use: it needs one, though
    only 3 are free; it is fetched until 16, computes 1 token and is done at 18."""
    simulation = simulate(
        [(10, 13, 12), (15, 17, 2)],
        stepwise=stepwise,
        num_gpu_blocks_override=7,
        resident=(1, 2, 3, 4),
        hash_ids=[(1, 2, 3, 9), (1, 2, 3, 4, 5)],
        **TIERED,
    )
    seen = watch(simulation, [15.5])
    records = play(simulation)
    assert seen[15.5].phases[1] == "FETCH_KVC"
    assert records[1]["prefix_hit_tokens"] == 16
    assert records[1]["token_times"] == [17, 18]


def test_what_was_fetched_can_be_shared() -> None:
    """r0's fetch of blocks 1 and 2 ends at 12; r1 (12.5, 9, 1) shares them, and fetches nothing:
    the tier's match is no longer."""
    simulation = simulate(
        [(10, 9, 6), (12.5, 9, 1)], resident=(1, 2), hash_ids=[(1, 2, 7), (1, 2, 8)], **TIERED
    )
    seen = watch(simulation, [13.5])
    records = play(simulation)
    assert records[1]["token_times"] == [14]
    assert records[1]["prefix_hit_tokens"] == 8
    # r0 holds 10 tokens in 3 blocks, the step makes 11; r1 has one of its own.
    assert seen[13.5].free == 96


@both_modes
def test_a_span_takes_its_blocks_before_others_give_theirs_back(stepwise: bool) -> None:
    """Pool 10, 32 tokens a step. rA (5, 1; 1), rB (17, 6; 5, 6, 7, 8) and rC (4, 20) start at 0.

    1 – 2   block 1 is stored; at 2 rA's 2 blocks come back, of which block 1 is idle
    6 – 10  rB's four hash blocks are stored; it holds 6 blocks until then
    8       rC, with 8 + 4 tokens, needs a fourth block: the only free one is block 1, which goes
    10      rB's blocks come back: it is too late for block 1
    12      rD (8, 1; 1, 10) finds block 1 in the tier only: fetched until 13, its token at 14
    """
    simulation = simulate(
        [(0, 5, 1), (0, 17, 6), (0, 4, 20), (12, 8, 1)],
        stepwise=stepwise,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=10,
        hash_ids=[(1, 2), (5, 6, 7, 8, 9), (), (1, 10)],
        **TIERED,
    )
    seen = watch(simulation, [9.5])
    records = play(simulation)
    assert seen[9.5].storing == [1]
    assert records[1]["token_times"] == [1, 2, 3, 4, 5, 6]
    assert records[3]["request_ready_time"] == 13
    assert records[3]["token_times"] == [14]


# --------------------------------------------------------------------------------- random workloads


def random_case(seed: int) -> tuple[dict[str, Any], list[tuple[float, int, int]], list[Any]]:
    """Overrides, requests and hash ids: two documents, a tight pool, none to two tiers."""
    source = SeededSource(seed)
    integer, pick = source.integer, source.pick
    block_size, pool = pick((1, 2, 4)), integer(4, 16)
    hash_tokens, budget = block_size * pick((1, 1, 2)), pick((2, 4, 8, 16))
    block_bytes = hash_tokens * KV_BYTES_PER_TOKEN
    tiers = [
        {
            "capacity_GB": (pick((2, 4, 16, 64)) + 0.5) * block_bytes / 1e9,
            "bandwidth_GBps": block_bytes / pick((1e-9, 0.25, 1.0, 3.0)) / 1e9,
            "latency_nsec": pick((0.0, 0.0, 0.5e9, 1e9)),
            "concurrency": pick((1, 2, 4)),
        }
        for _ in range(pick((0, 0, 1, 1, 2)))
    ]
    prefix = "worker.vllm_params."
    overrides = {
        prefix + "enable_prefix_caching": True,
        prefix + "block_size": block_size,
        prefix + "num_gpu_blocks_override": pool,
        prefix + "max_num_batched_tokens": budget,
        prefix + "max_num_seqs": integer(1, min(6, budget)),
        prefix + "max_kvc_ready_requests": integer(1, 4),
        prefix + "rebuild_on": pick(("change", "completion")),
        prefix + "first_token_at_prefill_end": pick((True, False)),
        "kvc.hash_block_tokens": hash_tokens,
        "kvc.chunk_size": pick((None, None, 2 * hash_tokens)),
        "kvc.save_unfull_chunk": pick((True, False)),
        "kvc.tiers": tiers,
        "worker.inference_params": {"model": "synthetic", "base_s": pick((0.4, 1.0))},
    }
    requests, hash_ids, time = [], [], 0.0
    for number in range(integer(2, 10)):
        time += pick((0, 0, 0.5, 1, 2.5, 6))
        prompt = integer(1, block_size * pool - 1)
        output = integer(1, min(20, block_size * pool - prompt))
        blocks = -(-prompt // hash_tokens)
        shared, document = integer(0, blocks), pick((0, 0, 1))
        hash_ids.append(
            tuple(1000 * (document if b < shared else 2 + number) + b for b in range(blocks))
        )
        requests.append((time, prompt, output))
    return overrides, requests, hash_ids


def check_pool(pool: BlockPool) -> None:
    assert 0 <= len(pool._idle) <= pool.free <= pool.total
    assert not pool._idle.keys() & pool._holders.keys()
    assert all(holders > 0 for holders in pool._holders.values())
    assert len(pool._holders) <= pool.total - pool.free


def run_random(seed: int, stepwise: bool) -> Simulation:
    """Runs a case to its very end, its invariants checked after every event."""
    overrides, requests, hash_ids = random_case(seed)
    simulation = Simulation(
        tiny_config({**overrides, "simulation.step_by_step": stepwise}),
        tiny_workload(requests, hash_ids=hash_ids),
        RandomPolicy() if seed % 2 else FifoLeastWorkPolicy(),
        policy_seed=seed,
    )
    events = 0
    while simulation.env.peek() < float("inf"):
        simulation.env.step()
        check_pool(simulation.worker.pool)
        events += 1
        assert events < 20_000, "livelock"
    worker = simulation.worker
    assert simulation.done
    assert worker.pool.free == worker.pool.total
    assert not worker.pool._holders
    assert worker.in_flight == worker.kvc_fetch_blocks_in_flight == worker.kvc_ready_count == 0
    return simulation


@pytest.mark.parametrize("chunk", range(6))
def test_blocks_are_conserved_and_spans_change_nothing(chunk: int) -> None:
    """With `check_invariants` on; times, hits and evictions of all requests to the last bit."""
    seen: Counter[str] = Counter()
    for seed in range(50 * chunk, 50 * (chunk + 1)):
        spans, steps = run_random(seed, False), run_random(seed, True)
        table, other = spans.records.table, steps.records.table
        assert table.tobytes() == other.tobytes(), f"random_case({seed})"
        assert not np.isnan(table["request_ready_time"]).any(), f"random_case({seed})"
        assert (table["prefix_hit_tokens"] < table["prompt_tokens"]).all()
        assert spans.worker.rebuild_id == steps.worker.rebuild_id
        assert spans.worker.pool.block_seconds() == pytest.approx(steps.worker.pool.block_seconds())
        seen["hits"] += int(table["prefix_hit_tokens"].sum())
        seen["evictions"] += int(table["preemptions"].sum())
        seen["shorter"] += int(spans.worker.steps.count > len(table))
    assert min(seen.values()) > 20, seen


def test_a_prefill_may_compute_what_idle_blocks_hold() -> None:
    """Found by chance, and shrunk: the fourth request fetches 4 tokens, all that there is room for;
    before it is admitted, the third one leaves further blocks of the same prompt idle. Whether the
    fourth reuses them in one step or another, it publishes what it computes."""
    shared = tuple(range(9))
    hash_ids = [
        (0, 1, 92),
        tuple(range(60, 70)),
        shared[:3],
        (*shared, 95, 96, 97),
        shared[:3],
        shared[:7],
    ]
    requests = [
        (6.0, 5, 1),
        (12.0, 21, 4),
        (12.0, 6, 1),
        (13.0, 24, 1),
        (13.0, 5, 10),
        (13.0, 14, 1),
    ]
    block_bytes = 2 * KV_BYTES_PER_TOKEN
    tier = {
        "capacity_GB": 4.5 * block_bytes / 1e9,
        "bandwidth_GBps": block_bytes / 1e9,
        "concurrency": 2,
    }
    tables = []
    for stepwise in (False, True):
        simulation = simulate(
            requests,
            stepwise=stepwise,
            hash_ids=hash_ids,
            overrides={
                "kvc.hash_block_tokens": 2,
                "kvc.save_unfull_chunk": True,
                "kvc.tiers": [tier],
            },
            enable_prefix_caching=True,
            block_size=2,
            num_gpu_blocks_override=13,
            max_num_batched_tokens=2,
            max_num_seqs=2,
            max_kvc_ready_requests=1,
            rebuild_on="completion",
            first_token_at_prefill_end=False,
        )
        simulation.run()
        tables.append(simulation.records.table.tobytes())
    assert tables[0] == tables[1]


def test_the_cache_saves_computation_and_changes_no_output() -> None:
    """All requests make their tokens, with the cache or without; with it in fewer prefill steps."""
    saved = 0
    for seed in range(40):
        overrides, requests, hash_ids = random_case(seed)
        counts = []
        for caching in (False, True):
            config = tiny_config(
                {
                    **overrides,
                    "kvc.tiers": [],
                    "worker.vllm_params.enable_prefix_caching": caching,
                    "worker.vllm_params.max_num_seqs": 1,
                }
            )
            simulation = Simulation(config, tiny_workload(requests, hash_ids=hash_ids))
            simulation.run()
            assert len(simulation.records) == len(requests)
            counts.append(simulation.worker.steps.count)
        # One request at a time: every hit shortens its own prefill.
        assert counts[1] <= counts[0]
        saved += counts[0] - counts[1]
    assert saved > 50


def test_the_snapshot_of_an_idle_worker_is_empty() -> None:
    """Idle blocks are free blocks."""
    simulation = simulate([(0, 12, 2)], hash_ids=[(1, 2, 3)], **CACHED)
    play(simulation)
    assert snapshot(simulation).free == 100
    assert simulation.worker.pool.match([1, 2, 3]) == (3, 0)
