"""RLlib: the pointer network as a module, workloads, training on two runners, resumption."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("ray", reason="needs the extra `rllib`")
pytest.importorskip("sb3_contrib", reason="needs the extra `train`")
pytest.importorskip("tensorboard", reason="needs the extra `train`")

import gymnasium
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.env.env_context import EnvContext
from stable_baselines3.common.logger import Logger, configure

from agents.evaluation import run_through_env
from agents.learning.inputs import CONTEXT, KINDS
from agents.learning.policy_file import TrainedPolicy
from agents.learning.processes import Processes
from agents.learning.rllib_module import PointerRLModule
from agents.learning.rllib_trainer import RLlibTrainer, make_env
from agents.learning.settings import TrainingConfig
from agents.learning.training import CheckpointError, Run
from agents.learning.validation import run_trained, validation_runs
from agents.seeds import TRAINING
from opal_gym.config import CONFIGS, load_config
from opal_gym.sim.candidates import FEATURES
from tests.ray_cluster import cluster
from tests.test_pointer import inputs, network

__all__ = ["cluster"]

ROOT = CONFIGS.parent
TINY: dict[str, Any] = {
    "name": "tiny",
    "scenario": "mem-chat-burst",
    "loads": [0.8, 1.2],
    "requests": [20, 20],
    "seed": 3,
    "algorithm": {
        "kind": "rllib-ppo",
        "iterations": 2,
        "timesteps": 64,
        "envs": 2,
        "hidden": [6, 5],
        "arguments": {"minibatch_size": 32, "num_epochs": 2, "lr": 0.01},
    },
    "validation": {"workloads": 2, "requests": 40, "every": 2},
}
SLOTS = 12
"""Candidates of the observations that are made here."""


def settings(**algorithm: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({**TINY, "algorithm": {**TINY["algorithm"], **algorithm}})


def started(training: TrainingConfig, directory: Path, runners: int = 2) -> Run:
    def make(training: TrainingConfig, processes: Processes, logger: Logger) -> RLlibTrainer:
        return RLlibTrainer(training, processes, checkpoints=directory / "rllib", runners=runners)

    return Run(training, directory, Processes(), configure(str(directory), ["tensorboard"]), make)


def trainer_of(run: Run) -> RLlibTrainer:
    assert isinstance(run.trainer, RLlibTrainer)
    return run.trainer


def weights(run: Run) -> dict[str, Any]:
    return trainer_of(run)._trained({}).weights.arrays()


def module(hidden: tuple[int, int] = (5, 4)) -> PointerRLModule:
    env = make_env(context())
    made = PointerRLModule(
        observation_space=env.observation_space,
        action_space=env.action_space,
        model_config={"hidden": list(hidden)},
    )
    made.pointer.load_network(network())
    return made


def batch(candidates: int, stop_allowed: bool, seed: int) -> tuple[dict[str, Any], Any]:
    """An observation of so many candidates as RLlib gives it, and what a policy would read."""
    given = inputs(candidates, seed)
    rows = np.zeros((1, SLOTS, len(FEATURES)), np.float32)
    rows[0, :candidates] = given.rows
    mask = np.zeros((1, SLOTS + 1), np.int8)
    mask[0, :candidates], mask[0, SLOTS] = 1, stop_allowed
    kinds = len(KINDS)
    observed = {
        "kind": given.context[None, :kinds],
        "worker": given.context[None, kinds:CONTEXT],
        "candidates": rows.reshape(1, -1),
    }
    as_tensors = {name: torch.from_numpy(array) for name, array in observed.items()}
    obs = {"observations": as_tensors, "action_mask": torch.from_numpy(mask)}
    return {Columns.OBS: obs}, given


def context(worker_index: int = 1, **config: Any) -> EnvContext:
    env_config = {
        "config": load_config("mem-chat-burst", {"workload.num_requests": 5}),
        "first_seed": 1000,
        "envs": 2,
        "made": 0,
        **config,
    }
    return EnvContext(env_config, worker_index=worker_index, num_workers=3)


class TestModule:
    @pytest.mark.parametrize("stop_allowed", [False, True])
    @pytest.mark.parametrize("candidates", [1, 4, SLOTS])
    def test_logits_are_the_pointer_networks(self, candidates: int, stop_allowed: bool) -> None:
        given, read = batch(candidates, stop_allowed, seed=candidates)
        legal = given[Columns.OBS]["action_mask"][0].bool()
        expected = network().logits(read, stop_allowed=stop_allowed)
        made = module()
        for forward in (made.forward_inference, made.forward_exploration, made.forward_train):
            logits = forward(given)[Columns.ACTION_DIST_INPUTS][0].detach()
            assert logits[legal].numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)

    def test_illegal_actions_have_probability_0(self) -> None:
        given, _ = batch(4, False, seed=0)
        made = module()
        logits = made.forward_exploration(given)[Columns.ACTION_DIST_INPUTS]
        distribution = made.get_exploration_action_dist_cls().from_logits(logits)
        illegal = torch.arange(4, SLOTS + 1)
        assert torch.exp(distribution.logp(illegal)).tolist() == [0.0] * len(illegal)
        assert {int(distribution.sample()) for _ in range(200)} <= {0, 1, 2, 3}

    def test_values_are_computed_once_in_training(self) -> None:
        given, _ = batch(4, True, seed=0)
        made = module()
        values = made.compute_values(given)
        assert values.shape == (1,)
        embeddings = made.forward_train(given)[Columns.EMBEDDINGS]
        assert made.compute_values({}, embeddings) == values


class TestWorkloads:
    def test_no_two_environments_share_one(self) -> None:
        """Three runners of two environments: seeds 1000 to 1005 first, then 1006 to 1011."""
        seeds = []
        for worker_index in (1, 2, 3):
            shared = context(worker_index)
            for env in (make_env(shared), make_env(shared)):
                for _ in range(2):
                    env.reset()
                    seeds.append(env.unwrapped.snapshot().options["workload_seed"])
        assert seeds[:4] == [1000, 1006, 1001, 1007]
        assert sorted(seeds) == list(range(1000, 1012))

    def test_they_are_training_workloads_and_after_a_restart_others(
        self, cluster: None, tmp_path: Path
    ) -> None:
        trainer = RLlibTrainer(settings(), Processes(), checkpoints=tmp_path, runners=2)
        first = trainer._ppo().env_config["first_seed"]
        trainer.iteration = 1
        assert first == TRAINING.start + 3_000_000
        assert trainer._ppo().env_config["first_seed"] == first + 1000


@pytest.mark.slow
def test_training_on_two_runners_and_resumption(cluster: None, tmp_path: Path) -> None:
    run = started(settings(), tmp_path)
    before = weights(run)
    run.step()
    assert not run.done
    after = weights(run)
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    trainer = trainer_of(run)
    runners = trainer._algorithm.env_runner_group
    seeds = runners.foreach_env_runner(
        lambda runner: [
            env.unwrapped.snapshot().options["workload_seed"] for env in runner.env.unwrapped.envs
        ],
        local_env_runner=False,
    )
    assert len({seed for each in seeds for seed in each}) == 4  # two runners of two environments
    assert all(seed in TRAINING for each in seeds for seed in each)
    entry = run.progress.curve[-1]
    assert entry["decisions"] >= 64
    assert {"train/policy_loss", "train/vf_loss", "train/entropy"} < set(entry)
    trainer._algorithm.stop()

    again = started(settings(), tmp_path)
    assert again.trainer.iteration == trainer_of(again)._algorithm.iteration == 1
    for name, array in weights(again).items():
        assert np.array_equal(array, after[name]), name
    again.step()
    assert again.done
    curve = again.progress.curve
    assert [each["iteration"] for each in curve] == [0, 1, 2]
    assert curve[2]["decisions"] > curve[1]["decisions"]
    assert [each["iteration"] for each in again.progress.validations] == [0, 2]
    assert sorted(path.name for path in (tmp_path / "rllib").iterdir()) == ["000001", "000002"]

    best = TrainedPolicy.load(tmp_path / "best.npz")
    assert best.card["validation"]["value"] == again.progress.best
    config = load_config("mem-chat-burst", {"workload.num_requests": 40})
    assert run_through_env(config, best.policy(), 1)[1]["illegal_actions"] == 0

    # What the runners' processes said of the last policy, this one says, too.
    current, validation = trainer_of(again)._trained({}), validation_runs(settings())
    expected = [run_trained((current, each)) for each in validation]
    assert trainer_of(again).validate(validation) == expected
    trainer_of(again)._algorithm.stop()


class TestRefused:
    def test_arguments_that_rllib_does_not_know(self, cluster: None, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"algorithm\.arguments: .*'colour'; allowed: those"):
            started(settings(arguments={"colour": "red"}), tmp_path)

    def test_arguments_that_rllib_refuses(self, cluster: None, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"`minibatch_size` \(100\) must be <= "):
            started(settings(arguments={"minibatch_size": 100}), tmp_path)

    def test_a_checkpoint_of_another_kind_of_training(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint.pt").write_bytes(b"hello")
        with pytest.raises(CheckpointError, match="allowed: a checkpoint"):
            started(settings(), tmp_path)

    @pytest.mark.parametrize(
        ("script", "changes", "message"),
        [
            ("train_rllib.py", {"scenario": "nope"}, "error: scenario: got 'nope'"),
            (
                "train_rllib.py",
                {"algorithm": {"kind": "ppo"}},
                "error: algorithm.kind: got 'ppo'; allowed: 'rllib-ppo'",
            ),
            (
                "train.py",
                {},
                "error: algorithm.kind: got 'rllib-ppo'; allowed: with scripts/train_rllib.py",
            ),
        ],
    )
    def test_settings(
        self, script: str, changes: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        path, out = tmp_path / "t.yaml", tmp_path / "out"
        path.write_text(yaml.safe_dump({**TINY, **changes}))
        command = [sys.executable, f"scripts/{script}", str(path), "--out", str(out)]
        result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        assert result.returncode == 2
        assert result.stderr.startswith(message)
        assert "Traceback" not in result.stderr


def test_the_environment_can_be_stepped_with_its_mask() -> None:
    env: gymnasium.Env[Any, Any] = make_env(context())
    observation, _ = env.reset()
    assert env.observation_space.contains(observation)
    assert set(observation) == {"observations", "action_mask"}
