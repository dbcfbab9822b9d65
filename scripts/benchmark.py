"""Measures the speed of the simulator and of the environment.

python scripts/benchmark.py --json benchmark.json
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

import opal_gym
from opal_gym.config import Config, load_config, scenario_names
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import Workload, make_workload

AZURE = "AzureLLMInferenceTrace_conv.csv"


@dataclass(frozen=True)
class Arguments:
    """Measure speed in CPU seconds: medians of several runs, on one core."""

    repeats: int = 5
    """Runs of each measurement; the median counts."""
    azure: Path = Path("../shared/data/traces") / AZURE
    """The Azure conversation trace; left out if the file is absent."""
    vector_s: float = 3.0
    """Wall-clock seconds of the vector-environment measurement."""
    json: Path | None = None
    """Also write the figures to this file."""


def main(arguments: Arguments) -> None:
    figures: dict[str, Any] = {}
    parts: list[Callable[[Arguments], dict[str, Any]]] = [
        simulator_alone,
        environment,
        reset_time,
        scaling,
        spans,
        vector_environments,
    ]
    console = Console()
    for part in track(parts, "measuring", console=console, transient=True):
        figures |= part(arguments)
    figures["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print_table(figures, console)
    if arguments.json:
        meta = {"python": platform.python_version(), "numpy": np.__version__}
        text = json.dumps({**figures, "meta": meta}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


def cpu_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median CPU seconds of `run`, after one run that is not counted."""
    run()
    return statistics.median(timed(run) for _ in range(repeats))


def timed(run: Callable[[], Any]) -> float:
    """CPU seconds of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def fixed_lengths(prompt: int, output: int, requests: int, rate: float) -> Config:
    """Requests of one length on an H100 with an 8B model, as by a GPU without other limits."""
    length = {"prompt": prompt, "output": output}
    return load_config(
        "rich-chat",
        {
            "workload": {
                "kind": "synthetic",
                "num_requests": requests,
                "arrivals": {"rate_per_s": rate},
                "tenants": [
                    {name: {"kind": "fixed", "tokens": tokens} for name, tokens in length.items()}
                ],
            }
        },
    )


def draw(config: Config, seed: int = 0) -> Workload:
    """A workload of a configuration."""
    return make_workload(
        config.workload,
        seed,
        length_information=config.simulation.length_information,
        hash_block_tokens=config.kvc.hash_block_tokens,
    )


def simulate(config: Config, workload: Workload) -> Simulation:
    """Runs the baseline in process to the end, without summarising."""
    simulation = Simulation(config, workload)
    simulation.advance()
    return simulation


# (a) The simulator alone, with the baseline policy.


def simulator_alone(arguments: Arguments) -> dict[str, Any]:
    config = fixed_lengths(512, 512, 1000, 10.0)
    workload = draw(config)
    seconds = cpu_seconds(lambda: simulate(config, workload), arguments.repeats)
    figures = {
        "requests_per_cpu_s": len(workload) / seconds,
        "output_tokens_per_cpu_s": int(workload.output_tokens.sum()) / seconds,
    }
    if arguments.azure.is_file():
        trace = {"workload.path": str(arguments.azure), "workload.window_s": None}
        config = load_config("trace-azure-conv", {**trace, "workload.window_start_s": 0.0})
        workload = draw(config)
        seconds = cpu_seconds(lambda: simulate(config, workload), arguments.repeats)
        figures["azure_requests_per_cpu_s"] = len(workload) / seconds
    return figures


# (b) The environment, through gymnasium.make.


def environment(arguments: Arguments) -> dict[str, Any]:
    figures = {}
    for scenario in ("mem-chat-burst", "prod-mix"):
        for actor in ("baseline", "random"):
            rates = [episode_rate(scenario, actor, seed) for seed in range(arguments.repeats)]
            figures[f"decisions_per_cpu_s[{scenario},{actor}]"] = statistics.median(rates)
    figures["decisions_per_cpu_s"] = figures["decisions_per_cpu_s[mem-chat-burst,random]"]
    return figures


def episode_rate(scenario: str, actor: str, seed: int) -> float:
    """Decisions per CPU second of one episode, without its reset."""
    env = gymnasium.make("OpalVLLM-v0", scenario=scenario, max_candidates=64)
    rng = np.random.default_rng(seed)
    _, info = env.reset(seed=seed)
    start, decisions, over = time.process_time(), 0, False
    while not over:
        if actor == "baseline":
            action = int(info["baseline_action"])
        else:
            (legal,) = info["action_mask"].nonzero()
            action = int(legal[int(rng.random() * len(legal))])
        _, _, terminated, truncated, info = env.step(action)
        over, decisions = terminated or truncated, decisions + 1
    return decisions / (time.process_time() - start)


# (c) reset.


def reset_time(arguments: Arguments) -> dict[str, Any]:
    env = gymnasium.make("OpalVLLM-v0", scenario="mem-chat-burst", num_requests=256)
    seconds = cpu_seconds(lambda: [env.reset(seed=seed) for seed in range(20)], arguments.repeats)
    return {"reset_ms": seconds / 20 * 1000}


# (d) Scaling with the number of requests.


def scaling(arguments: Arguments) -> dict[str, Any]:
    seconds = {}
    for requests in (1_000, 10_000, 100_000):
        config = fixed_lengths(512, 512, requests, 10.0)
        workload = draw(config)
        repeats = arguments.repeats if requests < 100_000 else 1
        seconds[requests] = statistics.median(
            timed(lambda c=config, w=workload: simulate(c, w)) for _ in range(repeats)
        )
    return {
        "scaling_10x": seconds[10_000] / seconds[1_000],
        "scaling_100x": seconds[100_000] / seconds[1_000],
    }


# (e) Spans against step by step.


def spans(arguments: Arguments) -> dict[str, Any]:
    config = fixed_lengths(128, 3000, 64, 1.0)
    together = replace(draw(config), arrival_time=np.zeros(64))
    speedup, _ = span_speedup(config, together, arguments.repeats)
    figures: dict[str, Any] = {"span_speedup": speedup}
    for scenario in scenario_names():
        if not scenario.startswith("trace-"):
            config = load_config(scenario)
            speedup, steps = span_speedup(config, draw(config), 1)
            figures[f"span_speedup[{scenario}]"] = speedup
            figures[f"steps_per_span[{scenario}]"] = steps
    return figures


def span_speedup(config: Config, workload: Workload, repeats: int) -> tuple[float, float]:
    """CPU seconds step by step over those with spans, and steps per span."""
    stepwise = load_config(config, {"simulation.step_by_step": True})
    slow = statistics.median(timed(lambda: simulate(stepwise, workload)) for _ in range(repeats))
    fast = cpu_seconds(lambda: simulate(config, workload), repeats)
    simulation = simulate(config, workload)
    return slow / fast, simulation.worker.steps.count / simulation.worker.spans


# (f) Eight environments side by side.


def vector_environments(arguments: Arguments) -> dict[str, Any]:
    one = vector_rate(1, arguments.vector_s)
    return {"async_8_over_1": vector_rate(8, arguments.vector_s) / one}


def vector_rate(num_envs: int, seconds: float) -> float:
    """Steps per wall-clock second of asynchronous environments that act as the baseline."""
    envs = gymnasium.make_vec(
        "opal_gym:OpalVLLM-v0",
        num_envs=num_envs,
        vectorization_mode="async",
        vector_kwargs={"context": "spawn"},
    )
    _, info = envs.reset(seed=0)
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        _, _, _, _, info = envs.step(info["baseline_action"].astype(np.int64))
        steps += num_envs
    rate = steps / (time.perf_counter() - start)
    envs.close()
    return rate


def print_table(figures: dict[str, Any], console: Console) -> None:
    table = Table("figure", "value", title=f"opal-gym, {Path(opal_gym.__file__).parent.name}")
    for name, value in figures.items():
        table.add_row(name.replace("[", r"\["), f"{value:,.2f}")
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
