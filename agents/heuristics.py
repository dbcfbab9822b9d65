"""Heuristic schedulers, composed of one rule for each kind of decision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from opal_gym.sim.decision import STOP, Decision, DecisionKind, Policy

Rule = Callable[[Decision], int]
"""Answers the decisions of one kind."""


def baseline(decision: Decision) -> int:
    """What the reference baseline answers."""
    return decision.baseline


def first(decision: Decision) -> int:
    """The first candidate."""
    return 0


def stop(decision: Decision) -> int:
    """STOP where it is allowed, else the first candidate."""
    return STOP if decision.stop_allowed else 0


def least(feature: str) -> Rule:
    """The candidate with the least value of a feature; ties: the first of them."""
    return lambda decision: int(np.argmin(decision.candidates[feature]))


def most(feature: str) -> Rule:
    """The candidate with the greatest value of a feature; ties: the first of them."""
    return lambda decision: int(np.argmax(decision.candidates[feature]))


class RulePolicy(Policy):
    """One rule for each kind of decision; without a rule, the baseline's answer.

    Args:
        admit: Answers ADMIT.
        preempt: Answers PREEMPT.
        chunk: Answers CHUNK.
    """

    def __init__(
        self, *, admit: Rule = baseline, preempt: Rule = baseline, chunk: Rule = baseline
    ) -> None:
        self._rules = {
            DecisionKind.ADMIT: admit,
            DecisionKind.PREEMPT: preempt,
            DecisionKind.CHUNK: chunk,
        }

    def choose(self, decision: Decision) -> int:
        """The answer of the rule for this kind."""
        return self._rules[decision.kind](decision)


class RandomPolicy(Policy):
    """Every legal answer, STOP included, is equally likely."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Begins the stream of `seed`."""
        self._rng = np.random.default_rng(seed)

    def choose(self, decision: Decision) -> int:
        """A legal answer."""
        answers = decision.legal_answers()
        return answers[int(self._rng.integers(len(answers)))]
