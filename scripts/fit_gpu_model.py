"""Fits a GPU's constants to measured engine steps, and prints what a configuration takes of them.

python scripts/fit_gpu_model.py steps.csv --model llama-3.1-8b --tflops 165.2 --mem-bw-TBps 1.008
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from opal_gym.config import CalibratedParams, ModelConfig
from opal_gym.sim.calibration import Fit, Form, fit, read_steps
from opal_gym.sim.gpu_model import GPUConstants, default_step_overhead_s
from opal_gym.sim.hf_config import read_hf_config
from opal_gym.sim.llm_model import get_model


@dataclass(frozen=True)
class Arguments:
    """Fit a GPU's constants to measured engine steps.

    The CSV has the columns chunks (cached+new tokens of each, separated by spaces), num_decodes,
    decode_context (sum of the contexts) and seconds.
    """

    steps: tyro.conf.Positional[Path]
    """The measured steps."""
    tflops: float
    """Dense bf16 peak of one GPU, 10^12 FLOP/s."""
    mem_bw_TBps: float  # noqa: N815 - the configuration's key
    """Memory bandwidth of one GPU, 10^12 bytes/s."""
    model: str = ModelConfig().name
    """The model that was served: a name, or the path of a Hugging Face config.json."""
    tp: int = 1
    """Number of GPUs (tensor parallelism)."""
    form: Form = "simple"
    """simple: mfu, mbu, overhead; full: six constants, for steps that vary widely."""
    step_overhead_s: float | None = None
    """Host seconds of a step, which the full form does not fit; default: vLLM's of 2024-25."""
    allreduce_s: float = 0.0
    """Latency of an all-reduce in seconds, at tp > 1."""
    link_bytes_per_s: float | None = None
    """Bandwidth between the GPUs, at tp > 1."""


def main(arguments: Arguments) -> None:
    path = Path(arguments.model)
    try:
        model = read_hf_config(path) if path.is_file() else get_model(arguments.model)
        result = fit(
            read_steps(arguments.steps),
            model,
            tflops=arguments.tflops,
            mem_bw_TBps=arguments.mem_bw_TBps,
            tp=arguments.tp,
            form=arguments.form,
            step_overhead_s=arguments.step_overhead_s,
            allreduce_s=arguments.allreduce_s,
            link_bytes_per_s=arguments.link_bytes_per_s,
        )
    except (ImportError, ValueError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    report(result, arguments, Console())


def report(result: Fit, arguments: Arguments, console: Console) -> None:
    table = Table("constant", "value", "standard error", title="Fit", title_justify="left")
    for name, error in result.standard_errors.items():
        table.add_row(name, f"{getattr(result.constants, name):.4g}", f"{error:.2g}")
    console.print(table)
    errors = np.abs(result.relative_errors)
    console.print(
        f"{len(errors)} steps, relative error: median {np.median(errors):.2%}, "
        f"90th percentile {np.quantile(errors, 0.9):.2%}, largest {errors.max():.2%}",
        highlight=False,
    )
    console.print(
        "The configuration's `worker.inference_params`, beside `worker.hw` with "
        f"tflops {arguments.tflops:g}, mem_bw_TBps {arguments.mem_bw_TBps:g}:"
    )
    console.print_json(json.dumps(inference_params(result, arguments)))


def inference_params(result: Fit, arguments: Arguments) -> dict[str, object]:
    constants = result.constants
    if not isinstance(constants, GPUConstants):
        return {"model": "simple", **constants.model_dump(exclude_defaults=True)}
    overhead_s = arguments.step_overhead_s
    if overhead_s is None:
        overhead_s = default_step_overhead_s(arguments.tp)
    timing = CalibratedParams(constants=constants, step_overhead_s=overhead_s)
    return timing.model_dump()


if __name__ == "__main__":
    main(tyro.cli(Arguments))
