"""`info`: its keys, types and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.episodes import SCENARIOS, Seen, assert_same, baseline, make_env, play, random_any

SCALARS = {"dt", "time", "rebuild_id", "worker_id", "baseline_action"}
KEYS = {"action_mask", "rewards", *SCALARS}


def assert_finite_floats(value: Any, path: str) -> None:
    """`value` is a finite Python float, or a nested dict of such."""
    if isinstance(value, Mapping):
        assert type(value) is dict
        assert value, path
        for key, part in value.items():
            assert type(key) is str
            assert_finite_floats(part, f"{path}.{key}")
    else:
        assert type(value) is float, f"{path}: {type(value)}"
        assert math.isfinite(value), f"{path}: {value}"


def check(seen: Seen, over: bool, actions: int) -> None:
    info = seen.info
    assert set(info) == (KEYS | {"episode_metrics"} if over else KEYS)
    for key in SCALARS:
        assert_finite_floats(info[key], key)
    assert_finite_floats(info["rewards"], "rewards")
    mask = info["action_mask"]
    assert isinstance(mask, np.ndarray)
    assert mask.dtype == np.int8
    assert mask.shape == (actions,)
    assert set(mask.tolist()) <= {0, 1}
    assert mask.any()
    assert type(seen.reward) is float
    assert type(seen.terminated) is bool
    assert type(seen.truncated) is bool
    if over:
        assert_finite_floats(info["episode_metrics"], "episode_metrics")


@pytest.mark.parametrize("horizon_s", [None, 1.5], ids=["terminated", "truncated"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_keys_and_types_are_the_same_at_every_step(name: str, horizon_s: float | None) -> None:
    env = make_env(name, horizon_s=horizon_s)
    episode = play(env, random_any(3), seed=1)
    for seen in episode:
        over = seen is episode[-1]
        check(seen, over, env.config.env.max_candidates + 1)
    assert list(episode[0].info) == list(episode[-2].info)
    assert episode[-1].truncated == (horizon_s is not None)


@pytest.mark.parametrize("name", ["busy", "busy-completion", "opal-docs"])
def test_values_are_those_of_the_pending_decision(name: str) -> None:
    env = make_env(name)
    draw = random_any(2)
    _, info = env.reset(seed=1)
    assert info["dt"] == 0.0
    assert set(info["rewards"].values()) == {0.0}
    over, last_rebuild = False, 0.0
    while not over:
        decision = env.decision
        assert decision is not None
        assert info["time"] == decision.time == env.simulation.env.now
        assert info["rebuild_id"] == decision.rebuild_id
        assert info["rebuild_id"] >= max(1.0, last_rebuild)
        assert info["worker_id"] == decision.worker_id == 0
        assert info["baseline_action"] == env.action_of(decision.baseline)
        assert info["action_mask"].tolist() == env.action_masks().tolist()
        last_rebuild, before = info["rebuild_id"], info["time"]
        _, _, over, _, info = env.step(draw(info))
        assert info["dt"] == info["time"] - before
    assert info["time"] == env.simulation.env.now


def test_several_questions_of_one_rebuild_take_no_time() -> None:
    episode = play(make_env("busy"), seed=1)
    within = [
        seen
        for before, seen in pairwise(episode[:-1])
        if seen.info["rebuild_id"] == before.info["rebuild_id"]
    ]
    assert len(within) > 10
    for seen in within:
        assert seen.info["dt"] == 0.0


def test_the_episodes_summary_is_that_of_the_records() -> None:
    env = make_env("busy")
    episode = play(env, seed=0)
    metrics = episode[-1].info["episode_metrics"]
    table = env.simulation.records.table
    e2e = table["decode_done_time"] - table["arrival_time"]
    ttft = table["first_token_time"] - table["arrival_time"]
    assert metrics["completed"] == len(table)
    assert metrics["requests"] + metrics["rejected"] == len(env.simulation.workload)
    for name, values in (("e2e_s", e2e), ("ttft_s", ttft)):
        assert metrics[name]["mean"] == pytest.approx(values.mean())
        for percentile in (50, 90, 99):
            expected = np.percentile(values, percentile)
            assert metrics[name][f"p{percentile}"] == pytest.approx(expected)
    assert metrics["preemptions"] == table["preemptions"].sum()
    assert metrics["decisions"] >= len(episode) - 1
    assert set(metrics["tenants"]) == {"chat", "rag", "huge"}


def test_each_step_has_an_info_of_its_own() -> None:
    """Whatever a driver does to the infos that it was given does not reach the environment."""
    env = make_env("busy")
    expected = play(make_env("busy"), seed=1)
    _, info = env.reset(seed=1)
    seen: list[Seen] = []
    while not (seen and seen[-1].terminated):
        action = baseline(info)
        info["action_mask"][:] = 1 - info["action_mask"]
        info["rewards"].clear()
        info.clear()
        observation, reward, terminated, truncated, info = env.step(action)
        seen.append(Seen(observation, reward, terminated, truncated, dict(info)))
        seen[-1].info["rewards"] = dict(info["rewards"])
        seen[-1].info["action_mask"] = info["action_mask"].copy()
    assert_same(seen, expected[1:])
