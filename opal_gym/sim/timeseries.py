"""Time series of the workers, sampled by event (seed, "Worker-Level Metrics")."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SAMPLE = np.dtype(
    [
        ("time", np.float64),
        ("worker_id", np.int32),
        ("waiting_requests", np.int32),
        ("running_requests", np.int32),
        ("completed_requests", np.int32),
        ("free_gpu_blocks", np.int32),
        ("kvc_fetch_blocks_in_flight", np.int32),
        ("gpu_busy_time", np.float64),
    ]
)


class TimeSeries:
    """Samples of all workers, in the order in which their state changed."""

    def __init__(self) -> None:
        self._table = np.empty(1024, SAMPLE)
        self._count = 0

    def __len__(self) -> int:
        """Number of samples."""
        return self._count

    @property
    def table(self) -> NDArray[np.void]:
        """The samples, shape (n,), dtype `SAMPLE`."""
        return self._table[: self._count]

    def add(self, *sample: float) -> None:
        """Adds a sample, a value for each field of `SAMPLE`."""
        if self._count == len(self._table):
            self._table = np.concatenate([self._table, np.empty_like(self._table)])
        self._table[self._count] = sample
        self._count += 1

    def export(self) -> Iterator[str]:
        """One JSON object a sample."""
        names = SAMPLE.names or ()
        return (json.dumps(dict(zip(names, row.item(), strict=True))) for row in self.table)
