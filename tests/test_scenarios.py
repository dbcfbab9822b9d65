"""The packaged scenarios: those of the design's table, as it describes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from agents.saturation import saturated_rate
from opal_gym.config import CONFIGS, Config, load_config, scenario_names
from opal_gym.sim.simulation import Simulation, accepted_requests
from opal_gym.sim.workloads import Workload, make_workload
from tests.tiny import tiny_config

SYNTHETIC = (
    "mem-chat-burst",
    "mem-longctx",
    "opal-docs",
    "prod-mix",
    "rich-azconv",
    "rich-chat",
    "slot8-chat",
    "slot8-heavy",
)
TRACES = ("trace-azure-code", "trace-azure-conv", "trace-mooncake")
LOADS = {
    "mem-chat-burst": (0.7, 0.9),
    "mem-longctx": (0.7, 0.9),
    "opal-docs": 0.9,
    "prod-mix": 1.05,
    "rich-azconv": (0.5, 1.0),
    "rich-chat": 0.6,
    "slot8-chat": 0.9,
    "slot8-heavy": 0.9,
}
POOLS = {"mem-chat-burst": 1500, "mem-longctx": 2500, "prod-mix": 4000}
SEQUENCES = {"opal-docs": 8, "slot8-chat": 8, "slot8-heavy": 8, "prod-mix": 64}


def workload_of(config: Config, seed: int) -> Workload:
    return make_workload(
        config.workload,
        seed,
        length_information=config.simulation.length_information,
        hash_block_tokens=config.kvc.hash_block_tokens,
    )


def run(name: str, seed: int = 0, **overrides: Any) -> Simulation:
    config = load_config(name, {"simulation.check_invariants": True, **overrides})
    simulation = Simulation(config, workload_of(config, seed))
    simulation.run()
    return simulation


def test_the_names_are_those_of_the_table() -> None:
    assert scenario_names() == sorted(SYNTHETIC + TRACES)


@pytest.mark.parametrize("name", scenario_names())
class TestEveryScenario:
    def test_is_called_as_its_file(self, name: str) -> None:
        assert load_config(name).name == name

    def test_has_the_worker_of_the_table(self, name: str) -> None:
        config = load_config(name)
        params, hw = config.worker.vllm_params, config.worker.hw
        assert (hw.gpu, hw.tp, config.model.name) == ("H100", 1, "llama-3.1-8b")
        assert (params.block_size, params.max_num_batched_tokens) == (16, 2048)
        assert params.max_num_seqs == SEQUENCES.get(name, 256)
        assert params.num_gpu_blocks_override == POOLS.get(name)

    def test_is_real_vllm_unless_it_is_the_documented_worker(self, name: str) -> None:
        config = load_config(name)
        params, hw = config.worker.vllm_params, config.worker.hw
        assert (
            hw.gpu_memory_utilization,
            hw.activation_reserve_gb,
            params.rebuild_on,
            params.first_token_at_prefill_end,
            config.worker.inference_params.model,
            config.simulation.length_information,
        ) == (
            (1.0, 0.0, "completion", False, "roofline", "oracle")
            if name == "opal-docs"
            else (0.9, 2.0, "change", True, "calibrated", "predicted")
        )

    def test_has_episodes_of_256_requests(self, name: str) -> None:
        assert load_config(name).workload.num_requests == 256


@pytest.mark.parametrize("name", SYNTHETIC)
class TestEverySyntheticScenario:
    def test_has_the_load_of_the_table_and_says_how_its_rate_was_found(self, name: str) -> None:
        config = load_config(name)
        assert config.workload.arrivals.load == LOADS[name]
        assert f"{config.workload.arrivals.rate_per_s:g}" in config.description
        assert "scripts/measure_saturation.py" in config.description

    def test_runs(self, name: str) -> None:
        simulation = run(name, **{"workload.num_requests": 64})
        assert simulation.metrics()["completed"] == 64

    def test_rejects_nobody(self, name: str) -> None:
        config = load_config(name, {"workload.num_requests": 5000})
        for seed in range(10):
            assert accepted_requests(config, workload_of(config, seed)).all()

    def test_has_lengths_whose_maxima_fit_together(self, name: str) -> None:
        config = load_config(name)
        pool_tokens = config.total_gpu_blocks * 16
        for tenant in config.workload.tenants:
            longest = _longest(tenant.prompt) + _longest(tenant.output)
            assert longest <= min(pool_tokens, config.max_model_len)


@pytest.mark.parametrize("name", TRACES)
class TestEveryTraceScenario:
    def test_draws_a_window_for_each_episode(self, name: str) -> None:
        workload = load_config(name).workload
        assert (workload.window_start_s, workload.window_s) == (None, None)

    def test_says_what_its_rate_scale_means(self, name: str) -> None:
        config = load_config(name)
        assert f"rate_scale {config.workload.rate_scale:g}" in config.description

    def test_runs_on_the_sample_of_its_format(self, name: str) -> None:
        sample = "mooncake_like.jsonl.gz" if name == "trace-mooncake" else "azure_like.csv"
        path = str(CONFIGS / "samples" / sample)
        simulation = run(name, **{"workload.path": path, "workload.num_requests": 64})
        assert simulation.metrics()["completed"] == 64


class TestOpalDocs:
    def test_is_the_documented_json(self) -> None:
        """The seed page's "Required Configuration Parameters"."""
        worker = load_config("opal-docs").worker
        assert worker.worker_params.model_dump() == {
            "periodic_infra_update_time": 1.0,
            "kvcevent_coalesce_time": 0.1,
        }
        documented = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "chunked_prefill": True,
            "block_size": 16,
            "max_kvc_ready_requests": 4,
            "lookahead_reqs": 256,
        }
        assert worker.vllm_params.model_dump().items() >= documented.items()
        hardware = {"memory_gb": 80.0, "tflops": 989.0, "mem_bw_TBps": 3.35}
        assert worker.hw.model_dump().items() >= hardware.items()

    def test_has_the_documented_memory(self) -> None:
        # 8,030,261,248 parameters of 2 bytes; 131,072 bytes of KV a token.
        free = 80 * 1024**3 - 2 * 8_030_261_248
        assert load_config("opal-docs").total_gpu_blocks == math.floor(free / (16 * 131_072))

    def test_fetches_prefixes_and_evicts_from_its_tier(self) -> None:
        simulation = run("opal-docs")
        assert simulation.metrics()["prefix_hit_tokens"] > 0
        stored = {block for row in simulation.workload.hash_ids for block in row}
        assert len(simulation.engine.tiers[0].resident) < len(stored)

    def test_preempts_in_a_smaller_pool(self) -> None:
        smaller = {"worker.vllm_params.num_gpu_blocks_override": 800}
        simulation = run("opal-docs", **smaller, **{"workload.num_requests": 100})
        assert simulation.metrics()["preemptions"] > 0


class TestProdMix:
    def test_has_three_tenants_in_their_shares(self) -> None:
        config = load_config("prod-mix", {"workload.num_requests": 20_000})
        workload = workload_of(config, 0)
        shares = np.bincount(workload.tenant) / len(workload)
        assert [tenant.name for tenant in workload.tenants] == ["chat", "rag", "batch"]
        np.testing.assert_allclose(shares, [0.6, 0.25, 0.15], atol=0.01)
        assert [tenant.weight for tenant in workload.tenants] == [1, 1, 0.2]
        assert [tenant.ttft_slo_s for tenant in workload.tenants] == [0.5, 2.0, math.inf]

    def test_questions_begin_with_one_of_20_documents_of_2048_tokens(self) -> None:
        workload = workload_of(load_config("prod-mix", {"workload.num_requests": 4000}), 0)
        rag = np.flatnonzero(workload.tenant == 1)
        documents = {workload.hash_ids[row][:4] for row in rag}
        assert workload.prompt_tokens[rag].min() > 2048
        assert len(documents) == 20
        assert not any(workload.hash_ids[row] for row in np.flatnonzero(workload.tenant != 1))

    def test_its_load_swings_about_its_mean(self) -> None:
        # sine: mean 1; on/off 1.3 and 0.7 for 10 s each: mean 1.
        sine, on_off = load_config("prod-mix").workload.arrivals.modulation
        assert (sine.period_s, sine.amplitude) == (120, 0.53)
        assert (on_off.on_factor, on_off.off_factor) == (1.3, 0.7)
        assert (on_off.mean_on_s, on_off.mean_off_s) == (10, 10)


def test_bursts_of_mem_chat_burst_keep_the_mean_rate() -> None:
    (burst,) = load_config("mem-chat-burst").workload.arrivals.modulation
    on, off = burst.mean_on_s, burst.mean_off_s
    assert (on, off) == (10, 20)
    assert (on * burst.on_factor + off * burst.off_factor) / (on + off) == pytest.approx(1)
    assert burst.on_factor == pytest.approx(7 / 3)


class TestSaturatedRate:
    def test_of_a_hand_worked_worker(self) -> None:
        """4 sequences, 1 s a step, 2 steps a request: 2 requests/s."""
        assert saturated_rate(tiny_config(), 40, 0) == pytest.approx(2.0)

    def test_does_not_depend_on_the_arrivals(self) -> None:
        config = tiny_config({"workload.arrivals": {"rate_per_s": 0.01, "load": 0.5}})
        assert saturated_rate(config, 40, 0) == pytest.approx(2.0)

    @pytest.mark.parametrize("name", ["slot8-chat", "opal-docs"])
    def test_is_the_rate_of_the_scenario(self, name: str) -> None:
        config = load_config(name)
        rates = [saturated_rate(config, 600, seed) for seed in range(2)]
        assert np.mean(rates) == pytest.approx(config.workload.arrivals.rate_per_s, rel=0.08)


def _longest(length: Any) -> int:
    if length.kind == "mixture":
        return max(_longest(part.length) for part in length.parts)
    return int(length.tokens if length.kind == "fixed" else length.max)
