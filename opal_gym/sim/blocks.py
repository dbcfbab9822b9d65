"""The GPU's KV-cache blocks (seed, "GPU Memory Block Management")."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.clock import SimEnvironment

Tokens = TypeVar("Tokens", int, NDArray[np.int64], NDArray[np.float64])


def blocks_of(tokens: Tokens, block_size: int) -> Tokens:
    """Blocks that hold `tokens` tokens, a number or an array: ceil(tokens / block_size)."""
    return -(-tokens // block_size)


class BlockPool:
    """A pool of `total` blocks, of which `free` are free.

    Attributes:
        total: Blocks of the pool.
        free: Blocks that nobody holds.
    """

    def __init__(self, env: SimEnvironment, total: int) -> None:
        self._env = env
        self.total = total
        self.free = total
        self._block_seconds = 0.0
        self._since = env.now

    def allocate(self, blocks: int) -> None:
        """Takes `blocks` free blocks."""
        self._settle()
        self.free -= blocks

    def release(self, blocks: int) -> None:
        """Gives `blocks` blocks back."""
        self._settle()
        self.free += blocks

    def charge(self, block_seconds: float) -> None:
        """Adds to the blocks' use what a span's later steps held before its end."""
        self._block_seconds += block_seconds

    def block_seconds(self) -> float:
        """Integral of the held blocks over time so far, blocks·s."""
        self._settle()
        return self._block_seconds

    def _settle(self) -> None:
        now = self._env.now
        self._block_seconds += (self.total - self.free) * (now - self._since)
        self._since = now
