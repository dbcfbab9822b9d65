"""Compares the calibrated GPU model with measured kernels and with a measured run of vLLM.

python scripts/validate_gpu_model.py --plot validation.png
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agents.kernel_errors import KINDS, KernelErrors, kernel_errors
from agents.measured_run import (
    Engine,
    MeasuredRun,
    RequestTimes,
    read_measured_run,
    replay,
    supported_engines,
)
from agents.operator_tables import GRAPH_TOKENS, OperatorTables

TIMES = {"TTFT": ("ttft", 1.0, "s"), "TPOT": ("tpot", 1e3, "ms"), "E2E": ("e2e", 1.0, "s")}


@dataclass(frozen=True)
class Arguments:
    """Compare the calibrated GPU model with measurements.

    Kernels: steps predicted by the model of the H100, without host overhead, against the sums of
    their measured kernels. Run: requests that the real vLLM served on an RTX 4090, replayed.
    """

    data: Path = Path("../shared/data/latency")
    """Folder of the operator tables and of the measured runs."""
    run: str = "llmservingsim_RTX4090_Llama-3.1-8B"
    """The measured run: its files' names without _requests.jsonl and _meta.json."""
    engines: tuple[Engine, ...] = supported_engines()
    """Engine profiles to replay the run with."""
    plot: Path | None = None
    """Also draw predicted over measured into this PNG."""


def main(arguments: Arguments) -> None:
    console = Console()
    if arguments.plot and find_spec("matplotlib") is None:
        Console(stderr=True).print("error: --plot needs matplotlib (the extra calibrate)")
        sys.exit(2)
    try:
        tables = OperatorTables(arguments.data)
        run = read_measured_run(arguments.data / arguments.run)
    except OSError as error:
        Console(stderr=True).print(
            f"error: {error}; allowed: a folder with the measurements (--data)",
            markup=False,
            soft_wrap=True,
        )
        sys.exit(2)
    kernels = kernel_errors(tables, "H100")
    print_kernels(kernels, console, "Kernel sums, H100: relative error of the calibrated model")
    print_kernels(
        [errors for errors in kernel_errors(tables, "H100", eager=True) if errors.tp > 1],
        console,
        f"The same with eager all-reduces in steps above {GRAPH_TOKENS} tokens",
    )
    print_roofline(kernels, console)
    replays = {engine: replay(run, engine) for engine in arguments.engines}
    print_replays(run, replays, console)
    if arguments.plot:
        draw(kernels, run.times, {e: times for e, (times, _) in replays.items()}, arguments.plot)
        console.print(f"wrote {arguments.plot}")


def print_kernels(results: Sequence[KernelErrors], console: Console, title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("model, GPUs")
    for kind in KINDS:
        table.add_column(f"{kind}: median", justify="right")
        table.add_column("p90", justify="right")
        table.add_column("steps", justify="right")
    for model, tp in dict.fromkeys((errors.model, errors.tp) for errors in results):
        add_row(
            table, f"{model}, {tp}", results, lambda e, m=model, t=tp: (e.model, e.tp) == (m, t)
        )
    table.add_section()
    degrees = sorted({errors.tp for errors in results})
    for tp in degrees:
        add_row(table, f"all, {tp}", results, lambda e, t=tp: e.tp == t)
    if len(degrees) > 1:
        add_row(table, "all", results, lambda _: True)
    console.print(table)
    relative = np.abs(np.concatenate([errors.relative for errors in results]))
    console.print(f"all {len(relative)} steps: {summary(relative)}", highlight=False)


def add_row(
    table: Table,
    label: str,
    results: Sequence[KernelErrors],
    belongs: Callable[[KernelErrors], bool],
) -> None:
    cells = []
    for kind in KINDS:
        relative = np.abs(
            np.concatenate([e.relative for e in results if e.kind == kind and belongs(e)])
        )
        cells += [f"{np.nanmedian(relative):.1%}", f"{np.nanquantile(relative, 0.9):.1%}"]
        cells.append(str(len(relative)))
    table.add_row(label, *cells)


def print_roofline(results: Sequence[KernelErrors], console: Console) -> None:
    cells = []
    for kind in KINDS:
        relative = np.concatenate([e.roofline_relative for e in results if e.kind == kind])
        low, middle, high = np.quantile(relative, (0.1, 0.5, 0.9))
        cells.append(f"{kind} {middle:+.0%} ({low:+.0%} to {high:+.0%})")
    console.print(
        "roofline against the same kernel sums, median (10th to 90th percentile): "
        + ", ".join(cells),
        highlight=False,
        soft_wrap=True,
    )


def summary(relative: NDArray[np.float64]) -> str:
    return f"median {np.nanmedian(relative):.1%}, p90 {np.nanquantile(relative, 0.9):.1%}"


def print_replays(
    run: MeasuredRun, replays: dict[Engine, tuple[RequestTimes, int]], console: Console
) -> None:
    table = Table(
        title=f"{len(run.arrival)} requests, vLLM {run.meta['vllm_version']}, "
        f"{run.meta['hardware']['device_name']}",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("measured", justify="right")
    for engine in replays:
        table.add_column(f"replayed, engine {engine}", justify="right")
    for label, (name, scale, unit) in TIMES.items():
        measured = float(np.nanmean(getattr(run.times, name)))
        cells = [f"{measured * scale:.1f} {unit}"]
        for times, _ in replays.values():
            mean = float(np.nanmean(getattr(times, name)))
            cells.append(f"{mean * scale:.1f} {unit} ({mean / measured - 1:+.1%})")
        table.add_row(f"mean {label}", *cells)
    for label, (name, _, _) in TIMES.items():
        measured_each = getattr(run.times, name)
        errors = [np.abs(getattr(times, name) / measured_each - 1) for times, _ in replays.values()]
        table.add_row(f"{label}, error of each request", "", *(summary(e) for e in errors))
    table.add_row("preemptions", "not recorded", *(str(count) for _, count in replays.values()))
    console.print(table)


def draw(
    kernels: Sequence[KernelErrors],
    measured: RequestTimes,
    replays: dict[Engine, RequestTimes],
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (steps, tpot, e2e) = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    for kind in KINDS:
        chosen = [errors for errors in kernels if errors.kind == kind]
        x, y = (np.concatenate([getattr(e, a) for e in chosen]) for a in ("measured", "predicted"))
        steps.plot(x * 1e3, y * 1e3, ".", markersize=3, label=kind)
    steps.set(title="steps, H100 (ms)", xscale="log", yscale="log")
    for engine, times in replays.items():
        tpot.plot(measured.tpot * 1e3, times.tpot * 1e3, ".", label=f"engine {engine}")
        e2e.plot(measured.e2e, times.e2e, ".", label=f"engine {engine}")
    tpot.set(title="TPOT of requests (ms)")
    e2e.set(title="E2E of requests (s)")
    for axes in (steps, tpot, e2e):
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color="black", linewidth=0.8)
        axes.set(xlabel="measured", ylabel="predicted")
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
