"""Paired comparison of policies over the same workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """How much more of a metric one policy has than another, over n paired workloads.

    Attributes:
        mean: Mean of the differences, in the metric's unit.
        low: Lower end of the bootstrap interval of that mean; None: n is 1.
        high: Upper end.
        relative: Mean difference over the other policy's mean; None where that is 0.
    """

    mean: float
    low: float | None
    high: float | None
    relative: float | None

    @property
    def is_clear(self) -> bool:
        """Whether 0 is outside of the interval."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Difference:
    """Compares a policy with a reference, workload by workload.

    Args:
        values: A metric of each of n workloads under the policy.
        reference: The same workloads under the reference.
    """
    differences = np.subtract(values, reference)
    mean, base = float(differences.mean()), float(np.mean(reference))
    low, high = bootstrap_interval(differences) if len(differences) > 1 else (None, None)
    return Difference(mean, low, high, mean / base if base else None)


def bootstrap_interval(values: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean of `values`, at `LEVEL`.

    Args:
        values: Independent values, shape (n,).
        seed: Of the resampling; equal seeds draw the same resamples for equal n.
    """
    n = len(values)
    rows = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(values[rows].mean(axis=1), (tail, 100 - tail))
    return float(low), float(high)
