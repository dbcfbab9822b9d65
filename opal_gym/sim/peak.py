"""Predicted peak of a batch's KV memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.float64]

RANKS = np.arange(100_001, dtype=np.float64)
"""More than a batch ever holds."""


class PeakKV:
    """The largest number of KV tokens that a batch will hold, if it runs as predicted.

    Sort the requests by their remaining output, longest first. When the i-th of them finishes, the
    i requests up to it are there, each grown by its remaining output; the peak is the largest of
    these moments: max over i of (Σ_{j ≤ i} current_j + i · remaining_i). A request's current
    tokens are its prompt (all of it) and what it has generated.

    With prefix and suffix maxima of the moments, one more request costs O(log n).

    Attributes:
        tokens: Peak of the batch as it is.

    Args:
        current: Tokens of the batch's requests, shape (n,).
        remaining: Their predicted remaining output tokens, shape (n,).
    """

    def __init__(self, current: Tokens, remaining: Tokens) -> None:
        n = len(current)
        order = (-remaining).argsort(kind="stable")
        self._remaining = remaining[order]
        self._total = current[order].cumsum()
        self._moments = self._total + RANKS[1 : n + 1] * self._remaining
        self.tokens = float(np.maximum.reduce(self._moments)) if n else 0.0

    def with_candidates(self, current: Tokens, remaining: Tokens) -> Tokens:
        """Peak of the batch with one more request, for each candidate, shape (len(current),)."""
        n = len(self._moments)
        # By the place that the request takes; 0 is less than any peak.
        total, before, after = np.zeros((3, n + 1))
        total[1:] = self._total
        np.maximum.accumulate(self._moments, out=before[1:])
        # A request that joins adds its own tokens and one growing slot to all moments after it.
        np.maximum.accumulate((self._moments + self._remaining)[::-1], out=after[:n][::-1])
        place = (-self._remaining).searchsorted(-remaining, side="right")
        own = total[place] + current + (place + 1) * remaining
        peaks: Tokens = np.maximum(before[place], own)
        np.maximum(peaks, current + after[place], out=peaks)
        return peaks
