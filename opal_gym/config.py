"""Configuration of a simulation, in the JSON form of the seed's "Configuration" section.

Every model is frozen and refuses unknown keys and wrong types. `load_config` reads a scenario's
name, a JSON file or a mapping, applies overrides, and reports every mistake with the key's full
path, the value and what is allowed, before anything runs.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from opal_gym.config_errors import ConfigError, RefusedError, explain, read_json_object
from opal_gym.sim.gpu_model import (
    GPU_CONSTANTS,
    GPU_SPECS,
    GPUConstants,
    SimpleConstants,
)
from opal_gym.sim.hf_config import read_hf_config
from opal_gym.sim.llm_model import MODELS, LLMModel, num_gpu_blocks

__all__ = ["Config", "ConfigError", "load_config", "scenario_names"]

PACKAGE = Path(__file__).resolve().parent
# A wheel carries configs/ inside the package; a checkout has it beside the package.
CONFIGS = next(path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir())
SCENARIOS = CONFIGS / "scenarios"

DecisionName = Literal["CHUNK", "PREEMPT", "ADMIT"]
LengthInformation = Literal["predicted", "oracle", "none"]
RewardTerm = Literal["latency", "slowdown", "ttft", "goodput", "throughput", "preemption"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys and wrong types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def List(item: Any, **constraints: Any) -> Any:  # noqa: N802 - a type, written like one
    """An immutable sequence that is written as a JSON list."""
    return Annotated[
        tuple[item, ...], BeforeValidator(_is_list), Field(strict=False, **constraints)
    ]


def _is_list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise RefusedError("", value, "a list")
    return value


class SimulationConfig(Section):
    """What is simulated, independent of the worker."""

    length_information: LengthInformation = Field(
        "predicted",
        description="What schedulers see of a request's output length: a noisy prediction, "
        "the truth (`oracle`), or nothing (`none`)",
    )
    num_workers: Count = Field(1, description="Workers behind the router")
    record_time_series: bool = Field(
        False, description="Keep a time series of queues, blocks and GPU use, sampled by event"
    )
    check_invariants: bool = Field(
        False, description="Check the seed's memory and batch invariants after every step (slow)"
    )
    step_by_step: bool = Field(
        False,
        description="One SimPy timeout per engine step, instead of one per span of equal steps; "
        "the reference that spans are tested against",
    )


class ModelConfig(Section):
    """The served model."""

    name: str = Field(
        "llama-3.1-8b",
        description="A model of `opal_gym.sim.llm_model.MODELS`; with `config_json`, any name",
    )
    config_json: str | None = Field(
        None, description="Path of a Hugging Face config.json that gives the model's shape"
    )

    @model_validator(mode="after")
    def _known(self) -> ModelConfig:
        if self.config_json is None and self.name not in MODELS:
            raise RefusedError(
                "name", self.name, f"one of {', '.join(sorted(MODELS))}, or a config_json"
            )
        return self

    @field_validator("config_json")
    @classmethod
    def _readable(cls, path: str | None) -> str | None:
        if path is not None:
            read_hf_config(path)
        return path

    @cached_property
    def shape(self) -> LLMModel:
        """The model's shape: layers, heads, parameters."""
        return MODELS[self.name] if self.config_json is None else read_hf_config(self.config_json)


class WorkerParams(Section):
    """The worker's messages to its router (seed, "Required Configuration Parameters")."""

    periodic_infra_update_time: Positive = Field(
        1.0, description="Seconds between two load updates to the router"
    )
    kvcevent_coalesce_time: NonNegative = Field(
        0.1, description="Seconds over which KV-cache events are gathered into one message"
    )


ENGINE_VALUES: dict[str, dict[str, Any]] = {
    "opal": {
        "policy": "fcfs",
        "long_prefill_token_threshold": 0,
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
    },
    "vllm_v1": {
        "rebuild_on": "change",
        "first_token_at_prefill_end": True,
        "max_kvc_ready_requests": 4,
    },
}
"""Parameters for which an engine knows one value only."""


class VLLMSchedulerConfig(Section):
    """The scheduler's parameters (seed, "VLLMSchedulerConfig"; DESIGN §2).

    The engine `vllm_v1` schedules as vLLM 0.33.0 does: `rebuild_on` is `change` and
    `first_token_at_prefill_end` is true there, also by default.
    """

    engine: Literal["opal", "vllm_v1"] = Field(
        "opal", description="Whose rules: the seed's worker, or vLLM 0.33.0's v1 scheduler"
    )
    max_num_seqs: Count = Field(256, description="Max sequences in a batch")
    max_num_batched_tokens: Count = Field(2048, description="Max tokens per step")
    chunked_prefill: bool = Field(
        True,
        description="Split large prompts into chunks; off: a prompt is prefilled in one step, "
        "which requires max_num_batched_tokens >= max_model_len",
    )
    max_model_len: Count | None = Field(
        None, description="Max prompt + output tokens of a request; default: the model's own"
    )
    block_size: Count = Field(16, description="Tokens per GPU memory block")
    num_gpu_blocks_override: Count | None = Field(
        None,
        description="Blocks of the KV pool; default: what the GPU's memory holds. As in vLLM, the "
        "engine vllm_v1 never hands out one of the pool's blocks",
    )
    gpu_memory_kvcache_bytes: Count | None = Field(
        None, description="Bytes of the KV pool; default: what the GPU's memory holds"
    )
    max_kvc_ready_requests: Count = Field(
        4, description="Max waiting requests that hold fetched (or being fetched) KV blocks"
    )
    lookahead_reqs: Count = Field(256, description="Max waiting requests scanned per rebuild")
    rebuild_on: Literal["completion", "change"] = Field(
        "completion",
        description="`completion`: the seed's persistent batch; `change`: also whenever asking "
        "could change something (arrival, READY, end of a prefill, left-over tokens)",
    )
    first_token_at_prefill_end: bool = Field(
        False, description="The step that ends a prefill makes the first token (as real vLLM)"
    )
    enable_prefix_caching: bool = Field(
        False,
        description="GPU blocks keep their content when freed, and prompts that begin alike share "
        "them (vLLM's automatic prefix caching)",
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="vllm_v1: who waits and who is evicted first: by arrival, or by "
        "(priority, arrival), lower first",
    )
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = Field(
        0,
        description="vllm_v1: max tokens of one prefill in a step, unless its request is the only "
        "one in the worker; 0: no limit",
    )
    scheduler_reserve_full_isl: bool = Field(
        True,
        description="vllm_v1: admit a request only if all of its known tokens fit into the free "
        "blocks, not only its first chunk",
    )
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="vllm_v1: share of the blocks that an admission must leave free while others "
        "run",
    )
    chunk_budgets: List(Count, min_length=1) | None = Field(  # type: ignore[valid-type]
        None,
        description="Prefill tokens per step that CHUNK offers, largest first; default: "
        "max_num_batched_tokens divided by 1, 2, 4, 8, 16",
    )

    @model_validator(mode="before")
    @classmethod
    def _engine_defaults(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("engine") == "vllm_v1":
            return {"rebuild_on": "change", "first_token_at_prefill_end": True} | values
        return values

    @model_validator(mode="after")
    def _fits_engine(self) -> VLLMSchedulerConfig:
        """What an engine would ignore is refused."""
        fixed = ENGINE_VALUES[self.engine]
        for name, value in fixed.items():
            given = getattr(self, name)
            if given != value:
                allowed = f"{json.dumps(value)}, as engine is {self.engine}"
                raise RefusedError(name, given, allowed)
        return self

    @model_validator(mode="after")
    def _consistent(self) -> VLLMSchedulerConfig:
        budget = self.max_num_batched_tokens
        if self.engine == "opal" and self.max_num_seqs > budget:
            raise RefusedError(
                "max_num_seqs",
                self.max_num_seqs,
                f"at most max_num_batched_tokens = {budget}, since every decode takes a token",
            )
        if self.num_gpu_blocks_override and self.gpu_memory_kvcache_bytes:
            raise RefusedError(
                "gpu_memory_kvcache_bytes",
                self.gpu_memory_kvcache_bytes,
                "either this or num_gpu_blocks_override, not both",
            )
        for index, chunk in enumerate(self.chunk_budgets or ()):
            if chunk > budget:
                allowed = f"at most max_num_batched_tokens = {budget}"
                raise RefusedError(f"chunk_budgets[{index}]", chunk, allowed)
        return self

    @property
    def unwritten_tokens(self) -> int:
        """Tokens at the end of a request that never need a place in KV: in vLLM the last one."""
        return int(self.engine == "vllm_v1")

    @property
    def chunk_choices(self) -> tuple[int, ...]:
        """The budgets of a CHUNK question in tokens per step, largest first, without duplicates."""
        budgets = self.chunk_budgets or tuple(
            max(1, self.max_num_batched_tokens // 2**i) for i in range(5)
        )
        return tuple(sorted(set(budgets), reverse=True))


class HardwareConfig(Section):
    """The GPUs of one worker (seed, "hw")."""

    gpu: str = Field("H100", description="Name of the GPU, as the calibrated model knows it")
    memory_gb: Positive = Field(
        description="Memory of one GPU in GiB; default, as of the next two: the datasheet's "
        "(`opal_gym.sim.gpu_model.GPU_SPECS`); needed for other GPUs"
    )
    tflops: Positive = Field(description="Dense bf16 peak of one GPU in TFLOPS")
    mem_bw_TBps: Positive = Field(  # noqa: N815 - the seed's key
        description="Memory bandwidth of one GPU in TB/s"
    )
    tp: Count = Field(1, description="Tensor-parallel degree; KV memory = tp * memory_gb")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Share of the memory that the worker may use (1.0: the seed)"
    )
    activation_reserve_gb: NonNegative = Field(
        0.0, description="GiB of each GPU kept for activations (0: the seed; 1.2-3 real)"
    )

    @model_validator(mode="before")
    @classmethod
    def _datasheet(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        gpu = data.get("gpu", "H100")
        known = isinstance(gpu, str) and gpu in GPU_SPECS
        return {**GPU_SPECS[gpu]._asdict(), **data} if known else data


class RooflineParams(Section):
    """The seed's timing: max(longest prefill, batched decode)."""

    model: Literal["roofline"] = "roofline"


class CalibratedParams(Section):
    """One fused forward pass with constants fitted per GPU."""

    model: Literal["calibrated"] = "calibrated"
    step_overhead_s: NonNegative | None = Field(
        None,
        description="Host seconds per step; default 1.5 ms at tp 1, 3 ms at tp >= 2 (vLLM of "
        "2024-25; about 0 with asynchronous scheduling)",
    )
    constants: GPUConstants | None = Field(
        None, description="Constants of a fit of yours; default: those of worker.hw.gpu"
    )


class SimpleParams(SimpleConstants):
    """FLOPs over a reached peak plus bytes over a reached bandwidth plus an overhead."""

    model: Literal["simple"] = "simple"


class SyntheticParams(Section):
    """A linear step time, for tests."""

    model: Literal["synthetic"] = "synthetic"
    base_s: NonNegative = Field(1.0, description="Seconds of every step")
    per_prefill_token_s: NonNegative = Field(0.0, description="Seconds per prefill token")
    per_decode_s: NonNegative = Field(0.0, description="Seconds per decoding request")
    per_context_token_s: NonNegative = Field(
        0.0, description="Seconds per token of context of the decoding requests"
    )

    @model_validator(mode="after")
    def _takes_time(self) -> SyntheticParams:
        if self.base_s == 0 and (self.per_prefill_token_s == 0 or self.per_decode_s == 0):
            raise RefusedError(
                "base_s",
                self.base_s,
                "above 0 unless prefill tokens and decodes both take time (a step must last)",
            )
        return self


InferenceParams = Annotated[
    RooflineParams | CalibratedParams | SimpleParams | SyntheticParams, Field(discriminator="model")
]


class WorkerConfig(Section):
    """One worker: its messages, scheduler, hardware and timing."""

    kind: Literal["vllm", "single_stage"] = Field(
        "vllm", description="The vLLM worker, or the one that serves one request at a time"
    )
    worker_params: WorkerParams = WorkerParams()
    vllm_params: VLLMSchedulerConfig = VLLMSchedulerConfig()
    hw: HardwareConfig = HardwareConfig.model_validate({})
    inference_params: InferenceParams = RooflineParams()

    @property
    def gpu_constants(self) -> GPUConstants | SimpleConstants | None:
        """The measured constants of the step times; None where there are none."""
        timing = self.inference_params
        if isinstance(timing, SimpleParams):
            return timing
        if not isinstance(timing, CalibratedParams):
            return None
        constants = timing.constants or GPU_CONSTANTS.get(self.hw.gpu)
        if isinstance(constants, SimpleConstants) and timing.step_overhead_s is not None:
            return constants.model_copy(update={"overhead_s": timing.step_overhead_s})
        return constants


class TierConfig(Section):
    """A storage tier of the KV cache."""

    name: Literal["CPUMemory", "LocalNVMe", "DistributedFS"] = "CPUMemory"
    capacity_GB: Positive = Field(description="Capacity in GB (1e9 bytes)")  # noqa: N815
    bandwidth_GBps: Positive = Field(description="Bandwidth in GB/s (1e9 bytes)")  # noqa: N815
    latency_nsec: NonNegative = Field(0.0, description="Latency of a transfer in ns")
    concurrency: Count = Field(
        1, description="Transfers that run at once and share the bandwidth equally; others queue"
    )


class KVCacheConfig(Section):
    """The KV cache engine; without tiers there are no matches and no cost."""

    hash_block_tokens: Count = Field(512, description="Tokens that one hash id stands for")
    chunk_size: Count | None = Field(
        None,
        description="Tokens that are stored, matched and moved as a unit, a multiple of "
        "hash_block_tokens; default: one hash block",
    )
    save_unfull_chunk: bool = Field(
        False, description="Also store a prompt's last chunk where it is not full"
    )
    tiers: List(TierConfig) = Field(  # type: ignore[valid-type]
        (), description="Storage tiers, fastest first; each evicts into the next"
    )

    @model_validator(mode="after")
    def _consistent(self) -> KVCacheConfig:
        if self.chunk_size and self.chunk_size % self.hash_block_tokens:
            raise RefusedError(
                "chunk_size",
                self.chunk_size,
                f"a multiple of hash_block_tokens = {self.hash_block_tokens}",
            )
        return self


class LogNormalLength(Section):
    """Token counts exp(N(ln median, sigma²)), rounded and clipped to [min, max]."""

    kind: Literal["lognormal"] = "lognormal"
    median: Positive
    sigma: NonNegative
    min: Count = 1
    max: Count = 16384

    @model_validator(mode="after")
    def _range(self) -> LogNormalLength:
        if self.min > self.max:
            raise RefusedError("min", self.min, f"at most max = {self.max}")
        return self


class FixedLength(Section):
    """Always the same token count."""

    kind: Literal["fixed"] = "fixed"
    tokens: Count


class MixtureLength(Section):
    """One of several length distributions, drawn with probability proportional to its share."""

    kind: Literal["mixture"] = "mixture"
    parts: List(MixturePart, min_length=1)  # type: ignore[valid-type]


LengthConfig = Annotated[LogNormalLength | FixedLength | MixtureLength, Field(discriminator="kind")]


class MixturePart(Section):
    """A part of a mixture."""

    share: Positive
    length: LengthConfig


class PrefixConfig(Section):
    """Prompts that begin with one of `num_prefixes` shared documents, Zipf-popular."""

    num_prefixes: Count
    tokens: Count = Field(description="Tokens of the shared document at the prompt's start")
    zipf: NonNegative = Field(1.1, description="Exponent of the popularity; 0: uniform")


class TenantConfig(Section):
    """A group of users with its lengths, weight and service-level objective."""

    name: str = "default"
    share: Positive = Field(1.0, description="Share of the requests, relative to the others")
    prompt: LengthConfig
    output: LengthConfig
    prefix: PrefixConfig | None = None
    weight: Positive = Field(1.0, description="Weight in `slowdown` and weighted goodput")
    slo: Literal["interactive", "conversational"] | None = Field(
        None,
        description="TTFT/TPOT objective of MLPerf Inference for Llama-3.1-8B: interactive "
        "500/30 ms, conversational 2000/100 ms; none: never missed",
    )
    priority: int = Field(0, description="vLLM's priority: lower runs first where it is used")


class PoissonProcess(Section):
    """Exponential gaps."""

    kind: Literal["poisson"] = "poisson"


class GammaProcess(Section):
    """Gamma-distributed gaps with a coefficient of variation."""

    kind: Literal["gamma"] = "gamma"
    cv: Positive


class OnOffModulation(Section):
    """The rate is multiplied by one of two factors, with exponential dwell times."""

    kind: Literal["on_off"] = "on_off"
    on_factor: NonNegative
    off_factor: NonNegative
    mean_on_s: Positive
    mean_off_s: Positive


class SineModulation(Section):
    """The rate is multiplied by 1 + amplitude * sin(2π t / period + phase)."""

    kind: Literal["sine"] = "sine"
    period_s: Positive
    amplitude: Annotated[float, Field(ge=0, lt=1)]
    phase: Finite | None = Field(None, description="Radians; default: drawn for each episode")


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


class ArrivalConfig(Section):
    """When requests arrive: a renewal process whose rate is modulated by a product of factors."""

    rate_per_s: Positive = Field(
        description="Requests per second at load 1; a scenario means by it the saturated FIFO "
        "service rate of its worker and workload"
    )
    load: float | tuple[float, float] = Field(
        1.0, description="Share of that rate, or a range [low, high] drawn anew at each reset"
    )
    process: Annotated[PoissonProcess | GammaProcess, Field(discriminator="kind")] = (
        PoissonProcess()
    )
    modulation: List(  # type: ignore[valid-type]
        Annotated[OnOffModulation | SineModulation, Field(discriminator="kind")]
    ) = Field((), description="Factors of the rate, multiplied")

    @field_validator("load", mode="before")
    @classmethod
    def _number_or_range(cls, load: Any) -> float | tuple[float, float]:
        if not isinstance(load, list | tuple):
            if not _is_positive(load):
                raise RefusedError("", load, "a finite number above 0, or [low, high]")
            return float(load)
        if len(load) != 2:
            raise RefusedError("", load, "a number, or 2 of them: [low, high]")
        for index, bound in enumerate(load):
            if not _is_positive(bound):
                raise RefusedError(f"[{index}]", bound, "a finite number above 0")
        if load[0] > load[1]:
            raise RefusedError("", list(load), "[low, high] with low <= high")
        return float(load[0]), float(load[1])

    @model_validator(mode="after")
    def _possible(self) -> ArrivalConfig:
        for index, factor in enumerate(self.modulation):
            if isinstance(factor, OnOffModulation) and factor.on_factor + factor.off_factor == 0:
                raise RefusedError(
                    f"modulation[{index}].on_factor", 0.0, "above 0 where off_factor is 0"
                )
        return self


class SyntheticWorkload(Section):
    """Requests drawn from distributions."""

    kind: Literal["synthetic"] = "synthetic"
    num_requests: Count = Field(256, description="Requests of an episode")
    arrivals: ArrivalConfig
    tenants: List(TenantConfig, min_length=1)  # type: ignore[valid-type]
    prediction_sigma: NonNegative = Field(
        0.6, description="σ of the log-normal error of predicted output lengths"
    )

    @model_validator(mode="after")
    def _distinct(self) -> SyntheticWorkload:
        names = [tenant.name for tenant in self.tenants]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise RefusedError(
                    f"tenants[{index}].name", name, "a name that no other tenant has"
                )
        return self


class TraceWorkload(Section):
    """Requests of a recorded trace, or of a window of it."""

    kind: Literal["trace"] = "trace"
    format: Literal["azure", "mooncake", "lengths", "sessions"] = Field(
        description="azure: CSV TIMESTAMP,ContextTokens,GeneratedTokens; mooncake: JSONL with "
        "timestamp (ms), input_length, output_length, hash_ids; lengths: CSV "
        "input_length,output_length, which needs `arrivals`; sessions: JSONL, a turn a row, with "
        "session_id, turn, t_session_s, think_time_s (null: not recorded; the time since the turn "
        "before began is used), input_length, output_length, hash_ids, which needs `arrivals` too "
        "and is replayed in closed loop: a turn arrives when the one before has ended, plus its "
        "think time"
    )
    path: str = Field(description="The trace file; .gz is decompressed")
    arrivals: ArrivalConfig | None = Field(
        None,
        description="Arrival process of a `lengths` file, which has no times, or of the sessions "
        "of a `sessions` file (its rate is sessions per second)",
    )
    window_s: Positive | None = Field(None, description="Seconds of the trace; default: all")
    window_start_s: NonNegative | None = Field(
        0.0,
        description="Start of the window in trace seconds; null: drawn for each episode (`lengths` "
        "and `sessions`: the first row or session is drawn)",
    )
    num_requests: Count | None = Field(
        None,
        description="At most this many requests; of `sessions` as many whole sessions as have so "
        "many turns, or the beginning of the first one where it alone has more",
    )
    rate_scale: Positive = Field(
        1.0, description="Arrivals are this much faster than recorded; think times are kept"
    )
    max_tokens: Count | None = Field(
        None,
        description="Leave out requests with more prompt + output tokens (counted); a session ends "
        "before such a turn",
    )
    spread_bins: bool = Field(
        True,
        description="Spread the mooncake trace's 3 s time grid evenly inside each bin",
    )
    on_error: Literal["error", "skip"] = Field(
        "error",
        description="What a malformed row does; skipped rows are counted and reported, as is the "
        "rest of a session after one",
    )
    tenant: str = "default"
    weight: Positive = 1.0
    slo: Literal["interactive", "conversational"] | None = None
    priority: int = 0
    prediction_sigma: NonNegative = Field(
        0.6, description="σ of the log-normal error of predicted output lengths"
    )

    @model_validator(mode="after")
    def _has_times(self) -> TraceWorkload:
        has_times = self.format in ("azure", "mooncake")
        if not has_times and self.window_s is not None:
            allowed = f"none for `{self.format}`, which has no times of arrival"
            raise RefusedError("window_s", self.window_s, allowed)
        if not has_times and self.window_start_s:
            allowed = f"0 or null for `{self.format}`, which has no times of arrival"
            raise RefusedError("window_start_s", self.window_start_s, allowed)
        if has_times != (self.arrivals is None):
            raise RefusedError(
                "arrivals",
                None if self.arrivals is None else "an arrival process",
                "given for the formats `lengths` and `sessions`, and only for them",
            )
        return self


WorkloadConfig = Annotated[SyntheticWorkload | TraceWorkload, Field(discriminator="kind")]


class EnvConfig(Section):
    """What the agent decides, sees and earns."""

    decisions: List(DecisionName) = Field(  # type: ignore[valid-type]
        ("CHUNK", "PREEMPT", "ADMIT"),
        description="Kinds of question that the agent answers; the baseline answers the others",
    )
    max_candidates: Count = Field(64, description="Rows of the candidate table")
    reward: dict[RewardTerm, Finite] = Field(
        {"latency": 1.0}, description="Weight of each reward term"
    )
    horizon_s: Positive | None = Field(
        None, description="Simulated seconds after which an episode is truncated"
    )

    @model_validator(mode="after")
    def _has_reward(self) -> EnvConfig:
        if not self.reward:
            raise RefusedError("reward", {}, "at least one reward term with its weight")
        return self


class RouterConfig(Section):
    """How requests reach workers."""

    policy: Literal["RoundRobin", "LeastLoaded", "Random", "MaxPrefix"] = Field(
        "RoundRobin",
        description="In turn; least load by the last update; at random; longest prefix by the KV "
        "events",
    )
    max_load_gap: Count | None = Field(
        8,
        description="MaxPrefix leaves out workers whose last reported load is this many requests "
        "above the smallest, or a prefix that all prompts share draws all of them to one worker; "
        "null: none is left out",
    )


class Config(Section):
    """A whole simulation, in the seed's JSON form.

    Attributes:
        name: The scenario's name.
        description: What the scenario is about, and where its rates come from.
    """

    name: str = "custom"
    description: str = ""
    simulation: SimulationConfig = SimulationConfig()
    model: ModelConfig = ModelConfig()
    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()
    kvc: KVCacheConfig = KVCacheConfig()
    workload: WorkloadConfig
    env: EnvConfig = EnvConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        params, hw, shape = self.worker.vllm_params, self.worker.hw, self.model.shape
        if self.max_model_len > shape.max_model_len:
            raise RefusedError(
                "worker.vllm_params.max_model_len",
                self.max_model_len,
                f"at most {shape.max_model_len}, the length of {self.model.name}",
            )
        if not params.chunked_prefill and params.max_num_batched_tokens < self.max_model_len:
            raise RefusedError(
                "worker.vllm_params.max_num_batched_tokens",
                params.max_num_batched_tokens,
                f"at least max_model_len = {self.max_model_len} where chunked_prefill is false",
            )
        constants = self.worker.gpu_constants
        if isinstance(self.worker.inference_params, CalibratedParams) and constants is None:
            raise RefusedError(
                "worker.hw.gpu",
                hw.gpu,
                f"one of {', '.join(GPU_CONSTANTS)} for the calibrated model, unless "
                "worker.inference_params.constants are given",
            )
        if hw.tp > 1 and constants is not None and constants.link_bytes_per_s is None:
            raise RefusedError(
                "worker.hw.tp",
                hw.tp,
                "1 where the timing's link_bytes_per_s, the bandwidth between the GPUs, is unknown",
            )
        if params.enable_prefix_caching and self.kvc.hash_block_tokens % params.block_size:
            raise RefusedError(
                "kvc.hash_block_tokens",
                self.kvc.hash_block_tokens,
                f"a multiple of block_size = {params.block_size} where enable_prefix_caching is on",
            )
        if shape.heads % hw.tp:
            raise RefusedError(
                "worker.hw.tp", hw.tp, f"a divisor of the model's {shape.heads} attention heads"
            )
        if self.memory_blocks < 1:
            raise RefusedError(
                "worker.hw.memory_gb",
                hw.memory_gb,
                f"memory for {self.model.name} ({shape.model_size_bytes / 1024**3:.1f} GiB), the "
                f"activation reserve and at least one KV block, at tp {hw.tp} and "
                f"gpu_memory_utilization {hw.gpu_memory_utilization}",
            )
        if params.num_gpu_blocks_override == 1 and self.total_gpu_blocks < 1:
            raise RefusedError(
                "worker.vllm_params.num_gpu_blocks_override",
                1,
                "at least 2, since vLLM never hands out one of them",
            )
        if self.total_gpu_blocks < 1:
            raise RefusedError(
                "worker.vllm_params.gpu_memory_kvcache_bytes",
                params.gpu_memory_kvcache_bytes,
                f"at least one block of {params.block_size * shape.kv_bytes_per_token} bytes",
            )
        return self

    @property
    def max_model_len(self) -> int:
        """Max prompt + output tokens of a request."""
        return self.worker.vllm_params.max_model_len or self.model.shape.max_model_len

    @property
    def memory_blocks(self) -> int:
        """KV blocks that the GPUs' memory holds (seed, "Tensor Parallelism Memory Model")."""
        hw = self.worker.hw
        return num_gpu_blocks(
            self.model.shape,
            memory_gb=hw.memory_gb,
            tp=hw.tp,
            block_size=self.worker.vllm_params.block_size,
            gpu_memory_utilization=hw.gpu_memory_utilization,
            activation_reserve_gb=hw.activation_reserve_gb,
        )

    @property
    def total_gpu_blocks(self) -> int:
        """KV blocks that the worker can hand out: vLLM keeps one of the pool's to itself."""
        return self._pool_blocks - (self.worker.vllm_params.engine == "vllm_v1")

    @property
    def _pool_blocks(self) -> int:
        params = self.worker.vllm_params
        if params.num_gpu_blocks_override is not None:
            return params.num_gpu_blocks_override
        if params.gpu_memory_kvcache_bytes is not None:
            block_bytes = params.block_size * self.model.shape.kv_bytes_per_token
            return params.gpu_memory_kvcache_bytes // block_bytes
        return self.memory_blocks


def scenario_names() -> list[str]:
    """Names of the packaged scenarios, sorted."""
    return sorted(path.stem for path in SCENARIOS.glob("*.json"))


def load_config(
    source: str | Path | Mapping[str, Any] | Config,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Reads and checks a configuration.

    Args:
        source: A packaged scenario's name, the path of a JSON file, a mapping of the same form, or
            a `Config`.
        overrides: Values that replace those of `source`, by dotted key, such as
            `{"worker.vllm_params.max_num_seqs": 8}`.

    Raises:
        ConfigError: The source cannot be read, or a key is unknown, has the wrong type or an
            impossible value; the message names all such keys.
    """
    label, data = _read(source)
    for key, value in (overrides or {}).items():
        _override(data, key, value)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(label, data, Config, error)) from None


def _read(source: str | Path | Mapping[str, Any] | Config) -> tuple[str, dict[str, Any]]:
    if isinstance(source, Config):
        return source.name, source.model_dump()
    if isinstance(source, Mapping):
        return "configuration", copy.deepcopy(dict(source))
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"scenario: got {source!r}; allowed: a name, a JSON file's path, a mapping or a Config"
        )
    path = Path(source)
    if isinstance(source, str) and source in scenario_names():
        path = SCENARIOS / f"{source}.json"
    elif not path.is_file():
        near = difflib.get_close_matches(str(source), scenario_names(), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"scenario: got {str(source)!r}{hint}; allowed: the path of a JSON file, or one of "
            f"{', '.join(scenario_names())}"
        )
    return str(path), read_json_object(path)


def _override(data: dict[str, Any], key: str, value: Any) -> None:
    if "[" in key:
        raise ConfigError(f"{key}: an item of a list; allowed: a dotted key, of the whole list")
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{key}: {section!r} is not a section; allowed: a dotted key")
    data[last] = copy.deepcopy(value)


MixtureLength.model_rebuild()
