"""Configuration: the seed's form and defaults, and what happens to every kind of mistake."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from opal_gym.config import (
    CalibratedParams,
    Config,
    ConfigError,
    EnvConfig,
    HardwareConfig,
    KVCacheConfig,
    ModelConfig,
    RooflineParams,
    SimulationConfig,
    SyntheticParams,
    TraceWorkload,
    VLLMSchedulerConfig,
    WorkerConfig,
    WorkerParams,
    load_config,
    scenario_names,
)
from tests.tiny import TINY, tiny_config

SEED_JSON = """
{
  "worker": {
    "worker_params": {
      "periodic_infra_update_time": 1.0,
      "kvcevent_coalesce_time": 0.1
    },
    "vllm_params": {
      "max_num_seqs": 8,
      "max_num_batched_tokens": 2048,
      "chunked_prefill": true,
      "block_size": 16,
      "max_kvc_ready_requests": 4,
      "lookahead_reqs": 256
    },
    "hw": {
      "gpu": "H100",
      "memory_gb": 80,
      "tflops": 989,
      "mem_bw_TBps": 3.35,
      "tp": 1
    }
  }
}
"""
"""The seed page's "Required Configuration Parameters", to the letter."""

FIXED = {"kind": "fixed", "tokens": 4}
TENANT = {"name": "default", "prompt": FIXED, "output": FIXED}
WORKLOAD = {"kind": "synthetic", "arrivals": {"rate_per_s": 1.0}, "tenants": [TENANT]}


def seed_config(**overrides: Any) -> Config:
    """The seed's JSON with a workload; overrides by keyword, `__` for dots."""
    data = {**json.loads(SEED_JSON), "workload": WORKLOAD}
    return load_config(data, {key.replace("__", "."): v for key, v in overrides.items()})


# ------------------------------------------------------------------ the seed


def test_the_schedulers_defaults_are_the_seeds() -> None:
    params = VLLMSchedulerConfig()
    assert params.max_num_seqs == 256
    assert params.max_num_batched_tokens == 2048
    assert params.chunked_prefill is True
    assert params.block_size == 16
    assert params.max_kvc_ready_requests == 4
    assert params.lookahead_reqs == 256


def test_the_schedulers_other_defaults_are_the_seeds_worker() -> None:
    """To the letter: its batch, its first token; the length comes from the model (DESIGN §2)."""
    params = VLLMSchedulerConfig()
    assert params.rebuild_on == "completion"
    assert params.first_token_at_prefill_end is False
    assert params.max_model_len is None
    assert params.num_gpu_blocks_override is None
    assert params.gpu_memory_kvcache_bytes is None
    assert params.chunk_budgets is None


def test_the_other_sections_defaults() -> None:
    assert WorkerParams().model_dump() == {
        "periodic_infra_update_time": 1.0,
        "kvcevent_coalesce_time": 0.1,
    }
    assert HardwareConfig().model_dump() == {
        "gpu": "H100",
        "memory_gb": 80.0,
        "tflops": 989.0,
        "mem_bw_TBps": 3.35,
        "tp": 1,
        # The seed's memory formula: all of the memory, nothing reserved.
        "gpu_memory_utilization": 1.0,
        "activation_reserve_gb": 0.0,
    }
    assert EnvConfig().model_dump() == {
        "decisions": ("CHUNK", "PREEMPT", "ADMIT"),
        "max_candidates": 64,
        "reward": {"latency": 1.0},
        "horizon_s": None,
    }
    assert SimulationConfig().model_dump() == {
        "length_information": "predicted",
        "num_workers": 1,
        "record_time_series": False,
        "check_invariants": False,
        "step_by_step": False,
    }
    assert KVCacheConfig().tiers == ()
    assert ModelConfig().name == "llama-3.1-8b"
    assert WorkerConfig().inference_params == RooflineParams()
    assert CalibratedParams().step_overhead_s is None


def test_the_workloads_defaults() -> None:
    config = seed_config()
    assert config.workload.kind == "synthetic"
    assert config.workload.num_requests == 256
    assert config.workload.prediction_sigma == 0.6
    assert config.workload.arrivals.load == 1.0
    tenant = config.workload.tenants[0]
    assert (tenant.weight, tenant.slo, tenant.priority, tenant.prefix) == (1.0, None, 0, None)


def test_the_default_chunk_budgets_are_halves_without_duplicates() -> None:
    assert VLLMSchedulerConfig().chunk_choices == (2048, 1024, 512, 256, 128)
    few = VLLMSchedulerConfig(max_num_seqs=1, max_num_batched_tokens=5)
    # 5, 2, 1, max(1, 0), max(1, 0).
    assert few.chunk_choices == (5, 2, 1)
    given = VLLMSchedulerConfig(chunk_budgets=[16, 512, 16])
    assert given.chunk_choices == (512, 16)


@pytest.mark.parametrize(("tp", "blocks"), [(1, 33301), (2, 74261), (4, 156181), (8, 320021)])
def test_the_seeds_json_gives_its_memory_by_hand(tp: int, blocks: int) -> None:
    """Llama-3.1-8B: 8,030,261,248 parameters of 2 bytes, so 16,060,522,496 bytes, once.

    A block is 16 tokens of 131,072 bytes: 2,097,152 bytes. Of tp · 80 · 1024³ bytes there remain
    69,838,823,424 at tp 1 (33,301.7 blocks), 155,738,169,344 at tp 2 (74,261.7), 327,536,861,184
    at tp 4 (156,181.7), 671,134,244,864 at tp 8 (320,021.7).
    """
    config = seed_config(worker__hw__tp=tp)
    assert config.total_gpu_blocks == config.memory_blocks == blocks


def test_the_seeds_json_means_what_it_says() -> None:
    config = seed_config()
    assert config.worker.vllm_params.max_num_seqs == 8
    assert config.worker.inference_params == RooflineParams()
    assert config.max_model_len == 131072
    assert config.simulation == SimulationConfig()


def test_utilisation_and_reserve_shrink_the_pool_by_hand() -> None:
    """(80 · 0.5 - 2) · 1024³ - 16,060,522,496 = 24,741,666,816 bytes: 11,797.7 blocks."""
    config = seed_config(
        worker__hw__gpu_memory_utilization=0.5, worker__hw__activation_reserve_gb=2.0
    )
    assert config.total_gpu_blocks == 11797


def test_the_pool_can_be_given_in_blocks_or_bytes() -> None:
    given = seed_config(worker__vllm_params__num_gpu_blocks_override=1500)
    assert given.total_gpu_blocks == 1500
    # 10 blocks of 2,097,152 bytes, less one byte.
    given = seed_config(worker__vllm_params__gpu_memory_kvcache_bytes=20_971_519)
    assert given.total_gpu_blocks == 9


def test_max_model_len_is_the_models_unless_given() -> None:
    assert seed_config(model__name="llama-3-8b").max_model_len == 8192
    assert seed_config(worker__vllm_params__max_model_len=100).max_model_len == 100


def test_a_budget_of_exactly_max_model_len_needs_no_chunks() -> None:
    config = tiny_config(chunked_prefill=False, max_model_len=16)
    assert config.worker.vllm_params.max_num_batched_tokens == 16


def test_a_pool_of_exactly_one_block_will_do() -> None:
    assert tiny_config(num_gpu_blocks_override=1).total_gpu_blocks == 1


def test_as_many_sequences_as_tokens_will_do() -> None:
    assert tiny_config(max_num_seqs=16).worker.vllm_params.max_num_seqs == 16


@pytest.mark.parametrize("name", scenario_names())
def test_every_packaged_scenario_loads_under_its_name(name: str) -> None:
    assert load_config(name).name == name


# ------------------------------------------------------------------ what load_config takes


def test_a_name_a_path_a_mapping_and_a_config_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    config = load_config(TINY)
    assert load_config(path) == load_config(str(path)) == load_config(config) == config


@pytest.mark.parametrize("name", scenario_names())
def test_a_scenario_survives_its_own_json(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    path = tmp_path / "again.json"
    path.write_text(config.model_dump_json(), encoding="utf-8")
    assert load_config(path) == load_config(config) == config


def test_overrides_apply_to_every_kind_of_source(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    overrides = {"worker.hw.tp": 2, "env.max_candidates": 3, "name": "changed"}
    expected = load_config(TINY, overrides)
    assert (expected.worker.hw.tp, expected.env.max_candidates, expected.name) == (2, 3, "changed")
    assert load_config(path, overrides) == load_config(load_config(TINY), overrides) == expected


def test_a_later_override_wins_inside_an_earlier_one() -> None:
    config = load_config(TINY, {"worker.hw": {"memory_gb": 40}, "worker.hw.tp": 2})
    assert (config.worker.hw.memory_gb, config.worker.hw.tp) == (40.0, 2)


def test_loading_changes_neither_the_source_nor_the_overrides() -> None:
    source, hw = copy.deepcopy(TINY), {"memory_gb": 40}
    overrides = {"worker.hw": hw, "worker.hw.tp": 2, "worker.vllm_params.max_num_seqs": 2}
    config = load_config(source, overrides)
    assert config.worker.hw.tp == 2
    assert source == TINY
    assert hw == {"memory_gb": 40}
    again = load_config(config, {"worker.hw.tp": 4})
    assert (again.worker.hw.tp, config.worker.hw.tp) == (4, 2)


@pytest.mark.parametrize("load", [(0.5, 1.0), [0.5, 1.0], [1, 1], (1.0, 1)])
def test_a_range_of_loads_may_be_a_tuple_or_a_list(load: Any) -> None:
    config = load_config(TINY, {"workload.arrivals.load": load})
    assert config.workload.kind == "synthetic"
    assert config.workload.arrivals.load == tuple(load)
    data = copy.deepcopy(TINY)
    data["workload"]["arrivals"]["load"] = load
    assert load_config(data) == config


def test_whole_numbers_are_real_numbers_too() -> None:
    config = load_config(TINY, {"worker.hw.memory_gb": 80, "env.reward": {"latency": 1}})
    assert config.worker.hw.memory_gb == 80.0
    assert load_config(TINY, {"worker.inference_params": {"model": "calibrated"}})


def test_a_step_needs_no_base_time_where_all_its_work_takes_time() -> None:
    overrides = {
        "worker.inference_params": {
            "model": "synthetic",
            "base_s": 0,
            "per_prefill_token_s": 0.1,
            "per_decode_s": 0.1,
        }
    }
    params = load_config(TINY, overrides).worker.inference_params
    assert isinstance(params, SyntheticParams)
    assert params.base_s == 0


# ------------------------------------------------------------------ frozen


def test_a_configuration_cannot_be_changed() -> None:
    config = seed_config()
    for section, key, value in (
        (config, "name", "x"),
        (config.worker.vllm_params, "max_num_seqs", 4),
        (config.worker.hw, "tp", 2),
        (config.workload, "num_requests", 3),
        (config.env, "max_candidates", 3),
        (config.simulation, "check_invariants", True),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, value)
        unknown = "no_such_key"
        with pytest.raises(ValidationError):
            setattr(section, unknown, value)


def test_lists_of_a_configuration_are_tuples() -> None:
    config = load_config(
        TINY,
        {
            "worker.vllm_params.chunk_budgets": [8, 4],
            "kvc.tiers": [{"capacity_GB": 1, "bandwidth_GBps": 1}],
            "env.decisions": ["ADMIT"],
        },
    )
    assert config.worker.vllm_params.chunk_budgets == (8, 4)
    assert isinstance(config.kvc.tiers, tuple)
    assert config.env.decisions == ("ADMIT",)
    assert config.workload.kind == "synthetic"
    assert isinstance(config.workload.tenants, tuple)


# ------------------------------------------------------------------ what is refused

V = "worker.vllm_params."
HW = "worker.hw."
TIMING = "worker.inference_params"
UPDATE_TIME = "worker.worker_params.periodic_infra_update_time"
ARRIVALS = "workload.arrivals."
TENANTS = "workload.tenants"
NAN, INF = float("nan"), float("inf")


def tenants(**second: Any) -> list[dict[str, Any]]:
    """Two tenants; the second with changes."""
    return [{**TENANT, "name": "first"}, {**TENANT, "name": "second", **second}]


def lognormal(**keys: Any) -> dict[str, Any]:
    return {"kind": "lognormal", "median": 5, "sigma": 1, **keys}


NO_TOKENS = {**FIXED, "tokens": 0}
TIER = {"capacity_GB": 1, "bandwidth_GBps": 1}
SINE = {"kind": "sine", "period_s": 10, "amplitude": 0.5}
TRACE = {"kind": "trace", "format": "azure", "path": "trace.csv"}

# Override key, value; then the path of the key that is wrong, what was given, what is allowed.
WRONG_TYPES = [
    (V + "max_num_seqs", "8", V + "max_num_seqs", "'8'", "integer"),
    (V + "max_num_seqs", 8.0, V + "max_num_seqs", "8.0", "integer"),
    (V + "max_num_seqs", True, V + "max_num_seqs", "True", "integer"),
    (V + "max_num_seqs", None, V + "max_num_seqs", "None", "integer"),
    (V + "max_num_seqs", [8], V + "max_num_seqs", "[8]", "integer"),
    (V + "chunked_prefill", 1, V + "chunked_prefill", "1", "boolean"),
    (V + "chunked_prefill", "true", V + "chunked_prefill", "'true'", "boolean"),
    (V + "first_token_at_prefill_end", None, V + "first_token_at_prefill_end", "None", "boolean"),
    (V + "chunk_budgets", [8, "4"], V + "chunk_budgets[1]", "'4'", "integer"),
    (V + "chunk_budgets", [8, 4.0], V + "chunk_budgets[1]", "4.0", "integer"),
    (V + "chunk_budgets", [8, True], V + "chunk_budgets[1]", "True", "integer"),
    (V + "chunk_budgets", 8, V + "chunk_budgets", "8", ""),
    (V + "chunk_budgets", "8", V + "chunk_budgets", "'8'", ""),
    (HW + "memory_gb", "80", HW + "memory_gb", "'80'", "number"),
    (HW + "memory_gb", True, HW + "memory_gb", "True", "number"),
    (HW + "gpu", 100, HW + "gpu", "100", "string"),
    (HW[:-1], [], "worker.hw", "[]", ""),
    ("worker", None, "worker", "None", ""),
    ("workload", None, "workload", "None", ""),
    ("workload", [], "workload", "[]", ""),
    ("name", 3, "name", "3", "string"),
    (TENANTS, TENANT, TENANTS, "'name'", ""),
    (TENANTS, tenants(priority=1.0), TENANTS + "[1].priority", "1.0", "integer"),
    (ARRIVALS + "load", "fast", ARRIVALS + "load", "'fast'", "number"),
    (ARRIVALS + "load", True, ARRIVALS + "load", "True", "number"),
    ("env.reward", {"latency": "1"}, "env.reward.latency", "'1'", "number"),
    ("env.reward", ["latency"], "env.reward", "['latency']", "dictionary"),
    ("kvc.tiers", TIER, "kvc.tiers", "'capacity_GB'", ""),
]

OUT_OF_RANGE = [
    (V + "max_num_seqs", 0, V + "max_num_seqs", "0", "1"),
    (V + "max_num_seqs", -3, V + "max_num_seqs", "-3", "1"),
    (V + "block_size", 0, V + "block_size", "0", "1"),
    (V + "max_kvc_ready_requests", 0, V + "max_kvc_ready_requests", "0", "1"),
    (V + "lookahead_reqs", 0, V + "lookahead_reqs", "0", "1"),
    (V + "num_gpu_blocks_override", 0, V + "num_gpu_blocks_override", "0", "1"),
    (V + "rebuild_on", "always", V + "rebuild_on", "'always'", "'completion' or 'change'"),
    (V + "chunk_budgets", [], V + "chunk_budgets", "[]", "at least 1"),
    (V + "chunk_budgets", [0], V + "chunk_budgets[0]", "0", "1"),
    (HW + "memory_gb", 0, HW + "memory_gb", "0", "0"),
    (HW + "memory_gb", NAN, HW + "memory_gb", "nan", "finite"),
    (HW + "memory_gb", INF, HW + "memory_gb", "inf", "finite"),
    (HW + "mem_bw_TBps", -1.0, HW + "mem_bw_TBps", "-1.0", "0"),
    (HW + "gpu_memory_utilization", 1.5, HW + "gpu_memory_utilization", "1.5", "1"),
    (HW + "gpu_memory_utilization", NAN, HW + "gpu_memory_utilization", "nan", "1"),
    (HW + "activation_reserve_gb", INF, HW + "activation_reserve_gb", "inf", "finite"),
    (UPDATE_TIME, 0, UPDATE_TIME, "0", "0"),
    ("env.max_candidates", 0, "env.max_candidates", "0", "1"),
    ("env.horizon_s", 0, "env.horizon_s", "0", "0"),
    ("env.horizon_s", NAN, "env.horizon_s", "nan", "finite"),
    ("env.decisions", ["ADMITT"], "env.decisions[0]", "'ADMITT'", "'ADMIT'"),
    ("env.reward", {}, "env.reward", "{}", "at least one"),
    ("env.reward", {"latncy": 1.0}, "env.reward.latncy", "'latncy'", "'latency'"),
    ("env.reward", {"latency": NAN}, "env.reward.latency", "nan", "finite"),
    ("env.reward", {"latency": INF}, "env.reward.latency", "inf", "finite"),
    ("simulation.length_information", "all", "simulation.length_information", "'all'", "oracle"),
    ("router.policy", "Sticky", "router.policy", "'Sticky'", "'RoundRobin'"),
    ("model.name", "llama-4", "model.name", "'llama-4'", "llama-3.1-8b"),
    ("kvc.hash_block_tokens", 0, "kvc.hash_block_tokens", "0", "1"),
    ("kvc.tiers", [{**TIER, "name": "RAM"}], "kvc.tiers[0].name", "'RAM'", "'CPUMemory'"),
    ("kvc.tiers", [{**TIER, "capacity_GB": 0}], "kvc.tiers[0].capacity_GB", "0", "0"),
    ("kvc.chunk_size", 700, "kvc.chunk_size", "700", "a multiple of hash_block_tokens"),
    ("workload.num_requests", 0, "workload.num_requests", "0", "1"),
    ("workload.prediction_sigma", NAN, "workload.prediction_sigma", "nan", "finite"),
    (ARRIVALS + "rate_per_s", 0, ARRIVALS + "rate_per_s", "0", "0"),
    (ARRIVALS + "load", 0, ARRIVALS + "load", "0", "0"),
    (ARRIVALS + "load", [1.0], ARRIVALS + "load", "[1.0]", "2"),
    (ARRIVALS + "load", [0.5, -1.0], ARRIVALS + "load[1]", "-1.0", "0"),
    (ARRIVALS + "load", [1.0, 0.5], ARRIVALS + "load", "[1.0, 0.5]", "low <= high"),
    (ARRIVALS + "process", {"kind": "gamma", "cv": 0}, ARRIVALS + "process.cv", "0", "0"),
    (
        ARRIVALS + "modulation",
        [{**SINE, "amplitude": 1.0}],
        ARRIVALS + "modulation[0].amplitude",
        "1.0",
        "1",
    ),
    (
        ARRIVALS + "modulation",
        [{**SINE, "phase": NAN}],
        ARRIVALS + "modulation[0].phase",
        "nan",
        "finite",
    ),
    (
        ARRIVALS + "modulation",
        [
            SINE,
            {"kind": "on_off", "on_factor": 0, "off_factor": 0, "mean_on_s": 1, "mean_off_s": 1},
        ],
        ARRIVALS + "modulation[1].on_factor",
        "0",
        "above 0",
    ),
    (TENANTS, [], TENANTS, "[]", "at least 1"),
    (TENANTS, tenants(prompt=lognormal(median=-1)), TENANTS + "[1].prompt.median", "-1", "0"),
    (TENANTS, tenants(output=lognormal(min=9, max=3)), TENANTS + "[1].output.min", "9", "3"),
    (TENANTS, tenants(slo="fast"), TENANTS + "[1].slo", "'fast'", "'interactive'"),
    (TENANTS, tenants(weight=0), TENANTS + "[1].weight", "0", "0"),
    (
        TENANTS,
        tenants(
            output={"kind": "mixture", "parts": [{"share": 1, "length": {**FIXED, "tokens": 0}}]}
        ),
        TENANTS + "[1].output.parts[0].length.tokens",
        "0",
        "1",
    ),
]

INCONSISTENT = [
    (V + "max_num_batched_tokens", 2, V + "max_num_seqs", "4", "max_num_batched_tokens = 2"),
    (V + "chunk_budgets", [8, 17], V + "chunk_budgets[1]", "17", "max_num_batched_tokens = 16"),
    (
        V + "gpu_memory_kvcache_bytes",
        10**9,
        V + "gpu_memory_kvcache_bytes",
        "1000000000",
        "num_gpu_blocks_override",
    ),
    (V + "chunked_prefill", False, V + "max_num_batched_tokens", "16", "max_model_len = 131072"),
    (V + "max_model_len", 131073, V + "max_model_len", "131073", "131072"),
    (HW + "memory_gb", 10, HW + "memory_gb", "10", "15.0 GiB"),
    (HW + "activation_reserve_gb", 80.0, HW + "memory_gb", "80.0", "activation reserve"),
    (HW + "tp", 3, HW + "tp", "3", "divisor"),
    (TIMING + ".base_s", 0, TIMING + ".base_s", "0", "above 0"),
    (TENANTS, tenants(name="first"), TENANTS + "[1].name", "'first'", "no other tenant"),
    ("workload", {**TRACE, "format": "lengths"}, "workload.arrivals", "None", "lengths"),
    ("workload", {**TRACE, "arrivals": {"rate_per_s": 1.0}}, "workload.arrivals", "", "lengths"),
]

UNKNOWN_TAGS = [
    (TIMING + ".model", "calibratd", TIMING + ".model", "'calibratd'", "'calibrated'"),
    ("workload.kind", "replay", "workload.kind", "'replay'", "'synthetic'"),
    (
        TENANTS,
        tenants(prompt={**FIXED, "kind": "fixd"}),
        TENANTS + "[1].prompt.kind",
        "'fixd'",
        "'fixed'",
    ),
    (ARRIVALS + "process", {"kind": "gama"}, ARRIVALS + "process.kind", "'gama'", "'gamma'"),
    (
        ARRIVALS + "modulation",
        [{"kind": "saw"}],
        ARRIVALS + "modulation[0].kind",
        "'saw'",
        "'sine'",
    ),
]

REFUSED = [*WRONG_TYPES, *OUT_OF_RANGE, *INCONSISTENT, *UNKNOWN_TAGS]


def refusal(source: Any, overrides: dict[str, Any] | None = None) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def line_of(message: str, path: str) -> str:
    """The line of a message that is about a key."""
    lines = [line for line in message.splitlines() if f" {path}: " in f" {line}"]
    assert len(lines) == 1, f"no line, or several, about {path!r} in: {message}"
    return lines[0]


@pytest.mark.parametrize(
    ("key", "value", "path", "given", "allowed"),
    REFUSED,
    ids=[f"{case[0]}={case[1]!r}"[:90] for case in REFUSED],
)
def test_a_mistake_is_named_with_its_key_its_value_and_what_is_allowed(
    key: str, value: Any, path: str, given: str, allowed: str
) -> None:
    line = line_of(refusal(TINY, {key: value}), path)
    before, found, after = line.partition("; allowed: ")
    assert found, line
    assert f"{path}: got " in before
    assert given in before.split(": got ", 1)[1]
    assert allowed in after


def test_there_are_forty_mistakes() -> None:
    assert len(REFUSED) >= 40


UNKNOWN_KEYS = [
    (V + "max_num_seq", 8, V + "max_num_seq", "max_num_seqs"),
    ("wrker.hw.tp", 1, "wrker", "worker"),
    ("worker.vlm_params.max_num_seqs", 1, "worker.vlm_params", "vllm_params"),
    ("simulation.step_by_stp", True, "simulation.step_by_stp", "step_by_step"),
    (HW + "memory_GB", 80, HW + "memory_GB", "memory_gb"),
    (TIMING + ".base", 1.0, TIMING + ".base", "base_s"),
    (TENANTS, tenants(promt=FIXED), TENANTS + "[1].promt", "prompt"),
    (TENANTS, tenants(prompt={**FIXED, "token": 3}), TENANTS + "[1].prompt.token", "tokens"),
    ("kvc.tiers", [{**TIER, "latency_ns": 3}], "kvc.tiers[0].latency_ns", "latency_nsec"),
    ("workload.num_request", 3, "workload.num_request", "num_requests"),
    ("env.rewards", {}, "env.rewards", "reward"),
]


@pytest.mark.parametrize(
    ("key", "value", "path", "meant"), UNKNOWN_KEYS, ids=[case[2] for case in UNKNOWN_KEYS]
)
def test_an_unknown_key_is_named_with_the_allowed_ones_and_the_likely_one(
    key: str, value: Any, path: str, meant: str
) -> None:
    line = line_of(refusal(TINY, {key: value}), path)
    before, found, after = line.partition("; allowed: ")
    assert found
    assert "unknown key" in before
    assert meant in after.split(", ")
    assert f"did you mean {meant!r}?" in before


def test_an_unknown_key_like_no_other_is_named_with_the_allowed_ones() -> None:
    line = line_of(refusal(TINY, {HW + "colour": "red"}), HW + "colour")
    assert "did you mean" not in line
    allowed = line.partition("; allowed: ")[2].split(", ")
    assert sorted(allowed) == sorted(HardwareConfig.model_fields)


@pytest.mark.parametrize("key", ["poisson", "sine", "synthetic", "fixed"])
def test_an_unknown_key_is_named_though_something_else_bears_its_name(key: str) -> None:
    """`poisson` is a kind of process; as a key it is unknown, and the path must show it."""
    assert f"{ARRIVALS}{key}: unknown key" in refusal(TINY, {ARRIVALS + key: {}})


@pytest.mark.parametrize(
    ("path", "overrides"),
    [
        (ARRIVALS + "rate_per_s", {ARRIVALS[:-1]: {}}),
        (TENANTS + "[1].prompt.tokens", {TENANTS: tenants(prompt={"kind": "fixed"})}),
        ("workload.path", {"workload": {"kind": "trace", "format": "azure"}}),
        ("kvc.tiers[0].bandwidth_GBps", {"kvc.tiers": [{"capacity_GB": 1}]}),
    ],
)
def test_a_missing_key_is_named(path: str, overrides: dict[str, Any]) -> None:
    assert "missing" in line_of(refusal(TINY, overrides), path)


@pytest.mark.parametrize(
    ("path", "overrides"),
    [
        (TIMING + ".model", {TIMING: {}}),
        ("workload.kind", {"workload": {}}),
        (TENANTS + "[1].prompt.kind", {TENANTS: tenants(prompt={"tokens": 3})}),
    ],
)
def test_a_missing_kind_is_named_with_the_kinds_there_are(
    path: str, overrides: dict[str, Any]
) -> None:
    line = line_of(refusal(TINY, overrides), path)
    kinds = {"workload.kind": "trace", TIMING + ".model": "roofline"}.get(path, "lognormal")
    assert kinds in line.partition("; allowed: ")[2]


def test_the_workload_must_be_given() -> None:
    assert "workload: missing" in refusal(json.loads(SEED_JSON))
    assert "workload: missing" in refusal({})


def test_all_mistakes_are_named_at_once() -> None:
    message = refusal(TINY, {V + "max_num_seqs": 0, HW + "tp": "1", "env.horizon": 3})
    assert len(message.splitlines()) == 3
    for path in (V + "max_num_seqs", HW + "tp", "env.horizon"):
        assert line_of(message, path)


@pytest.mark.parametrize(
    "overrides",
    [
        {TENANTS: tenants(prompt=lognormal(median=-1))},
        {TENANTS: tenants(promt=FIXED)},
        {V + "chunk_budgets": [True]},
        {ARRIVALS + "load": "fast"},
        {ARRIVALS + "load": [0.5, -1.0]},
    ],
)
def test_one_mistake_makes_one_line(overrides: dict[str, Any]) -> None:
    """Not also that the list around it be empty, or that it be no other kind of value."""
    assert len(refusal(TINY, overrides).splitlines()) == 1


@pytest.mark.parametrize("value", [{4, 8}, object(), b"8", 1 + 2j, np.int64(8)])
def test_what_json_cannot_say_is_refused_like_any_wrong_value(value: Any) -> None:
    """A NumPy integer is no Python one; a set has no order. In a mapping and as an override."""
    data = copy.deepcopy(TINY)
    data["worker"]["vllm_params"]["chunk_budgets"] = value
    assert f"{V}chunk_budgets" in refusal(data)
    assert f"{V}chunk_budgets: got " in refusal(TINY, {V + "chunk_budgets": value})


# ------------------------------------------------------------------ overrides that lead nowhere


@pytest.mark.parametrize(
    ("key", "culprit"),
    [
        ("worker.hw.tp.degree", "tp"),
        ("worker.vllm_params.max_num_seqs.x", "max_num_seqs"),
        ("name.x", "name"),
        ("workload.tenants.prompt", "tenants"),
        ("workload.tenants.0.weight", "tenants"),
    ],
)
def test_an_override_through_something_that_is_no_section_is_refused(
    key: str, culprit: str
) -> None:
    message = refusal(load_config(TINY), {key: 1})
    assert key in message
    assert culprit in message
    assert "not a section" in message


def test_an_override_with_a_list_index_names_itself() -> None:
    """Lists are replaced as a whole; the key as it was typed must be in the message."""
    assert "workload.tenants[0].weight" in refusal(TINY, {"workload.tenants[0].weight": 2.0})


# ------------------------------------------------------------------ sources that cannot be read


def test_an_unknown_scenario_is_refused_with_the_likely_one_and_all() -> None:
    message = refusal("mem-chat-brst")
    assert "'mem-chat-brst'" in message
    assert "did you mean 'mem-chat-burst'?" in message
    assert all(name in message for name in scenario_names())


@pytest.mark.parametrize("as_path", [True, False])
def test_a_missing_file_is_refused(tmp_path: Path, as_path: bool) -> None:
    path = tmp_path / "nowhere.json"
    message = refusal(path if as_path else str(path))
    assert str(path) in message
    assert "JSON file" in message.partition("allowed: ")[2]


def test_a_directory_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert "JSON file" in message.partition("allowed: ")[2]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{\n  "worker": {,}\n}', "line 2"),
        (b'{"name": "x"', "line 1"),
        (b"", "line 1"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ("{}".encode("utf-16"), "utf-8"),
        (b"\x00\xff\x00", "utf-8"),
    ],
    ids=["syntax", "cut-off", "empty", "bom", "utf-16", "binary"],
)
def test_a_file_that_is_no_json_is_refused_with_the_place(
    tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    message = refusal(path)
    assert str(path) in message
    assert why in message
    assert "JSON" in message


@pytest.mark.parametrize("content", ["[]", "null", "3", '"opal-docs"', "true"])
def test_a_file_that_holds_no_object_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "list.json"
    path.write_text(content, encoding="utf-8")
    message = refusal(path)
    assert str(path) in message
    assert "object" in message.partition("allowed: ")[2]


def test_mistakes_in_a_file_are_told_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**TINY, "nmae": 1}), encoding="utf-8")
    message = refusal(path)
    assert message.startswith(f"{path}: nmae: unknown key (did you mean 'name'?)")


def test_nan_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nan.json"
    path.write_text(json.dumps({**TINY, "worker": {"hw": {"tflops": NAN}}}), encoding="utf-8")
    assert "got nan" in line_of(refusal(path), "worker.hw.tflops")


def test_a_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_a_trace_of_lengths_needs_arrivals_and_takes_them() -> None:
    arrivals = {"rate_per_s": 1.0}
    config = load_config(TINY, {"workload": {**TRACE, "format": "lengths", "arrivals": arrivals}})
    assert isinstance(config.workload, TraceWorkload)
    assert config.workload.window_start_s == 0.0
