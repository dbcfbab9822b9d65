"""The KV-cache engine: prefixes of prompts, kept outside the GPU."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from itertools import takewhile
from typing import Any

import simpy

from opal_gym.config import KVCacheConfig, TierConfig
from opal_gym.sim.clock import SimEnvironment


class OpalKVCacheEngine:
    """Prefix matching over chained block hashes, with asynchronous transfers.

    A hash id stands for `hash_block_tokens` tokens and, being chained, for all that precede them.
    Without a tier there are no matches and no cost.

    Attributes:
        stores_skipped: Stores that found no evictable room.
    """

    def __init__(self, env: SimEnvironment, config: KVCacheConfig, kv_bytes_per_token: int) -> None:
        self.block_tokens = config.hash_block_tokens
        block_bytes = config.hash_block_tokens * kv_bytes_per_token
        self._tier = Tier(env, config.tiers[0], block_bytes) if config.tiers else None
        self.stores_skipped = 0

    @property
    def enabled(self) -> bool:
        """Whether there is a tier."""
        return self._tier is not None

    def lookup(self, hash_ids: Sequence[int]) -> int:
        """Tokens of the longest resident prefix; a hint that pins nothing."""
        return len(self._match(hash_ids)) * self.block_tokens

    def retrieve(self, hash_ids: Sequence[int], tokens: int) -> Generator[simpy.Event, Any, None]:
        """Moves the resident prefix's first `tokens` tokens to the GPU; pinned until the end.

        The blocks are pinned when this is called, not when the transfer begins.
        """
        tier = self._tier
        assert tier is not None
        blocks = hash_ids[: -(-tokens // self.block_tokens)]
        tier.pin(blocks)
        return self._retrieve(tier, blocks)

    def _retrieve(self, tier: Tier, blocks: Sequence[int]) -> Generator[simpy.Event, Any, None]:
        yield from tier.transfer(len(blocks))
        tier.unpin(blocks)
        tier.touch(blocks)

    def store(self, hash_ids: Sequence[int]) -> Generator[simpy.Event, Any, None]:
        """Writes the blocks of a prompt that are not resident; skipped where no room is."""
        tier = self._tier
        if tier is None:
            return
        resident = self._match(hash_ids)
        tier.touch(resident)
        missing = [block for block in hash_ids[len(resident) :] if block not in tier.resident]
        if not missing:
            return
        tier.pin(resident)
        room = tier.make_room(len(missing))
        tier.unpin(resident)
        if not room:
            self.stores_skipped += 1
            return
        yield from tier.transfer(len(missing))
        tier.admit(missing)
        tier.touch(hash_ids)

    def _match(self, hash_ids: Sequence[int]) -> Sequence[int]:
        tier = self._tier
        if tier is None:
            return ()
        return list(takewhile(tier.resident.__contains__, hash_ids))


class Tier:
    """A storage tier: resident blocks in LRU order, and one transfer at a time.

    Attributes:
        resident: Resident blocks, least recently used first.
        reserved: Blocks of room that stores under way have reserved.
    """

    def __init__(self, env: SimEnvironment, config: TierConfig, block_bytes: int) -> None:
        self._env = env
        self._channel = simpy.Resource(env, capacity=1)
        self._latency_s = config.latency_nsec * 1e-9
        self._block_s = block_bytes / (config.bandwidth_GBps * 1e9)
        self.capacity = int(config.capacity_GB * 1e9 // block_bytes)
        self.resident: OrderedDict[int, None] = OrderedDict()
        self.reserved = 0
        self._pins: Counter[int] = Counter()

    def transfer(self, blocks: int) -> Generator[simpy.Event, Any, None]:
        """Occupies the channel for the latency plus the bytes over the bandwidth."""
        with self._channel.request() as turn:
            yield turn
            yield self._env.timeout(self._latency_s + blocks * self._block_s)

    def pin(self, blocks: Sequence[int]) -> None:
        """Keeps `blocks` from eviction until as many `unpin`."""
        self._pins.update(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Undoes one `pin`."""
        for block in blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]

    def touch(self, blocks: Sequence[int]) -> None:
        """Marks a chain as just used, its head last, so that tails are evicted first."""
        for block in reversed(blocks):
            if block in self.resident:
                self.resident.move_to_end(block)

    def make_room(self, blocks: int) -> bool:
        """Evicts least recently used blocks and reserves room for `blocks`; False if it can't."""
        excess = len(self.resident) + self.reserved + blocks - self.capacity
        victims = []
        if excess > 0:
            unpinned = (block for block in self.resident if block not in self._pins)
            victims = [block for block, _ in zip(unpinned, range(excess), strict=False)]
            if len(victims) < excess:
                return False
        for block in victims:
            del self.resident[block]
        self.reserved += blocks
        return True

    def admit(self, blocks: Sequence[int]) -> None:
        """Makes blocks resident in the room that was reserved for them."""
        self.reserved -= len(blocks)
        for block in blocks:
            self.resident[block] = None
