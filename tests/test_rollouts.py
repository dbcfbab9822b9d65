"""Rollouts: the environment's observations and rewards, without the environment."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from agents import make_policy
from agents.evaluation import draw_workload, run_in_process
from agents.learning.episodes import Demonstrator, Episode, Sampler, run_episode
from agents.learning.inputs import Inputs
from agents.learning.rollouts import episode_score, rollout
from opal_gym.config import Config, load_config
from opal_gym.envs import OpalVLLMEnv
from opal_gym.envs.observations import KINDS
from opal_gym.sim.candidates import FEATURES
from opal_gym.sim.decision import Decision, DecisionKind
from tests.test_pointer import inputs, network

ALL = tuple(DecisionKind)
REWARD = {"latency": 1.0, "slowdown": 0.5, "preemption": 0.1}


def busy(**changes: object) -> Config:
    return load_config(
        "mem-chat-burst", {"workload.num_requests": 60, "workload.arrivals.load": 2.0, **changes}
    )


def test_a_rollout_is_the_environment_s_episode() -> None:
    """Equal observations, times and rewards, decision by decision."""
    config = busy()
    policy = Demonstrator("random", 5)
    seen = rollout(config, draw_workload(config, 3), policy, ALL, REWARD)
    env = gymnasium.make("OpalVLLM-v0", scenario=config, reward=REWARD)
    inner = env.unwrapped
    assert isinstance(inner, OpalVLLMEnv)
    observation, info = env.reset(options={"workload_seed": 3})
    total, row = 0.0, 0
    for i, choice in enumerate(seen.choice):
        n = seen.num_candidates[i]
        assert np.array_equal(
            seen.context[i], np.concatenate([observation["kind"], observation["worker"]])
        )
        table = observation["candidates"].reshape(-1, len(FEATURES))
        assert np.array_equal(seen.rows[row : row + n], table[:n])
        assert seen.time[i] == info["time"]
        assert seen.stop_allowed[i] == info["action_mask"][-1]
        row += n
        action = config.env.max_candidates if choice == n else choice
        observation, reward, terminated, _, info = env.step(np.int64(action))
        total += reward
        if i:
            assert reward == pytest.approx(seen.reward[i], abs=1e-12)
    assert terminated
    assert row == len(seen.rows)
    assert seen.score == pytest.approx(total)


def test_the_score_is_that_of_the_whole_episode() -> None:
    config = busy()
    _, metrics = run_in_process(config, make_policy("sjf"), 4)
    workload = draw_workload(config, 4)
    assert rollout(config, workload, Demonstrator("sjf", 0), ALL, {"latency": 1}).score == (
        pytest.approx(-metrics["e2e_s"]["mean"])
    )
    assert episode_score(config, workload, make_policy("sjf"), {"latency": 1}) == (
        pytest.approx(-metrics["e2e_s"]["mean"])
    )


def test_only_the_kinds_that_are_learned_are_asked() -> None:
    config = busy()
    seen = rollout(config, draw_workload(config, 4), Demonstrator("sjf", 0), ALL[:1], REWARD)
    assert len(seen.choice)
    assert set(seen.context[:, : len(KINDS)].argmax(axis=1)) == {0}


def test_sampled_choices_have_the_network_s_probabilities() -> None:
    """40,000 samples of four choices; 4 standard errors of a share are at most .01."""
    given, weights = inputs(3), network()
    logits = weights.logits(given, stop_allowed=True)
    chances = np.exp(logits) / np.exp(logits).sum()

    class Asked(Decision):
        num_candidates = 3

        def __init__(self) -> None:
            self.stop_allowed = True

    sampler = Sampler(weights, 0)
    samples = [sampler(Asked(), Inputs(*given)) for _ in range(40_000)]
    choices = np.array([choice for choice, _ in samples])
    assert np.bincount(choices, minlength=4) / len(choices) == pytest.approx(chances, abs=0.01)
    for choice, log_prob in samples[:20]:
        assert log_prob == pytest.approx(np.log(chances[choice]), abs=1e-5)


def test_equal_seeds_give_equal_episodes() -> None:
    def run(seed: int) -> np.ndarray:
        return run_episode(Episode(busy(), 1, network(), seed, ALL, REWARD)).choice

    assert np.array_equal(run(1), run(1))
    assert not np.array_equal(run(1), run(2))
