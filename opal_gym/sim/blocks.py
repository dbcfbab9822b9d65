"""The GPU's KV-cache blocks (seed, "GPU Memory Block Management")."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
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

    Blocks are alike, so holders count them. A block whose content is published under a hash can be
    shared (vLLM's automatic prefix caching): it is in use as long as somebody holds it; freed, it
    stays idle with its content until all other free blocks are taken, and the least recently freed
    idle block is taken first.

    Attributes:
        total: Blocks of the pool.
        free: Blocks that nobody holds, idle ones included.
    """

    def __init__(self, env: SimEnvironment, total: int) -> None:
        self._env = env
        self.total = total
        self.free = total
        self._holders: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_seconds = 0.0
        self._since = env.now

    def allocate(self, blocks: int) -> None:
        """Takes `blocks` free blocks, those without content first."""
        if not blocks:
            return
        self._settle()
        self.free -= blocks
        while len(self._idle) > self.free:
            self._idle.popitem(last=False)

    def release(self, blocks: int, hashes: Sequence[int] = ()) -> None:
        """Gives `blocks` blocks back, of which `hashes` have published content, tail first."""
        self._settle()
        self.free += blocks - len(hashes)
        for block_hash in reversed(hashes):
            self._holders[block_hash] -= 1
            if not self._holders[block_hash]:
                del self._holders[block_hash]
                self._idle[block_hash] = None
                self.free += 1

    def match(self, hashes: Sequence[int]) -> tuple[int, int]:
        """How many leading hashes have a block, and how many of these blocks are in use."""
        hits = in_use = 0
        for block_hash in hashes:
            if block_hash in self._holders:
                in_use += 1
            elif block_hash not in self._idle:
                break
            hits += 1
        return hits, in_use

    def acquire(self, hashes: Sequence[int]) -> None:
        """Holds the blocks of matched hashes; an idle one is no longer free."""
        self._settle()
        for block_hash in hashes:
            if block_hash in self._idle:
                del self._idle[block_hash]
                self.free -= 1
            self._holders[block_hash] += 1

    def publish(self, block_hash: int) -> bool:
        """Publishes the content of a held block; False if another one in use has the same content.

        An idle block of the same content is empty from then on.
        """
        if block_hash in self._holders:
            return False
        self._idle.pop(block_hash, None)
        self._holders[block_hash] = 1
        return True

    @property
    def shared(self) -> int:
        """Blocks that holders count more than once."""
        return self._holders.total() - len(self._holders)

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
