"""`snapshot` and `restore`, copies and pickles."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest

from opal_gym.envs import OpalVLLMEnv, Snapshot
from tests.episodes import (
    Chooser,
    Info,
    Seen,
    assert_same,
    digest,
    make_env,
    play,
    random_any,
    random_legal,
)
from tests.tiny import tiny_config, tiny_workload

NAMES = ["busy", "busy-completion", "opal-docs"]


def by_time(salt: int) -> Chooser:
    """Actions, some illegal, that depend on nothing but the info, so they can be repeated."""

    def choose(info: Info) -> int:
        rng = np.random.default_rng([salt, *np.float64(info["time"]).tobytes()])
        legal = np.flatnonzero(info["action_mask"])
        if rng.random() < 0.1:
            return int(rng.integers(len(info["action_mask"])))
        return int(rng.choice(legal))

    return choose


def go_on(env: OpalVLLMEnv, info: Info, choose: Chooser) -> list[Seen]:
    """From `info` to the end of the episode."""
    seen: list[Seen] = []
    while not (seen and (seen[-1].terminated or seen[-1].truncated)):
        seen.append(Seen(*env.step(choose(seen[-1].info if seen else info))))
    return seen


def with_snapshots(
    env: OpalVLLMEnv, choose: Chooser, share: float, **reset: Any
) -> tuple[list[Seen], dict[int, Snapshot]]:
    """An episode, with snapshots taken on the way after `reset` and after random steps."""
    rng = np.random.default_rng(0)
    snapshots: dict[int, Snapshot] = {}
    steps = 0

    def snapping(info: Info) -> int:
        nonlocal steps
        if steps == 0 or rng.random() < share:
            snapshots[steps] = env.snapshot()
        steps += 1
        return choose(info)

    episode = play(env, snapping, **reset)
    snapshots[steps] = env.snapshot()
    return episode, snapshots


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_episode_continues_to_the_last_bit(name: str) -> None:
    episode, snapshots = with_snapshots(make_env(name), by_time(1), 0.03, seed=2)
    assert len(snapshots) >= 3
    for step, snapshot in list(snapshots.items())[:4]:
        env = make_env(name)
        observation, info = env.restore(snapshot)
        assert_same((observation, info), (episode[step].observation, episode[step].info))
        if step < len(episode) - 1:
            assert_same(go_on(env, info, by_time(1)), episode[step + 1 :])


def test_snapshots_of_a_truncated_episode_restore_as_well() -> None:
    end = play(make_env("busy"), by_time(3), seed=1)[-1].info["time"]
    env = make_env("busy", horizon_s=end / 3)
    episode, snapshots = with_snapshots(env, by_time(3), 0.1, seed=1)
    assert episode[-1].truncated
    for step, snapshot in snapshots.items():
        _, info = env.restore(snapshot)
        if step < len(episode) - 1:
            assert_same(go_on(env, info, by_time(3)), episode[step + 1 :])


def test_the_end_of_an_episode_is_restored_as_its_end() -> None:
    env, other = make_env("busy"), make_env("busy")
    last = play(env, by_time(0), seed=0)[-1]
    assert_same(other.restore(env.snapshot()), (last.observation, last.info))
    with pytest.raises(gymnasium.error.ResetNeeded):
        other.step(0)


def test_the_past_can_be_tried_again_in_the_same_environment() -> None:
    """A snapshot stays what it is, whatever happens to the environment later."""
    env = make_env("busy")
    _, info = env.reset(seed=4)
    for _ in range(30):
        _, _, _, _, info = env.step(by_time(0)(info))
    snapshot = env.snapshot()
    futures = [go_on(env, info, by_time(1))]
    for salt in (1, 2, 1):
        play(env, random_legal(9))
        _, info = env.restore(snapshot)
        futures.append(go_on(env, info, by_time(salt)))
    assert_same(futures[0], futures[1])
    assert_same(futures[0], futures[3])
    assert digest(futures[0]) != digest(futures[2])


def test_the_stream_of_workloads_continues_from_the_snapshot() -> None:
    env, other = make_env("slot8-chat"), make_env("slot8-chat")
    env.reset(seed=4)
    snapshot = env.snapshot()
    following = [play(env) for _ in range(2)]
    other.reset(seed=99)
    other.restore(snapshot)
    assert_same([play(other) for _ in range(2)], following)


def test_a_snapshot_can_be_restored_into_a_gymnasium_wrapped_environment() -> None:
    env = gymnasium.make("OpalVLLM-v0", scenario="slot8-chat", num_requests=10)
    _, info = env.reset(seed=1)
    for _ in range(5):
        _, _, _, _, info = env.step(int(info["baseline_action"]))
    assert isinstance(env.unwrapped, OpalVLLMEnv)
    snapshot = env.unwrapped.snapshot()
    result = env.step(int(info["baseline_action"]))
    env.unwrapped.restore(snapshot)
    assert_same(env.step(int(info["baseline_action"])), result)


@pytest.mark.parametrize(
    "options",
    [
        {"workload_seed": 12},
        {"workload_seed": 12, "rate_scale": 1.5},
        {"rate_scale": 0.7},
        {"workload": tiny_workload([(0.0, 30, 9), (0.5, 40, 20), (0.6, 10, 3)])},
    ],
    ids="+".join,
)
def test_options_of_reset_are_part_of_a_snapshot(options: dict[str, Any]) -> None:
    episode, snapshots = with_snapshots(make_env("busy"), by_time(1), 0.05, seed=3, options=options)
    for step, snapshot in list(snapshots.items())[:2]:
        env = make_env("busy")
        _, info = env.restore(pickle.loads(pickle.dumps(snapshot)))
        assert_same(go_on(env, info, by_time(1)), episode[step + 1 :])


def _continue_elsewhere(pickled: bytes, name: str) -> str:
    env = make_env(name)
    observation, info = env.restore(pickle.loads(pickled))
    return digest([observation, info, go_on(env, info, by_time(1))])


def test_a_pickled_snapshot_continues_in_a_spawned_process() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as elsewhere:
        for name in ("busy", "opal-docs"):
            episode, snapshots = with_snapshots(make_env(name), by_time(1), 0.05, seed=5)
            step = sorted(snapshots)[len(snapshots) // 2]
            pickled = pickle.dumps(snapshots[step])
            here = digest([episode[step].observation, episode[step].info, episode[step + 1 :]])
            assert elsewhere.submit(_continue_elsewhere, pickled, name).result() == here


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_candidates": 13},
        {"num_requests": 25},
        {"decisions": ("ADMIT",)},
        {"horizon_s": 3.0},
        {"reward": "ttft"},
        {"overrides": {"worker.vllm_params.num_gpu_blocks_override": 81}},
        {"length_information": "oracle"},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_a_snapshot_of_another_configuration_is_refused(kwargs: dict[str, Any]) -> None:
    other = make_env("busy", **kwargs)
    other.reset(seed=1)
    env, twin = make_env("busy"), make_env("busy")
    _, info = env.reset(seed=2)
    twin.reset(seed=2)
    with pytest.raises(ValueError, match="configuration"):
        env.restore(other.snapshot())
    for _ in range(10):
        result = env.step(by_time(0)(info))
        assert_same(result, twin.step(by_time(0)(info)))
        info = result[4]


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, pickle.dumps])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "made"])
def test_a_running_environment_refuses_to_be_copied_and_says_what_to_do(
    wrapped: bool, copier: Callable[[Any], Any]
) -> None:
    env: Any = make_env("slot8-chat", num_requests=4)
    if wrapped:
        env = gymnasium.make("OpalVLLM-v0", num_requests=3)
        if copier is copy.copy:
            pytest.skip("a shallow copy of a wrapper holds the same environment")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="snapshot"):
        copier(env)
    play(env.unwrapped, random_any(0), seed=0)
    with pytest.raises(TypeError, match="snapshot"):
        copier(env)


def minus_tokens(terms: Mapping[str, float]) -> float:
    return -terms["throughput"]


@pytest.mark.parametrize(
    "reward",
    [None, "ttft", {"ttft": 0.5, "latency": 0.5}, minus_tokens],
    ids=["default", "name", "weights", "function"],
)
@pytest.mark.parametrize("copier", ["deepcopy", "pickle"])
def test_before_reset_an_environment_can_be_copied_and_pickled(copier: str, reward: Any) -> None:
    env = make_env("slot8-chat", reward=reward)
    if copier == "pickle":
        twin = pickle.loads(pickle.dumps(env))
    else:
        twin = copy.deepcopy(env)
    assert_same(play(twin, seed=3), play(env, seed=3))


def test_what_a_snapshot_holds_is_the_episode_and_not_the_simulation() -> None:
    """A snapshot is small: how the episode began, and its actions."""
    env = OpalVLLMEnv(tiny_config())
    env.reset(options={"workload": tiny_workload([(0.0, 4, 5), (0.5, 4, 5)])})
    taken = []
    for action in (0, 0, 1):
        env.step(action)
        taken.append(action)
    snapshot = env.snapshot()
    assert snapshot.actions == tuple(taken)
    assert snapshot.config == env.config
    assert set(snapshot.options) == {"workload"}
