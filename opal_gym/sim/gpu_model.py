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
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.llm_model import LLMModel

TERA = 1e12

Chunk = tuple[int, int]
"""A prefill chunk: (tokens already in KV, new tokens)."""


class GPUModel(ABC):
    """Latency of engine steps; subclasses supply the formula."""

    @abstractmethod
    def _latency(
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: int, step: Any
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
        first = self.batch_latency((), 1, start)
        last = self.batch_latency((), 1, stop - 1)
        return num_steps * (first + last) / 2


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
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: int, step: Any
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


@dataclass(frozen=True)
class GPUConstants:
    """Fitted constants of one GPU type, a row of the table in ``reference/gpu-model.md``.

    Attributes:
        mfu_linear: Fraction of the peak FLOP/s that the matrices reach.
        mbu_weights: Fraction of the bandwidth at which weights are read.
        mfu_attention: Fraction of the peak FLOP/s that prefill attention reaches.
        mbu_kv: Fraction of the bandwidth at which decode attention reads the KV cache.
        q: Exponent that joins compute and weight reading; infinity would be their maximum.
        layer_overhead_s: Time per layer, in seconds.
        allreduce_s: Latency of one all-reduce, in seconds.
        link_bytes_per_s: Bandwidth between the GPUs.
    """

    mfu_linear: float
    mbu_weights: float
    mfu_attention: float
    mbu_kv: float
    q: float
    layer_overhead_s: float
    allreduce_s: float
    link_bytes_per_s: float


# H100 and H200 are the SXM modules, A100 the SXM module of 80 GB.
GPU_CONSTANTS: Mapping[str, GPUConstants] = MappingProxyType(
    {
        "H100": GPUConstants(0.705, 0.874, 0.650, 0.857, 2.23, 39.5e-6, 4.5e-6, 287e9),
        "H200": GPUConstants(0.714, 0.857, 0.668, 0.828, 2.11, 40.7e-6, 3.8e-6, 328e9),
        "A100": GPUConstants(0.802, 0.788, 0.586, 0.730, 1.54, 53.6e-6, 10.1e-6, 134e9),
    }
)
"""The fitted constants by GPU name."""


class CalibratedGPUModel(GPUModel):
    """One fused forward pass, with constants fitted to measured kernels.

    Source: ``reference/gpu-model.md``. The constants belong to the peaks they were fitted with:
    989 TFLOPS and 3.35 TB/s (H100), 989 and 4.8 (H200), 312 and 2.039 (A100).
    """

    def __init__(
        self,
        model: LLMModel,
        gpu: str,
        tflops: float,
        mem_bw_TBps: float,  # noqa: N803 - the name in the seed's configuration
        tp: int,
        step_overhead_s: float | None = None,
    ) -> None:
        """Precomputes the coefficients.

        Args:
            model: The model served.
            gpu: A key of ``GPU_CONSTANTS``.
            tflops: Peak of one GPU, in 10**12 FLOP/s (bf16, dense).
            mem_bw_TBps: Memory bandwidth of one GPU, in 10**12 bytes/s.
            tp: Number of GPUs (tensor parallelism).
            step_overhead_s: Host overhead of a step, in seconds; None takes that of vLLM in
                2024-25, 1.5 ms on one GPU and 3 ms on more.

        Raises:
            ValueError: If the GPU has no constants.
        """
        if gpu not in GPU_CONSTANTS:
            allowed = ", ".join(sorted(GPU_CONSTANTS))
            raise ValueError(f"no calibrated constants for GPU {gpu!r}; allowed: {allowed}")
        k = GPU_CONSTANTS[gpu]
        if step_overhead_s is None:
            step_overhead_s = 1.5e-3 if tp == 1 else 3e-3
        flops_per_s = tflops * TERA * tp
        bytes_per_s = mem_bw_TBps * TERA * tp
        linear_flops_per_s = k.mfu_linear * flops_per_s
        self._q = k.q
        self._inverse_q = 1 / k.q
        self._token_s = 2 * model.layer_weights / linear_flops_per_s
        self._head_s = 2 * model.hidden * model.vocab / linear_flops_per_s
        self._weights_s_to_q = (model.forward_bytes / (k.mbu_weights * bytes_per_s)) ** k.q
        # Half of a query-key pair's FLOPs, to count c * p + c**2 / 2 in whole numbers.
        half_pair_flops = 2 * model.layers * model.heads * model.head_dim
        self._half_pair_s = half_pair_flops / (k.mfu_attention * flops_per_s)
        self._context_s = model.kv_bytes_per_token / (k.mbu_kv * bytes_per_s)
        self._fixed_s = model.layers * k.layer_overhead_s + step_overhead_s
        self._comm_token_s = 0.0
        if tp > 1:
            # Two all-reduces per layer, each moving 2 (tp - 1) / tp of the activations.
            token_bytes = 2 * model.layers * model.hidden * model.dtype_bytes
            self._comm_token_s = token_bytes * 2 * (tp - 1) / tp / k.link_bytes_per_s
            self._fixed_s += 2 * model.layers * k.allreduce_s

    def _latency(
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: int, step: Any
    ) -> Any:
        tokens = num_decodes
        half_pairs = 0
        half_pairs_growth = 0
        for p, c in chunks:
            tokens += c
            half_pairs += c * (2 * p + c)
            half_pairs_growth += 2 * c * c
        num_seqs = len(chunks) + num_decodes
        linear_s = self._token_s * tokens + self._head_s * num_seqs
        fused_s = (linear_s**self._q + self._weights_s_to_q) ** self._inverse_q
        return (
            (fused_s + self._fixed_s + self._comm_token_s * tokens)
            + self._half_pair_s * (half_pairs + step * half_pairs_growth)
            + self._context_s * (decode_context + step * num_decodes)
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
        self, chunks: Sequence[Chunk], num_decodes: int, decode_context: int, step: Any
    ) -> Any:
        new_tokens = sum(c for _, c in chunks)
        return (
            self._base_s
            + self._per_prefill_token_s * new_tokens
            + self._per_decode_s * num_decodes
            + self._per_context_token_s * (decode_context + step * num_decodes)
        )
