"""Simulated time: SimPy's environment with events at exact times.

SimPy schedules by delay, and `now + (time - now)` need not be `time` in floating point. Step
boundaries and arrivals must happen at exactly the time that their request records say.
"""

from __future__ import annotations

from heapq import heappush
from operator import attrgetter

import simpy
from simpy.events import NORMAL, EventPriority

BOUNDARY = EventPriority(NORMAL + 1)
"""Priority of step boundaries: all else that happens at the same time happens first."""


class SimEnvironment(simpy.Environment):
    """A SimPy environment that also knows absolute times."""

    # Read several times an event: the same value without a Python call.
    now = property(attrgetter("_now"), doc="The current simulated time, s.")

    def at(self, time: float, priority: EventPriority = NORMAL) -> simpy.Event:
        """An event that happens at exactly `time`, s, not before now."""
        return _At(self, time, priority)


class Signal(simpy.Event):
    """An event that happens the moment it is fired, before all that is scheduled."""

    def fire(self, value: object) -> None:
        """Resumes whoever waits for it, with `value`."""
        self._ok, self._value = True, value
        callbacks, self.callbacks = self.callbacks, None  # type: ignore[assignment]
        for callback in callbacks:
            callback(self)


class _At(simpy.Event):
    """The twin of `simpy.Timeout` for an absolute time."""

    def __init__(self, env: SimEnvironment, time: float, priority: EventPriority) -> None:
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None
        heappush(env._queue, (time, priority, next(env._eid), self))
