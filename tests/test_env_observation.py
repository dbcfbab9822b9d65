"""Observations: their space, their arrays, and how raw features are scaled into them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.candidates import FEATURES, INDEX
from opal_gym.sim.decision import DecisionKind
from opal_gym.sim.features import Feature
from opal_gym.sim.gauges import GAUGES
from opal_gym.sim.request import Tenant
from tests.episodes import SCENARIOS, assert_same, baseline, make_env, play, random_legal
from tests.tiny import tiny_config, tiny_workload

KEYS = {"kind", "worker", "candidates"}


def scaled(value: float, feature: Feature) -> float:
    """As documented: linear / scale or log(1 + x) / log(1 + scale), clipped."""
    if feature.scaling == "log":
        value = math.log1p(value) / math.log1p(feature.scale)
    else:
        value = value / feature.scale
    return max(feature.low / feature.scale, min(1.0, value))


def scaled_rows(values: Any, features: Sequence[Feature]) -> np.ndarray:
    return np.array([[scaled(v, f) for v, f in zip(row, features, strict=True)] for row in values])


def boxes_of(env: OpalVLLMEnv) -> dict[str, spaces.Box]:
    space = env.observation_space
    assert isinstance(space, spaces.Dict)
    boxes = {key: box for key, box in space.spaces.items() if isinstance(box, spaces.Box)}
    assert boxes.keys() == space.spaces.keys()
    return boxes


# ---------------------------------------------------------------------------- the space


@pytest.mark.parametrize("rows", [5, 64, 100])
def test_the_space_is_a_dict_of_one_dimensional_finite_float32_boxes(rows: int) -> None:
    boxes = boxes_of(OpalVLLMEnv(tiny_config(), max_candidates=rows))
    assert set(boxes) == KEYS
    for box in boxes.values():
        assert box.dtype == np.float32
        assert len(box.shape) == 1
        assert np.isfinite(box.low).all()
        assert (box.high == 1).all()
        assert set(np.unique(box.low)) <= {0.0, -1.0}
    low = boxes["candidates"].low.reshape(rows, len(FEATURES))
    slacks = [k for k, feature in enumerate(FEATURES) if feature.name.endswith("slack")]
    assert len(slacks) == 2
    assert (low[:, slacks] == -1).all()
    assert (np.delete(low, slacks, axis=1) == 0).all()


def test_shapes_are_those_that_the_docstring_promises() -> None:
    documented = dict(
        re.findall(r"`(\w+)`, shape \(([^)]*?),?\)", " ".join((OpalVLLMEnv.__doc__ or "").split()))
    )
    assert set(documented) == KEYS
    env = OpalVLLMEnv(tiny_config(), max_candidates=11)
    boxes = boxes_of(env)
    for key, text in documented.items():
        size = math.prod(
            11 if part.strip() == "max_candidates" else int(part) for part in text.split("*")
        )
        assert boxes[key].shape == (size,)
    assert len(GAUGES) == int(documented["worker"])
    assert f"max_candidates * {len(FEATURES)}" == documented["candidates"]
    actions = re.search(r"Discrete\(max_candidates \+ 1\)", OpalVLLMEnv.__doc__ or "")
    assert actions
    assert env.action_space == spaces.Discrete(12)


@pytest.mark.parametrize("features", [FEATURES, GAUGES], ids=["FEATURES", "GAUGES"])
def test_the_tables_name_every_feature_with_unit_meaning_and_scale(
    features: tuple[Feature, ...],
) -> None:
    assert len({feature.name for feature in features}) == len(features)
    for feature in features:
        assert feature.name
        assert feature.unit
        assert feature.meaning
        assert feature.scaling in ("linear", "log")
        assert feature.scale > 0
        assert feature.low in (0, -feature.scale)


# --------------------------------------------------------------------------- the arrays


@pytest.mark.parametrize("name", SCENARIOS)
def test_observations_are_the_scaled_tables_with_zeros_below(name: str) -> None:
    env, choose = make_env(name), random_legal(4)
    rows, kinds = env.config.env.max_candidates, list(DecisionKind)
    observation, info = env.reset(seed=0)
    over, seen = False, set()
    while not over:
        decision = env.decision
        assert decision is not None
        assert set(observation) == set(boxes_of(env))
        for key, array in observation.items():
            assert array.dtype == np.float32
            assert array.shape == boxes_of(env)[key].shape
            assert np.isfinite(array).all()
        assert env.observation_space.contains(observation)
        one_hot = [float(kind is decision.kind) for kind in kinds]
        assert observation["kind"].tolist() == one_hot
        table = observation["candidates"].reshape(rows, len(FEATURES))
        n = decision.num_candidates
        assert len(decision.candidates) == n
        assert not table[n:].any()
        assert (table[:n, INDEX["present"]] == 1).all()
        expected = scaled_rows(decision.candidates.values, FEATURES)
        np.testing.assert_allclose(table[:n], expected, rtol=1e-6, atol=1e-7)
        gauges = scaled_rows([decision.gauges.values], GAUGES)[0]
        np.testing.assert_allclose(observation["worker"], gauges, rtol=1e-6, atol=1e-7)
        seen.add(decision.kind)
        observation, _, over, _, info = env.step(choose(info))
    assert env.observation_space.contains(observation)
    assert not observation["kind"].any()
    assert not observation["candidates"].any()
    assert DecisionKind.ADMIT in seen


def test_kinds_stand_in_the_documented_order() -> None:
    env = make_env("busy")
    _, info = env.reset(seed=0)
    order = {"CHUNK": 0, "PREEMPT": 1, "ADMIT": 2}
    seen: dict[str, set[int]] = {name: set() for name in order}
    over, observation = False, env.reset(seed=0)[0]
    while not over:
        assert env.decision is not None
        seen[env.decision.kind.name].add(int(observation["kind"].argmax()))
        observation, _, over, _, info = env.step(baseline(info))
    assert seen == {name: {place} for name, place in order.items()}


@pytest.mark.parametrize("name", ["busy", "opal-docs"])
def test_each_step_has_arrays_of_its_own(name: str) -> None:
    """Kept observations do not change, and writing into them does not reach the environment."""
    expected = play(make_env(name), seed=1)
    env = make_env(name)
    kept = play(env, seed=1)
    assert_same([seen.observation for seen in kept], [seen.observation for seen in expected])
    arrays = [array for seen in kept for array in seen.observation.values()]
    arrays += [seen.info["action_mask"] for seen in kept]
    owners = {array.__array_interface__["data"][0] for array in arrays}
    assert len(owners) == len(arrays)

    observation, info = env.reset(seed=1)
    for after in expected[1:]:
        for array in observation.values():
            array[:] = 7
        observation, _, _, _, info = env.step(baseline(info))
        assert_same(observation, after.observation)


# ---------------------------------------------------------------------------- clipping


def test_values_beyond_the_scale_are_clipped_into_the_space() -> None:
    """Steps of 100 s: waiting and step times leave their scales, and so does the slack."""
    slow = {"worker.inference_params": {"model": "synthetic", "base_s": 1000.0}}
    env = OpalVLLMEnv(tiny_config(slow), decisions=("ADMIT",))
    workload = tiny_workload(
        [(0.0, 4, 3), (0.0, 4, 3), (1.0, 4, 3)], tenants=(Tenant("t", 9.0, 2.0, 0.1),)
    )
    env.reset(options={"workload": workload})
    env.step(0)  # the first
    observation, _, _, _, _ = env.step(4 * 16)  # STOP: the second waits until 1000
    assert env.decision is not None
    assert env.decision.time == 1000.0
    table = env.decision.candidates
    assert table["waiting_time"].tolist() == [1000.0, 999.0]
    assert table["ttft_slack"].tolist() == [-998.0, -997.0]
    assert table["tpot_slack"].tolist() == [math.inf, math.inf]
    rows = observation["candidates"].reshape(-1, len(FEATURES))
    shown = dict(zip((f.name for f in FEATURES), rows[0].tolist(), strict=True))
    assert shown["waiting_time"] == 1.0
    assert shown["weight"] == 1.0
    assert shown["ttft_slack"] == -1.0
    assert shown["tpot_slack"] == 1.0
    gauges = dict(zip((g.name for g in GAUGES), observation["worker"].tolist(), strict=True))
    assert gauges["step_time"] == 1.0
    assert gauges["oldest_age"] == 1.0
    assert env.observation_space.contains(observation)


# ------------------------------------------------------------------ spans and single steps


@pytest.mark.parametrize("name", ["busy", "busy-completion", "opal-docs", "slot8-chat"])
def test_spans_and_single_steps_are_observed_the_same(name: str) -> None:
    """DESIGN §6: a span is a matter of speed alone; GAUGES: `step_time` is that of the last step"""
    overrides = dict(SCENARIOS[name].get("overrides", {}))
    steps = {**overrides, "simulation.step_by_step": True}
    one = play(make_env(name), seed=1)
    other = play(make_env(name, overrides=steps), seed=1)
    assert [seen.info["time"] for seen in one] == [seen.info["time"] for seen in other]
    names = [gauge.name for gauge in GAUGES]
    different = {
        names[column]
        for seen, also in zip(one, other, strict=True)
        for column in np.flatnonzero(seen.observation["worker"] != also.observation["worker"])
    }
    assert not different
    for seen, also in zip(one, other, strict=True):
        for key in ("kind", "candidates"):
            assert_same(seen.observation[key], also.observation[key])
        assert seen.info["rewards"] == pytest.approx(also.info["rewards"], abs=1e-12)
