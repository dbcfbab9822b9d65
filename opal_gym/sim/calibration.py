"""Fits a GPU model's constants to measured engine steps.

The file of steps is a CSV, a step a row, with a first line that names the columns:

- ``chunks``: the step's prefill chunks, separated by spaces, each ``cached+new`` in tokens (tokens
  in the KV cache before it, and tokens that it computes); empty: none
- ``num_decodes``: number of decoding requests
- ``decode_context``: sum of their contexts, in tokens
- ``seconds``: measured time of the step

Other columns are ignored. ``docs/gpu-model.md`` shows how to measure such steps.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.gpu_model import (
    CalibratedGPUModel,
    Chunk,
    GPUConstants,
    GPUModel,
    SimpleConstants,
    SimpleGPUModel,
)
from opal_gym.sim.llm_model import LLMModel

Form = Literal["simple", "full"]

COLUMNS = ("chunks", "num_decodes", "decode_context", "seconds")

OUTLIER = 0.05
"""Relative errors beyond this weigh less than by their square: steps that the host disturbed."""

MAX_STANDARD_ERROR = 0.5
"""A constant with a larger relative standard error is not told by the steps."""


class StepsError(ValueError):
    """Unusable steps; the message names file, line, column, value and what is allowed."""


@dataclass(frozen=True)
class MeasuredStep:
    """One engine step and how long it took.

    Attributes:
        chunks: Prefill chunks, (tokens already in KV, new tokens) each.
        num_decodes: Number of decodes.
        decode_context: Sum of their contexts, in tokens.
        seconds: Measured time of the step.
    """

    chunks: tuple[Chunk, ...]
    num_decodes: int
    decode_context: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Fitted constants, and how well they describe the steps.

    Attributes:
        constants: What a configuration takes as `worker.inference_params` (the simple form, with
            its `model`), or as its `constants` (the full form).
        standard_errors: Of each fitted constant, in its own unit.
        relative_errors: Predicted / measured - 1 of each step, shape (steps,).
    """

    constants: SimpleConstants | GPUConstants
    standard_errors: dict[str, float]
    relative_errors: NDArray[np.float64]


def read_steps(path: str | Path) -> list[MeasuredStep]:
    """Reads measured steps; the module's docstring describes the file.

    Raises:
        StepsError: The file cannot be read, lacks a column, or has a malformed row.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for column in COLUMNS:
                if column not in (reader.fieldnames or ()):
                    raise StepsError(
                        f"{path}:1: {column}: missing; allowed: a first line that names "
                        f"{', '.join(COLUMNS)}"
                    )
            steps = [_step(f"{path}:{reader.line_num}", row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise StepsError(f"{path}: not a readable CSV file: {error}") from None
    if not steps:
        raise StepsError(f"{path}: got no step; allowed: at least one row")
    return steps


def _step(line: str, row: dict[str, str | None]) -> MeasuredStep:
    def wrong(column: str, allowed: str) -> StepsError:
        return StepsError(f"{line}: {column}: got {row[column]!r}; allowed: {allowed}")

    def count(column: str) -> int:
        text = row[column] or ""
        if not text.isdecimal():
            raise wrong(column, "a whole number, at least 0")
        return int(text)

    chunks = []
    for text in (row["chunks"] or "").split():
        cached, plus, new = text.partition("+")
        if not (plus and cached.isdecimal() and new.isdecimal() and int(new) > 0):
            raise wrong("chunks", "cached+new of each chunk in tokens, new above 0, like 0+512")
        chunks.append((int(cached), int(new)))
    num_decodes, decode_context = count("num_decodes"), count("decode_context")
    if decode_context < num_decodes:
        raise wrong("decode_context", f"at least num_decodes = {num_decodes}")
    if not chunks and not num_decodes:
        raise wrong("num_decodes", "above 0 where chunks is empty")
    try:
        seconds = float(row["seconds"] or "")
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise wrong("seconds", "a finite number above 0")
    return MeasuredStep(tuple(chunks), num_decodes, decode_context, seconds)


def fit(
    steps: Sequence[MeasuredStep],
    model: LLMModel,
    *,
    tflops: float,
    mem_bw_TBps: float,  # noqa: N803 - the name in the seed's configuration
    tp: int = 1,
    form: Form = "simple",
    step_overhead_s: float | None = None,
    allreduce_s: float = 0.0,
    link_bytes_per_s: float | None = None,
) -> Fit:
    """Fits the constants of a GPU to measured steps, by least squares of the relative errors.

    The constants belong to the peak and the bandwidth that they are fitted with.

    Args:
        steps: Measured steps: prefills and decodes of several sizes, at least as many as there are
            constants (three of the simple form, six of the full one).
        model: The model that was served.
        tflops: Peak of one GPU, in 10**12 FLOP/s.
        mem_bw_TBps: Memory bandwidth of one GPU, in 10**12 bytes/s.
        tp: Number of GPUs (tensor parallelism).
        form: `simple`: mfu, mbu and an overhead per step; `full`: the constants of
            `GPUConstants`, for steps in which decodes and prefills vary widely.
        step_overhead_s: Of the full form: the host's overhead of a step in s, which these steps
            cannot tell from that of the layers; None: the default of `tp`.
        allreduce_s: Latency of an all-reduce in s, at tp > 1; measured apart.
        link_bytes_per_s: Bandwidth between the GPUs, at tp > 1; measured apart.

    Raises:
        StepsError: The steps do not tell a constant.
        ValueError: At tp > 1 without `link_bytes_per_s`.
        ImportError: SciPy is not installed (the extra `calibrate`).
    """
    links: dict[str, Any] = {"allreduce_s": allreduce_s, "link_bytes_per_s": link_bytes_per_s}
    if form == "simple":
        # Start, lowest, highest and scale of each constant.
        ranges = {
            "mfu": (0.6, 0.01, 3.0, 1.0),
            "mbu": (0.8, 0.01, 3.0, 1.0),
            "overhead_s": (1e-3, 0.0, 1.0, 1e-3),
        }

        def make(values: dict[str, float]) -> tuple[SimpleConstants | GPUConstants, GPUModel]:
            constants = SimpleConstants(**values, **links)
            return constants, SimpleGPUModel(model, constants, tflops, mem_bw_TBps, tp)
    else:
        ranges = {
            "mfu_linear": (0.7, 0.01, 3.0, 1.0),
            "mbu_weights": (0.8, 0.01, 3.0, 1.0),
            "mfu_attention": (0.6, 0.01, 3.0, 1.0),
            "mbu_kv": (0.8, 0.01, 3.0, 1.0),
            "q": (2.0, 1.0, 20.0, 1.0),
            "layer_overhead_s": (4e-5, 0.0, 1e-2, 1e-5),
        }

        def make(values: dict[str, float]) -> tuple[SimpleConstants | GPUConstants, GPUModel]:
            constants = GPUConstants(**values, **links)
            gpu = CalibratedGPUModel(model, constants, tflops, mem_bw_TBps, tp, step_overhead_s)
            return constants, gpu

    return _least_squares(steps, ranges, make)


def _least_squares(
    steps: Sequence[MeasuredStep],
    ranges: dict[str, tuple[float, float, float, float]],
    make: Callable[[dict[str, float]], tuple[SimpleConstants | GPUConstants, GPUModel]],
) -> Fit:
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise ImportError(f"{error}: a fit needs SciPy (the extra calibrate)") from error

    if len(steps) < len(ranges):
        raise StepsError(f"got {len(steps)} steps; allowed: at least {len(ranges)}")
    measured = np.array([step.seconds for step in steps])

    def relative_errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
        _, gpu = make(dict(zip(ranges, map(float, values), strict=True)))
        predicted = [
            gpu.batch_latency(step.chunks, step.num_decodes, step.decode_context) for step in steps
        ]
        errors: NDArray[np.float64] = np.array(predicted) / measured - 1
        return errors

    start, lowest, highest, scale = (
        np.array(column) for column in zip(*ranges.values(), strict=True)
    )
    solution = least_squares(
        relative_errors,
        start,
        bounds=(lowest, highest),
        x_scale=scale,
        loss="soft_l1",
        f_scale=OUTLIER,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    errors = relative_errors(solution.x)
    standard_errors = _standard_errors(solution.jac, scale, errors)
    too_large = standard_errors > MAX_STANDARD_ERROR * np.maximum(solution.x, scale)
    if too_large.any():
        untold = [name for name, large in zip(ranges, too_large, strict=True) if large]
        raise StepsError(
            f"the steps do not tell {', '.join(untold)}; allowed: steps in which each constant "
            "matters: long prefills for compute, decodes with short and long contexts for "
            "bandwidth, small steps for overheads"
        )
    constants, _ = make(dict(zip(ranges, map(float, solution.x), strict=True)))
    return Fit(constants, dict(zip(ranges, map(float, standard_errors), strict=True)), errors)


def _standard_errors(
    jacobian: NDArray[np.float64], scale: NDArray[np.float64], errors: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of each constant, from the scatter of the errors and the slopes at the solution."""
    # The median bears outliers (1.48 of it is a normal distribution's sigma). At the least 0.1 %:
    # steps without any scatter still must depend on every constant.
    scatter = max(1e-3, 1.48 * float(np.median(np.abs(errors))))
    _, singular, rows = np.linalg.svd(jacobian * scale, full_matrices=False)
    inverse = rows.T / np.maximum(singular, 1e-12)
    standard: NDArray[np.float64] = scatter * np.linalg.norm(inverse, axis=1) * scale
    return standard
