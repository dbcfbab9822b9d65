"""Decisions, rejections and parameters under `vllm_v1`, worked out by hand.

Steps of 1 s, 16 tokens a step, blocks of 4 tokens; the pool keeps one block to itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opal_gym.config import ConfigError, load_config
from opal_gym.sim.decision import STOP, Policy
from opal_gym.sim.simulation import Simulation
from tests.driving import Script, kv_cache, play, simulate, watch
from tests.tiny import tiny_config, tiny_workload


def v1(requests: list[tuple[float, int, int]], policy: Policy | None = None, **params: Any) -> Any:
    return simulate(requests, policy=policy, engine="vllm_v1", stepwise=True, **params)


# ----------------------------------------------------------------------------- ADMIT

HEAD_OF_LINE = [(0.0, 20, 10), (0.0, 24, 1), (0.0, 4, 1)]
"""With 10 blocks: the first takes 5, the second needs 6, the third 1."""


def test_a_head_that_does_not_fit_ends_the_baseline_s_scan() -> None:
    script = Script()
    simulation = v1(HEAD_OF_LINE, script, num_gpu_blocks_override=11)
    seen = watch(simulation, [0.5, 1.5])
    finished = play(simulation)
    # t = 0: all fit, and the first takes all 16 tokens. t = 1: it takes 4, and 5 blocks are left.
    assert [(asked.time, asked.ids, asked.baseline) for asked in script.of("ADMIT")][:2] == [
        (0.0, (0, 1, 2), 0),
        (1.0, (2,), STOP),
    ]
    assert seen[0.5].tokens == {0: 16}
    assert seen[1.5].tokens == {0: 4}
    # The first ends after 2 steps of prefill and 9 of decode.
    assert finished[0]["decode_done_time"] == 11
    assert finished[1]["gpu_start_time"] == 11


def test_a_policy_may_choose_another_head() -> None:
    script = Script(admit=[0, 2])
    simulation = v1(HEAD_OF_LINE, script, num_gpu_blocks_override=11)
    seen = watch(simulation, [1.5])
    finished = play(simulation)
    assert seen[1.5].tokens == {0: 4, 2: 4}
    assert finished[2]["decode_done_time"] == 2


def test_a_stop_holds_until_something_changes() -> None:
    """Asked at t = 0 and after the prefill's step; not in the decode's steps."""
    script = Script(admit=[0, STOP, STOP])
    finished = play(v1([(0.0, 4, 6), (0.0, 4, 1)], script))
    assert [asked.time for asked in script.of("ADMIT")] == [0, 0, 1]
    # At t = 6 the batch is empty: it must be admitted, unasked.
    assert finished[1]["gpu_start_time"] == 6


def test_the_whole_known_sequence_must_fit_unless_the_gate_is_off() -> None:
    """10 blocks, of which the first takes 5: a prompt of 7 blocks, whose first chunk takes 4."""
    requests = [(0.0, 16, 3), (0.0, 28, 1)]
    begins = {}
    for gate in (True, False):
        params = {"num_gpu_blocks_override": 11, "scheduler_reserve_full_isl": gate}
        begins[gate] = play(v1(requests, **params))[1]["gpu_start_time"]
    # No token is left at t = 0; from t = 1 on 5 blocks are free, until the first ends at t = 3.
    assert begins == {True: 3.0, False: 1.0}


# --------------------------------------------------------------------------- PREEMPT

CROWD = [(0.0, 12, 9), (0.0, 12, 9), (0.0, 12, 9)]
"""10 blocks. t = 0: 12 + 4 tokens; t = 1: 1 + 8 + 7, 9 blocks taken; t = 2: the second takes the
last one, and the third needs its third."""


def test_the_baseline_evicts_the_tail_of_running() -> None:
    script = Script()
    simulation = v1(CROWD, script, num_gpu_blocks_override=11)
    seen = watch(simulation, [2.5])
    play(simulation)
    first = script.of("PREEMPT")[0]
    assert (first.time, first.ids, first.baseline) == (2.0, (2, 1, 0), 0)
    assert seen[2.5].tokens == {0: 1, 1: 1}
    assert seen[2.5].queue == [2]
    assert seen[2.5].free == 2


def test_another_victim_gives_its_tokens_and_blocks_back() -> None:
    script = Script(preempt=[1])
    simulation = v1(CROWD, script, num_gpu_blocks_override=11)
    seen = watch(simulation, [1.5, 2.5, 3.5])
    finished = play(simulation)
    assert seen[1.5].tokens == {0: 1, 1: 8, 2: 7}
    assert seen[2.5].tokens == {0: 1, 2: 5}
    assert seen[2.5].queue == [1]
    # It keeps its one token: 13 known tokens are 4 blocks, of which 10 - 4 - 3 - 1 are free.
    assert seen[2.5].blocks == {0: 4, 1: 0, 2: 3}
    assert finished[1]["preemptions"] == 1
    assert finished[1]["first_token_time"] == 2
    assert len(finished[1]["token_times"]) == 9


def test_priority_evicts_the_least_urgent_and_then_the_youngest() -> None:
    script = Script()
    config = tiny_config(engine="vllm_v1", policy="priority", num_gpu_blocks_override=11)
    workload = tiny_workload([(0.0, 12, 9), (0.1, 12, 9), (0.2, 12, 9)])
    workload = replace(workload, priority=np.array([1, 1, 0]))
    Simulation(config, workload, script).run()
    # The last one is admitted first at t = 1, the first one runs since t = 0.
    assert script.of("PREEMPT")[0].ids == (1, 0, 2)


# ----------------------------------------------------------------------------- CHUNK


def test_the_chunk_budget_is_that_of_prefills_alone() -> None:
    """A decode gets its token beside a prefill of 1 token a step."""
    script = Script(chunk=["baseline", 1, 2])
    simulation = v1([(0.0, 4, 9), (1.0, 8, 1)], script)
    seen = watch(simulation, [0.5, 1.5, 2.5, 3.5])
    play(simulation)
    assert script.ids("CHUNK")[0] == (0.0, (16, 8, 4, 2, 1))
    assert [seen[time].tokens for time in (0.5, 1.5, 2.5, 3.5)] == [
        {0: 4},
        {0: 1, 1: 1},
        {0: 1, 1: 2},
        {0: 1, 1: 5},
    ]


# ------------------------------------------------------------------- resumes and loads


def test_a_resume_prefills_what_was_generated_and_counts_it_as_recomputed() -> None:
    """8 blocks for two: at t = 5 both need a fourth one, and 8 tokens + 5 generated are lost."""
    finished = play(v1([(0.0, 8, 12), (0.0, 8, 12)], num_gpu_blocks_override=7))
    # t = 1: the first takes block 3 of 6, the second too. t = 5: 12 tokens in KV, no block left.
    assert finished[0]["preemptions"] == 0
    assert finished[1]["preemptions"] == 1
    assert finished[1]["recomputed_tokens"] == 12
    assert finished[1]["token_times"][:5] == [1, 2, 3, 4, 5]
    # The first ends at t = 12; the 13 known tokens take one step, which makes the sixth token.
    assert finished[1]["token_times"][5:] == [13, 14, 15, 16, 17, 18, 19]


def test_a_remote_load_takes_no_slot_and_no_token_of_a_step() -> None:
    """4 s for 2 hash blocks (of the 8 tokens, 7 may come: one whole block of 4)."""
    simulation = v1(
        [(5.0, 8, 2), (5.0, 4, 3)],
        overrides=kv_cache(block_s=2.0),
        max_num_seqs=1,
        hash_ids=[(1, 2), (9,)],
        resident=(1, 2),
    )
    seen = watch(simulation, [5.5, 7.5, 8.5])
    finished = play(simulation)
    assert seen[5.5].phases == {0: "FETCH_KVC", 1: "PREFILL_CHUNKED"}
    assert seen[5.5].blocks == {0: 1, 1: 1}
    assert seen[7.5].phases[0] == "READY"
    # The other one ends at t = 8; its slot is the loaded one's, with 4 tokens left to compute.
    assert seen[8.5].tokens == {0: 4}
    assert finished[0]["decode_done_time"] == 10
    assert finished[0]["prefix_hit_tokens"] == 4


# ------------------------------------------------------------------ what can never run


def test_a_request_that_needs_exactly_all_blocks_runs() -> None:
    """4 blocks are 16 tokens; the last of the 17 is never written."""
    simulation = v1([(0.0, 8, 9), (0.0, 8, 10)], num_gpu_blocks_override=5)
    finished = play(simulation)
    assert list(finished) == [0]
    ((request, reason),) = simulation.records.rejected
    assert request.request_id == 1
    assert reason == "18 tokens exceed the pool of 4 blocks"


# ----------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"engine": "v1"}, "worker.vllm_params.engine: got 'v1'"),
        ({"policy": "priority"}, "policy: got 'priority'; allowed: \"fcfs\", as engine is opal"),
        ({"watermark": 0.1}, "watermark: got 0.1; allowed: 0.0, as engine is opal"),
        ({"long_prefill_token_threshold": 4}, "allowed: 0, as engine is opal"),
        ({"scheduler_reserve_full_isl": False}, "allowed: true, as engine is opal"),
        (
            {"engine": "vllm_v1", "rebuild_on": "completion"},
            "rebuild_on: got 'completion'; allowed: \"change\", as engine is vllm_v1",
        ),
        (
            {"engine": "vllm_v1", "first_token_at_prefill_end": False},
            "first_token_at_prefill_end: got False; allowed: true, as engine is vllm_v1",
        ),
        (
            {"engine": "vllm_v1", "max_kvc_ready_requests": 2},
            "max_kvc_ready_requests: got 2; allowed: 4, as engine is vllm_v1",
        ),
        (
            {"engine": "vllm_v1", "num_gpu_blocks_override": 1},
            "num_gpu_blocks_override: got 1; allowed: at least 2",
        ),
        ({"engine": "vllm_v1", "watermark": 1.0}, "worker.vllm_params.watermark: got 1.0"),
        ({"engine": "vllm_v1", "long_prefill_token_threshold": -1}, "got -1"),
    ],
)
def test_what_makes_no_sense_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_config(**params)
    assert message in str(error.value)


def test_the_engine_brings_its_own_defaults() -> None:
    bare = {"worker": {"vllm_params": {"engine": "vllm_v1", "num_gpu_blocks_override": 100}}}
    config = load_config({**bare, "workload": load_config("mem-chat-burst").workload.model_dump()})
    params = config.worker.vllm_params
    assert (params.rebuild_on, params.first_token_at_prefill_end) == ("change", True)
    assert config.total_gpu_blocks == 99
    assert load_config(config) == config
    # Nobody is admitted without a token: slots may outnumber the tokens of a step.
    assert tiny_config(engine="vllm_v1", max_num_seqs=256).worker.vllm_params.max_num_seqs == 256
