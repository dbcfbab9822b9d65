"""Advantages against the other rollouts of the same workload.

Most of what an episode costs is decided by its workload: who arrives when, and how long they run.
Rollouts of one workload share that, so the mean of the others' cost-to-go at the same simulated
time is a baseline that knows the future arrivals, which no critic can. What the others do not share
is the state that each has come to by then; the difference that this makes is estimated by a linear
regression on the worker's gauges. Neither depends on the action, so neither biases the gradient.
Sources: Mao et al., "Variance Reduction for Reinforcement Learning in Input-Driven Environments"
(ICLR 2019); ``reference/policies.md``, "Learning".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from agents.learning.rollouts import Rollout
from opal_gym.envs.observations import KINDS

FloatArray = NDArray[np.float64]

RIDGE = 1e-3
"""Penalty of the regression's squared weights; features lie in [-1, 1]."""

AT_ONCE_S = 1e-9
"""A step of no more simulated seconds takes no time."""


def paired_advantages(
    groups: Sequence[Sequence[Rollout]], time_constant_s: float
) -> list[list[FloatArray]]:
    """Advantages of the decisions of each rollout.

    Rewards are discounted by exp(-dt / time constant), and the return of a decision is compared
    with the mean return of the group's other rollouts from the same simulated time on, less what
    the different states explain.

    Args:
        groups: Rollouts of one workload each, at least two.
        time_constant_s: Simulated seconds in which a reward loses 63 % of its worth.

    Returns:
        For each rollout, an array of shape (D,).
    """
    returns = [return_differences(group, time_constant_s) for group in groups]
    states = [state_differences(group) for group in groups]
    weights = _regression(
        np.concatenate(list(chain.from_iterable(states))),
        np.concatenate(list(chain.from_iterable(returns))),
    )
    return [
        [own - state @ weights for own, state in zip(*each, strict=True)]
        for each in zip(returns, states, strict=True)
    ]


def return_differences(rollouts: Sequence[Rollout], time_constant_s: float) -> list[FloatArray]:
    """Each decision's return less the mean of the other rollouts' from the same time on."""
    curves = [ReturnCurve(each, time_constant_s) for each in rollouts]
    differences = []
    for rollout, own in zip(rollouts, curves, strict=True):
        times = rollout.time[:-1]
        others = np.mean([curve.at(times) for curve in curves if curve is not own], axis=0)
        differences.append(own.of_decisions - others)
    return differences


def state_differences(rollouts: Sequence[Rollout]) -> list[FloatArray]:
    """Each decision's gauges and their squares, less the mean of the other rollouts' at the time.

    Theirs are those of their last decision until then.
    """
    gauges = [each.context[:, len(KINDS) :].astype(np.float64) for each in rollouts]
    states = [np.column_stack([each, each**2]) for each in gauges]
    differences = []
    for own, rollout in enumerate(rollouts):
        others = [
            state[np.searchsorted(other.time[:-1], rollout.time[:-1], side="right") - 1]
            for i, (other, state) in enumerate(zip(rollouts, states, strict=True))
            if i != own
        ]
        differences.append(states[own] - np.mean(others, axis=0))
    return differences


def _regression(x: FloatArray, y: FloatArray) -> FloatArray:
    """Weights of the least squares, held back where the data say little."""
    weights: FloatArray = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y)
    return weights


class ReturnCurve:
    """The discounted rewards of an episode from each simulated time on.

    A step's reward accrues at a constant rate; one whose step takes no time is earned at once.

    Args:
        rollout: The episode.
        time_constant_s: Time constant of the discount.

    Attributes:
        of_decisions: The returns from each decision on, shape (D,).
    """

    def __init__(self, rollout: Rollout, time_constant_s: float) -> None:
        self._tau = time_constant_s
        self._begin, self._end = rollout.time[:-1], rollout.time[1:]
        dt = self._end - self._begin
        takes_time = dt > AT_ONCE_S
        self._rate = np.where(takes_time, rollout.reward / np.where(takes_time, dt, 1.0), 0.0)
        steps = np.where(takes_time, self._rate * self._worth(dt), rollout.reward)
        decay = np.exp(-dt / time_constant_s)
        self._ahead = np.zeros(len(dt) + 1)
        for i in range(len(dt) - 1, -1, -1):
            self._ahead[i] = steps[i] + decay[i] * self._ahead[i + 1]
        self.of_decisions = self._ahead[:-1]

    def at(self, times: FloatArray) -> FloatArray:
        """The returns from each of `times` on.

        Args:
            times: Simulated times, s, not before the first decision; nothing is earned after the
                episode's end.
        """
        # Of several decisions at the same time the first is the one that all is still ahead of.
        place = np.searchsorted(self._begin, times, side="right") - 1
        first = np.searchsorted(self._begin, self._begin[place], side="left")
        left = np.maximum(0.0, self._end[place] - times)
        later = np.where(times < self._end[place], self._ahead[place + 1], 0.0)
        between = self._rate[place] * self._worth(left) + np.exp(-left / self._tau) * later
        return np.where(times == self._begin[place], self._ahead[first], between)

    def _worth(self, seconds: FloatArray) -> FloatArray:
        """What a reward rate of 1 is worth that lasts so long from now on."""
        result: FloatArray = -self._tau * np.expm1(-seconds / self._tau)
        return result
