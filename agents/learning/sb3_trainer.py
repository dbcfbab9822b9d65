"""Training by an algorithm of Stable-Baselines3 or sb3-contrib, in the environment as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from agents.learning.policy_file import TrainedPolicy
from agents.learning.processes import Processes
from agents.learning.sb3_policy import PointerPolicy
from agents.learning.sb3_state import model_state, restore_model
from agents.learning.settings import SB3Settings, TrainingConfig, scenario_of
from agents.learning.trainer import NEVER, Trainer
from agents.learning.validation import ValidationRun
from opal_gym.config import Config
from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.metrics import Metrics

ALGORITHMS: Mapping[str, type[BaseAlgorithm]] = {
    "maskable-ppo": MaskablePPO,
    "ppo": PPO,
    "a2c": A2C,
    "dqn": DQN,
}

EPISODES_OF_AN_ITERATION = 1000
"""Numbers of workloads that an iteration may use, so that none is used again after a restart."""


class TrainingWorkloads(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Every reset takes the next of a training's workloads.

    Args:
        env: `OpalVLLM-v0`.
        first_seed: Seed of the first workload.
        step: From one workload's seed to the next's.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], first_seed: int, step: int) -> None:
        super().__init__(env)
        self._next, self._step = first_seed, step

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets with the next workload."""
        options = {**(options or {}), "workload_seed": self._next}
        self._next += self._step
        return self.env.reset(seed=seed, options=options)

    def action_masks(self) -> Any:
        """Which actions are legal."""
        inner = self.env.unwrapped
        assert isinstance(inner, OpalVLLMEnv)
        return inner.action_masks()


class WholeTraining(BaseCallback):
    """Schedules follow the whole training, not the iteration that `learn` is called for.

    Args:
        timesteps: Decisions of the whole training.
    """

    def __init__(self, timesteps: int) -> None:
        super().__init__()
        self._timesteps = timesteps

    def _on_training_start(self) -> None:
        self.model._total_timesteps = self._timesteps

    def _on_step(self) -> bool:
        return True


class SB3Trainer(Trainer):
    """Trains by an algorithm of Stable-Baselines3 or sb3-contrib.

    A state holds the weights and the optimizer's state, not the environments and, for DQN, not the
    replay buffer: after a restart, episodes begin anew and DQN collects again before it learns.
    """

    def __init__(self, training: TrainingConfig, processes: Processes, logger: Logger) -> None:
        super().__init__(training, processes)
        settings = training.algorithm
        assert isinstance(settings, SB3Settings)
        self._settings = settings
        self._config = scenario_of(training, requests=training.requests[1], load=training.loads)
        pointer = settings.policy == "pointer"
        self._model = ALGORITHMS[settings.kind](
            PointerPolicy if pointer else settings.policy,
            self._environments(),
            seed=training.seed,
            device="cpu",
            **settings.arguments,
        )
        self._model.set_logger(logger)

    def _environments(self) -> DummyVecEnv:
        envs = self._settings.envs
        first = self.workload(self.iteration * EPISODES_OF_AN_ITERATION)[1]
        return DummyVecEnv([partial(_make_env, self._config, first + i, envs) for i in range(envs)])

    def warm_start(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def step(self) -> dict[str, float]:
        """Learns from so many decisions."""
        timesteps, model = self._settings.timesteps, self._model
        whole = WholeTraining(self.iterations * timesteps)
        model.learn(timesteps, whole, log_interval=NEVER, reset_num_timesteps=False)
        self.iteration += 1
        episodes = [episode["r"] for episode in model.ep_info_buffer or ()]
        score = {"rollout/score": float(np.mean(episodes))} if episodes else {}
        return {"decisions": float(model.num_timesteps), **score}

    def validate(self, runs: Sequence[ValidationRun]) -> list[Metrics]:
        """The results of the most probable actions."""
        trained = self._trained({})
        if trained is not None:
            return self.run_trained(trained, runs)
        return [self._run_in_env(run) for run in runs]

    def _run_in_env(self, run: ValidationRun) -> Metrics:
        env = gymnasium.make("OpalVLLM-v0", scenario=run.config)
        masked = {} if self._settings.kind != "maskable-ppo" else {"action_masks": None}
        observation, info = env.reset(seed=run.seed, options={"workload_seed": run.seed})
        over = False
        while not over:
            if masked:
                masked["action_masks"] = info["action_mask"]
            action, _ = self._model.predict(observation, deterministic=True, **masked)
            observation, _, terminated, truncated, info = env.step(action.item())
            over = terminated or truncated
        metrics: Metrics = info["episode_metrics"]
        return metrics

    def state(self) -> dict[str, Any]:
        """Weights, the optimizer's state and counts."""
        return {"iteration": self.iteration, **model_state(self._model)}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up a state; episodes begin anew."""
        self.iteration = state["iteration"]
        restore_model(self._model, state)
        self._model.set_env(self._environments())

    def save_policy(self, path: Path, card: dict[str, Any]) -> Path:
        """Writes a pointer network for NumPy, and any other policy as its library does."""
        trained = self._trained(card)
        if trained is not None:
            return trained.save(path)
        path = path.with_name(f"{path.name}.zip")
        self._model.save(path)
        return path

    def _trained(self, card: dict[str, Any]) -> TrainedPolicy | None:
        policy: Any = self._model.policy
        if not isinstance(policy, PointerPolicy):
            return None
        return TrainedPolicy(policy.pointer.network(), self.training.decisions, card)


def _make_env(config: Config, first_seed: int, step: int) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("OpalVLLM-v0", scenario=config)
    return Monitor(TrainingWorkloads(env, first_seed, step))
