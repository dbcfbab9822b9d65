"""Predicted peak of a batch's KV memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.float64]


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
        order = np.argsort(-remaining, kind="stable")
        current, remaining = current[order], remaining[order]
        self._ascending = -remaining
        self._total = np.concatenate(([0.0], np.cumsum(current)))
        moments = self._total[1:] + np.arange(1, len(remaining) + 1) * remaining
        # A request that joins adds its own tokens and one growing slot to all moments after it.
        later = moments + remaining
        self._before = np.concatenate(([0.0], np.maximum.accumulate(moments)))
        self._after = np.concatenate((np.maximum.accumulate(later[::-1])[::-1], [-np.inf]))

    @property
    def tokens(self) -> float:
        """Peak of the batch as it is."""
        return float(self._before[-1])

    def with_candidates(self, current: Tokens, remaining: Tokens) -> Tokens:
        """Peak of the batch with one more request, for each candidate, shape (len(current),)."""
        place = np.searchsorted(self._ascending, -remaining, side="right")
        own = self._total[place] + current + (place + 1) * remaining
        return np.maximum(np.maximum(self._before[place], own), current + self._after[place])
