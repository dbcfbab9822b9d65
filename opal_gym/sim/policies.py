"""The reference baseline."""

from __future__ import annotations

from opal_gym.sim.decision import Decision, Policy


class FifoLeastWorkPolicy(Policy):
    """FIFO admission, least-work-done preemption, full chunk budget (the seed's scheduler)."""

    def choose(self, decision: Decision) -> int:
        """The baseline's answer, without a candidate table."""
        return decision.baseline
