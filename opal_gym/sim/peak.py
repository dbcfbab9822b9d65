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

    Args:
        current: Tokens of the batch's requests, shape (n,).
        remaining: Their predicted remaining output tokens, shape (n,).
    """

    def __init__(self, current: Tokens, remaining: Tokens) -> None:
        n = len(current)
        order = (-remaining).argsort(kind="stable")
        current, remaining = current[order], remaining[order]
        self._ascending = -remaining
        self._total = np.zeros(n + 1)
        current.cumsum(out=self._total[1:])
        moments = self._total[1:] + RANKS[1 : n + 1] * remaining
        self._before = np.zeros(n + 1)
        np.maximum.accumulate(moments, out=self._before[1:])
        # A request that joins adds its own tokens and one growing slot to all moments after it.
        self._after = np.full(n + 1, -np.inf)
        np.maximum.accumulate((moments + remaining)[::-1], out=self._after[n - 1 :: -1][:n])

    @property
    def tokens(self) -> float:
        """Peak of the batch as it is."""
        return float(self._before[-1])

    def with_candidates(self, current: Tokens, remaining: Tokens) -> Tokens:
        """Peak of the batch with one more request, for each candidate, shape (len(current),)."""
        place = self._ascending.searchsorted(-remaining, side="right")
        own = self._total[place] + current + (place + 1) * remaining
        peaks: Tokens = np.maximum(self._before[place], own)
        np.maximum(peaks, current + self._after[place], out=peaks)
        return peaks
