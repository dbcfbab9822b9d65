"""Gymnasium's own checks, registration, and vectorised environments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import opal_gym
from opal_gym.envs import OpalVLLMEnv
from tests.episodes import BUSY, SCENARIOS, Seen, assert_same, baseline, play

ROOT = Path(opal_gym.__file__).parents[1]
IDS = ("OpalVLLM-v0", "opal_gym:OpalVLLM-v0")


def made(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("OpalVLLM-v0", **{**SCENARIOS[name], **kwargs})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCENARIOS)
def test_gymnasium_check_env_passes_without_a_warning(name: str) -> None:
    check_env(made(name, render_mode="ansi").unwrapped)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["busy", "opal-docs", "slot8-chat"])
def test_a_whole_episode_passes_the_passive_checker_without_a_warning(name: str) -> None:
    env = made(name)
    observation, info = env.reset(seed=5)
    over = False
    while not over:
        observation, _, terminated, truncated, info = env.step(baseline(info))
        assert env.observation_space.contains(observation)
        over = terminated or truncated


@pytest.mark.parametrize("env_id", IDS)
def test_make_gives_the_documented_environment(env_id: str) -> None:
    env = gymnasium.make(env_id, scenario="slot8-chat", num_requests=3)
    assert isinstance(env.unwrapped, OpalVLLMEnv)
    assert env.unwrapped.config.name == "slot8-chat"


def test_default_scenario_is_mem_chat_burst() -> None:
    env = gymnasium.make("OpalVLLM-v0").unwrapped
    assert isinstance(env, OpalVLLMEnv)
    assert env.config.name == "mem-chat-burst"


def test_importing_opal_gym_is_what_registers_the_environment() -> None:
    code = (
        "import gymnasium\n"
        "assert 'OpalVLLM-v0' not in gymnasium.registry\n"
        "import opal_gym\n"
        "assert 'OpalVLLM-v0' in gymnasium.registry\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_module_prefix_registers_the_environment_by_itself() -> None:
    code = (
        "import gymnasium\n"
        "env = gymnasium.make('opal_gym:OpalVLLM-v0', num_requests=2)\n"
        "env.reset(seed=0)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="num_request"):
        gymnasium.make("OpalVLLM-v0", num_request=3)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("decisions", "env.decisions", ["ADMIT"]),
        ("max_candidates", "env.max_candidates", 7),
        ("horizon_s", "env.horizon_s", 2.5),
        ("num_requests", "workload.num_requests", 5),
        ("load", "workload.arrivals.load", 0.3),
        ("load", "workload.arrivals.load", [0.3, 0.4]),
        ("length_information", "simulation.length_information", "none"),
        ("reward", "env.reward", {"ttft": 2.0}),
    ],
)
def test_arguments_are_short_for_overrides(name: str, key: str, value: Any) -> None:
    plain, given = OpalVLLMEnv(BUSY), OpalVLLMEnv(BUSY, **{name: value})
    assert given.config == OpalVLLMEnv(BUSY, overrides={key: value}).config
    assert given.config != plain.config


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize(
    ("mode", "context"),
    [
        ("sync", None),
        ("async", None),
        pytest.param("async", "spawn", marks=pytest.mark.slow),
        pytest.param("async", "forkserver", marks=pytest.mark.slow),
    ],
)
def test_make_vec_steps_the_same_episodes_as_single_environments(
    env_id: str, mode: str, context: str | None
) -> None:
    singles = [play(OpalVLLMEnv(BUSY), seed=seed) for seed in (3, 4)]
    vector = gymnasium.make_vec(
        env_id,
        num_envs=2,
        vectorization_mode=mode,
        vector_kwargs={"context": context} if context else {},
        scenario=BUSY,
    )
    try:
        observations, infos = vector.reset(seed=[3, 4])  # type: ignore[arg-type]
        for step in range(min(map(len, singles))):
            seen = [single[step] for single in singles]
            assert_same(_stacked(seen), dict(observations))
            np.testing.assert_array_equal(
                infos["action_mask"], [one.info["action_mask"] for one in seen]
            )
            np.testing.assert_array_equal(infos["time"], [one.info["time"] for one in seen])
            if any(one.terminated for one in seen):
                break
            observations, rewards, terminated, _, infos = vector.step(
                infos["baseline_action"].astype(np.int64)
            )
            np.testing.assert_array_equal(rewards, [single[step + 1].reward for single in singles])
            np.testing.assert_array_equal(
                terminated, [single[step + 1].terminated for single in singles]
            )
        assert any(one.terminated for one in seen)
    finally:
        vector.close()


def _stacked(seen: list[Seen]) -> dict[str, Any]:
    keys = ("kind", "worker", "candidates")
    stacked = {key: np.stack([one.observation[key] for one in seen]) for key in keys}
    return {key: stacked[key] for key in sorted(keys)}


def test_vectorised_infos_hold_the_metrics_of_the_episode_that_ended() -> None:
    single = play(OpalVLLMEnv(BUSY, num_requests=4), seed=9)
    vector = gymnasium.make_vec("OpalVLLM-v0", num_envs=1, scenario=BUSY, num_requests=4)
    _, infos = vector.reset(seed=9)
    for _ in single[1:]:
        _, _, _, _, infos = vector.step(infos["baseline_action"].astype(np.int64))
    metrics = single[-1].info["episode_metrics"]
    assert infos["episode_metrics"]["e2e_s"]["mean"][0] == metrics["e2e_s"]["mean"]
    vector.close()
