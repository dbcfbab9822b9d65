"""The replay of a measured run: what it reads, what it simulates, and how near it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.measured_run import (
    read_measured_run,
    replay,
    replay_config,
    supported_engines,
    workload_of,
)

DATA = Path(__file__).parents[1] / "../shared/data/latency"
RUN = DATA / "llmservingsim_RTX4090_Llama-3.1-8B"

META: dict[str, Any] = {
    "vllm_version": "0.19.0",
    "engine_kwargs": {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "tensor_parallel_size": 1,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 4096,
    },
    "kv_cache": {"num_gpu_blocks": 100, "block_size": 16, "enable_prefix_caching": True},
    "hardware": {"device_name": "NVIDIA H100 80GB HBM3"},
    "resolved_config": {"scheduler_config": {"async_scheduling": True}},
}
# Not in order of arrival, as the file is written in order of submission.
ROWS = [(102.5, 103.0, 104.0, 40, 3), (100.0, 100.5, 101.5, 17, 11), (104.0, 105.0, 105.0, 5, 1)]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    keys = ("queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in ROWS]
    (tmp_path / "run_requests.jsonl").write_text("\n".join(lines))
    (tmp_path / "run_meta.json").write_text(json.dumps(META))
    return tmp_path / "run"


def test_a_run_is_read_in_order_of_arrival(prefix: Path) -> None:
    run = read_measured_run(prefix)
    assert run.arrival.tolist() == [0.0, 2.5, 4.0]
    assert run.prompt_tokens.tolist() == [17, 40, 5]
    assert run.times.ttft.tolist() == [0.5, 0.5, 1.0]
    assert run.times.tpot[:2].tolist() == [0.1, 0.5]
    assert np.isnan(run.times.tpot[2])
    assert run.times.e2e.tolist() == [1.5, 1.5, 1.0]


def test_the_worker_is_that_of_the_engine(prefix: Path) -> None:
    config = replay_config(read_measured_run(prefix), supported_engines()[0])
    params = config.worker.vllm_params
    assert (config.model.name, config.worker.hw.gpu) == ("llama-3.1-8b", "H100")
    assert (params.max_num_seqs, params.max_num_batched_tokens) == (32, 512)
    assert (params.num_gpu_blocks_override, params.block_size) == (100, 16)
    assert params.enable_prefix_caching
    timing = config.worker.inference_params
    assert timing.model == "calibrated"
    # Asynchronous scheduling hides the host.
    assert timing.step_overhead_s == 0.0


def test_no_two_prompts_share_a_block(prefix: Path) -> None:
    # 17, 40 and 5 tokens: 2, 3 and 1 blocks of 16.
    assert workload_of(read_measured_run(prefix)).hash_ids == ((0, 1), (2, 3, 4), (5,))


def test_a_device_that_is_not_modelled_is_named(prefix: Path) -> None:
    run = read_measured_run(prefix)
    run.meta["hardware"]["device_name"] = "NVIDIA L4"
    with pytest.raises(ValueError, match="NVIDIA L4: not modelled; allowed: one of H100, "):
        replay(run, "opal")


def test_a_replay_answers_all_requests(prefix: Path) -> None:
    times, preemptions = replay(read_measured_run(prefix), supported_engines()[0])
    assert preemptions == 0
    assert (times.ttft > 0).all()
    # Alone on the GPU: a token takes its weights' reading, 5.1 ms, and the layers' 1.3 ms.
    assert times.tpot[0] == pytest.approx(6.4e-3, rel=0.02)
    assert np.isnan(times.tpot[2])


@pytest.mark.slow
@pytest.mark.skipif(not Path(f"{RUN}_meta.json").exists(), reason="needs the measured run")
@pytest.mark.parametrize("engine", supported_engines())
def test_the_measured_run_is_met(engine: Any) -> None:
    """The reference scheduler within 5 %; the documented worker's own rules within 15 %."""
    run = read_measured_run(RUN)
    times, preemptions = replay(run, engine)
    limit = {"vllm_v1": 0.05, "opal": 0.15}[engine]
    for name in ("tpot", "e2e"):
        measured = getattr(run.times, name).mean()
        assert getattr(times, name).mean() == pytest.approx(measured, rel=limit)
    assert preemptions > 0
