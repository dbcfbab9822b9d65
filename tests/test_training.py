"""Training: imitation, every algorithm, kills, resumption, and settings that are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("sb3_contrib", reason="needs the extra `train`")
pytest.importorskip("cma", reason="needs the extra `train`")
pytest.importorskip("tensorboard", reason="needs the extra `train`")

import gymnasium
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.logger import configure

from agents.learning.episodes import Episode, run_episode
from agents.learning.imitation import imitate, soften
from agents.learning.paired_ppo import PairedPPO
from agents.learning.policy_file import TrainedPolicy
from agents.learning.processes import Processes
from agents.learning.rollout_buffer import EpisodeBuffer
from agents.learning.rollouts import Rollout
from agents.learning.sb3_policy import PointerModule, PointerPolicy
from agents.learning.settings import MAX_SEEDS, TrainingConfig, load_training, training_names
from agents.learning.trainer import DEMONSTRATIONS, Trainer
from agents.learning.training import CheckpointError, Run
from agents.learning.validation import is_better, score
from agents.seeds import TRAINING
from opal_gym.config import ConfigError, load_config
from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.decision import DecisionKind
from tests.test_pointer import network

ROOT = Path(__file__).parents[1]
ALL = tuple(DecisionKind)
TINY: dict[str, Any] = {
    "name": "tiny",
    "scenario": "mem-chat-burst",
    "loads": [0.8, 1.2],
    "requests": [20, 40],
    "validation": {"workloads": 2, "requests": 40, "every": 2},
}
PAIRED: dict[str, Any] = {
    "kind": "paired-ppo",
    "iterations": 4,
    "rollouts": 2,
    "hidden": [6, 5],
    "batch_size": 64,
    "warm_start": {"policy": "sjf", "episodes": 2, "epochs": 2},
}
EVOLUTION: dict[str, Any] = {"kind": "cma-es", "iterations": 4, "population": 4, "workloads": 2}


def sb3(kind: str, **changes: Any) -> dict[str, Any]:
    on_policy = {"n_steps": 32} if kind != "dqn" else {"learning_starts": 20, "buffer_size": 100}
    return {
        "kind": kind,
        "iterations": 2,
        "timesteps": 64,
        "envs": 2,
        "arguments": on_policy,
        **changes,
    }


def settings(algorithm: dict[str, Any], **changes: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({**TINY, "algorithm": algorithm, **changes})


def started(training: TrainingConfig, directory: Path) -> Run:
    return Run(training, directory, Processes(), configure(str(directory), ["tensorboard"]))


def finished(training: TrainingConfig, directory: Path) -> Run:
    run = started(training, directory)
    while not run.done:
        run.step()
    return run


def two_groups() -> list[list[Rollout]]:
    """Two rollouts of each of two workloads."""
    config = load_config("mem-chat-burst", {"workload.num_requests": 20})
    return [
        [
            run_episode(Episode(config, TRAINING.start + i, network(), seed, ALL, {"latency": 1.0}))
            for seed in (0, 1)
        ]
        for i in range(2)
    ]


def demonstrations(policy: str, episodes: int) -> EpisodeBuffer:
    config = load_config(
        "mem-chat-burst", {"workload.num_requests": 100, "workload.arrivals.load": 1.2}
    )
    seen = [
        run_episode(Episode(config, TRAINING.start + i, policy, 0, ALL, {"latency": 1.0}))
        for i in range(episodes)
    ]
    return EpisodeBuffer(seen, [np.zeros(len(e.choice)) for e in seen], np.random.default_rng(0))


class TestImitation:
    def test_it_learns_what_a_heuristic_does(self) -> None:
        """Among ten candidates and more a guess would agree in a tenth of the cases."""
        torch.manual_seed(0)
        module = PointerModule()
        given = demonstrations("admit=sjf,chunk=1/8", 4)
        assert imitate(module, given, epochs=12, batch_size=32) > 0.95

    def test_softened_logits_are_scaled(self) -> None:
        module = PointerModule((6, 5))
        before = module.network().logit.copy()
        soften(module, 0.25)
        assert module.network().logit == pytest.approx(before / 4)


class TestWhatIsLearnedFrom:
    def trainer(self, tmp_path: Path, **changes: Any) -> Trainer:
        return started(settings(EVOLUTION, **changes), tmp_path).trainer

    def test_loads_are_drawn_and_episodes_grow(self, tmp_path: Path) -> None:
        """Loads from .8 to 1.2; 20 requests at the beginning, 40 at the end of 4 iterations."""
        trainer = self.trainer(tmp_path)
        configs = [trainer.workload(number)[0] for number in range(50)]
        loads = [config.workload.arrivals.load for config in configs]
        assert min(loads) < 0.85
        assert max(loads) > 1.15
        assert 0.8 <= min(loads) <= max(loads) <= 1.2
        sizes = []
        for trainer.iteration in (0, 1, 2, 4):
            sizes.append(trainer.workload(0)[0].workload.num_requests)
        assert sizes == [20, 25, 30, 40]

    def test_workloads_are_of_the_training_seeds_and_of_no_other_training(
        self, tmp_path: Path
    ) -> None:
        seeds = []
        for seed in (0, 1, MAX_SEEDS - 1):
            trainer = self.trainer(tmp_path / str(seed), seed=seed)
            last = DEMONSTRATIONS + 1000
            seeds.append(range(trainer.workload(0)[1], trainer.workload(last)[1] + 1))
        assert all(each[0] in TRAINING and each[-1] in TRAINING for each in seeds)
        assert all(one[-1] < other[0] for one, other in pairwise(seeds))

    def test_advantages_by_share(self) -> None:
        """The scores of the groups are -2 and -8 on average: halves and eighths."""
        env = gymnasium.make("OpalVLLM-v0", num_requests=20)
        taken = []
        for relative in (False, True):
            groups = [
                [replace(each, score=score) for each in seen]
                for seen, score in zip(two_groups(), (-2.0, -8.0), strict=True)
            ]
            model = PairedPPO(env, lambda _, g=groups: g, time_constant_s=30, relative=relative)
            model.set_logger(configure(None, []))
            model.learn(1)
            taken.append(model.rollout_buffer.batch(np.arange(len(model.rollout_buffer))))
        plain, shares = (batch.advantages.numpy() for batch in taken)
        first = sum(len(each.choice) for each in groups[0])
        assert plain.any()
        assert shares == pytest.approx(
            np.concatenate([plain[:first] / 2, plain[first:] / 8]), rel=1e-5
        )


class TestValidation:
    def metrics(self, *values: float) -> list[Any]:
        return [{"e2e_s": {"mean": value}, "goodput": value} for value in values]

    def test_loads_weigh_alike(self) -> None:
        """Two loads of two workloads: means 2 and 8, of which the geometric mean is 4."""
        result = score(settings(EVOLUTION), self.metrics(1, 3, 6, 10))
        assert result.by_load == (2, 8)
        assert result.value == pytest.approx(4)

    @pytest.mark.parametrize(("metric", "better"), [("e2e", 1.0), ("goodput", 3.0)])
    def test_what_is_better_follows_the_metric(self, metric: str, better: float) -> None:
        training = settings(EVOLUTION, metric=metric)
        assert is_better(training, better, 2.0)
        assert not is_better(training, 4 - better, 2.0)
        assert not is_better(training, 2.0, 2.0)
        assert is_better(training, 5.0, None)


class TestPointerPolicy:
    def test_maskable_ppo_learns_with_it(self) -> None:
        env = gymnasium.make("OpalVLLM-v0", num_requests=20)
        model = MaskablePPO(PointerPolicy, env, n_steps=32, batch_size=16, seed=0, device="cpu")
        before = model.policy.pointer.network()
        model.learn(64)
        after = model.policy.pointer.network()
        assert not np.array_equal(before.features, after.features)

    def test_it_predicts_what_the_numpy_policy_chooses(self) -> None:
        env = gymnasium.make("OpalVLLM-v0", num_requests=40, load=2.0)
        inner = env.unwrapped
        assert isinstance(inner, OpalVLLMEnv)
        model = MaskablePPO(
            PointerPolicy,
            env,
            n_steps=32,
            seed=0,
            device="cpu",
            policy_kwargs={"hidden": (5, 4)},
        )
        model.policy.pointer.load_network(network())
        policy = network().policy()
        observation, info = env.reset(seed=1)
        terminated, steps = False, 0
        while not terminated:
            action, _ = model.predict(
                observation, deterministic=True, action_masks=info["action_mask"]
            )
            assert inner.decision is not None
            assert action == inner.action_of(policy.choose(inner.decision))
            observation, _, terminated, _, info = env.step(action.item())
            steps += 1
        assert steps > 100

    def test_it_is_saved_and_loaded(self, tmp_path: Path) -> None:
        env = gymnasium.make("OpalVLLM-v0", num_requests=20)
        model = MaskablePPO(
            PointerPolicy, env, n_steps=16, device="cpu", policy_kwargs={"hidden": (6, 5)}
        )
        model.save(tmp_path / "model")
        loaded = MaskablePPO.load(tmp_path / "model", device="cpu")
        weights = model.policy.pointer.network().arrays()
        for name, array in loaded.policy.pointer.network().arrays().items():
            assert np.array_equal(array, weights[name])


class TestRuns:
    @pytest.mark.parametrize("algorithm", [PAIRED, EVOLUTION], ids=lambda a: a["kind"])
    def test_a_run_taken_up_again_is_the_run_that_was_not_stopped(
        self, algorithm: dict[str, Any], tmp_path: Path
    ) -> None:
        training = settings(algorithm)
        whole = finished(training, tmp_path / "whole")
        started(training, tmp_path / "parts").step()
        again = started(training, tmp_path / "parts")
        assert again.trainer.iteration == 1
        again.step()
        parts = finished(training, tmp_path / "parts")
        assert parts.progress.validations == whole.progress.validations
        assert parts.progress.curve == whole.progress.curve
        ours, theirs = (
            TrainedPolicy.load(tmp_path / name / "best.npz").weights.arrays()
            for name in ("whole", "parts")
        )
        assert all(np.array_equal(array, theirs[name]) for name, array in ours.items())

    def test_another_number_of_processes_gives_the_same(self, tmp_path: Path) -> None:
        training = settings({**PAIRED, "iterations": 1, "workloads": 2})
        alone = finished(training, tmp_path / "one")
        with Processes(2) as processes:
            logger = configure(str(tmp_path / "two"), ["tensorboard"])
            both = Run(training, tmp_path / "two", processes, logger)
            both.step()
        assert both.progress.validations == alone.progress.validations
        assert alone.progress.cpu_s > 0
        assert processes.cpu_s > 0

    def test_another_seed_gives_another_run(self, tmp_path: Path) -> None:
        runs = [
            finished(settings({**PAIRED, "iterations": 1}, seed=seed), tmp_path / str(seed))
            for seed in (0, 1)
        ]
        assert runs[0].progress.curve != runs[1].progress.curve

    @pytest.mark.parametrize(
        "algorithm",
        [sb3("maskable-ppo", policy="pointer"), *map(sb3, ("maskable-ppo", "ppo", "a2c", "dqn"))],
        ids=lambda a: f"{a['kind']}-{a.get('policy', 'mlp')}",
    )
    def test_algorithms_of_sb3_run_and_are_taken_up_again(
        self, algorithm: dict[str, Any], tmp_path: Path
    ) -> None:
        training = settings(algorithm)
        started(training, tmp_path).step()
        run = finished(training, tmp_path)
        assert run.trainer.iteration == 2
        assert [entry["iteration"] for entry in run.progress.validations] == [0, 2]
        decisions = [entry["decisions"] for entry in run.progress.curve[1:]]
        assert decisions == [64, 128]
        assert (tmp_path / ("best.npz" if "policy" in algorithm else "best.zip")).is_file()

    def test_the_best_is_kept(self, tmp_path: Path) -> None:
        run = finished(settings(PAIRED), tmp_path)
        values = [entry["value"] for entry in run.progress.validations]
        assert run.progress.best == min(values)
        card = TrainedPolicy.load(tmp_path / "best.npz").card
        assert card["validation"]["value"] == min(values)
        assert card["training"]["scenario"] == "mem-chat-burst"

    def test_decisions_can_be_left_to_the_baseline(self, tmp_path: Path) -> None:
        run = finished(settings({**PAIRED, "iterations": 1}, decisions=["ADMIT"]), tmp_path)
        assert TrainedPolicy.load(tmp_path / "best.npz").decisions == ("ADMIT",)
        assert run.progress.best is not None


class TestRefused:
    def test_a_checkpoint_of_other_settings(self, tmp_path: Path) -> None:
        started(settings(EVOLUTION), tmp_path)
        with pytest.raises(CheckpointError, match=r"other settings \(scenario, algorithm\.sigma\)"):
            started(settings({**EVOLUTION, "sigma": 0.1}, scenario="rich-chat"), tmp_path)

    @pytest.mark.parametrize("content", [b"", b"hello", None])
    def test_a_broken_checkpoint(self, tmp_path: Path, content: bytes | None) -> None:
        started(settings(EVOLUTION), tmp_path)
        path = tmp_path / "checkpoint.pt"
        path.write_bytes(path.read_bytes()[:500] if content is None else content)
        with pytest.raises(CheckpointError, match=r"checkpoint\.pt: got .*; allowed: a checkpoint"):
            started(settings(EVOLUTION), tmp_path)

    def test_a_checkpoint_that_would_run_code(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return (os.mkdir, (str(tmp_path / "evil"),))

        torch.save({"training": Evil()}, tmp_path / "checkpoint.pt")
        with pytest.raises(CheckpointError, match="allowed: a checkpoint"):
            started(settings(EVOLUTION), tmp_path)
        assert not (tmp_path / "evil").exists()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"scenario": "nope"}, r"scenario: got 'nope'"),
            ({"overrides": {"worker.speed": 1}}, r"worker\.speed: unknown key"),
            ({"decisions": ["GUESS"]}, r"decisions\[0\]: got 'GUESS'; allowed: 'CHUNK'"),
            ({"loads": [1.2, 0.8]}, r"load"),
            ({"seed": 2000}, r"seed: got 2000; allowed: less than 2000"),
            ({"loads": [0, 1]}, r"loads\[0\]: got 0; allowed: greater than 0"),
            ({"requests": [10, 0]}, r"requests\[1\]: got 0; allowed"),
            ({"colour": "red"}, r"colour: unknown key; allowed: algorithm, decisions"),
            ({"metric": "luck"}, r"metric: got 'luck'; allowed: 'e2e'"),
            (
                {"algorithm": {"kind": "luck"}},
                r"algorithm\.kind: got 'luck'; allowed: 'paired-ppo'",
            ),
            ({"algorithm": {"kind": "cma-es", "start": {"x": 1}}}, r"start: .*got 'x'; allowed"),
            ({"algorithm": {**PAIRED, "rollouts": 1}}, r"rollouts: got 1; allowed"),
            (
                {"algorithm": {**PAIRED, "warm_start": {"policy": "nope"}}},
                r"warm_start\.policy: .*got 'nope'; allowed",
            ),
            (
                {"algorithm": {"kind": "ppo", "policy": "pointer"}},
                r"policy: got 'pointer'; allowed: MultiInputPolicy where kind is ppo",
            ),
        ],
    )
    def test_settings(self, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
        path = tmp_path / "t.yaml"
        path.write_text(yaml.safe_dump({**TINY, "algorithm": EVOLUTION, **changes}))
        with pytest.raises(ConfigError, match=message):
            load_training(path)

    @pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00"])
    def test_files_that_hold_no_settings(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "t.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"t\.yaml: "):
            load_training(path)

    def test_an_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match="got 'nope'; allowed: the path of a YAML file, or"):
            load_training("nope")


@pytest.mark.parametrize("name", training_names())
def test_the_published_trainings_can_be_read(name: str) -> None:
    assert load_training(name).name == name


class TestScript:
    def command(self, path: Path, out: Path, *more: str) -> list[str]:
        return [sys.executable, "scripts/train.py", str(path), "--out", str(out), *more]

    def written(self, directory: Path, **changes: Any) -> Path:
        path = directory / "t.yaml"
        path.write_text(
            yaml.safe_dump({**TINY, "algorithm": {**PAIRED, "iterations": 6}, **changes})
        )
        return path

    @pytest.mark.slow
    def test_killed_at_some_moment_it_goes_on_and_ends_alike(self, tmp_path: Path) -> None:
        path = self.written(tmp_path)
        whole, parts = tmp_path / "whole", tmp_path / "parts"
        subprocess.run(self.command(path, whole), cwd=ROOT, check=True, capture_output=True)
        process = subprocess.Popen(
            self.command(path, parts), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + 120
        while self.iteration(parts) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert 2 <= self.iteration(parts) < 6
        assert not json.loads((parts / "run.json").read_text())["meta"]["complete"]
        result = subprocess.run(
            self.command(path, parts), cwd=ROOT, check=True, capture_output=True, text=True
        )
        assert ", from iteration " in result.stdout
        curves = [json.loads((d / "curves.json").read_text()) for d in (whole, parts)]
        assert curves[0] == curves[1]
        about = json.loads((parts / "run.json").read_text())
        assert about["meta"]["complete"]
        assert {"torch", "sb3-contrib", "opal-gym"} < set(about["meta"]["versions"])

    def iteration(self, directory: Path) -> int:
        """Iterations that `curves.json` tells of; -1: there is none."""
        try:
            return int(
                json.loads((directory / "curves.json").read_text())["curve"][-1]["iteration"]
            )
        except FileNotFoundError:
            return -1

    def test_what_is_refused_is_said_without_a_traceback(self, tmp_path: Path) -> None:
        path = self.written(tmp_path, scenario="nope")
        result = subprocess.run(
            self.command(path, tmp_path / "out"),
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 2
        assert result.stderr.startswith("error: scenario: got 'nope'")
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "out").exists()
