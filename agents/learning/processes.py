"""Work in one or several processes, with results that do not depend on how many."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Processes:
    """Processes that live as long as a training.

    Args:
        workers: How many; with 1 all runs in this one.

    Attributes:
        cpu_s: CPU seconds that work has taken in other processes.
    """

    def __init__(self, workers: int = 1) -> None:
        self.cpu_s = 0.0
        self._pool = (
            ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_ignore_interrupts,
            )
            if workers > 1
            else None
        )

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results of a function of the module level, in the items' order."""
        if self._pool is None:
            return [function(each) for each in items]
        timed = list(self._pool.map(partial(_timed, function), items))
        self.cpu_s += sum(cpu_s for _, cpu_s in timed)
        return [result for result, _ in timed]

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _timed(function: Callable[[Item], Result], item: Item) -> tuple[Result, float]:
    """A result, and the CPU seconds that it took."""
    started = time.process_time()
    return function(item), time.process_time() - started


def _ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; this one's parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
