"""What the training scripts have in common: changed settings, and a run that is told of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from agents.files import write_atomically
from agents.learning.settings import TrainingConfig, check_training, load_training
from agents.learning.training import Run
from agents.progress import progress_bar
from agents.provenance import PACKAGES, TRAINING_PACKAGES, provenance
from agents.results import to_json


def load(source: str, *, seed: int | None, iterations: int | None) -> TrainingConfig:
    """Reads settings; None: as they say.

    Raises:
        ConfigError: See `load_training`; or a given value is impossible.
    """
    data = load_training(source).model_dump()
    if seed is not None:
        data["seed"] = seed
    if iterations is not None:
        data["algorithm"]["iterations"] = iterations
    return check_training(source, data)


def finish(run: Run, console: Console, started: float, **meta: Any) -> None:
    """Runs all iterations, shows how far they are, and writes run.json.

    Args:
        run: A new run, or one that was taken up.
        console: Where it is said what runs, and how good the best policy is.
        started: Unix time of the start, s.
        meta: What else `meta` of run.json says.
    """
    console.print(what_runs(run), highlight=False, soft_wrap=True)
    # At the beginning, too, so that a kill leaves it.
    describe(run, started, meta)
    iterate(run)
    describe(run, started, meta)
    console.print(
        f"best on validation: {run.progress.best:.5g}; written: {run.directory}", soft_wrap=True
    )


def describe(run: Run, started: float, meta: Mapping[str, Any]) -> None:
    """Writes run.json; see `finish`."""
    packages = (*PACKAGES, *TRAINING_PACKAGES)
    about = {
        "training": run.training.model_dump(mode="json"),
        "validations": run.progress.validations,
        "best": run.progress.best,
        "cpu_s": round(run.progress.cpu_s, 1),
        "meta": {**provenance(started, complete=run.done, packages=packages), **meta},
    }
    write_atomically(run.directory / "run.json", to_json(about))


def what_runs(run: Run) -> str:
    """A line about a run."""
    trainer, training = run.trainer, run.training
    begun = f", from iteration {trainer.iteration}" if trainer.iteration else ""
    return (
        f"{training.name}: {training.algorithm.kind} on {training.scenario}, seed {training.seed}, "
        f"{trainer.iterations} iterations{begun}; validated by {training.metric}"
    )


def iterate(run: Run) -> None:
    """Runs all iterations under a progress bar."""
    trainer = run.trainer
    with progress_bar("iterations") as progress:
        task = progress.add_task("", total=trainer.iterations, completed=trainer.iteration)
        while not run.done:
            last, best = run.progress.validations[-1]["value"], run.progress.best
            progress.update(task, description=f"validation {last:.4g}, best {best:.4g}")
            run.step()
            progress.update(task, completed=trainer.iteration)
