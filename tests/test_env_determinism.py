"""Equal seeds give equal episodes: again, elsewhere, and without any global randomness."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import opal_gym
from tests.episodes import SCENARIOS, assert_same, baseline, digest, make_env, play, random_legal

ROOT = Path(opal_gym.__file__).parents[1]

HASHED = ("busy", "opal-docs", "mem-chat-burst")

DIGESTS = """
import sys
from tests.episodes import digest, make_env, play, random_legal
for name in sys.argv[1:]:
    print(digest([play(make_env(name), seed=11), play(make_env(name), random_legal(1), seed=12)]))
"""


@pytest.mark.parametrize("name", SCENARIOS)
def test_equal_seeds_give_equal_episodes_of_the_baseline(name: str) -> None:
    assert_same(play(make_env(name), seed=1), play(make_env(name), seed=1))


@pytest.mark.parametrize("name", ["busy", "busy-completion", "opal-docs", "mem-longctx"])
def test_equal_seeds_give_equal_episodes_of_random_actions(name: str) -> None:
    assert_same(
        play(make_env(name), random_legal(3), seed=2), play(make_env(name), random_legal(3), seed=2)
    )


@pytest.mark.parametrize("name", ["busy", "opal-docs", "slot8-chat"])
def test_an_episode_leaves_nothing_behind_in_the_environment(name: str) -> None:
    env = make_env(name)
    first = play(env, seed=4)
    play(env, random_legal(0), seed=5)
    assert_same(play(env, seed=4), first)


def test_an_episode_given_up_halfway_leaves_nothing_behind() -> None:
    env = make_env("busy")
    first = play(env, seed=4)
    _, info = env.reset(seed=5)
    for _ in range(20):
        _, _, _, _, info = env.step(baseline(info))
    assert_same(play(env, seed=4), first)


@pytest.mark.parametrize("name", ["busy", "slot8-chat"])
def test_different_seeds_give_different_episodes(name: str) -> None:
    assert digest(play(make_env(name), seed=1)) != digest(play(make_env(name), seed=2))


def test_environments_stepped_in_turn_do_not_disturb_each_other() -> None:
    alone = play(make_env("busy"), seed=6)
    one, other = make_env("busy"), make_env("busy")
    seen, (_, info) = one.reset(seed=6), other.reset(seed=8)
    assert_same(seen, (alone[0].observation, alone[0].info))
    for before, after in pairwise(alone[:60]):
        assert_same(one.step(baseline(before.info)), tuple(after))
        _, _, terminated, _, info = other.step(baseline(info))
        if terminated:
            _, info = other.reset()


def test_processes_with_different_hash_seeds_play_the_same_episodes() -> None:
    digests = {
        hash_seed: subprocess.run(
            [sys.executable, "-c", DIGESTS, *HASHED],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for hash_seed in ("0", "4242")
    }
    here = [
        digest([play(make_env(name), seed=11), play(make_env(name), random_legal(1), seed=12)])
        for name in HASHED
    ]
    assert digests["0"] == digests["4242"] == here


def _refuse(module: ModuleType, name: str) -> Any:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError(f"{module.__name__}.{name}: global randomness")

    return refused


@pytest.fixture
def no_global_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function of `random` and `numpy.random` with a hidden state, or none, raises."""
    for module in (random, np.random):
        for name, value in vars(module).items():
            method_of = getattr(value, "__self__", None)
            if isinstance(method_of, (random.Random, np.random.RandomState)):
                monkeypatch.setattr(module, name, _refuse(module, name))
    seeded = np.random.default_rng

    def default_rng(seed: Any = None) -> np.random.Generator:
        assert seed is not None, "numpy.random.default_rng without a seed"
        return seeded(seed)

    monkeypatch.setattr(np.random, "default_rng", default_rng)


@pytest.mark.usefixtures("no_global_randomness")
def test_the_guard_against_global_randomness_works() -> None:
    with pytest.raises(AssertionError, match="global randomness"):
        np.random.random()
    with pytest.raises(AssertionError, match="global randomness"):
        random.random()
    with pytest.raises(AssertionError, match="without a seed"):
        np.random.default_rng()


@pytest.mark.usefixtures("no_global_randomness")
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_global_randomness_is_ever_used(name: str) -> None:
    play(make_env(name), random_legal(0), seed=3)


@pytest.mark.parametrize("name", ["busy", "opal-docs"])
def test_global_seeds_do_not_matter(name: str) -> None:
    episodes = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        episodes.append(play(make_env(name), seed=3))
    assert_same(*episodes)
