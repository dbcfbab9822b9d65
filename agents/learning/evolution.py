"""CMA-ES over the weights of a scoring policy. Source: Hansen, arXiv:1604.00772."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cma
import numpy as np

from agents.evaluation import draw_workload
from agents.learning.policy_file import TrainedPolicy
from agents.learning.processes import Processes
from agents.learning.rollouts import episode_score
from agents.learning.scoring import PARAMETERS, FloatArray, ScoringWeights
from agents.learning.settings import EvolutionSettings, TrainingConfig
from agents.learning.trainer import Trainer
from agents.learning.validation import ValidationRun
from opal_gym.config import Config, RewardTerm
from opal_gym.sim.metrics import Metrics

STEPS = np.array(list(PARAMETERS.values()))
Task = tuple[Config, int, TrainedPolicy, Mapping[RewardTerm, float]]


class EvolutionTrainer(Trainer):
    """Searches the weights of a scoring policy by CMA-ES.

    All policies of a generation run the same workloads, new ones in every generation. A policy's
    fitness is the mean, over these, of its result by the generation's mean result there, so that
    hard workloads do not outweigh the others. What is validated and kept is the mean of the
    search distribution.
    """

    def __init__(self, training: TrainingConfig, processes: Processes) -> None:
        super().__init__(training, processes)
        settings = training.algorithm
        assert isinstance(settings, EvolutionSettings)
        self._settings = settings
        self._start = ScoringWeights.named(settings.start).values
        self._fitness: list[list[float]] = []
        self._search = cma.CMAEvolutionStrategy(
            np.zeros(len(STEPS)),
            settings.sigma,
            # Seed 0 means the clock there.
            {"popsize": settings.population, "seed": training.seed + 1, "verbose": -9},
        )

    def warm_start(self) -> dict[str, float]:
        """Nothing: the search begins at the weights of the settings."""
        return {}

    def step(self) -> dict[str, float]:
        """One generation."""
        settings, reward = self._settings, self.training.reward
        self._asked = self._search.ask()
        members = [self._trained(point) for point in self._asked]
        first = self.iteration * settings.workloads
        workloads = [self.workload(first + i) for i in range(settings.workloads)]
        tasks = [(*workload, member, reward) for member in members for workload in workloads]
        costs = -np.array(self.processes.map(score_of, tasks)).reshape(len(members), -1)
        fitness = (costs / np.abs(costs.mean(axis=0))).mean(axis=1)
        self._tell(list(map(float, fitness)))
        return {
            "rollout/score": -float(costs.mean()),
            "rollout/spread": float(costs.std(axis=0).mean()),
            "train/sigma": float(self._search.sigma),
        }

    def _tell(self, fitness: list[float]) -> None:
        """Ends a generation whose points have been asked for."""
        self._search.tell(self._asked, fitness)
        self._fitness.append(fitness)
        self.iteration += 1

    def validate(self, runs: Sequence[ValidationRun]) -> list[Metrics]:
        """The results of the search's mean."""
        return self.run_trained(self._trained(self._search.mean), runs)

    def state(self) -> dict[str, Any]:
        """The fitness of all generations: the search is replayed from it."""
        return {"fitness": self._fitness}

    def restore(self, state: dict[str, Any]) -> None:
        """Replays a search up to where it was."""
        for fitness in state["fitness"]:
            self._asked = self._search.ask()
            self._tell(fitness)

    def save_policy(self, path: Path, card: dict[str, Any]) -> Path:
        """Writes the weights of the search's mean."""
        return self._trained(self._search.mean, card).save(path)

    def _trained(self, point: FloatArray, card: dict[str, Any] | None = None) -> TrainedPolicy:
        weights = ScoringWeights(self._start + STEPS * np.asarray(point))
        return TrainedPolicy(weights, self.training.decisions, card or {})


def score_of(task: Task) -> float:
    """The sum of an episode's rewards."""
    config, seed, trained, reward = task
    return episode_score(config, draw_workload(config, seed), trained.policy(), reward)
