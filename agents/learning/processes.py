"""Work in one or several processes, with results that do not depend on how many."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Processes:
    """Processes that live as long as a training.

    Args:
        workers: How many; with 1 all runs in this one.
    """

    def __init__(self, workers: int = 1) -> None:
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
        return list(self._pool.map(function, items))

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


def _ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; this one's parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
