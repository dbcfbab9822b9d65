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

from agents.files import check_writable, write_atomically
from agents.missing import require
from agents.progress import progress_bar
from agents.provenance import PACKAGES, TRAINING_PACKAGES, provenance
from agents.results import to_json
from opal_gym.config import ConfigError
from opal_gym.sim.workloads import TraceError

if TYPE_CHECKING:
    from agents.learning.settings import TrainingConfig
    from agents.learning.training import Run

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
    from agents.learning.settings import TrainingConfig, load_training

    for name, least in (("seed", 0), ("iterations", 1), ("workers", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name}: got {value}; allowed: at least {least}")
    training = load_training(arguments.training)
    data = training.model_dump()
    if arguments.seed is not None:
        data["seed"] = arguments.seed
    if arguments.iterations is not None:
        data["algorithm"]["iterations"] = arguments.iterations
    return TrainingConfig.model_validate(data)


def train(training: TrainingConfig, out: Path, workers: int, console: Console) -> int:
    import torch
    from stable_baselines3.common.logger import configure

    from agents.learning.processes import Processes
    from agents.learning.training import Run

    torch.set_num_threads(1)
    started = time.time()
    with Processes(workers) as processes:
        try:
            run = Run(training, out, processes, configure(str(out), ["tensorboard"]))
            console.print(what_runs(run), highlight=False, soft_wrap=True)
            describe(run, started, workers)
            iterate(run)
        except KeyboardInterrupt:
            console.print(f"interrupted; the same command goes on from {out}", soft_wrap=True)
            return INTERRUPTED
    describe(run, started, workers)
    console.print(f"best on validation: {run.progress.best:.5g}; written: {out}", soft_wrap=True)
    return 0


def describe(run: Run, started: float, workers: int) -> None:
    """Writes run.json: at the beginning of a process, so that a kill leaves it, and at the end."""
    packages = (*PACKAGES, *TRAINING_PACKAGES)
    about = {
        "training": run.training.model_dump(mode="json"),
        "validations": run.progress.validations,
        "best": run.progress.best,
        "meta": {
            **provenance(started, complete=run.done, packages=packages),
            "workers": workers,
        },
    }
    write_atomically(run.directory / "run.json", to_json(about))


def what_runs(run: Run) -> str:
    trainer, training = run.trainer, run.training
    begun = f", from iteration {trainer.iteration}" if trainer.iteration else ""
    return (
        f"{training.name}: {training.algorithm.kind} on {training.scenario}, seed {training.seed}, "
        f"{trainer.iterations} iterations{begun}; validated by {training.metric}"
    )


def iterate(run: Run) -> None:
    trainer = run.trainer
    with progress_bar("iterations") as progress:
        task = progress.add_task("", total=trainer.iterations, completed=trainer.iteration)
        while not run.done:
            last, best = run.progress.validations[-1]["value"], run.progress.best
            progress.update(task, description=f"validation {last:.4g}, best {best:.4g}")
            run.step()
            progress.update(task, completed=trainer.iteration)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Arguments, config=(tyro.conf.FlagCreatePairsOff,))))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
