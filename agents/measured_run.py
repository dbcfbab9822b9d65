"""A measured run of the real vLLM, and its replay through the simulator.

The files are those of LLMServingSim's examples: `*_requests.jsonl` with a request a line (lengths
in tokens, times at which it was queued, scheduled, and gave its first and last token, in s), and
`*_meta.json` with the engine's arguments and the size of its KV cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from opal_gym.config import Config, VLLMSchedulerConfig, load_config
from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import Workload

Engine = Literal["opal", "vllm_v1"]

GPUS = {"NVIDIA GeForce RTX 4090": "RTX 4090"}
MODELS = {"meta-llama/Llama-3.1-8B": "llama-3.1-8b"}


@dataclass(frozen=True)
class RequestTimes:
    """Times of n requests in s, in order of arrival; each of shape (n,).

    Attributes:
        ttft: Time to the first token.
        tpot: Time per output token after the first.
        e2e: End-to-end latency.
    """

    ttft: NDArray[np.float64]
    tpot: NDArray[np.float64]
    e2e: NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredRun:
    """What was asked of the engine, what the engine was, and how long it took.

    Attributes:
        arrival: When the engine queued each request, s after the first, shape (n,).
        prompt_tokens: Shape (n,).
        output_tokens: Shape (n,), at least 2.
        times: What was measured.
        meta: The file of the engine.
    """

    arrival: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    times: RequestTimes
    meta: dict[str, Any]


def read_measured_run(requests: Path, meta: Path) -> MeasuredRun:
    """Reads a run's two files."""
    rows = [json.loads(line) for line in requests.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row["queued_ts"])
    queued, first, last, prompt, output = (
        np.array([row[key] for row in rows])
        for key in ("queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    )
    times = RequestTimes(first - queued, (last - first) / (output - 1), last - queued)
    return MeasuredRun(
        queued - queued[0], prompt, output, times, json.loads(meta.read_text(encoding="utf-8"))
    )


def supported_engines() -> tuple[Engine, ...]:
    """The engine profiles of this version, the one nearest to vLLM first."""
    has_profiles = "engine" in VLLMSchedulerConfig.model_fields
    return ("vllm_v1", "opal") if has_profiles else ("opal",)


def replay_config(run: MeasuredRun, engine: Engine) -> Config:
    """The simulated worker that is nearest to the measured engine."""
    arguments, cache = run.meta["engine_kwargs"], run.meta["kv_cache"]
    vllm_params: dict[str, Any] = {
        "max_num_seqs": arguments["max_num_seqs"],
        "max_num_batched_tokens": arguments["max_num_batched_tokens"],
        "max_model_len": arguments["max_model_len"],
        "block_size": cache["block_size"],
        "num_gpu_blocks_override": cache["num_gpu_blocks"],
        "enable_prefix_caching": cache["enable_prefix_caching"],
        "rebuild_on": "change",
        "first_token_at_prefill_end": True,
    }
    if "engine" in VLLMSchedulerConfig.model_fields:
        vllm_params["engine"] = engine
    fixed = {"kind": "fixed", "tokens": 1}
    return load_config(
        {
            "name": f"replay with engine {engine}",
            "model": {"name": MODELS[arguments["model"]]},
            "kvc": {"hash_block_tokens": cache["block_size"]},
            "worker": {
                "vllm_params": vllm_params,
                "hw": {
                    "gpu": GPUS[run.meta["hardware"]["device_name"]],
                    "tp": arguments["tensor_parallel_size"],
                },
                "inference_params": {"model": "calibrated"},
            },
            # Required, but the run brings its own requests.
            "workload": {
                "kind": "synthetic",
                "arrivals": {"rate_per_s": 1.0},
                "tenants": [{"prompt": fixed, "output": fixed}],
            },
        }
    )


def workload_of(run: MeasuredRun) -> Workload:
    """The run's requests; no two prompts share a prefix."""
    block_size = run.meta["kv_cache"]["block_size"]
    blocks = [blocks_of(int(tokens), block_size) for tokens in run.prompt_tokens]
    ends = accumulate(blocks)
    zeros = np.zeros(len(run.arrival), np.int64)
    return Workload(
        arrival_time=run.arrival,
        prompt_tokens=run.prompt_tokens,
        output_tokens=run.output_tokens,
        predicted_output_tokens=run.output_tokens,
        tenant=zeros,
        priority=zeros,
        hash_ids=tuple(tuple(range(end - n, end)) for end, n in zip(ends, blocks, strict=True)),
    )


def replay(run: MeasuredRun, engine: Engine) -> tuple[RequestTimes, int]:
    """Simulates the run's requests.

    Returns:
        The simulated times, and the number of preemptions.
    """
    simulation = Simulation(replay_config(run, engine), workload_of(run))
    simulation.run()
    records = np.sort(simulation.records.table, order="request_id")
    arrival, first, done = (
        records[name].astype(np.float64)
        for name in ("arrival_time", "first_token_time", "decode_done_time")
    )
    times = RequestTimes(first - arrival, (done - first) / (run.output_tokens - 1), done - arrival)
    return times, int(records["preemptions"].sum())
