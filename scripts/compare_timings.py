"""Shows what the seed's timing rule lets a scheduler exploit: constant small chunks.

python scripts/compare_timings.py rich-azconv
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from agents.evaluation import run_in_process
from agents.heuristics import RulePolicy
from agents.saturation import saturated_rate
from opal_gym.config import Config, ConfigError, load_config
from opal_gym.sim.metrics import Metrics

TIMINGS = ("roofline", "calibrated")


@dataclass(frozen=True)
class Arguments:
    """Compare constant chunk budgets under the seed's timing and under the calibrated one.

    Under each timing the requests arrive at the same share of the rate that a saturated FIFO
    worker with full chunks serves.
    """

    scenario: tyro.conf.Positional[str] = "rich-azconv"
    """Name or JSON file of a synthetic scenario."""
    load: float = 0.5
    """Share of the saturated FIFO service rate."""
    requests: int = 1000
    """Requests of a workload."""
    seeds: int = 5
    """Workloads, with seeds 0, 1, …"""
    workers: int = 1
    """Processes."""


def main(arguments: Arguments) -> None:
    console = Console()
    context = multiprocessing.get_context("spawn")
    try:
        configs = [
            load_config(arguments.scenario, {"worker.inference_params": {"model": timing}})
            for timing in TIMINGS
        ]
    except ConfigError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as executor:
        for config in configs:
            seeds = range(arguments.seeds)
            measured = [
                executor.submit(saturated_rate, config, arguments.requests, seed) for seed in seeds
            ]
            rate = float(np.mean([job.result() for job in measured]))
            loaded = load_config(
                config,
                {
                    "workload.arrivals.rate_per_s": rate,
                    "workload.arrivals.load": arguments.load,
                    "workload.num_requests": arguments.requests,
                },
            )
            budgets = loaded.worker.vllm_params.chunk_choices
            jobs = list(product([loaded], range(len(budgets)), seeds))
            results = list(executor.map(run_constant, *zip(*jobs, strict=True)))
            rows = [results[i * len(seeds) : (i + 1) * len(seeds)] for i in range(len(budgets))]
            print_table(loaded, rate, budgets, rows, console)


def run_constant(config: Config, choice: int, seed: int) -> Metrics:
    """An episode of the FIFO baseline in which every CHUNK question gets the same answer."""
    return run_in_process(config, RulePolicy(chunk=lambda _: choice), seed)[1]


def print_table(
    config: Config,
    rate: float,
    budgets: Sequence[int],
    rows: Sequence[Sequence[Metrics]],
    console: Console,
) -> None:
    timing = config.worker.inference_params.model
    table = Table(
        title=f"{config.name}, {timing}: saturated rate {rate:.3g} requests/s",
        title_justify="left",
    )
    for column in ("chunk budget", "mean E2E (s)", "against full chunks", "TTFT (s)", "TPOT (ms)"):
        table.add_column(column, justify="right")
    full = np.array([run["e2e_s"]["mean"] for run in rows[0]])
    for budget, runs in zip(budgets, rows, strict=True):
        e2e, ttft, tpot = (
            np.array([run[name]["mean"] for run in runs]) for name in ("e2e_s", "ttft_s", "tpot_s")
        )
        table.add_row(
            str(budget),
            f"{e2e.mean():.3f}",
            f"{e2e.mean() / full.mean() - 1:+.1%}",
            f"{ttft.mean():.3f}",
            f"{tpot.mean() * 1e3:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
