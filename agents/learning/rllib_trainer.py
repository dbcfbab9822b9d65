"""Training by RLlib's PPO, with environments on the machines of a Ray cluster."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.env_runner import EnvRunner
from ray.tune.registry import register_env

from agents.learning.policy_file import TrainedPolicy
from agents.learning.processes import Processes
from agents.learning.rllib_module import OBSERVATIONS, PointerRLModule
from agents.learning.sb3_trainer import EPISODES_OF_AN_ITERATION, TrainingWorkloads
from agents.learning.settings import RLlibSettings, TrainingConfig, scenario_of
from agents.learning.trainer import Trainer
from agents.learning.validation import ValidationRun, run_trained
from opal_gym.envs import MaskObservationWrapper
from opal_gym.sim.metrics import Metrics

ENVIRONMENT = "opal_gym/training"
"""What RLlib calls `make_env`."""

LEARNED = ("policy_loss", "vf_loss", "vf_explained_var", "entropy", "mean_kl_loss")
"""What is logged of the learner's results."""


class RLlibTrainer(Trainer):
    """Trains a pointer network by RLlib's PPO (its new API stack).

    An environment runner is a process on some machine of the cluster that the calling process is
    connected to (`agents.cluster.connect`); validation runs there, too. The learner is in the
    calling process. A state names a checkpoint that RLlib wrote; after a restart episodes begin
    anew, with other workloads. A runner that died is begun again, with its workloads since the
    last start.

    Args:
        training: The settings.
        processes: Not used.
        checkpoints: Directory of RLlib's checkpoints.
        runners: Environment runners; 0: the calling process runs the environments.

    Raises:
        ValueError: RLlib refuses the arguments.
    """

    def __init__(
        self, training: TrainingConfig, processes: Processes, *, checkpoints: Path, runners: int
    ) -> None:
        super().__init__(training, processes)
        assert isinstance(training.algorithm, RLlibSettings)
        self._settings = training.algorithm
        self._checkpoints = checkpoints.resolve()
        self._runners = runners
        register_env(ENVIRONMENT, make_env)
        self._ppo().validate()
        self._algorithm: Algorithm

    def _ppo(self) -> PPOConfig:
        training, settings = self.training, self._settings
        try:
            config = PPOConfig().training(**settings.arguments)
        except TypeError as error:
            raise ValueError(
                f"algorithm.arguments: {error}; allowed: those of RLlib's PPOConfig.training"
            ) from None
        workloads = {
            "config": scenario_of(training, requests=training.requests[1], load=training.loads),
            "first_seed": self.workload(self.iteration * EPISODES_OF_AN_ITERATION)[1],
            "envs": settings.envs,
            "made": 0,
        }
        module = RLModuleSpec(
            module_class=PointerRLModule, model_config={"hidden": list(settings.hidden)}
        )
        return (
            config.training(train_batch_size_per_learner=settings.timesteps)
            .environment(ENVIRONMENT, env_config=workloads)
            .env_runners(
                num_env_runners=self._runners,
                num_envs_per_env_runner=settings.envs,
            )
            .rl_module(rl_module_spec=module)
            .debugging(seed=training.seed, log_level="ERROR")
        )

    def warm_start(self) -> dict[str, float]:
        """Starts the environment runners."""
        self._start()
        return {}

    def _start(self) -> None:
        self._algorithm = self._ppo().build_algo()
        Path(self._algorithm.logdir).rmdir()  # empty, and of no use without Ray Tune

    def step(self) -> dict[str, float]:
        """Learns from so many decisions."""
        result = self._algorithm.train()
        self.iteration += 1
        played, learned = result["env_runners"], result["learners"]["default_policy"]
        logged = {f"train/{name}": float(learned[name]) for name in LEARNED if name in learned}
        if "episode_return_mean" in played:
            logged["rollout/score"] = float(played["episode_return_mean"])
        return {"decisions": float(played["num_env_steps_sampled_lifetime"]), **logged}

    def validate(self, runs: Sequence[ValidationRun]) -> list[Metrics]:
        """The results of the most probable actions, from the environment runners' processes."""
        trained, share = self._trained({}), max(1, self._runners)

        def run_share(runner: EnvRunner) -> dict[int, Metrics]:
            first = max(0, runner.worker_index - 1)
            return {i: run_trained((trained, runs[i])) for i in range(first, len(runs), share)}

        group = self._algorithm.env_runner_group
        shares = group.foreach_env_runner(run_share, local_env_runner=self._runners == 0)
        done = {number: metrics for each in shares for number, metrics in each.items()}
        # A runner that died has sent nothing.
        return [done[i] if i in done else run_trained((trained, run)) for i, run in enumerate(runs)]

    def state(self) -> dict[str, Any]:
        """Writes a checkpoint of RLlib's; its number, and that of iterations."""
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        path = self._checkpoint(self.iteration)
        shutil.rmtree(path, ignore_errors=True)
        self._algorithm.save_to_path(path)
        # The one before is what a run goes on from that is killed before it has noted this one.
        kept = {path, self._checkpoint(self.iteration - 1)}
        for other in sorted(self._checkpoints.iterdir()):
            if other not in kept:
                shutil.rmtree(other)
        return {"iteration": self.iteration}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up a state; episodes begin anew."""
        self.iteration = state["iteration"]
        self._start()
        self._algorithm.restore_from_path(self._checkpoint(self.iteration))

    def _checkpoint(self, iteration: int) -> Path:
        return self._checkpoints / f"{iteration:06d}"

    def save_policy(self, path: Path, card: dict[str, Any]) -> Path:
        """Writes a pointer network for NumPy."""
        return self._trained(card).save(path)

    def _trained(self, card: dict[str, Any]) -> TrainedPolicy:
        network = self._algorithm.get_module().pointer.network()
        return TrainedPolicy(network, self.training.decisions, card)


def make_env(context: EnvContext) -> gymnasium.Env[Any, Any]:
    """An environment of an environment runner, whose workloads no other has.

    RLlib makes a runner's environments from one context, one after another, and does not number
    them; so they are counted there.
    """
    envs = context["envs"]
    slot = max(0, context.worker_index - 1) * envs + context["made"]
    context["made"] += 1
    env = gymnasium.make("OpalVLLM-v0", scenario=context["config"])
    step = max(1, context.num_workers) * envs
    workloads = TrainingWorkloads(env, context["first_seed"] + slot, step)
    return MaskObservationWrapper(workloads, OBSERVATIONS)
