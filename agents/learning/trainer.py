"""What all trainers do: iterations that can be interrupted and taken up again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agents.learning.policy_file import TrainedPolicy
from agents.learning.processes import Processes
from agents.learning.settings import TrainingConfig, scenario_of
from agents.learning.validation import ValidationRun, run_trained
from agents.seeds import TRAINING
from opal_gym.config import Config
from opal_gym.sim.metrics import Metrics

SEEDS_OF_A_TRAINING = 1_000_000
"""Workload seeds between those of two trainings with different seeds."""
NEVER = 2**31
"""Interval of the logs that Stable-Baselines3 would write by itself."""
DEMONSTRATIONS = 900_000
"""Number of the first workload that is demonstrated on; those before are of the iterations."""


class Trainer(ABC):
    """Improves a policy, iteration by iteration.

    Args:
        training: The settings.
        processes: Where episodes run.

    Attributes:
        iteration: Iterations that have ended.
    """

    def __init__(self, training: TrainingConfig, processes: Processes) -> None:
        self.training = training
        self.processes = processes
        self.iteration = 0

    @property
    def iterations(self) -> int:
        """Iterations of the whole training."""
        return self.training.algorithm.iterations

    @abstractmethod
    def warm_start(self) -> dict[str, float]:
        """What comes before the first iteration; returns numbers to log."""

    @abstractmethod
    def step(self) -> dict[str, float]:
        """One iteration; returns numbers to log."""

    @abstractmethod
    def validate(self, runs: Sequence[ValidationRun]) -> list[Metrics]:
        """The policy's results where it takes what it holds for best, in the runs' order."""

    def run_trained(self, trained: TrainedPolicy, runs: Sequence[ValidationRun]) -> list[Metrics]:
        """The results of a policy that decides in NumPy, in the runs' order."""
        return self.processes.map(run_trained, [(trained, run) for run in runs])

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that the next iteration depends on, as tensors, numbers and texts."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Takes up a state."""

    @abstractmethod
    def save_policy(self, path: Path, card: dict[str, Any]) -> Path:
        """Writes the policy and what is known of it; returns the file, with the form's ending."""

    def workload(self, number: int) -> tuple[Config, int]:
        """Workload `number` of this training: what is simulated, and the seed.

        Load and length are drawn for it; the length grows during the training.
        """
        training = self.training
        seed = TRAINING.start + SEEDS_OF_A_TRAINING * training.seed + number
        rng = np.random.default_rng((training.seed, number))
        load = None if training.loads is None else float(rng.uniform(*training.loads))
        first, last = training.requests
        requests = round(first + (last - first) * min(1.0, self.iteration / self.iterations))
        return scenario_of(training, requests=requests, load=load), seed
