"""Drives vLLM's own scheduler beside the engine profile `vllm_v1`, on random workloads.

python -m venv .venv-vllm && .venv-vllm/bin/pip install -e '.[dev,vllm]'
.venv-vllm/bin/python scripts/check_against_vllm.py --workloads 500

The scheduler needs no GPU and no weights. Both sides see the same arrivals, step times and remote
loads; the first step, or request, that differs is printed, and the exit status is 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track

from opal_gym.sim.vllm_v1.worker import STALEMATE_EVICTIONS
from tests.vllm_v1_replay import DEFAULTS, Trace, first_difference, replay

VLLM = "0.33.0"

LINEAR_S = {"step": 0.006, "prefill_token": 3.0e-5, "decode": 4.0e-5, "context_token": 2.5e-8}


@dataclass(frozen=True)
class Arguments:
    """Compare the profile `vllm_v1` with vLLM's scheduler, step by step."""

    workloads: int = 100
    """Random workloads."""
    seed: int = 0
    """Seed of the first one; the others follow."""
    tier: Literal[1, 2, 3, 4] | None = None
    """1: fcfs; 2: + priority, caps, watermark, unchunked; 3: + prefix caching; 4: + remote loads.
    Default: all in turn."""
    keep: Path | None = None
    """Write the first workload that differs to this file, with vLLM's steps."""


def main(arguments: Arguments) -> int:
    console = Console()
    if installed() != VLLM:
        console.print(
            f"vLLM {VLLM} is needed, found {installed() or 'none'}: "
            r"pip install -e '.\[dev,vllm]' in an environment of its own (it pins its own PyTorch)"
        )
        return 2
    console.print("[dim]a workload that fails is repeated by --workloads 1 --seed SEED --tier TIER")
    steps = endless = 0
    for seed in track(range(arguments.seed, arguments.seed + arguments.workloads), "comparing"):
        tier = arguments.tier or 1 + seed % 4
        trace = record(random_workload(np.random.default_rng([seed, tier]), tier))
        if not trace["steps"]:
            if len(replay(trace).ended) < len(trace["workload"]):
                console.print(f"seed {seed}, tier {tier}: neither vLLM nor ours comes to an end")
                return 1
            endless += 1
            continue
        steps += len(trace["steps"])
        for step_by_step in (True, False):
            difference = first_difference(trace, replay(trace, step_by_step=step_by_step))
            if difference is not None:
                mode = "step by step" if step_by_step else "in spans"
                console.print(f"seed {seed}, tier {tier}, {mode}: {trace['config']}")
                console.print(difference, markup=False)
                if arguments.keep:
                    arguments.keep.write_text(json.dumps(trace) + "\n", encoding="utf-8")
                return 1
    console.print(
        f"{arguments.workloads - endless} workloads, {steps} steps: all equal; "
        f"left out, since vLLM never ends them: {endless}"
    )
    return 0


def installed() -> str | None:
    """The installed version of vLLM."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


# ------------------------------------------------------------------------ random workloads


def random_workload(rng: np.random.Generator, tier: int) -> Trace:
    """A workload and configuration under memory pressure, in the recordings' form."""
    config = random_config(rng, tier)
    size, longest = config["block_size"], config["max_model_len"]
    usable = (config["num_gpu_blocks"] - 1) * size
    groups = int(rng.integers(1, 5))
    arrival, requests = 0.0, []
    for number in range(int(rng.integers(8, 40))):
        if rng.random() < 0.6:
            arrival += float(rng.exponential(1.0 if config["step_time"] == "linear" else 8.0))
        tokens = int(rng.integers(2, min(longest, usable) + 1))
        output = int(rng.integers(1, max(2, tokens // 2)))
        request = {
            "id": f"r{number:03}",
            "arrival": arrival,
            "prompt_tokens": tokens - output,
            "output_tokens": output,
        }
        if config["policy"] == "priority":
            request["priority"] = int(rng.integers(0, 4))
        if config["enable_prefix_caching"] and rng.random() < 0.8:
            request["prefix_group"] = int(rng.integers(groups))
            request["prefix_tokens"] = int(rng.integers(1, request["prompt_tokens"] + 1))
        if config["kv_connector"] and rng.random() < 0.6:
            request["ext_tokens"] = int(rng.integers(0, request["prompt_tokens"] + 1))
            request["fetch_time"] = float(rng.choice([0.0, 0.01, 0.3, 5.0]))
        requests.append(request)
    return {"config": config, "workload": requests}


def random_config(rng: np.random.Generator, tier: int) -> dict[str, Any]:
    size = int(rng.choice([4, 8, 16]))
    longest = int(rng.choice([64, 128, 256]))
    budget = int(rng.choice([16, 32, 64, 128, 256]))
    config: dict[str, Any] = {
        "block_size": size,
        "max_model_len": longest,
        "num_gpu_blocks": 2 + int(longest / size * rng.uniform(0.8, 3.0)),
        "max_num_seqs": int(rng.choice([2, 4, 8, 16])),
        "max_num_batched_tokens": budget,
        "scheduler_reserve_full_isl": bool(rng.random() < 0.5),
        "step_time": str(rng.choice(["unit", "linear"])),
    }
    if tier >= 2:
        config["policy"] = str(rng.choice(["fcfs", "priority"]))
        config["watermark"] = float(rng.choice([0.0, 0.0, 0.02, 0.1, 0.2]))
        config["long_prefill_token_threshold"] = int(rng.choice([0, 0, 8, 16, 32]))
        if rng.random() < 0.3:
            config |= {"enable_chunked_prefill": False, "max_num_batched_tokens": longest}
    if tier >= 3:
        config["enable_prefix_caching"] = tier == 3 or bool(rng.random() < 0.6)
    if tier >= 4:
        config["kv_connector"] = True
    return {**DEFAULTS, **config}


# ------------------------------------------------------------------------- vLLM's scheduler


def record(trace: Trace) -> Trace:
    """The workload with the steps and times that vLLM's scheduler gives it.

    No steps where it evicts in a circle, or waits, for ever: ours goes another way there, to come
    to an end.
    """
    return Recorder(trace).run()


class StuckError(Exception):
    """vLLM's scheduler will never end a workload."""


class Recorder:
    """vLLM's scheduler on a simulated clock; the model samples a new token wherever it may."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.config = trace["config"]
        self.now = 0.0
        self.loads: dict[str, float] = {}
        self.preempted: list[str] = []
        self.fruitless = 0
        self.workload = {request["id"]: request for request in trace["workload"]}
        self.times = {
            name: {"arrival": request["arrival"], "num_preemptions": 0}
            for name, request in self.workload.items()
        }
        self.scheduler = make_scheduler(self.config)
        if self.config["kv_connector"]:
            self.scheduler.connector = make_connector(self)
        self._note_preemptions()
        self._tokens = 10**6
        self._hasher = make_hasher(self.config["block_size"])

    def run(self) -> Trace:
        try:
            steps = self._steps()
        except StuckError:
            steps = []
        return {**self.trace, "steps": steps, "requests": self.times}

    def _steps(self) -> list[dict[str, Any]]:
        arriving = list(self.workload.values())
        steps = []
        while len(self.ended) < len(self.workload):
            while arriving and arriving[0]["arrival"] <= self.now:
                self.scheduler.add_request(self._request(arriving.pop(0)))
            self._end_loads()
            output = self.scheduler.schedule()
            has_evicted = bool(self.preempted)
            self.fruitless += len(self.preempted)
            if self.fruitless >= STALEMATE_EVICTIONS:
                raise StuckError
            if output.num_scheduled_tokens or has_evicted:
                steps.append(self._step(output))
            if output.num_scheduled_tokens:
                self.now += self._step_time(output)
            elif self.loads or not has_evicted:
                # As in the recordings: a step that scheduled nothing waits for the next event,
                # unless it evicted and no load is under way.
                self.now = max(self.now, self._next_event(arriving))
            self._update(output)
        return steps

    def _next_event(self, arriving: list[dict[str, Any]]) -> float:
        times = [request["arrival"] for request in arriving[:1]] + list(self.loads.values())
        if not times:
            raise StuckError
        return min(times)

    @property
    def ended(self) -> list[str]:
        return [name for name, times in self.times.items() if "finish_time" in times]

    def _request(self, given: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        # A group's prompts begin alike; all other tokens are used once.
        shared = given.get("prefix_tokens", 0)
        group = given.get("prefix_group", 0)
        tokens = [group * 10_000 + place for place in range(shared)]
        tokens += [self._new_token() for _ in range(given["prompt_tokens"] - shared)]
        return Request(
            request_id=given["id"],
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=given["output_tokens"], ignore_eos=True),
            pooling_params=None,
            arrival_time=given["arrival"],
            priority=given.get("priority", 0),
            block_hasher=self._hasher if self.config["enable_prefix_caching"] else None,
        )

    def _new_token(self) -> int:
        self._tokens += 1
        return self._tokens

    def _end_loads(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        ended = {name for name, time in self.loads.items() if time <= self.now}
        if ended:
            for name in ended:
                del self.loads[name]
            self.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=ended))

    def _note_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def note(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(request.request_id)
            self.times[request.request_id]["num_preemptions"] += 1
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = note

    def _step(self, output: Any) -> dict[str, Any]:
        running, waiting = self.scheduler.get_request_counts()
        preempted, self.preempted = self.preempted, []
        return {
            "step": self.scheduler.current_step - 1,
            "time": self.now,
            "scheduled": dict(output.num_scheduled_tokens),
            "preempted": preempted,
            "running": running,
            "waiting": waiting,
            "free_blocks": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def _step_time(self, output: Any) -> float:
        if self.config["step_time"] == "unit":
            return 1.0
        prefill = decodes = context = 0
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            if request.num_tokens - (request.num_computed_tokens - tokens) > 1:
                prefill += tokens
            else:
                decodes += 1
                context += request.num_tokens
        return (
            LINEAR_S["step"]
            + LINEAR_S["prefill_token"] * prefill
            + LINEAR_S["decode"] * decodes
            + LINEAR_S["context_token"] * context
        )

    def _update(self, output: Any) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [
            [self._new_token()] if request.num_computed_tokens == request.num_tokens else []
            for request in requests
        ]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        if any(sampled):
            self.fruitless = 0
        for request in requests:
            times = self.times[request.request_id]
            if request.num_output_tokens and "first_token_time" not in times:
                times["first_token_time"] = self.now
            if request.is_finished():
                times["finish_time"] = self.now


def make_scheduler(config: dict[str, Any]) -> Any:
    """vLLM's scheduler with one group of full-attention layers."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
        model = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float16",
            max_model_len=config["max_model_len"],
        )
    scheduler_config = SchedulerConfig(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        enable_chunked_prefill=config["enable_chunked_prefill"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
        watermark=config["watermark"],
        policy=config["policy"],
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    size, blocks = config["block_size"], config["num_gpu_blocks"]
    cache = CacheConfig(block_size=size, enable_prefix_caching=config["enable_prefix_caching"])
    cache.num_gpu_blocks = blocks
    vllm_config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler_config,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float16)
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=size,
    )


TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
}
"""A model that is only ever described."""


def make_hasher(block_size: int) -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)


def make_connector(recorder: Recorder) -> Any:
    """A connector whose loads take the workload's time."""

    def matched(request: Any, local_tokens: int) -> tuple[int, bool]:
        given = recorder.workload[request.request_id]
        tokens = min(given.get("ext_tokens", 0), request.num_tokens - 1)
        size = recorder.config["block_size"]
        tokens = max(0, tokens // size * size - local_tokens)
        return tokens, tokens > 0

    def after_alloc(request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            given = recorder.workload[request.request_id]
            recorder.loads[request.request_id] = recorder.now + given["fetch_time"]

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def none_loaded(request: Any) -> Iterable[int]:
        return ()

    return SimpleNamespace(
        supports_divergent_local_hybrid_hits=False,
        get_num_new_matched_tokens=matched,
        update_state_after_alloc=after_alloc,
        has_pending_block_frees=lambda: False,
        has_pending_push_work=lambda: False,
        get_loaded_kv_cache_group_ids=none_loaded,
        build_connector_meta=nothing,
        bind_kv_cache_manager=nothing,
        on_new_request=nothing,
        update_connector_output=nothing,
        get_kv_connector_stats=nothing,
        take_events=nothing,
        request_finished=lambda request, blocks: (False, None),
    )


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
