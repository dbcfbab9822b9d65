"""The decisions of a scheduler: the only door to its freedom (DESIGN §3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import simpy

from opal_gym.sim.candidates import CandidateTable

if TYPE_CHECKING:
    from opal_gym.sim.gauges import WorkerGauges

STOP = -1
"""The answer to ADMIT that ends the admissions of a rebuild."""


class DecisionKind(Enum):
    """Kinds of question, in the order in which a rebuild asks them."""

    CHUNK = "CHUNK"
    PREEMPT = "PREEMPT"
    ADMIT = "ADMIT"


class Decision:
    """One question of a batch rebuild; valid until it is answered.

    The candidates, their table and the gauges are found when they are first asked for, since the
    baseline needs none of them.

    Attributes:
        kind: What is decided.
        rebuild_id: Number of the rebuild that asks, from 1.
        worker_id: The worker that asks.
        time: Simulated time, s.
        stop_allowed: Whether STOP is a legal answer.
        baseline: The reference baseline's answer: FIFO admission, least-work-done preemption,
            full chunk budget.
    """

    def __init__(
        self,
        kind: DecisionKind,
        *,
        rebuild_id: int,
        worker_id: int,
        time: float,
        stop_allowed: bool,
        baseline: int,
        num_candidates: Callable[[], int],
        candidates: Callable[[], CandidateTable],
        gauges: Callable[[], WorkerGauges],
    ) -> None:
        self.kind = kind
        self.rebuild_id = rebuild_id
        self.worker_id = worker_id
        self.time = time
        self.stop_allowed = stop_allowed
        self.baseline = baseline
        self._count_candidates = num_candidates
        self._build_candidates = candidates
        self._read_gauges = gauges
        self._candidates: CandidateTable | None = None
        self._gauges: WorkerGauges | None = None

    @property
    def num_candidates(self) -> int:
        """Number of candidates, at least 1."""
        return self._count_candidates()

    @property
    def candidates(self) -> CandidateTable:
        """The candidates; a policy answers with a row's index."""
        if self._candidates is None:
            self._candidates = self._build_candidates()
        return self._candidates

    @property
    def gauges(self) -> WorkerGauges:
        """The state of the worker that asks."""
        if self._gauges is None:
            self._gauges = self._read_gauges()
        return self._gauges

    def is_legal(self, answer: int) -> bool:
        """Whether `answer` is a candidate's index or an allowed STOP."""
        if answer == STOP:
            return self.stop_allowed
        # There is always a first one.
        return answer == 0 or 0 < answer < self.num_candidates

    def legal_answers(self) -> Sequence[int]:
        """All legal answers, candidates first."""
        rows = list(range(self.num_candidates))
        return [*rows, STOP] if self.stop_allowed else rows


class DecisionMaker(Protocol):
    """Whoever answers a worker's decisions."""

    def ask(self, decision: Decision) -> Generator[simpy.Event, int, int]:
        """Yields until the decision is answered; returns the answer."""


class Policy(ABC):
    """Answers decisions. A policy may keep state; `reset` begins an episode."""

    def reset(self, seed: int) -> None:  # noqa: B027 - most policies keep no state
        """Begins an episode; all randomness must come from `seed`."""

    @abstractmethod
    def choose(self, decision: Decision) -> int:
        """A candidate's index, or `STOP` where `decision.stop_allowed`."""
