"""Paired advantages, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.learning.advantages import ReturnCurve, paired_advantages, return_differences
from agents.learning.inputs import CONTEXT
from agents.learning.rollouts import Rollout
from opal_gym.envs.observations import KINDS
from opal_gym.sim.candidates import FEATURES

NEVER = 1e12
"""A time constant so long that nothing is discounted."""


def rollout(times: list[float], rewards: list[float]) -> Rollout:
    n = len(rewards)
    return Rollout(
        context=np.zeros((n, CONTEXT), np.float32),
        rows=np.zeros((n, len(FEATURES)), np.float32),
        num_candidates=np.ones(n, np.int64),
        stop_allowed=np.zeros(n, np.bool_),
        choice=np.zeros(n, np.int64),
        log_prob=np.zeros(n, np.float32),
        time=np.array(times),
        reward=np.array(rewards),
        score=sum(rewards),
    )


def test_returns_without_discount() -> None:
    """-2 over [0, 2], -6 over [2, 4]: from 1 on half of the first is left, from 3 half of -6."""
    curve = ReturnCurve(rollout([0, 2, 4], [-2, -6]), NEVER)
    assert curve.of_decisions == pytest.approx([-8, -6])
    times = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert curve.at(times) == pytest.approx([-8, -7, -6, -3, 0, 0])


def test_a_reward_rate_is_discounted_as_it_accrues() -> None:
    """Rate -1 over [0, 2] and [2, 4], time constant 2: -2 (1 - e^-1) and that times e^-1 more."""
    curve = ReturnCurve(rollout([0, 2, 4], [-2, -2]), 2.0)
    one = -2 * (1 - exp(-1))
    assert curve.of_decisions == pytest.approx([one * (1 + exp(-1)), one])
    # Cutting a step in two changes nothing.
    cut = ReturnCurve(rollout([0, 1, 2, 4], [-1, -1, -2]), 2.0)
    assert cut.of_decisions[0] == pytest.approx(curve.of_decisions[0])
    assert curve.at(np.array([1.0])) == pytest.approx([cut.of_decisions[1]])


def test_of_decisions_at_one_time_the_others_see_the_first() -> None:
    """Two decisions at 1; the first earns -1 at once, the second -3 by 2."""
    curve = ReturnCurve(rollout([1, 1, 2], [-1, -3]), NEVER)
    assert curve.of_decisions == pytest.approx([-4, -3])
    assert curve.at(np.array([1.0])) == pytest.approx([-4])


def test_advantages_are_against_the_mean_of_the_others_at_the_same_time() -> None:
    """From 0: -8 against the mean of -4 and -6; from 2: -6 against that of -2 and -3."""
    a, b, c = rollout([0, 2, 4], [-2, -6]), rollout([0, 4], [-4]), rollout([0, 4], [-6])
    first, second, third = return_differences([a, b, c], NEVER)
    assert first == pytest.approx([-8 + 5, -6 + 2.5])
    assert second == pytest.approx([-4 + 7])
    assert third == pytest.approx([-6 + 6], abs=1e-9)


def test_without_decisions_there_are_no_advantages() -> None:
    nothing = [rollout([3], []), rollout([3], [])]
    assert [len(each) for each in paired_advantages([nothing], 1)[0]] == [0, 0]


def test_what_the_state_explains_is_no_advantage() -> None:
    """Returns that are twice the first gauge: the difference between any two is explained.

    Four rollouts of 200 decisions a second apart, each with its own gauge g; every decision's
    return is g * 2 (all is earned at the last). Without the gauges the differences remain.
    """
    rng = np.random.default_rng(0)
    gauges = rng.random(4)
    rollouts = []
    for gauge in gauges:
        each = rollout(list(range(201)), [0.0] * 199 + [2 * gauge])
        each.context[:, len(KINDS)] = gauge
        rollouts.append(each)
    unseen = [replace(each, context=np.zeros_like(each.context)) for each in rollouts]
    spread = np.std(np.concatenate(paired_advantages([unseen], NEVER)[0]))
    assert spread == pytest.approx(np.std(2 * gauges) * 4 / 3)
    assert np.abs(np.concatenate(paired_advantages([rollouts], NEVER)[0])).max() < 0.01 * spread


@settings(max_examples=50)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(0, 5), st.floats(-5, 5)), min_size=1, max_size=6),
        min_size=2,
        max_size=4,
    )
)
def test_advantages_of_the_first_decision_sum_to_nothing(
    episodes: list[list[tuple[float, float]]],
) -> None:
    """All begin at 0, so each is compared with the others there."""
    rollouts = [
        rollout([0.0, *np.cumsum([dt for dt, _ in episode])], [reward for _, reward in episode])
        for episode in episodes
    ]
    firsts = [each[0] for each in return_differences(rollouts, 7.0)]
    assert sum(firsts) == pytest.approx(0, abs=1e-9)
