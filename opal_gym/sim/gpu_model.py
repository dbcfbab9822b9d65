"""How long one engine step takes on the GPUs.

A batch is a list of prefill chunks and a set of decodes. A chunk is a pair (p, c): p tokens
already in the KV cache and c new ones. A decode adds one token to a context of some length, and
all models here depend on the contexts only through their number and their sum.

While the batch does not change, a scheduler can ask for many steps at once (a span). Each model
states its formula once, in ``_latency``, for one step and for an array of steps alike, so that
running a span or its steps one by one gives the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from opal_gym.sim.llm_model import LLMModel

TERA = 1e12

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Chunk = tuple[int, int]
"""A prefill chunk: (tokens already in KV, new tokens)."""


class GPUModel(ABC):
    """Latency of engine steps; subclasses supply the formula."""

    @abstractmethod
    def _latency(
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: float, step: Any
    ) -> Any:
        """Latency of a step of a span in which the batch does not change.

        In step number s, chunk (p, c) has become (p + s * c, c), and the sum of the decode
        contexts has become decode_context + s * num_decodes.

        The integer 0 and an array must go through the same operations in the same order, and
        ``pow`` may take only scalars that do not depend on the step, as NumPy's differs from
        Python's in the last bit. The latency of a chunk alone, and of decodes alone, must be
        linear in the step: ``unloaded_latency`` sums such steps in closed form.

        Args:
            chunks: Prefill chunks of the span's first step.
            num_decodes: Number of decodes.
            decode_context: Sum of the decode contexts in the span's first step, in tokens.
            step: The int 0, or an int64 array of step numbers.

        Returns:
            Seconds: a float for the int, a float64 array for an array.
        """

    def batch_latency(
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: int
    ) -> float:
        """Latency of one step.

        Args:
            chunks: Prefill chunks.
            num_decodes: Number of decodes.
            decode_context: Sum of the decode contexts, in tokens.

        Returns:
            Seconds.
        """
        latency: float = self._latency(chunks, num_decodes, decode_context, 0)
        return latency

    def span_latencies(
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: int, num_steps: int
    ) -> NDArray[np.float64]:
        """Latency of each step of a span in which the batch does not change.

        Args:
            chunks: Prefill chunks of the first step; each advances by its new tokens every step.
            num_decodes: Number of decodes; each context grows by one token every step.
            decode_context: Sum of the decode contexts in the first step, in tokens.
            num_steps: Number of steps.

        Returns:
            Seconds, of shape (num_steps,); each bit-equal to ``batch_latency`` of its batch.
        """
        steps = np.arange(num_steps, dtype=np.int64)
        latencies: NDArray[np.float64] = self._latency(chunks, num_decodes, decode_context, steps)
        return latencies

    def step_latency(self, chunks: Sequence[Chunk], decode_contexts: Sequence[int]) -> float:
        """Latency of one step.

        Args:
            chunks: Prefill chunks.
            decode_contexts: Context of each decode, in tokens.

        Returns:
            Seconds.
        """
        return self.batch_latency(chunks, len(decode_contexts), sum(decode_contexts))

    def get_prefill_latency(self, total_context: int, cached_prefix: int) -> float:
        """Latency of one prefill chunk alone (the seed page's "Timing Calculation").

        Args:
            total_context: Tokens in KV once the chunk is done.
            cached_prefix: Tokens of them that are in KV before.

        Returns:
            Seconds; 0 if all tokens are in KV already.
        """
        new_tokens = total_context - cached_prefix
        if new_tokens == 0:
            return 0.0
        return self.batch_latency(((cached_prefix, new_tokens),), 0, 0)

    def get_decode_latency_batch(self, contexts: Sequence[int]) -> float:
        """Latency of a batch of decodes alone (the seed page's "Timing Calculation").

        Args:
            contexts: Context of each decode, in tokens.

        Returns:
            Seconds; 0 for an empty batch.
        """
        if not contexts:
            return 0.0
        return self.batch_latency((), len(contexts), sum(contexts))

    def unloaded_latency(
        self,
        prompt_tokens: int,
        output_tokens: int,
        chunk_tokens: int,
        first_token_at_prefill_end: bool,
    ) -> float:
        """Time that a request takes alone on the worker, with nothing of it cached.

        Args:
            prompt_tokens: Length of the prompt.
            output_tokens: Tokens to generate, at least 1.
            chunk_tokens: Longest prefill chunk.
            first_token_at_prefill_end: Whether the prefill's last step makes the first output
                token, as in vLLM; otherwise the first decode step makes it, as in the seed.

        Returns:
            Seconds.
        """
        return self._unloaded_prefill(prompt_tokens, chunk_tokens) + self._unloaded_decode(
            prompt_tokens + first_token_at_prefill_end, prompt_tokens + output_tokens
        )

    def _unloaded_prefill(self, prompt_tokens: int, chunk_tokens: int) -> float:
        """Seconds to prefill a prompt alone, in full chunks and a last shorter one."""
        num_full, rest = divmod(prompt_tokens, chunk_tokens)
        full_tokens = num_full * chunk_tokens
        total = 0.0
        if num_full:
            first = self.batch_latency(((0, chunk_tokens),), 0, 0)
            last = self.batch_latency(((full_tokens - chunk_tokens, chunk_tokens),), 0, 0)
            total += num_full * (first + last) / 2
        if rest:
            total += self.batch_latency(((full_tokens, rest),), 0, 0)
        return total

    def _unloaded_decode(self, start: int, stop: int) -> float:
        """Seconds of single decodes at the contexts start, start + 1, ..., stop - 1."""
        num_steps = stop - start
        if num_steps == 0:
            return 0.0
        mean = self._latency((), 1, (start + stop - 1) / 2, 0)
        return num_steps * float(mean)


class RooflineGPUModel(GPUModel):
    """The seed's rule: the longer of the longest prefill and the batched decode.

    Source: the seed page's "Timing Calculation", with the formulas of DESIGN section 5. The
    prefills of a batch run beside each other for free, so the rule is known to be too fast.
    """

    def __init__(
        self,
        model: LLMModel,
        tflops: float,
        mem_bw_TBps: float,  # noqa: N803 - the name in the seed's configuration
        tp: int,
        a: float = 4.0,
        b: float = 24.0,
    ) -> None:
        """Precomputes the coefficients.

        Args:
            model: The model served.
            tflops: Peak of one GPU, in 10**12 FLOP/s.
            mem_bw_TBps: Memory bandwidth of one GPU, in 10**12 bytes/s.
            tp: Number of GPUs (tensor parallelism).
            a: FLOPs per layer, hidden unit and pair of tokens of the attention.
            b: FLOPs per layer, squared hidden unit and new token of the matrices.
        """
        flops_per_s = tflops * TERA * tp
        bytes_per_s = mem_bw_TBps * TERA * tp
        self._pair_s = model.layers * a * model.hidden / flops_per_s
        self._token_s = model.layers * b * model.hidden**2 / flops_per_s
        self._weights_s = model.model_size_bytes / bytes_per_s
        self._context_s = model.kv_bytes_per_token / bytes_per_s

    def _latency(
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: float, step: Any
    ) -> Any:
        larger: Any = max if isinstance(step, int) else np.maximum
        latency: Any = 0.0
        if num_decodes:
            latency = self._weights_s + self._context_s * (decode_context + step * num_decodes)
        for p, c in chunks:
            # n(n + 1) - p(p + 1) with n = p + c, where p grows by c every step.
            pairs = c * (2 * p + c + 1) + step * (2 * c * c)
            latency = larger(latency, self._pair_s * pairs + self._token_s * c)
        return latency


class GPUSpec(NamedTuple):
    """Datasheet of one GPU.

    Attributes:
        memory_gb: Memory, in GiB.
        tflops: Peak of dense bf16 matrices, in 10**12 FLOP/s.
        mem_bw_TBps: Memory bandwidth, in 10**12 bytes/s.
    """

    memory_gb: float
    tflops: float
    mem_bw_TBps: float  # noqa: N815 - the name in the seed's configuration


# H100 and H200 are the SXM modules, A100 the SXM module of 80 GB.
GPU_SPECS: Mapping[str, GPUSpec] = MappingProxyType(
    {
        "H100": GPUSpec(80.0, 989.0, 3.35),
        "H200": GPUSpec(141.0, 989.0, 4.8),
        "A100": GPUSpec(80.0, 312.0, 2.039),
        "RTX 4090": GPUSpec(24.0, 165.2, 1.008),
    }
)
"""The datasheets by GPU name. The fitted constants belong to these peaks and bandwidths."""


class _Constants(BaseModel):
    """Measured constants, in a form that a configuration can hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class GPUConstants(_Constants):
    """Constants of `CalibratedGPUModel`, fitted to measured kernels or steps of one GPU type."""

    mfu_linear: Positive = Field(description="Fraction of the peak that the matrices reach")
    mbu_weights: Positive = Field(description="Fraction of the bandwidth at which weights are read")
    mfu_attention: Positive = Field(
        description="Fraction of the peak that prefill attention reaches"
    )
    mbu_kv: Positive = Field(
        description="Fraction of the bandwidth at which decode attention reads the KV cache"
    )
    q: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        description="Exponent that joins compute and weight reading; 1: their sum; large: their "
        "maximum"
    )
    layer_overhead_s: NonNegative = Field(description="Seconds per layer")
    allreduce_s: NonNegative = Field(0.0, description="Latency of an all-reduce in s")
    link_bytes_per_s: Positive | None = Field(
        None, description="Bandwidth between the GPUs; needed at tp > 1"
    )


class SimpleConstants(_Constants):
    """Constants of `SimpleGPUModel`."""

    mfu: Positive = Field(description="Fraction of the peak FLOP/s that a step reaches")
    mbu: Positive = Field(description="Fraction of the memory bandwidth that a step reaches")
    overhead_s: NonNegative = Field(0.0, description="Seconds of any step, the host's included")
    allreduce_s: NonNegative = Field(0.0, description="Latency of an all-reduce in s")
    link_bytes_per_s: Positive | None = Field(
        None, description="Bandwidth between the GPUs; needed at tp > 1"
    )


GPU_CONSTANTS: Mapping[str, GPUConstants | SimpleConstants] = MappingProxyType(
    {
        "H100": GPUConstants(
            mfu_linear=0.705,
            mbu_weights=0.874,
            mfu_attention=0.650,
            mbu_kv=0.857,
            q=2.23,
            layer_overhead_s=39.5e-6,
            allreduce_s=4.5e-6,
            link_bytes_per_s=287e9,
        ),
        "H200": GPUConstants(
            mfu_linear=0.714,
            mbu_weights=0.857,
            mfu_attention=0.668,
            mbu_kv=0.828,
            q=2.11,
            layer_overhead_s=40.7e-6,
            allreduce_s=3.8e-6,
            link_bytes_per_s=328e9,
        ),
        "A100": GPUConstants(
            mfu_linear=0.802,
            mbu_weights=0.788,
            mfu_attention=0.586,
            mbu_kv=0.730,
            q=1.54,
            layer_overhead_s=53.6e-6,
            allreduce_s=10.1e-6,
            link_bytes_per_s=134e9,
        ),
        # Fits, not shares: the card runs at higher clocks than its datasheet reckons with.
        "RTX 4090": SimpleConstants(mfu=1.09, mbu=0.93),
    }
)
"""The fitted constants by GPU name (the table of ``reference/gpu-model.md``)."""


def default_step_overhead_s(tp: int) -> float:
    """Host overhead of a step in vLLM of 2024-25, in s; about 0 with asynchronous scheduling.

    Args:
        tp: Number of GPUs (tensor parallelism).
    """
    return 1.5e-3 if tp == 1 else 3e-3


def _communication(
    model: LLMModel, constants: GPUConstants | SimpleConstants, tp: int
) -> tuple[float, float]:
    """What the all-reduces of a step cost: seconds per token, and seconds besides.

    There are two in a layer; each moves 2 (tp - 1) / tp of the activations over the links.
    """
    if tp == 1:
        return 0.0, 0.0
    if constants.link_bytes_per_s is None:
        raise ValueError(f"tp {tp} needs link_bytes_per_s, the bandwidth between the GPUs")
    token_bytes = 2 * model.layers * model.hidden * model.dtype_bytes
    token_s = token_bytes * 2 * (tp - 1) / tp / constants.link_bytes_per_s
    return token_s, 2 * model.layers * constants.allreduce_s


class CalibratedGPUModel(GPUModel):
    """One fused forward pass, with constants fitted to measured kernels.

    Source: ``reference/gpu-model.md``. Tensor parallelism divides FLOPs and bytes, a mixture's
    experts included (each is split over the GPUs); the constants were fitted on dense models.
    """

    def __init__(
        self,
        model: LLMModel,
        constants: GPUConstants,
        tflops: float,
        mem_bw_TBps: float,  # noqa: N803 - the name in the seed's configuration
        tp: int,
        step_overhead_s: float | None = None,
    ) -> None:
        """Precomputes the coefficients.

        Args:
            model: The model served.
            constants: Those fitted with this peak and bandwidth.
            tflops: Peak of one GPU, in 10**12 FLOP/s (bf16, dense).
            mem_bw_TBps: Memory bandwidth of one GPU, in 10**12 bytes/s.
            tp: Number of GPUs (tensor parallelism).
            step_overhead_s: Host overhead of a step, in seconds; None: the default of `tp`.

        Raises:
            ValueError: At tp > 1 without a bandwidth between the GPUs.
        """
        if step_overhead_s is None:
            step_overhead_s = default_step_overhead_s(tp)
        flops_per_s = tflops * TERA * tp
        linear_flops_per_s = constants.mfu_linear * flops_per_s
        self._token_s = 2 * model.layer_weights / linear_flops_per_s
        self._head_s = 2 * model.hidden * model.vocab / linear_flops_per_s
        bytes_per_s = mem_bw_TBps * TERA * tp
        weight_bytes_per_s = constants.mbu_weights * bytes_per_s

        # A step has few different numbers of tokens, at most those of its budget.
        @cache
        def weights_s_to_q(tokens: int) -> float:
            return float((model.forward_bytes(tokens) / weight_bytes_per_s) ** constants.q)

        # What a step costs whatever its contexts: decodes alone, over and over.
        @lru_cache(1 << 14)
        def context_free_s(tokens: int, num_seqs: int) -> float:
            linear_s = self._token_s * tokens + self._head_s * num_seqs
            fused_s: float = (linear_s**constants.q + weights_s_to_q(tokens)) ** (1 / constants.q)
            return fused_s + self._fixed_s + self._comm_token_s * tokens

        self._context_free_s = context_free_s
        # Half of a query-key pair's FLOPs, to count c * p + c**2 / 2 in whole numbers.
        half_pair_flops = 2 * model.layers * model.heads * model.head_dim
        self._half_pair_s = half_pair_flops / (constants.mfu_attention * flops_per_s)
        self._context_s = model.kv_bytes_per_token / (constants.mbu_kv * bytes_per_s)
        self._comm_token_s, comm_s = _communication(model, constants, tp)
        self._fixed_s = model.layers * constants.layer_overhead_s + step_overhead_s + comm_s

    def _latency(
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: float, step: Any
    ) -> Any:
        tokens = num_decodes
        half_pairs = 0
        for p, c in chunks:
            tokens += c
            # Without chunks this stays a number, which spares operations on arrays of zeros.
            half_pairs += c * (2 * p + c) + step * (2 * c * c)
        return (
            self._context_free_s(tokens, len(chunks) + num_decodes)
            + self._half_pair_s * half_pairs
            + self._context_s * (decode_context + step * num_decodes)
        )


class SimpleGPUModel(GPUModel):
    """FLOPs over a reached peak, plus bytes over a reached bandwidth, plus an overhead.

    Source: the simple form of ``reference/gpu-model.md``, for a GPU without a fit of its own and
    for one that few measured steps are known of.
    """

    def __init__(
        self,
        model: LLMModel,
        constants: SimpleConstants,
        tflops: float,
        mem_bw_TBps: float,  # noqa: N803 - the name in the seed's configuration
        tp: int,
    ) -> None:
        """Precomputes the coefficients.

        Args:
            model: The model served.
            constants: Those fitted with this peak and bandwidth.
            tflops: Peak of one GPU, in 10**12 FLOP/s (bf16, dense).
            mem_bw_TBps: Memory bandwidth of one GPU, in 10**12 bytes/s.
            tp: Number of GPUs (tensor parallelism).

        Raises:
            ValueError: At tp > 1 without a bandwidth between the GPUs.
        """
        flops_per_s = constants.mfu * tflops * TERA * tp
        bytes_per_s = constants.mbu * mem_bw_TBps * TERA * tp

        # A step has few different numbers of tokens, at most those of its budget.
        @cache
        def weights_s(tokens: int) -> float:
            return model.forward_bytes(tokens) / bytes_per_s

        self._weights_s = weights_s
        self._token_s = 2 * model.layer_weights / flops_per_s
        self._head_s = 2 * model.hidden * model.vocab / flops_per_s
        # Half of a query-key pair's FLOPs, to count c * p + c**2 / 2 in whole numbers.
        self._half_pair_s = 2 * model.layers * model.heads * model.head_dim / flops_per_s
        self._context_s = model.kv_bytes_per_token / bytes_per_s
        self._comm_token_s, comm_s = _communication(model, constants, tp)
        self._fixed_s = constants.overhead_s + comm_s

    def _latency(
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: float, step: Any
    ) -> Any:
        tokens = num_decodes
        half_pairs = 2 * decode_context
        half_pairs_growth = 2 * num_decodes
        context = decode_context
        context_growth = num_decodes
        for p, c in chunks:
            tokens += c
            half_pairs += c * (2 * p + c)
            half_pairs_growth += 2 * c * c
            context += p + c
            context_growth += c
        num_seqs = len(chunks) + num_decodes
        return (
            self._token_s * tokens
            + self._head_s * num_seqs
            + self._weights_s(tokens)
            + (self._fixed_s + self._comm_token_s * tokens)
            + self._half_pair_s * (half_pairs + step * half_pairs_growth)
            + self._context_s * (context + step * context_growth)
        )


class SyntheticGPUModel(GPUModel):
    """A constant, or a base and terms linear in the batch; for tests (DESIGN section 5)."""

    def __init__(
        self,
        base_s: float,
        per_prefill_token_s: float = 0.0,
        per_decode_s: float = 0.0,
        per_context_token_s: float = 0.0,
    ) -> None:
        """Stores the terms.

        Args:
            base_s: Seconds of any step.
            per_prefill_token_s: Seconds per new token of a prefill chunk.
            per_decode_s: Seconds per decode.
            per_context_token_s: Seconds per token of the decode contexts.
        """
        self._base_s = base_s
        self._per_prefill_token_s = per_prefill_token_s
        self._per_decode_s = per_decode_s
        self._per_context_token_s = per_context_token_s

    def _latency(
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: float, step: Any
    ) -> Any:
        new_tokens = sum(c for _, c in chunks)
        return (
            self._base_s
            + self._per_prefill_token_s * new_tokens
            + self._per_decode_s * num_decodes
            + self._per_context_token_s * (decode_context + step * num_decodes)
        )
