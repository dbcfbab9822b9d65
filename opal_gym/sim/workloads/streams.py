"""Independent random streams of a workload, and choices made from them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Stream(IntEnum):
    """What random numbers are for.

    A stream's number is part of every published result: numbers may be added, never changed.
    """

    ARRIVALS = 0
    MODULATION = 1
    LENGTHS = 2
    TENANTS = 3
    PREFIXES = 4
    PREDICTIONS = 5
    LOAD = 6
    WINDOW = 7
    ROUTING = 8


def generator(seed: int, stream: Stream, *index: int) -> np.random.Generator:
    """The generator of one stream of a workload, the same at every call.

    Args:
        seed: The workload's seed; child `stream` of its `SeedSequence` is used.
        stream: What the numbers are for.
        index: Numbers a part of the stream that must not shift when another part draws more.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream, *index)))


def pick(
    shares: Sequence[float] | NDArray[np.float64], uniform: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Indices with probabilities proportional to `shares`, one for each uniform draw in [0, 1)."""
    cumulated = np.cumsum(shares)
    return np.searchsorted(cumulated[:-1] / cumulated[-1], uniform, side="right")
