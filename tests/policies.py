"""Policies that several tests drive the worker with."""

from __future__ import annotations

import random

from opal_gym.sim.decision import STOP, Decision, Policy


class RandomPolicy(Policy):
    """Any legal answer."""

    def reset(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, decision: Decision) -> int:
        return self._random.choice(decision.legal_answers())


class StopPolicy(Policy):
    """Admits nobody that it need not admit."""

    def choose(self, decision: Decision) -> int:
        return STOP if decision.stop_allowed else decision.baseline
