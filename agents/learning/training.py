"""A training run: iterations, curves, validation, checkpoints, and taking up where it stopped."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.logger import Logger

from agents.files import write_atomically
from agents.learning.evolution import EvolutionTrainer
from agents.learning.paired_ppo import PairedPPOTrainer
from agents.learning.processes import Processes
from agents.learning.sb3_trainer import SB3Trainer
from agents.learning.settings import (
    EvolutionSettings,
    PairedPPOSettings,
    RLlibSettings,
    TrainingConfig,
)
from agents.learning.trainer import Trainer
from agents.learning.validation import is_better, score, validation_runs

CHECKPOINT, CURVES, BEST, LAST = "checkpoint.pt", "curves.json", "best", "last"
"""Files of a run's directory; the policies get their form's ending."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be taken up."""


@dataclass
class Progress:
    """What has happened in a run so far.

    Attributes:
        curve: One entry an iteration: its number and what it logged.
        validations: One entry a validation: iteration, value, by_load.
        best: The best value.
        cpu_s: CPU seconds that it took, in all processes.
    """

    curve: list[dict[str, float]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    best: float | None = None
    cpu_s: float = 0.0


def make_trainer(training: TrainingConfig, processes: Processes, logger: Logger) -> Trainer:
    """The trainer of the settings' algorithm.

    Raises:
        ValueError: It is RLlib's.
    """
    if isinstance(training.algorithm, PairedPPOSettings):
        return PairedPPOTrainer(training, processes, logger)
    if isinstance(training.algorithm, EvolutionSettings):
        return EvolutionTrainer(training, processes)
    if isinstance(training.algorithm, RLlibSettings):
        raise ValueError(
            f"algorithm.kind: got {training.algorithm.kind!r}; allowed: with scripts/train_rllib.py"
        )
    return SB3Trainer(training, processes, logger)


class Run:
    """A training run with its directory.

    Args:
        training: The settings.
        directory: Where all is written; a checkpoint there is taken up.
        processes: Where episodes run.
        logger: Stable-Baselines3's, for TensorBoard.
        make: Makes the trainer.

    Raises:
        CheckpointError: The directory has a checkpoint of other settings, or a broken one.
    """

    def __init__(
        self,
        training: TrainingConfig,
        directory: Path,
        processes: Processes,
        logger: Logger,
        make: Callable[[TrainingConfig, Processes, Logger], Trainer] = make_trainer,
    ) -> None:
        self.training = training
        self.directory = directory
        self.progress = Progress()
        self._processes, self._cpu_s = processes, _cpu_seconds(processes)
        checkpoint = read_checkpoint(directory / CHECKPOINT, training)
        self._logger = logger
        self.trainer = make(training, processes, logger)
        if checkpoint is None:
            self._begin()
        else:
            self.progress = Progress(**checkpoint["progress"])
            self.trainer.restore(checkpoint["trainer"])

    def _begin(self) -> None:
        self._log(self.trainer.warm_start())
        self._validate()
        self._write()

    @property
    def done(self) -> bool:
        """Whether all iterations have ended."""
        return self.trainer.iteration >= self.trainer.iterations

    def step(self) -> None:
        """One iteration, its validation if it is due, and a checkpoint."""
        logged = self.trainer.step()
        every = self.training.validation.every
        self._log(logged)
        if self.trainer.iteration % every == 0 or self.done:
            self._validate()
        self._write()

    def _log(self, logged: dict[str, float]) -> None:
        iteration = self.trainer.iteration
        for key, value in logged.items():
            self._logger.record(key, value)
        values = {key: float(value) for key, value in self._logger.name_to_value.items()}
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        self.progress.curve.append({"iteration": iteration, **finite})
        self._logger.dump(iteration)

    def _validate(self) -> None:
        result = score(self.training, self.trainer.validate(validation_runs(self.training)))
        iteration = self.trainer.iteration
        entry = {"iteration": iteration, "value": result.value, "by_load": list(result.by_load)}
        self.progress.validations.append(entry)
        self._logger.record("validation/value", result.value)
        self._logger.dump(iteration)
        if is_better(self.training, result.value, self.progress.best):
            self.progress.best = result.value
            self.trainer.save_policy(self.directory / BEST, self.card(entry))

    def card(self, validation: dict[str, Any]) -> dict[str, Any]:
        """What a policy's file says of its training."""
        return {
            "name": self.training.name,
            "training": self.training.model_dump(mode="json"),
            "validation": validation,
        }

    def _write(self) -> None:
        """The curves and then the checkpoint, which is what counts."""
        now = _cpu_seconds(self._processes)
        self.progress.cpu_s, self._cpu_s = self.progress.cpu_s + now - self._cpu_s, now
        curves = {"curve": self.progress.curve, "validations": self.progress.validations}
        write_atomically(self.directory / CURVES, json.dumps(curves, indent=1).encode())
        buffer = io.BytesIO()
        content = {
            "training": self.training.model_dump_json(),
            "progress": vars(self.progress),
            "trainer": self.trainer.state(),
        }
        torch.save(content, buffer)
        write_atomically(self.directory / CHECKPOINT, buffer.getvalue())


def _cpu_seconds(processes: Processes) -> float:
    """CPU seconds since this process began, in all processes."""
    return time.process_time() + processes.cpu_s


def read_checkpoint(path: Path, training: TrainingConfig) -> dict[str, Any] | None:
    """A run's checkpoint; None: there is none.

    Only tensors, numbers and texts are read from it, no code.

    Raises:
        CheckpointError: It is broken, or of other settings.
    """
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True)
        settings = TrainingConfig.model_validate_json(content["training"])
    except Exception as error:
        raise CheckpointError(
            f"{path}: got {type(error).__name__}; allowed: a checkpoint that scripts/train.py wrote"
        ) from None
    if settings != training:
        changed = ", ".join(_differences(settings.model_dump(), training.model_dump()))
        raise CheckpointError(
            f"{path}: is of other settings ({changed}); allowed: the same, or another --out"
        )
    return content


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The keys in which two settings differ."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [path]
    keys = [*one, *(key for key in other if key not in one)]
    return [
        difference
        for key in keys
        for difference in _differences(
            one.get(key), other.get(key), f"{path}.{key}" if path else str(key)
        )
    ]
