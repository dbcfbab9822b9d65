"""Stable-Baselines3 and sb3-contrib: checker, vectorised environments, and learning."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest

from opal_gym.envs import OpalVLLMEnv
from tests.episodes import BUSY, SCENARIOS, assert_same, play

pytest.importorskip("stable_baselines3", reason="needs the extra `train` (stable-baselines3)")
pytest.importorskip("sb3_contrib", reason="needs the extra `train` (sb3-contrib)")

from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

CPU: dict[str, Any] = {"device": "cpu", "seed": 0}


def made(env_id: str = "OpalVLLM-v0", **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(env_id, scenario=BUSY, **kwargs)


class IllegalActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Collects each ended episode's count of illegal actions."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.counts: list[float] = []

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        if "episode_metrics" in result[4]:
            self.counts.append(result[4]["episode_metrics"]["illegal_actions"])
        return result


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCENARIOS)
def test_sb3_check_env_passes_without_a_warning(name: str) -> None:
    check_env(gymnasium.make("OpalVLLM-v0", **SCENARIOS[name]))
    check_env(OpalVLLMEnv(**SCENARIOS[name]))


def test_dummy_vec_env_steps_the_episode_of_a_single_environment() -> None:
    _check_vectorised(DummyVecEnv([made]))


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_subproc_vec_env_steps_the_episode_of_a_single_environment(start_method: str) -> None:
    make = partial(made, "opal_gym:OpalVLLM-v0")
    _check_vectorised(SubprocVecEnv([make], start_method=start_method))


def _check_vectorised(vector: VecEnv) -> None:
    single = play(OpalVLLMEnv(BUSY), seed=7)
    try:
        assert is_masking_supported(vector)
        vector.seed(7)
        observation: Any = vector.reset()
        for seen, after in pairwise(single):
            for key in seen.observation:
                assert_same(observation[key][0], seen.observation[key])
            np.testing.assert_array_equal(get_action_masks(vector)[0], seen.info["action_mask"])
            action = np.array([int(seen.info["baseline_action"])])
            observation, reward, done, infos = vector.step(action)
            assert np.float32(reward[0]) == np.float32(after.reward)
            assert bool(done[0]) == after.terminated
        assert_same(infos[0]["episode_metrics"], single[-1].info["episode_metrics"])
        assert_same(dict(infos[0]["terminal_observation"]), single[-1].observation)
    finally:
        vector.close()


def test_make_vec_env_takes_the_documented_id() -> None:
    """SB3's helper, as every SB3 example calls it; it asks for render mode `rgb_array`."""
    vector = make_vec_env("OpalVLLM-v0", n_envs=2, env_kwargs={"num_requests": 3})
    observation: Any = vector.reset()
    assert observation["kind"].shape == (2, 3)
    vector.close()


def test_masks_reach_sb3_contrib_through_gymnasiums_wrappers() -> None:
    env = made()
    assert is_masking_supported(env)
    _, info = env.reset(seed=0)
    masks = get_action_masks(env)
    assert masks.dtype == np.bool_
    np.testing.assert_array_equal(masks, info["action_mask"])


@pytest.mark.slow
def test_maskable_ppo_learns_and_never_takes_an_illegal_action() -> None:
    env = IllegalActions(made())
    model = MaskablePPO("MultiInputPolicy", env, n_steps=500, **CPU)
    model.learn(2000)
    assert model.num_timesteps >= 2000
    assert env.counts
    assert set(env.counts) == {0.0}


@pytest.mark.slow
def test_ppo_learns_without_masks_whatever_illegal_actions_it_takes() -> None:
    env = IllegalActions(made(num_requests=20))
    model = PPO("MultiInputPolicy", env, n_steps=200, batch_size=50, n_epochs=2, **CPU)
    model.learn(600)
    assert env.counts
    assert sum(env.counts) > 0


@pytest.mark.slow
def test_dqn_learns_without_masks() -> None:
    env = IllegalActions(made(num_requests=20))
    model = DQN("MultiInputPolicy", env, buffer_size=500, learning_starts=100, **CPU)
    model.learn(400)
    assert env.counts
