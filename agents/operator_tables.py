"""Measured times of single GPU kernels, and what they sum to for an engine step.

The tables are those that AIConfigurator publishes for vLLM (matrix products, attention over
prompts, attention of decodes, all-reduce), one file an operator. A step's kernels are, per layer:
the products q/k/v, o, gate/up and down; the attention of its chunks and that of its decodes; two
all-reduces at tp > 1; and besides, once, the output head over the positions that are sampled.

What the tables lack is composed. Norms and the activation, which are not measured, take
AIConfigurator's estimate: their bytes at 80 % of the bandwidth, plus 3 µs each. A chunk c after a
cached prefix p takes the share ((p + c)² - p²) / (p + c)² of the attention over p + c tokens. In a
mixed step, the attentions of chunks and decodes follow each other.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TextIO, cast

import numpy as np

from opal_gym.sim.gpu_model import GPU_SPECS, TERA, Chunk
from opal_gym.sim.llm_model import LLMModel

MILLI = 1e-3

ELEMENTWISE_MBU = 0.8
ELEMENTWISE_S = 3e-6
"""AIConfigurator's estimate of a kernel that only reads and writes."""

GRAPH_TOKENS = 512
"""Up to so many tokens, vLLM's steps run as captured CUDA graphs, beyond them eagerly."""

Curve = dict[int, float]
"""Milliseconds by size."""


class OperatorTables:
    """The operator tables of one GPU type, interpolated linearly; times in s.

    Args:
        folder: Holds `aic_<gpu>_*.csv` or `.csv.gz`.
        gpu: A key of `GPU_SPECS`.

    Raises:
        FileNotFoundError: A table is not there.
    """

    def __init__(self, folder: Path, gpu: str = "H100") -> None:
        prefix = f"aic_{gpu.lower()}_"
        self._bytes_per_s = GPU_SPECS[gpu].mem_bw_TBps * TERA
        self._gemm: dict[tuple[int, int], Curve] = defaultdict(dict)
        for (m, n, k), ms in _rows(folder, prefix + "gemm_bf16", ("m", "n", "k")):
            self._gemm[n, k][m] = ms
        self._sizes = sorted({n for n, _ in self._gemm})
        shape = ("num_heads", "num_key_value_heads", "batch_size")
        self._context = self._attention(
            folder, prefix + "context_attention_bf16_hd128", (*shape, "isl")
        )
        self._generation = self._attention(
            folder, prefix + "generation_attention_bf16_hd128", (*shape, "step")
        )
        self._all_reduce: dict[tuple[int, str], Curve] = defaultdict(dict)
        columns = ("num_gpus", "message_size")
        for backend in ("vllm_graph", "vllm_eager"):
            for (gpus, elements), ms in _rows(folder, prefix + "allreduce", columns, backend):
                self._all_reduce[gpus, backend][elements] = ms

    @staticmethod
    def _attention(
        folder: Path, name: str, columns: Sequence[str]
    ) -> dict[tuple[int, int], dict[tuple[int, int], float]]:
        table: dict[tuple[int, int], dict[tuple[int, int], float]] = defaultdict(dict)
        for (heads, kv_heads, batch, tokens), ms in _rows(folder, name, columns):
            table[heads, kv_heads][batch, tokens] = ms
        return dict(table)

    def has(self, model: LLMModel, tp: int) -> bool:
        """Whether both attention tables hold the model's heads on one of `tp` GPUs."""
        heads = _heads(model, tp)
        return (
            model.head_dim == 128
            and heads in self._context
            and heads in self._generation
            and (tp == 1 or (tp, "vllm_graph") in self._all_reduce)
        )

    def prompts(self, model: LLMModel, tp: int) -> list[tuple[int, int]]:
        """The measured (number of prompts, tokens in each) of the context attention."""
        return sorted(self._context[_heads(model, tp)])

    def decodes(self, model: LLMModel, tp: int) -> list[tuple[int, int]]:
        """The measured (number of decodes, context of each) of the generation attention."""
        return sorted(self._generation[_heads(model, tp)])

    def step_s(
        self,
        model: LLMModel,
        tp: int,
        chunks: Sequence[Chunk],
        decodes: tuple[int, int],
        *,
        eager: bool = False,
    ) -> float:
        """Sum of a step's kernels on one of `tp` GPUs, in s; the host is not in it.

        Args:
            model: The model served.
            tp: Number of GPUs.
            chunks: Prefill chunks; all are equal.
            decodes: Number of decodes, and the context of each, as measured.
            eager: Whether the all-reduces of steps above `GRAPH_TOKENS` are those outside of CUDA
                graphs, which copy more, rather than those inside.
        """
        heads = _heads(model, tp)
        num_decodes, context = decodes
        tokens = sum(c for _, c in chunks) + num_decodes
        layer_ms = self._products_ms(model, tp, tokens)
        if chunks:
            p, c = chunks[0]
            share = ((p + c) ** 2 - p**2) / (p + c) ** 2
            layer_ms += share * self._context[heads][len(chunks), p + c]
        if num_decodes:
            layer_ms += self._generation[heads][num_decodes, context]
        layer_s = layer_ms * MILLI + self._elementwise_s(model, tp, tokens)
        if tp > 1:
            backend = "vllm_eager" if eager and tokens > GRAPH_TOKENS else "vllm_graph"
            message = self._all_reduce[tp, backend]
            layer_s += 2 * _interpolate(message, tokens * model.hidden) * MILLI
        sampled = len(chunks) + num_decodes
        head_ms = self._gemm_ms(sampled, model.vocab / tp, model.hidden)
        return model.layers * layer_s + head_ms * MILLI

    def _products_ms(self, model: LLMModel, tp: int, tokens: int) -> float:
        qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
        shapes = (
            (qkv / tp, model.hidden),
            (model.hidden, model.heads * model.head_dim / tp),
            (2 * model.intermediate / tp, model.hidden),
            (model.hidden, model.intermediate / tp),
        )
        return sum(self._gemm_ms(tokens, n, k) for n, k in shapes)

    def _elementwise_s(self, model: LLMModel, tp: int, tokens: int) -> float:
        """Two norms with their residual additions, and the MLP's activation."""
        norms = 2 * 4 * model.hidden
        activation = 3 * model.intermediate / tp
        moved = tokens * (norms + activation) * model.dtype_bytes
        return moved / (ELEMENTWISE_MBU * self._bytes_per_s) + 3 * ELEMENTWISE_S

    def _gemm_ms(self, m: int, n: float, k: float) -> float:
        """An (m, k) by (k, n) product, linear between the measured n and k around it.

        A product wider than the table (the output head) is several narrower ones.
        """
        parts = int(np.ceil(n / self._sizes[-1]))
        n /= parts
        for low_k, high_k in _around(self._sizes, k):
            low, high = (self._gemm_at_ms(m, n, measured) for measured in (low_k, high_k))
            if low is not None and high is not None:
                return parts * _between(k, low_k, high_k, low, high)
        raise ValueError(f"no measured products around m {m}, n {n:g}, k {k:g}")

    def _gemm_at_ms(self, m: int, n: float, k: int) -> float | None:
        measured = [
            size
            for size in self._sizes
            if (size, k) in self._gemm and m <= max(self._gemm[size, k])
        ]
        for low, high in _around(measured, n):
            return _between(n, low, high, *(_interpolate(self._gemm[i, k], m) for i in (low, high)))
        return None


def _heads(model: LLMModel, tp: int) -> tuple[int, int]:
    return model.heads // tp, max(1, model.kv_heads // tp)


def _around(sizes: Sequence[int], size: float) -> Iterator[tuple[int, int]]:
    """Pairs of sizes with `size` between them, near ones first."""
    low = [s for s in reversed(sizes) if s <= size]
    high = [s for s in sizes if s >= size]
    return product(low, high)


def _between(x: float, low: int, high: int, at_low: float, at_high: float) -> float:
    return at_low if low == high else at_low + (at_high - at_low) * (x - low) / (high - low)


def _interpolate(curve: Curve, size: int) -> float:
    sizes = sorted(curve)
    return float(np.interp(size, sizes, [curve[s] for s in sizes]))


def _rows(
    folder: Path, name: str, columns: Sequence[str], backend: str | None = None
) -> Iterator[tuple[list[int], float]]:
    """The columns' integers, and the latency in ms, of each row (of the backend)."""
    path = folder / f"{name}.csv"
    with path.open() if path.exists() else gzip.open(f"{path}.gz", "rt") as file:
        for row in csv.DictReader(cast(TextIO, file)):
            if backend is None or row["backend"] == backend:
                yield [int(row[column]) for column in columns], float(row["latency"])
