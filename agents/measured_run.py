"""A measured run of the real vLLM, and its replay through the simulator.

The files are those of LLMServingSim's examples: `*_requests.jsonl` with a request a line (lengths
in tokens, times at which it was queued, scheduled, and gave its first and last token, in s), and
`*_meta.json` with the engine's arguments and the size of its KV cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from opal_gym.config import Config, VLLMSchedulerConfig, load_config
from opal_gym.sim.blocks import blocks_of
from opal_gym.sim.gpu_model import GPU_CONSTANTS
from opal_gym.sim.llm_model import MODELS
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import Workload

Engine = Literal["opal", "vllm_v1"]


@dataclass(frozen=True)
class RequestTimes:
    """Times of n requests in s, in order of arrival; each of shape (n,).

    Attributes:
        ttft: Time to the first token.
        tpot: Time per output token after the first; NaN where there is none.
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
        output_tokens: Shape (n,).
        times: What was measured.
        meta: The file of the engine.
    """

    arrival: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    times: RequestTimes
    meta: dict[str, Any]


def read_measured_run(prefix: Path) -> MeasuredRun:
    """Reads a run's two files.

    Args:
        prefix: Their path, without `_requests.jsonl` and `_meta.json`.
    """
    meta = json.loads(Path(f"{prefix}_meta.json").read_text(encoding="utf-8"))
    lines = Path(f"{prefix}_requests.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: float(row["queued_ts"]))
    queued, first, last, prompt, output = (
        np.array([row[key] for row in rows])
        for key in ("queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    )
    times = _request_times(queued, first, last, output)
    return MeasuredRun(queued - queued[0], prompt, output, times, meta)


def _request_times(
    queued: NDArray[np.float64],
    first: NDArray[np.float64],
    last: NDArray[np.float64],
    output_tokens: NDArray[np.int64],
) -> RequestTimes:
    later_tokens = np.where(output_tokens > 1, output_tokens - 1.0, np.nan)
    return RequestTimes(first - queued, (last - first) / later_tokens, last - queued)


def supported_engines() -> tuple[Engine, ...]:
    """The engine profiles of this version, the one nearest to vLLM first."""
    has_profiles = "engine" in VLLMSchedulerConfig.model_fields
    return ("vllm_v1", "opal") if has_profiles else ("opal",)


def replay_config(run: MeasuredRun, engine: Engine) -> Config:
    """The simulated worker that is nearest to the measured engine.

    Raises:
        ValueError: The GPU or the model is not modelled.
    """
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
    timing: dict[str, Any] = {"model": "calibrated"}
    if run.meta["resolved_config"]["scheduler_config"]["async_scheduling"]:
        timing["step_overhead_s"] = 0.0
    fixed = {"kind": "fixed", "tokens": 1}
    return load_config(
        {
            "name": f"replay with engine {engine}",
            "model": {"name": _known(arguments["model"].lower(), MODELS)},
            "kvc": {"hash_block_tokens": cache["block_size"]},
            "worker": {
                "vllm_params": vllm_params,
                "hw": {
                    "gpu": _known(run.meta["hardware"]["device_name"], GPU_CONSTANTS),
                    "tp": arguments["tensor_parallel_size"],
                },
                "inference_params": timing,
            },
            # Required, but the run brings its own requests.
            "workload": {
                "kind": "synthetic",
                "arrivals": {"rate_per_s": 1.0},
                "tenants": [{"prompt": fixed, "output": fixed}],
            },
        }
    )


def _known(published: str, names: Iterable[str]) -> str:
    """The one of our names that a published name contains, such as that of a model or device."""
    for name in names:
        if name in published:
            return name
    raise ValueError(f"{published}: not modelled; allowed: one of {', '.join(names)}")


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
    times = _request_times(
        records["arrival_time"],
        records["first_token_time"],
        records["decode_done_time"],
        records["output_tokens"],
    )
    return times, int(records["preemptions"].sum())
