"""The KV-cache engine: prefixes of prompts, kept in tiers outside the GPU."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import simpy

from opal_gym.config import KVCacheConfig, TierConfig
from opal_gym.sim.channel import SharedChannel
from opal_gym.sim.clock import SimEnvironment

Process = Generator[simpy.Event, Any, None]


class KVChunk(NamedTuple):
    """A unit of KV that is stored, matched and moved as a whole.

    Attributes:
        chunk_id: Hash id of its last block, which stands for all of the prefix up to there.
        tokens: Tokens that it holds.
    """

    chunk_id: int
    tokens: int


class KVEvent(NamedTuple):
    """A change of what an engine holds.

    Attributes:
        stored: Whether the chunk came (or left).
        chunk_id: The chunk.
    """

    stored: bool
    chunk_id: int


class OpalKVCacheEngine:
    """Prefix matching over chained block hashes, with asynchronous transfers (seed, "KVC").

    A hash id stands for `hash_block_tokens` tokens and, being chained, for all that precede them.
    Tiers are filled from the first; what one evicts moves to the next, and out of the last one.
    Without tiers there are no matches and no cost.

    Args:
        env: The simulation.
        config: Tiers and granularity.
        kv_bytes_per_token: Bytes of KV per token.
        on_event: Told of every chunk that comes or leaves.

    Attributes:
        tiers: The storage tiers, fastest first.
        stores_skipped: Stores that found no evictable room.
    """

    def __init__(
        self,
        env: SimEnvironment,
        config: KVCacheConfig,
        kv_bytes_per_token: int,
        on_event: Callable[[KVEvent], None] = lambda event: None,
    ) -> None:
        self._env = env
        self._config = config
        self._on_event = on_event
        self._incoming: set[int] = set()
        self.tiers = [Tier(env, tier, kv_bytes_per_token) for tier in config.tiers]
        self.stores_skipped = 0

    @property
    def enabled(self) -> bool:
        """Whether there is a tier."""
        return bool(self.tiers)

    def lookup(self, hash_ids: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of the longest resident prefix; a hint that pins nothing."""
        chunks = prompt_chunks(self._config, hash_ids, prompt_tokens)
        return sum(chunk.tokens for _, chunk in self._match(chunks))

    def retrieve(self, hash_ids: Sequence[int], tokens: range, prompt_tokens: int) -> Process:
        """Moves the resident chunks that hold tokens `tokens` of a prompt to the GPU.

        They are pinned when this is called, until the transfer ends. Chunks of different tiers
        move side by side.
        """
        chunks = prompt_chunks(self._config, hash_ids, prompt_tokens)
        parts: dict[Tier, list[KVChunk]] = {}
        begin = 0
        for tier, chunk in self._match(chunks):
            if begin < tokens.stop and tokens.start < begin + chunk.tokens:
                parts.setdefault(tier, []).append(chunk)
            begin += chunk.tokens
        for tier, moved in parts.items():
            tier.pin(moved)
        return self._move(parts)

    def _move(self, parts: dict[Tier, list[KVChunk]]) -> Process:
        moves = [self._env.process(tier.read(chunks)) for tier, chunks in parts.items()]
        yield self._env.all_of(moves)

    def store(self, hash_ids: Sequence[int], prompt_tokens: int) -> Process | None:
        """Writes a prompt's chunks that no tier holds; room is made for them at once.

        Returns:
            The transfer; None where nothing is written: no chunk is missing, or no room is found.
        """
        if not self.tiers:
            return None
        chunks = list(prompt_chunks(self._config, hash_ids, prompt_tokens))
        self._touch(chunks)
        resident = self._match(chunks)
        missing = [
            chunk
            for chunk in chunks
            if self._tier_of(chunk) is None and chunk.chunk_id not in self._incoming
        ]
        if not missing:
            return None
        tokens = sum(chunk.tokens for chunk in missing)
        for tier, chunk in resident:
            tier.pin([chunk])
        found_room = self._make_room(0, tokens)
        for tier, chunk in resident:
            tier.unpin([chunk])
        if not found_room:
            self.stores_skipped += 1
            return None
        self.tiers[0].reserved += tokens
        self._incoming.update(chunk.chunk_id for chunk in missing)
        return self._write(missing, tokens, chunks)

    def _write(self, missing: Sequence[KVChunk], tokens: int, chunks: Sequence[KVChunk]) -> Process:
        tier = self.tiers[0]
        yield from tier.channel.transfer(tokens * tier.token_bytes)
        tier.reserved -= tokens
        for chunk in missing:
            self._incoming.remove(chunk.chunk_id)
            tier.add(chunk)
            self._on_event(KVEvent(True, chunk.chunk_id))
        # All of the prompt's, not only the new ones: they would outlive what leads to them.
        self._touch(chunks)

    def _touch(self, chunks: Sequence[KVChunk]) -> None:
        """Marks what is resident of a chain as just used, its head last: tails go first."""
        for chunk in reversed(chunks):
            tier = self._tier_of(chunk)
            if tier is not None:
                tier.touch([chunk])

    def _make_room(self, level: int, tokens: int) -> bool:
        """Evicts least recently used chunks of a tier until `tokens` tokens are free.

        Returns:
            False, with nothing evicted, if what is not pinned does not suffice.
        """
        tier = self.tiers[level]
        victims = tier.victims(tokens)
        if victims is None:
            return False
        for chunk in victims:
            tier.remove(chunk)
            self._demote(level + 1, chunk)
        return True

    def _demote(self, level: int, chunk: KVChunk) -> None:
        """Writes an evicted chunk to the next tier in the background; the last one drops it."""
        if level < len(self.tiers) and self._make_room(level, chunk.tokens):
            tier = self.tiers[level]
            tier.add(chunk)
            self._env.process(tier.channel.transfer(chunk.tokens * tier.token_bytes))
        else:
            self._on_event(KVEvent(False, chunk.chunk_id))

    def _match(self, chunks: Iterable[KVChunk]) -> list[tuple[Tier, KVChunk]]:
        """The chunks of the longest resident prefix, with their tiers."""
        match = []
        for chunk in chunks:
            tier = self._tier_of(chunk)
            if tier is None:
                break
            match.append((tier, chunk))
        return match

    def _tier_of(self, chunk: KVChunk) -> Tier | None:
        for tier in self.tiers:
            if chunk.chunk_id in tier.resident:
                return tier
        return None


def prompt_chunks(
    config: KVCacheConfig, hash_ids: Sequence[int], prompt_tokens: int
) -> Iterator[KVChunk]:
    """The chunks of a prompt as the cache keeps them; the last one may be unfull."""
    block_tokens = config.hash_block_tokens
    chunk_tokens = config.chunk_size or block_tokens
    hashed = min(prompt_tokens, len(hash_ids) * block_tokens)
    for begin in range(0, hashed, chunk_tokens):
        tokens = min(chunk_tokens, hashed - begin)
        if tokens < chunk_tokens and not config.save_unfull_chunk:
            return
        yield KVChunk(hash_ids[(begin + tokens - 1) // block_tokens], tokens)


class Tier:
    """A storage tier with its resident chunks in LRU order.

    Attributes:
        name: The tier's name.
        capacity: Tokens that fit.
        resident: Tokens of each resident chunk by id, least recently used first.
        reserved: Tokens of room that stores under way have reserved.
        token_bytes: Bytes of KV per token.
        channel: What moves its bytes.
    """

    def __init__(self, env: SimEnvironment, config: TierConfig, token_bytes: int) -> None:
        self.name = config.name
        self.capacity = round(config.capacity_GB * 1e9) // token_bytes
        self.resident: OrderedDict[int, int] = OrderedDict()
        self.reserved = 0
        self.token_bytes = token_bytes
        self.channel = SharedChannel(
            env, config.bandwidth_GBps * 1e9, config.latency_nsec * 1e-9, config.concurrency
        )
        self._resident_tokens = 0
        self._pins: Counter[int] = Counter()

    @property
    def used(self) -> int:
        """Tokens of room that are taken: resident or reserved."""
        return self._resident_tokens + self.reserved

    def read(self, chunks: Sequence[KVChunk]) -> Process:
        """Moves pinned chunks out, then unpins them as the most recently used."""
        tokens = sum(chunk.tokens for chunk in chunks)
        yield from self.channel.transfer(tokens * self.token_bytes)
        self.unpin(chunks)
        self.touch(chunks)

    def pin(self, chunks: Iterable[KVChunk]) -> None:
        """Keeps chunks from eviction until as many `unpin`."""
        self._pins.update(chunk.chunk_id for chunk in chunks)

    def unpin(self, chunks: Iterable[KVChunk]) -> None:
        """Undoes one `pin`."""
        self._pins.subtract(chunk.chunk_id for chunk in chunks)
        for chunk in chunks:
            if not self._pins[chunk.chunk_id]:
                del self._pins[chunk.chunk_id]

    def touch(self, chunks: Sequence[KVChunk]) -> None:
        """Marks a chain as just used, its head last, so that tails are evicted first."""
        for chunk in reversed(chunks):
            self.resident.move_to_end(chunk.chunk_id)

    def victims(self, tokens: int) -> list[KVChunk] | None:
        """Least recently used chunks whose eviction frees `tokens`; None if too few are."""
        missing = self.used + tokens - self.capacity
        victims = []
        for chunk_id, size in self.resident.items():
            if missing <= 0:
                break
            if chunk_id not in self._pins:
                victims.append(KVChunk(chunk_id, size))
                missing -= size
        return victims if missing <= 0 else None

    def add(self, chunk: KVChunk) -> None:
        """Makes a chunk resident, as the most recently used."""
        self.resident[chunk.chunk_id] = chunk.tokens
        self._resident_tokens += chunk.tokens

    def remove(self, chunk: KVChunk) -> None:
        """Takes a chunk out."""
        del self.resident[chunk.chunk_id]
        self._resident_tokens -= chunk.tokens
