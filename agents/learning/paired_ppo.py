"""PPO on whole episodes, with advantages against other rollouts of the same workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from sb3_contrib import MaskablePPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from agents.learning.advantages import paired_advantages
from agents.learning.episodes import Episode, run_episode
from agents.learning.imitation import imitate, soften
from agents.learning.pointer import PointerNetwork
from agents.learning.policy_file import TrainedPolicy
from agents.learning.processes import Processes
from agents.learning.rollout_buffer import EpisodeBuffer
from agents.learning.rollouts import Rollout
from agents.learning.sb3_policy import PointerPolicy
from agents.learning.sb3_state import model_state, restore_model
from agents.learning.settings import PairedPPOSettings, TrainingConfig, WarmStart
from agents.learning.trainer import DEMONSTRATIONS, NEVER, Trainer
from agents.learning.validation import ValidationRun
from opal_gym.sim.decision import DecisionKind
from opal_gym.sim.metrics import Metrics

Groups = Callable[[PointerNetwork], "Sequence[Sequence[Rollout]]"]
"""Runs an iteration's episodes with a network; the rollouts of a group have one workload."""


class PairedPPO(MaskablePPO):
    """MaskablePPO whose rollouts are whole episodes, in groups of one workload.

    The losses are sb3-contrib's. Advantages are discounted by time and paired
    (`agents.learning.advantages`), so no critic is trained. Episodes run without `env`, which only
    says what is observed and what can be done.

    Args:
        env: `OpalVLLM-v0`.
        groups: Runs the episodes.
        time_constant_s: Time constant of the discount, s.
        relative: Advantages are shares of the absolute mean score of the group.
        kwargs: Arguments of `MaskablePPO`.
    """

    policy: PointerPolicy
    rollout_buffer: EpisodeBuffer  # type: ignore[assignment]

    def __init__(
        self,
        env: Any,
        groups: Groups,
        *,
        time_constant_s: float,
        relative: bool,
        **kwargs: Any,
    ) -> None:
        self._groups = groups
        self._time_constant_s = time_constant_s
        self._relative = relative
        self.rng = np.random.default_rng(0)
        super().__init__(PointerPolicy, env, n_steps=2, vf_coef=0.0, device="cpu", **kwargs)

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
        use_masking: bool = True,
    ) -> bool:
        """Runs the episodes of an iteration."""
        callback.on_rollout_start()
        groups = self._groups(self.policy.pointer.network())
        advantages = paired_advantages(groups, self._time_constant_s)
        scores = [[rollout.score for rollout in group] for group in groups]
        if self._relative:
            advantages = [
                [each / abs(np.mean(score)) for each in group]
                for group, score in zip(advantages, scores, strict=True)
            ]
        self.rollout_buffer = EpisodeBuffer(
            list(chain.from_iterable(groups)), list(chain.from_iterable(advantages)), self.rng
        )
        self.num_timesteps += len(self.rollout_buffer)
        self.logger.record("rollout/score", float(np.mean(scores)))
        self.logger.record("rollout/spread", float(np.mean(np.std(scores, axis=1))))
        callback.on_rollout_end()
        return callback.on_step()


class PairedPPOTrainer(Trainer):
    """Trains a pointer network by `PairedPPO`."""

    def __init__(self, training: TrainingConfig, processes: Processes, logger: Logger) -> None:
        super().__init__(training, processes)
        settings = training.algorithm
        assert isinstance(settings, PairedPPOSettings)
        self._settings = settings
        self._kinds = tuple(DecisionKind[name] for name in training.decisions)
        self._model = PairedPPO(
            gymnasium.make("OpalVLLM-v0", scenario=self.workload(0)[0]),
            self._run_groups,
            time_constant_s=settings.time_constant_s,
            relative=settings.relative,
            policy_kwargs={"hidden": settings.hidden},
            learning_rate=settings.learning_rate,
            ent_coef=settings.entropy,
            clip_range=settings.clip,
            n_epochs=settings.epochs,
            batch_size=settings.batch_size,
            seed=training.seed,
        )
        self._model.set_logger(logger)

    def warm_start(self) -> dict[str, float]:
        """Imitation, if the settings say so."""
        settings = self._settings.warm_start
        return {} if settings is None else self._imitate(settings)

    def _imitate(self, settings: WarmStart) -> dict[str, float]:
        numbers = range(DEMONSTRATIONS, DEMONSTRATIONS + settings.episodes)
        episodes = [self._episode(number, settings.policy, 0) for number in numbers]
        rollouts = self.processes.map(run_episode, episodes)
        nothing = [np.zeros(len(each.choice)) for each in rollouts]
        demonstrations = EpisodeBuffer(rollouts, nothing, self._rng())
        module = self._model.policy.pointer
        agreement = imitate(module, demonstrations, epochs=settings.epochs)
        soften(module, settings.soften)
        return {"warm_start/agreement": agreement, "warm_start/decisions": len(demonstrations)}

    def step(self) -> dict[str, float]:
        """Runs episodes and updates the network."""
        settings, model = self._settings, self._model
        done = self.iteration / max(1, self.iterations - 1)
        first, last = settings.learning_rate, settings.final_learning_rate
        model.lr_schedule = lambda _: first + (last - first) * done
        model.rng = self._rng()
        # One collection is more than one timestep.
        model.learn(1, log_interval=NEVER, reset_num_timesteps=False)
        self.iteration += 1
        return {"decisions": float(model.num_timesteps)}

    def _run_groups(self, network: PointerNetwork) -> list[list[Rollout]]:
        settings, first = self._settings, self.iteration * self._settings.workloads
        episodes = [
            self._episode(first + group, network, rollout)
            for group in range(settings.workloads)
            for rollout in range(settings.rollouts)
        ]
        rollouts = self.processes.map(run_episode, episodes)
        size = settings.rollouts
        return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]

    def _episode(self, number: int, actor: PointerNetwork | str, rollout: int) -> Episode:
        config, workload_seed = self.workload(number)
        seed = np.random.SeedSequence((self.training.seed, workload_seed, rollout))
        return Episode(
            config,
            workload_seed,
            actor,
            int(seed.generate_state(1)[0]),
            self._kinds,
            self.training.reward,
        )

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng((self.training.seed, self.iteration))

    def validate(self, runs: Sequence[ValidationRun]) -> list[Metrics]:
        """The results of the most probable choices."""
        return self.run_trained(self._trained({}), runs)

    def state(self) -> dict[str, Any]:
        """Weights, the optimizer's state and counts."""
        return {"iteration": self.iteration, **model_state(self._model)}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up a state."""
        self.iteration = state["iteration"]
        restore_model(self._model, state)

    def save_policy(self, path: Path, card: dict[str, Any]) -> Path:
        """Writes the network for NumPy."""
        return self._trained(card).save(path)

    def _trained(self, card: dict[str, Any]) -> TrainedPolicy:
        network = self._model.policy.pointer.network()
        return TrainedPolicy(network, self.training.decisions, card)
