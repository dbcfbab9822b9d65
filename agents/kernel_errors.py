"""How far the calibrated model is from the sums of measured kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agents.operator_tables import OperatorTables
from opal_gym.sim.gpu_model import (
    GPU_CONSTANTS,
    GPU_SPECS,
    CalibratedGPUModel,
    Chunk,
    GPUConstants,
    RooflineGPUModel,
)
from opal_gym.sim.llm_model import LLMModel, get_model, num_gpu_blocks

Kind = Literal["prefill", "decode", "mixed"]
KINDS: tuple[Kind, ...] = ("prefill", "decode", "mixed")

CASES = (
    ("llama-3-8b", 1),
    ("mistral-7b", 1),
    ("llama-3-8b", 2),
    ("llama-3-70b", 2),
    ("llama-3-8b", 4),
    ("llama-3-70b", 4),
    ("qwen2.5-72b", 4),
    ("llama-3-70b", 8),
    ("qwen2.5-72b", 8),
)
"""Models and the numbers of GPUs that they are served on."""

MIN_TOKENS, MAX_TOKENS = 64, 8192
"""Tokens of the prefill steps, and the shortest context of the decodes."""

MAX_SEQS = 256

MIXED_CHUNKS: tuple[Chunk, ...] = (
    (0, 256),
    (0, 512),
    (0, 1024),
    (0, 2048),
    (512, 512),
    (1536, 512),
    (1024, 1024),
    (2048, 2048),
    (6144, 2048),
)
MIXED_DECODES = (1, 8, 32, 64, 128, 256)
MIXED_CONTEXTS = (255, 1023, 4095)


@dataclass(frozen=True)
class KernelErrors:
    """Steps of one kind on one model; times in s.

    Attributes:
        model: The model's name.
        tp: Number of GPUs.
        kind: What the steps hold.
        predicted: By the calibrated model without host overhead, shape (steps,).
        roofline: By the seed's rule, shape (steps,).
        measured: Sums of the measured kernels, shape (steps,).
    """

    model: str
    tp: int
    kind: Kind
    predicted: NDArray[np.float64]
    roofline: NDArray[np.float64]
    measured: NDArray[np.float64]

    @property
    def relative(self) -> NDArray[np.float64]:
        """Predicted / measured - 1 of each step."""
        return self.predicted / self.measured - 1

    @property
    def roofline_relative(self) -> NDArray[np.float64]:
        """The same of the seed's rule."""
        return self.roofline / self.measured - 1


def kernel_errors(tables: OperatorTables, gpu: str, *, eager: bool = False) -> list[KernelErrors]:
    """Compares the calibrated model with the sums of kernels, case by case.

    Args:
        tables: Measured kernels of the GPU.
        gpu: Its name.
        eager: See `OperatorTables.step_s`.
    """
    constants = GPU_CONSTANTS[gpu]
    assert isinstance(constants, GPUConstants)
    spec = GPU_SPECS[gpu]
    results = []
    for name, tp in CASES:
        model = get_model(name)
        calibrated = CalibratedGPUModel(
            model, constants, spec.tflops, spec.mem_bw_TBps, tp, step_overhead_s=0.0
        )
        roofline = RooflineGPUModel(model, spec.tflops, spec.mem_bw_TBps, tp)
        blocks = num_gpu_blocks(
            model,
            memory_gb=spec.memory_gb,
            tp=tp,
            block_size=16,
            gpu_memory_utilization=0.9,
            activation_reserve_gb=2.0,
        )
        for kind in KINDS:
            steps = list(_steps(tables, model, tp, kind, max_context=16 * blocks))
            batches = [(chunks, n, n * k) for chunks, (n, k) in steps]
            results.append(
                KernelErrors(
                    name,
                    tp,
                    kind,
                    predicted=np.array([calibrated.batch_latency(*batch) for batch in batches]),
                    roofline=np.array([roofline.batch_latency(*batch) for batch in batches]),
                    measured=np.array(
                        [tables.step_s(model, tp, *step, eager=eager) for step in steps]
                    ),
                )
            )
    return results


def _steps(
    tables: OperatorTables, model: LLMModel, tp: int, kind: Kind, max_context: int
) -> Iterator[tuple[Sequence[Chunk], tuple[int, int]]]:
    """Steps that an engine makes and whose attention was measured: chunks, and decodes."""
    prompts = tables.prompts(model, tp)
    decodes = [(n, k) for n, k in tables.decodes(model, tp) if n * (k + 1) <= max_context]
    if kind == "prefill":
        for n, tokens in prompts:
            if MIN_TOKENS <= n * tokens <= MAX_TOKENS and n <= MIN_TOKENS:
                yield [(0, tokens)] * n, (0, 0)
    elif kind == "decode":
        for n, k in decodes:
            if n <= MAX_SEQS and k + 1 >= MIN_TOKENS:
                yield [], (n, k)
    else:
        for p, c in MIXED_CHUNKS:
            for n, k in decodes:
                measured = (1, p + c) in prompts
                if measured and n in MIXED_DECODES and k in MIXED_CONTEXTS:
                    yield [(p, c)], (n, k)
