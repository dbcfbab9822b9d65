"""Trains a scheduler; the same command takes up a training that was stopped.

python scripts/train.py prod-mix --workers 2
python scripts/train.py configs/training/mem-chat-burst.yaml --seed 1 --workers 2
tensorboard --logdir runs
python scripts/evaluate.py --scenario prod-mix --policies pretrained:runs/prod-mix-0/best.npz
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

# Sums of floats depend on how they are spread over threads; set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import tyro
from rich.console import Console

from agents.files import check_writable
from agents.missing import require
from opal_gym.config import ConfigError
from opal_gym.sim.workloads import TraceError

if TYPE_CHECKING:
    from agents.learning.settings import TrainingConfig

RUNS = Path("runs")
BAD_INPUT, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Arguments:
    """Train a scheduler as a YAML file of settings says.

    Writes into a directory: checkpoint.pt after every iteration, from which the same command goes
    on; best.npz, the policy that was best on the validation workloads, which evaluate.py takes;
    curves.json; run.json with settings, command and versions; and TensorBoard's events.
    """

    training: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|FILE")]
    """Settings: a name from configs/training, or a YAML file."""
    seed: int | None = None
    """Seed of workloads, weights and samples; default: the settings'."""
    iterations: int | None = None
    """Iterations; default: the settings'."""
    workers: int = 1
    """Processes in which episodes run; the result does not depend on it."""
    out: Path | None = None
    """Directory of the run; default: runs/NAME-SEED."""


def main(arguments: Arguments) -> int:
    console = Console()
    try:
        require("train", "sb3_contrib", "cma", "tensorboard", "yaml")
        training = load(arguments)
        out = arguments.out or RUNS / f"{training.name}-{training.seed}"
        check_writable(out)
        return train(training, out, arguments.workers, console)
    except (ValueError, ConfigError, TraceError, OSError, ImportError) as error:
        for line in str(error).splitlines():
            Console(stderr=True).print(f"error: {line}", markup=False, soft_wrap=True)
        return BAD_INPUT


def load(arguments: Arguments) -> TrainingConfig:
    from agents.learning.command_line import load

    for name, least in (("seed", 0), ("iterations", 1), ("workers", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name}: got {value}; allowed: at least {least}")
    return load(arguments.training, seed=arguments.seed, iterations=arguments.iterations)


def train(training: TrainingConfig, out: Path, workers: int, console: Console) -> int:
    import torch
    from stable_baselines3.common.logger import configure

    from agents.learning.command_line import finish
    from agents.learning.processes import Processes
    from agents.learning.training import Run

    torch.set_num_threads(1)
    started = time.time()
    with Processes(workers) as processes:
        try:
            run = Run(training, out, processes, configure(str(out), ["tensorboard"]))
            finish(run, console, started, workers=workers)
        except KeyboardInterrupt:
            console.print(f"interrupted; the same command goes on from {out}", soft_wrap=True)
            return INTERRUPTED
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Arguments, config=(tyro.conf.FlagCreatePairsOff,))))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
