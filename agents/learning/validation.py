"""How good a policy is on the fixed validation workloads that checkpoints are chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.evaluation import run_in_process
from agents.learning.policy_file import TrainedPolicy
from agents.learning.settings import TrainingConfig, scenario_of
from agents.seeds import validation_seeds
from agents.tuning import METRICS
from opal_gym.config import Config
from opal_gym.sim.metrics import Metrics


@dataclass(frozen=True)
class ValidationRun:
    """A workload that a policy is validated on.

    Attributes:
        config: What is simulated.
        seed: Seed of the workload.
    """

    config: Config
    seed: int


@dataclass(frozen=True)
class Score:
    """A policy's result on the validation workloads.

    Attributes:
        value: Geometric mean over the loads of the mean over a load's workloads, so that a load at
            which all is slow does not outweigh the others.
        by_load: The mean of each load.
    """

    value: float
    by_load: tuple[float, ...]


def run_trained(item: tuple[TrainedPolicy, ValidationRun]) -> Metrics:
    """Runs a trained policy on a workload."""
    trained, run = item
    return run_in_process(run.config, trained.policy(), run.seed)[1]


def validation_runs(training: TrainingConfig) -> list[ValidationRun]:
    """The runs of a training, all workloads of one load before the next."""
    settings = training.validation
    return [
        ValidationRun(config, seed)
        for config in validation_configs(training)
        for seed in validation_seeds(settings.workloads)
    ]


def validation_configs(training: TrainingConfig) -> list[Config]:
    """What is simulated at each load of the validation."""
    settings = training.validation
    loads = settings.loads or (_load_of(scenario_of(training)),)
    return [scenario_of(training, requests=settings.requests, load=load) for load in loads]


def score(training: TrainingConfig, metrics: Sequence[Metrics]) -> Score:
    """Summarises the metrics of `validation_runs`, in their order."""
    measure = METRICS[training.metric].measure
    values = np.array([measure.of(each) for each in metrics])
    by_load = values.reshape(-1, training.validation.workloads).mean(axis=1)
    return Score(float(np.exp(np.log(by_load).mean())), tuple(map(float, by_load)))


def is_better(training: TrainingConfig, value: float, than: float | None) -> bool:
    """Whether a score is better than the best so far."""
    sign = METRICS[training.metric].sign
    return than is None or sign * value < sign * than


def _load_of(config: Config) -> float | None:
    """The scenario's load, of a range the highest; None for a trace."""
    arrivals = config.workload.arrivals
    if arrivals is None:
        return None
    return arrivals.load[1] if isinstance(arrivals.load, tuple) else arrivals.load
