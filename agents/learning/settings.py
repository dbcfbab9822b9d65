"""What a training run is: a YAML file of `configs/training`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agents.learning.scoring import ScoringWeights
from agents.policies import make_policy
from agents.tuning import MetricName
from opal_gym.config import Config, ConfigError, DecisionName, RewardTerm, load_config
from opal_gym.config_errors import RefusedError, explain

TRAININGS = Path(__file__).parents[2] / "configs" / "training"
"""Where the settings of the published trainings lie."""

MAX_SEEDS = 2000
"""Seeds of a training; each has workloads of its own (`agents.learning.trainer`)."""

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """A section; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WarmStart(Settings):
    """Imitation of a policy before anything is learned from rewards."""

    policy: str = Field(description="A policy's name, as evaluate.py takes it.")
    episodes: Count = Field(12, description="Demonstrated episodes.")
    epochs: Count = Field(15, description="Passes over their decisions.")
    soften: Positive = Field(
        0.35, description="Factor of the logits afterwards; a smaller one explores more."
    )

    @field_validator("policy")
    @classmethod
    def _is_known(cls, name: str) -> str:
        make_policy(name)
        return name


class PairedPPOSettings(Settings):
    """PPO on whole episodes, with advantages against other rollouts of the same workload."""

    kind: Literal["paired-ppo"] = "paired-ppo"
    iterations: Count = Field(200, description="Updates.")
    workloads: Count = Field(2, description="Workloads of an iteration.")
    rollouts: int = Field(8, ge=2, description="Episodes of each of them.")
    time_constant_s: Positive = Field(30.0, description="Time constant of the discount, s.")
    hidden: tuple[Count, Count] = Field((48, 48), description="Hidden units of the two layers.")
    relative: bool = Field(
        False,
        description="Advantages are shares of what the workload's episodes cost, so that easy and "
        "hard loads weigh alike.",
    )
    learning_rate: Positive = 3e-4
    final_learning_rate: Positive = Field(3e-5, description="Reached linearly at the end.")
    entropy: float = Field(0.003, ge=0, description="Coefficient of the entropy.")
    clip: Positive = Field(0.2, description="PPO's clip range.")
    epochs: Count = Field(2, description="Passes over an iteration's decisions.")
    batch_size: Count = Field(1024, description="Decisions of a minibatch.")
    warm_start: WarmStart | None = Field(None, description="null: from random weights.")


class EvolutionSettings(Settings):
    """CMA-ES over a few weights of the features of a scoring policy."""

    kind: Literal["cma-es"] = "cma-es"
    iterations: Count = Field(60, description="Generations.")
    population: int = Field(12, ge=4, description="Policies of a generation.")
    workloads: Count = Field(4, description="Workloads that all of a generation run.")
    sigma: Positive = Field(0.5, description="First step size, in the steps of PARAMETERS.")
    start: dict[str, float] = Field(
        {"admit.predicted_output_tokens": 1.0, "preempt.work_lost": 1.0, "gate": 0.95, "chunk": -4},
        description="Weights that it begins with, by name; the others are 0.",
    )

    @field_validator("start")
    @classmethod
    def _is_known(cls, weights: dict[str, float]) -> dict[str, float]:
        ScoringWeights.named(weights)
        return weights


class SB3Settings(Settings):
    """An algorithm of Stable-Baselines3 or sb3-contrib, in the environment as it is."""

    kind: Literal["maskable-ppo", "ppo", "a2c", "dqn"]
    iterations: Count = Field(50, description="Parts of the training, a checkpoint after each.")
    timesteps: Count = Field(10_000, description="Decisions of an iteration.")
    envs: Count = Field(4, description="Environments side by side.")
    policy: Literal["pointer", "MultiInputPolicy"] = Field(
        "MultiInputPolicy", description="pointer: for maskable-ppo alone."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the algorithm's class, such as n_steps."
    )

    @model_validator(mode="after")
    def _fits(self) -> SB3Settings:
        if self.policy == "pointer" and self.kind != "maskable-ppo":
            allowed = f"MultiInputPolicy where kind is {self.kind}"
            raise RefusedError("policy", "pointer", allowed)
        return self


class RLlibSettings(Settings):
    """RLlib's PPO of a pointer network, in environments on many machines."""

    kind: Literal["rllib-ppo"]
    iterations: Count = Field(50, description="Updates.")
    timesteps: Count = Field(4000, description="Decisions of an iteration, of all environments.")
    envs: Count = Field(4, description="Environments of an environment runner, side by side.")
    hidden: tuple[Count, Count] = Field((48, 48), description="Hidden units of the two layers.")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of PPOConfig.training, such as lr."
    )


class Validation(Settings):
    """How the best checkpoint is chosen: on fixed validation workloads."""

    workloads: Count = Field(6, description="Workloads of each load.")
    requests: Count = Field(1000, description="Requests of each.")
    loads: tuple[Positive, ...] = Field(
        (), description="Loads; empty: the scenario's, of a range the highest."
    )
    every: Count = Field(20, description="Iterations between two validations.")


class TrainingConfig(Settings):
    """A training run.

    Attributes:
        name: Its name, which the policy gets, too.
    """

    name: str = Field(pattern=r"^[\w.-]+$", description="Name of the trained policy.")
    description: str = ""
    scenario: str = Field(description="Scenario, by name or as a JSON file.")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Changes of the scenario, by dotted key."
    )
    decisions: tuple[DecisionName, ...] = Field(
        ("CHUNK", "PREEMPT", "ADMIT"), min_length=1, description="What the policy decides."
    )
    reward: dict[RewardTerm, float] = Field(
        {"latency": 1.0}, min_length=1, description="Weights of the reward's terms."
    )
    metric: MetricName = Field("e2e", description="What validation goes by.")
    seed: int = Field(0, ge=0, lt=MAX_SEEDS, description="Of workloads, weights and samples.")
    loads: tuple[Positive, Positive] | None = Field(
        None, description="A workload's load is drawn between these; null: as the scenario says."
    )
    requests: tuple[Count, Count] = Field(
        (256, 256), description="Requests of an episode, at the beginning and at the end."
    )
    algorithm: PairedPPOSettings | EvolutionSettings | SB3Settings | RLlibSettings = Field(
        discriminator="kind"
    )
    validation: Validation = Validation()


def training_names() -> list[str]:
    """Names of the published trainings, sorted."""
    return sorted(path.stem for path in TRAININGS.glob("*.yaml"))


def load_training(source: str | Path) -> TrainingConfig:
    """Reads and checks the settings of a training.

    Args:
        source: One of `training_names()`, or a YAML file's path.

    Raises:
        ConfigError: It cannot be read, or a key is unknown or has an impossible value; the message
            names all such keys.
    """
    path = Path(source)
    if str(source) in training_names():
        path = TRAININGS / f"{source}.yaml"
    elif not path.is_file():
        raise ConfigError(
            f"training: got {str(source)!r}; allowed: the path of a YAML file, or one of "
            f"{', '.join(training_names())}"
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a readable YAML file: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: got {type(data).__name__}; allowed: a mapping")
    return check_training(str(path), data)


def check_training(label: str, data: Mapping[str, Any]) -> TrainingConfig:
    """Checks the settings of a training, and that its scenario can be simulated.

    Args:
        label: Where they come from.
        data: The settings.

    Raises:
        ConfigError: A key is unknown or has an impossible value.
    """
    try:
        training = TrainingConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(label, data, TrainingConfig, error)) from None
    scenario_of(training, requests=max(training.requests), load=training.loads)
    return training


def scenario_of(
    training: TrainingConfig,
    *,
    requests: int | None = None,
    load: float | tuple[float, float] | None = None,
) -> Config:
    """What a training simulates.

    Args:
        training: The training.
        requests: Requests of an episode; None: as the scenario says.
        load: Share of the saturated service rate, or a range; None: as the scenario says.

    Raises:
        ConfigError: The scenario or one of the overrides is not known.
    """
    given = {"workload.num_requests": requests, "workload.arrivals.load": load}
    changes = {key: value for key, value in given.items() if value is not None}
    settings = {"env.decisions": training.decisions, "env.reward": training.reward}
    return load_config(training.scenario, {**settings, **training.overrides, **changes})
