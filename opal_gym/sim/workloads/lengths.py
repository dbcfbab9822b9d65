"""Token counts drawn from log-normal, fixed and mixed distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.workloads.streams import pick

if TYPE_CHECKING:
    from opal_gym.config import FixedLength, LengthConfig, LogNormalLength, MixturePart


def lengths_from(
    config: LengthConfig, uniform: NDArray[np.float64], normal: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Lengths in tokens that follow a distribution.

    Every length depends on its own two draws only, so that request i of a seed keeps its length
    whatever the number of requests.

    Args:
        config: The distribution.
        uniform: Draws in [0, 1) that pick a mixture's part, shape (n,).
        normal: Standard normal draws, shape (n,).

    Returns:
        Shape (n,), at least 1.
    """
    if config.kind == "fixed":
        return np.full(len(normal), config.tokens, np.int64)
    if config.kind == "lognormal":
        tokens = np.rint(config.median * np.exp(config.sigma * normal))
        clipped: NDArray[np.float64] = np.clip(tokens, config.min, config.max)
        return clipped.astype(np.int64)
    parts = _simple_parts(config, 1.0)
    picked = pick([share for share, _ in parts], uniform)
    lengths = np.empty(len(normal), np.int64)
    for index, (_, part) in enumerate(parts):
        rows = np.flatnonzero(picked == index)
        lengths[rows] = lengths_from(part, uniform[rows], normal[rows])
    return lengths


def _simple_parts(
    config: LengthConfig, share: float
) -> list[tuple[float, LogNormalLength | FixedLength]]:
    """The parts of a mixture, with those of mixtures in it in their place."""
    if config.kind != "mixture":
        return [(share, config)]
    parts: tuple[MixturePart, ...] = config.parts
    total = sum(part.share for part in parts)
    return [
        simple
        for part in parts
        for simple in _simple_parts(part.length, share * part.share / total)
    ]
