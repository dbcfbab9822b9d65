"""Measures the rate that a scenario's `rate_per_s` means: that of a saturated FIFO worker.

python scripts/measure_saturation.py mem-chat-burst slot8-chat --workers 2
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console

from agents.saturation import saturated_rate
from opal_gym.config import Config, ConfigError, load_config
from opal_gym.sim.workloads import TraceError


def main(
    scenarios: tyro.conf.Positional[tuple[str, ...]],
    requests: int = 2000,
    seeds: int = 20,
    trace: Path | None = None,
    workers: int = 1,
) -> None:
    """Print the saturated FIFO service rate of scenarios, in requests per second.

    All requests of a workload arrive at once; the rate is that of the completions between 20 %
    and 80 % of them, in which the queue is never empty. A pool that is too small for the batch
    thrashes all that time, so that the rate includes the recomputation.

    Args:
        scenarios: Names or JSON files.
        requests: Requests of a workload.
        seeds: Workloads, with seeds 0, 1, …
        trace: The file of a trace scenario, whose path it replaces.
        workers: Processes.
    """
    try:
        overrides = {} if trace is None else {"workload.path": str(trace)}
        configs = [load_config(scenario, overrides) for scenario in scenarios]
        measure(configs, requests, range(seeds), workers)
    except (ConfigError, TraceError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)


def measure(configs: Sequence[Config], requests: int, seeds: Sequence[int], workers: int) -> None:
    console = Console()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as executor:
        for config in configs:
            jobs = [executor.submit(saturated_rate, config, requests, seed) for seed in seeds]
            rates = np.array([job.result() for job in jobs])
            error = rates.std(ddof=1) / np.sqrt(len(rates)) if len(rates) > 1 else np.nan
            console.print(
                f"{config.name}: {rates.mean():.4g} requests/s (standard error {error:.2g}, "
                f"{rates.min():.4g} to {rates.max():.4g} over {len(rates)} workloads of "
                f"{requests} requests)",
                soft_wrap=True,
                highlight=False,
            )


if __name__ == "__main__":
    tyro.cli(main)
