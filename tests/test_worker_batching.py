"""Batches of the vLLM worker on timelines worked out by hand: steps, boundaries, rebuilds.

Every step takes 1 s and computes at most 16 tokens; a block holds 4 tokens. "Held" is
prompt_processed + decode_tokens_generated; a request holds ceil(held / 4) blocks, those of the step
under way included (DESIGN §2.1).
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from opal_gym.config import ConfigError
from opal_gym.sim.decision import STOP
from tests.driving import Script, exported, play, simulate, watch
from tests.tiny import tiny_config

both_modes = pytest.mark.parametrize("stepwise", [False, True])


# ------------------------------------------------------------------------------- one request


@both_modes
def test_one_request_makes_its_first_token_at_the_end_of_its_prefill(stepwise: bool) -> None:
    """Prompt 6, output 3, arrival 0.25 at an idle worker: it starts at once.

    step           held   blocks  token
    0.25 – 1.25    6 + 1  2       1
    1.25 – 2.25    8      2       2
    2.25 – 3.25    9      3       3, complete
    """
    simulation = simulate([(0.25, 6, 3)], stepwise=stepwise)
    record = play(simulation)[0]
    assert record["token_times"] == [1.25, 2.25, 3.25]
    for name in ("arrival", "worker_arrival", "start_processing", "request_ready", "gpu_start"):
        assert record[f"{name}_time"] == 0.25, name
    assert record["first_token_time"] == 1.25
    assert record["decode_done_time"] == 3.25
    assert record["max_gap"] == 1.0
    assert simulation.worker.gpu_busy_time == 3.0


@both_modes
def test_without_a_first_token_at_prefill_end_decode_makes_all_tokens(stepwise: bool) -> None:
    """The same request takes one step more: prefill 0.25 – 1.25, tokens at 2.25, 3.25, 4.25."""
    simulation = simulate([(0.25, 6, 3)], stepwise=stepwise, first_token_at_prefill_end=False)
    record = play(simulation)[0]
    assert record["token_times"] == [2.25, 3.25, 4.25]
    assert record["gpu_start_time"] == 0.25
    assert record["first_token_time"] == 2.25
    assert record["decode_done_time"] == 4.25
    assert simulation.worker.gpu_busy_time == 4.0


@pytest.mark.parametrize(
    ("at_prefill_end", "free_blocks"),
    [
        # held 7, 8, 9
        (True, [98, 98, 97, 100, 100]),
        # held 6, 7, 8, 9
        (False, [98, 98, 98, 97, 100]),
    ],
)
def test_blocks_grow_with_every_step_and_come_back_at_completion(
    at_prefill_end: bool, free_blocks: list[int]
) -> None:
    simulation = simulate([(0, 6, 3)], stepwise=True, first_token_at_prefill_end=at_prefill_end)
    seen = watch(simulation, [0.5, 1.5, 2.5, 3.5, 4.5])
    play(simulation)
    assert [state.free for state in seen.values()] == free_blocks


def test_phases_go_from_waiting_over_prefill_to_decode() -> None:
    """Prompt 20 > 16: chunks of 16 and 4, then decodes."""
    simulation = simulate([(0, 20, 3)], stepwise=True)
    seen = watch(simulation, [0.5, 1.5, 2.5])
    play(simulation)
    assert [state.phases[0] for state in seen.values()] == [
        "PREFILL_CHUNKED",
        "PREFILL_CHUNKED",
        "DECODE",
    ]
    assert [state.tokens[0] for state in seen.values()] == [16, 4, 1]


@both_modes
@pytest.mark.parametrize(("at_prefill_end", "time"), [(True, 1.0), (False, 2.0)])
def test_an_output_of_one_token_ends_with_its_first_token(
    stepwise: bool, at_prefill_end: bool, time: float
) -> None:
    simulation = simulate([(0, 6, 1)], stepwise=stepwise, first_token_at_prefill_end=at_prefill_end)
    record = play(simulation)[0]
    assert record["token_times"] == [time]
    assert record["first_token_time"] == record["decode_done_time"] == time
    assert record["max_gap"] == 0.0
    assert simulation.worker.pool.free == 100


# ----------------------------------------------------------------------------- shared batches


@both_modes
def test_two_requests_share_a_batch(stepwise: bool) -> None:
    """r0 (6, 4) and r1 (8, 2) at 0: 14 ≤ 16 tokens, so both prefills fit one step.

    step   r0 held, blocks   r1 held, blocks   free
    0 – 1  7, 2              9, 3              95
    1 – 2  8, 2              10, 3 complete    95
    2 – 3  9, 3              –                 97
    3 – 4  10, 3 complete    –                 97
    """
    simulation = simulate([(0, 6, 4), (0, 8, 2)], stepwise=stepwise)
    seen = watch(simulation, [0.5, 1.5, 2.5, 3.5, 4.5])
    records = play(simulation)
    assert records[0]["token_times"] == [1, 2, 3, 4]
    assert records[1]["token_times"] == [1, 2]
    assert simulation.worker.gpu_busy_time == 4.0
    if stepwise:
        assert [state.free for state in seen.values()] == [95, 95, 97, 97, 100]
        assert [state.tokens for state in seen.values()] == [
            {0: 6, 1: 8},
            {0: 1, 1: 1},
            {0: 1},
            {0: 1},
            {},
        ]


@both_modes
def test_scheduler_timestamps_end_the_steps_that_a_request_took_part_in(stepwise: bool) -> None:
    """r0 (20, 2) gets 16 tokens in 0 – 1 and 4 in 1 – 2; r1 (0.5, 4, 2) gets its 4 in 1 – 2."""
    simulation = simulate([(0, 20, 2), (0.5, 4, 2)], stepwise=stepwise)
    play(simulation)
    rows = exported(simulation)
    assert rows[0]["scheduler_timestamps"] == [1, 2, 3]
    assert rows[1]["scheduler_timestamps"] == [2, 3]


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    """One slot: r0 (4, 3) until 3, then r1 (4, 2)."""
    records = play(simulate([(0, 4, 3), (0, 4, 2)], max_num_seqs=1))
    assert records[0]["token_times"] == [1, 2, 3]
    assert records[1]["token_times"] == [4, 5]
    assert records[1]["start_processing_time"] == 0
    assert records[1]["gpu_start_time"] == 3


@both_modes
def test_an_admission_needs_blocks_for_its_first_chunk_only(stepwise: bool) -> None:
    """Pool 9. r0 (4, 2) takes 2 blocks; r1 (28, 2) needs 8 in the end, and 7 are left.

    step   r0 held, blocks  r1 processed, blocks
    0 – 1  5, 2             12 (r0 leaves 12 of 16 tokens), 3
    1 – 2  6, 2 complete    27, 7
    2 – 3  –                28 + first token, 8
    3 – 4  –                30, 8 complete
    """
    simulation = simulate([(0, 4, 2), (0, 28, 2)], stepwise=stepwise, num_gpu_blocks_override=9)
    records = play(simulation)
    assert records[1]["gpu_start_time"] == 0
    assert records[1]["token_times"] == [3, 4]
    assert simulation.ledger.preemptions == 0


# ---------------------------------------------------------------------------- chunked prefill

CHUNKS = [(0, 4, 6), (0.5, 40, 2), (0.5, 8, 2)]
"""r0 decodes; r1 prefills in chunks; r2 stands behind r1."""


def test_decodes_and_prefills_share_the_token_budget() -> None:
    """`CHUNKS` under `change`; tokens of each step:

    step   r0             r1                     r2
    0 – 1  4, token 1
    1 – 2  1, token 2     15                     no token left: not admitted
    2 – 3  1, token 3     15 (30 in KV)          no token left: no rebuild either
    3 – 4  1, token 4     10, token 1            5: left-over tokens are a rebuild
    4 – 5  1, token 5     1, token 2, complete   3 (not 14: no overshoot), token 1
    5 – 6  1, token 6                            1, token 2
    """
    simulation = simulate(CHUNKS, stepwise=True)
    seen = watch(simulation, [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5])
    records = play(simulation)
    assert [state.tokens for state in seen.values()] == [
        {0: 4},
        {0: 1, 1: 15},
        {0: 1, 1: 15},
        {0: 1, 1: 10, 2: 5},
        {0: 1, 1: 1, 2: 3},
        {0: 1, 2: 1},
        {},
    ]
    # Rebuilds at 0 (arrival), 1 (arrivals), 3 (left-over tokens), 4 and 5 (prefill ends), 6.
    assert [state.rebuilds for state in seen.values()] == [1, 2, 2, 3, 4, 5, 6]
    assert records[2]["request_ready_time"] == 1


@both_modes
def test_a_prefill_that_waited_for_tokens_gets_those_that_are_left_over(stepwise: bool) -> None:
    """The timeline of the test above, in both modes of simulation."""
    records = play(simulate(CHUNKS, stepwise=stepwise))
    assert records[0]["token_times"] == [1, 2, 3, 4, 5, 6]
    assert records[1]["token_times"] == [4, 5]
    assert records[2]["token_times"] == [5, 6]
    assert [records[i]["gpu_start_time"] for i in range(3)] == [0, 1, 3]


@both_modes
def test_under_completion_nobody_asks_for_left_over_tokens(stepwise: bool) -> None:
    """`CHUNKS` under `completion`: rebuilds at 0 (empty batch), 6 (r0), 10 (r1), 12 (r2).

    6 – 9    r1: 16, 16, 8 tokens; the 8 that are left in the last step go to nobody; token 1 at 9
    9 – 10   r1: token 2, complete
    10 – 12  r2: tokens at 11, 12
    """
    simulation = simulate(CHUNKS, stepwise=stepwise, rebuild_on="completion")
    records = play(simulation)
    assert records[0]["token_times"] == [1, 2, 3, 4, 5, 6]
    assert records[1]["token_times"] == [9, 10]
    assert records[2]["token_times"] == [11, 12]
    assert simulation.worker.rebuild_id == 4


@both_modes
def test_several_prefills_share_one_step(stepwise: bool) -> None:
    """r0 (12, 2), r1 (8, 2), r2 (2, 1) at 0.

    step   tokens
    0 – 1  r0 12 and token 1; r1 4
    1 – 2  r0 token 2; r1 4 and token 1; r2 2 and token 1 (left-over tokens, a prefill's end)
    2 – 3  r1 token 2
    """
    records = play(simulate([(0, 12, 2), (0, 8, 2), (0, 2, 1)], stepwise=stepwise))
    assert records[0]["token_times"] == [1, 2]
    assert records[1]["token_times"] == [2, 3]
    assert records[2]["token_times"] == [2]
    assert [records[i]["gpu_start_time"] for i in range(3)] == [0, 0, 1]


@both_modes
def test_without_chunked_prefill_a_prompt_is_prefilled_in_one_step(stepwise: bool) -> None:
    """r0 and r1 (10, 2) at 0: r1's 10 do not fit beside r0's 10, so it starts at 1 as a whole."""
    policy = Script()
    simulation = simulate(
        [(0, 10, 2), (0, 10, 2)],
        stepwise=stepwise,
        policy=policy,
        chunked_prefill=False,
        max_model_len=16,
    )
    seen = watch(simulation, [0.5, 1.5])
    records = play(simulation)
    assert records[0]["token_times"] == [1, 2]
    assert records[1]["token_times"] == [2, 3]
    assert [state.tokens for state in seen.values()] == [{0: 10}, {0: 1, 1: 10}]
    assert policy.of("CHUNK") == []


def test_chunked_prefill_off_requires_a_budget_for_the_longest_request() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        tiny_config(chunked_prefill=False, max_model_len=17)
    assert not tiny_config(
        chunked_prefill=False, max_model_len=16
    ).worker.vllm_params.chunked_prefill


# ----------------------------------------------------------------------------------- rebuilds


@both_modes
@pytest.mark.parametrize(
    ("rebuild_on", "tokens", "rebuilds"),
    [
        # 0 (arrival), 1 (prefill end), 2 (arrival), 3 (prefill end), 4 and 6 (completions)
        ("change", [3, 4], 6),
        # 0 (arrival at an empty batch), 6 and 8 (completions)
        ("completion", [7, 8], 3),
    ],
)
def test_under_completion_an_arrival_waits_for_somebody_elses_completion(
    stepwise: bool, rebuild_on: str, tokens: list[float], rebuilds: int
) -> None:
    """r0 (4, 6) runs from 0 to 6; r1 (4, 2) arrives at 1.5 and would fit at once."""
    simulation = simulate([(0, 4, 6), (1.5, 4, 2)], stepwise=stepwise, rebuild_on=rebuild_on)
    records = play(simulation)
    assert records[0]["token_times"] == [1, 2, 3, 4, 5, 6]
    assert records[1]["token_times"] == tokens
    assert simulation.worker.rebuild_id == rebuilds


@both_modes
def test_an_arrival_exactly_at_a_boundary_is_seen_by_it(stepwise: bool) -> None:
    """Steps of 0.1 s; r1 arrives at the third boundary, to the last bit, r2 just after it."""
    third = 0.1 + 0.1 + 0.1
    after = math.nextafter(third, 1)
    simulation = simulate(
        [(0, 4, 9), (third, 4, 9), (after, 4, 9)],
        stepwise=stepwise,
        overrides={"worker.inference_params.base_s": 0.1},
    )
    records = play(simulation)
    assert records[1]["gpu_start_time"] == third
    assert records[1]["first_token_time"] == third + 0.1
    assert records[2]["gpu_start_time"] == third + 0.1


@both_modes
@pytest.mark.parametrize(
    ("first", "second", "rebuilds"),
    [
        # 0 (arrival), 1 (prefill end), 4 (arrivals)
        (3.3, 3.3, 3),
        (3.2, 3.7, 3),
        (3.3, 4.0, 3),
        # 0, 1, 3 (arrival), 4 (arrival and r1's prefill end)
        (2.5, 3.5, 4),
    ],
)
def test_a_boundary_has_at_most_one_rebuild(
    stepwise: bool, first: float, second: float, rebuilds: int
) -> None:
    """r0 runs from 0 to 10; r1 and r2 arrive; counted in the step 4 – 5."""
    simulation = simulate([(0, 4, 10), (first, 4, 2), (second, 4, 2)], stepwise=stepwise)
    seen = watch(simulation, [4.5])
    play(simulation)
    assert seen[4.5].rebuilds == rebuilds


@both_modes
@pytest.mark.parametrize("rebuild_on", ["change", "completion"])
def test_two_arrivals_at_one_instant_at_an_idle_worker_cause_one_rebuild(
    stepwise: bool, rebuild_on: str
) -> None:
    simulation = simulate([(7, 4, 2), (7, 4, 2)], stepwise=stepwise, rebuild_on=rebuild_on)
    seen = watch(simulation, [6.5, 7.5])
    records = play(simulation)
    assert [state.rebuilds for state in seen.values()] == [0, 1]
    assert records[0]["token_times"] == records[1]["token_times"] == [8, 9]


@both_modes
def test_a_stop_is_not_asked_about_again_at_every_step(stepwise: bool) -> None:
    """r0 (4, 10) runs until 10; r1 (4, 2) arrives at 2.5 and is stopped at 3. The next rebuild is
    r0's completion, where the empty batch must take r1: no question."""
    policy = Script(admit=[STOP])
    simulation = simulate([(0, 4, 10), (2.5, 4, 2)], stepwise=stepwise, policy=policy)
    records = play(simulation)
    assert policy.ids("ADMIT") == [(3.0, (1,))]
    assert records[1]["token_times"] == [11, 12]
    # 0, 1 (prefill end), 3 (arrival), 10 (completion), 11 (prefill end), 12 (completion)
    assert simulation.worker.rebuild_id == 6


@both_modes
def test_a_lack_of_blocks_is_not_asked_about_again_at_every_step(stepwise: bool) -> None:
    """Pool 5. At 3 r0 (4, 10) needs 2 blocks for its 8 tokens; r1 (12, 2) needs ceil(13 / 4) = 4,
    which come back only at 10."""
    policy = Script()
    simulation = simulate(
        [(0, 4, 10), (2.5, 12, 2)], stepwise=stepwise, policy=policy, num_gpu_blocks_override=5
    )
    records = play(simulation)
    assert policy.of("ADMIT") == []
    assert records[1]["start_processing_time"] == 3
    assert records[1]["token_times"] == [11, 12]
    assert simulation.worker.rebuild_id == 6


def test_at_most_the_lookahead_is_scanned_even_when_the_batch_began_empty() -> None:
    """Four equal requests (2, 3) at 0, a window of max(1, 2) = 2: the others come with the rebuild
    at 1, the prefills' end."""
    simulation = simulate([(0, 2, 3)] * 4, lookahead_reqs=1, overrides={"env.max_candidates": 2})
    records = play(simulation)
    assert [records[i]["gpu_start_time"] for i in range(4)] == [0, 0, 1, 1]
    assert [records[i]["start_processing_time"] for i in range(4)] == [0, 0, 1, 1]
    assert records[3]["token_times"] == [2, 3, 4]


# --------------------------------------------------------------------------------- rejections


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        # ceil(17 / 4) = 5 > 4 blocks
        ({"num_gpu_blocks_override": 4}, "blocks"),
        ({"max_model_len": 16}, "max_model_len"),
    ],
)
def test_a_request_that_can_never_run_is_rejected_and_blocks_nobody(
    params: dict[str, Any], reason: str
) -> None:
    """r0 (6, 11) has one token too many; r1 (6, 10) behind it has exactly what fits."""
    simulation = simulate([(0, 6, 11), (0, 6, 10)], **params)
    records = play(simulation)
    assert list(records) == [1]
    assert records[1]["token_times"] == list(range(1, 11))
    ((request, why),) = simulation.records.rejected
    assert request.request_id == 0
    assert reason in why
    assert request.stats.worker_arrival_time == 0
    assert simulation.ledger.rejections.total() == 1
    assert simulation.ledger.arrived_requests == 1
    assert simulation.metrics()["rejected"] == 1
    assert exported(simulation)[0]["rejected"] == why


@both_modes
def test_a_request_that_needs_exactly_all_blocks_runs_alone(stepwise: bool) -> None:
    """Pool 4. r0 (6, 10) holds 16 tokens = 4 blocks in its last step; r1 (4, 2) needs 2.

    0 – 2   r0 holds 7, 8: 2 blocks; r1 runs beside it (5, 6: 2 blocks)
    2 – 10  r0 alone: 3 blocks from 9 tokens on, 4 from 13 on; r2 (4, 2), there since 1.5, waits
    10 – 12 r2
    """
    simulation = simulate(
        [(0, 6, 10), (0, 4, 2), (1.5, 4, 2)], stepwise=stepwise, num_gpu_blocks_override=4
    )
    records = play(simulation)
    assert records[0]["token_times"] == list(range(1, 11))
    assert records[1]["token_times"] == [1, 2]
    assert records[2]["token_times"] == [11, 12]
    assert simulation.ledger.preemptions == 0
