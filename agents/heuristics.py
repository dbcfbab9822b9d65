"""Heuristic schedulers, composed of one rule for each kind of decision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.decision import STOP, Decision, DecisionKind, Policy

Rule = Callable[[Decision], int]
"""Answers the decisions of one kind."""

Condition = Callable[[Decision, int], bool]
"""Whether a candidate of an ADMIT decision may be admitted now."""

AGEING_S = 5.0
"""Each so many seconds of waiting, an aged request counts as one more time as short."""

WATERMARK = 0.05
"""Share of the pool that an admission leaves free (vLLM's `watermark`)."""

# --- any kind ------------------------------------------------------------------------------------


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


# --- ADMIT ---------------------------------------------------------------------------------------


def aged_sjf(decision: Decision) -> int:
    """The least predicted output / (1 + waiting time / `AGEING_S`): nobody starves."""
    table = decision.candidates
    age = 1 + table["waiting_time"] / AGEING_S
    return int(np.argmin(table["predicted_output_tokens"] / age))


def weighted_sjf(decision: Decision) -> int:
    """The least predicted output² / weight: Smith's rule for the mean weighted slowdown.

    A request's cost of waiting for a second is weight / its own length there, and the rule serves
    the greatest cost per length first.
    """
    table = decision.candidates
    return int(np.argmin(table["predicted_output_tokens"] ** 2 / table["weight"]))


def stop_unless(condition: Condition, order: Rule) -> Rule:
    """The choice of `order` where it meets the condition; else STOP, where that is allowed."""

    def rule(decision: Decision) -> int:
        choice = order(decision)
        if choice == STOP or not decision.stop_allowed or condition(decision, choice):
            return choice
        return STOP

    return rule


def peak_kv_within(share: float) -> Condition:
    """The predicted peak KV of the batch with the candidate is at most `share` of the pool."""
    return lambda decision, row: bool(decision.candidates["predicted_peak_kv"][row] <= share)


def leaves_watermark(decision: Decision, row: int) -> bool:
    """The candidate's first chunk, or its fetch, leaves `WATERMARK` of the pool free."""
    left = decision.gauges["free_blocks"] - decision.candidates["blocks_needed"][row]
    # Shares of the pool are quotients: 6 % less 1 % is a little below 5 %.
    return bool(left >= WATERMARK - 1e-9)


# --- CHUNK ---------------------------------------------------------------------------------------


def budget_share(share: float) -> Rule:
    """The largest chunk budget that is at most `share` of the full one, else the smallest."""

    def rule(decision: Decision) -> int:
        budgets = decision.candidates["budget_tokens"]
        return _largest(budgets <= share * budgets[0])

    return rule


def step_within(limit_s: float) -> Rule:
    """The largest chunk budget whose step takes at most `limit_s`, else the smallest."""
    return lambda decision: _largest(decision.candidates["step_time"] <= limit_s)


def _largest(allowed: NDArray[np.bool_]) -> int:
    """The first allowed row, or else the last: budgets stand largest first."""
    return int(allowed.argmax()) if allowed.any() else len(allowed) - 1


# --- policies ------------------------------------------------------------------------------------


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
