"""Prompts that begin with a shared document, as chained ids of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.workloads.streams import Stream, generator, pick

if TYPE_CHECKING:
    from opal_gym.config import PrefixConfig


def prompt_hash_ids(
    prefixes: Sequence[PrefixConfig | None],
    tenant: NDArray[np.int64],
    prompt_tokens: NDArray[np.int64],
    hash_block_tokens: int,
    seed: int,
) -> tuple[tuple[int, ...], ...]:
    """Ids of every prompt's blocks: equal ids, equal tokens up to the block's end.

    A prompt begins with as much of its tenant's document as it has room for. The full blocks of
    that have the document's ids; the others, the partial last one included, are the request's own.

    Args:
        prefixes: The documents of each tenant; None: its requests have no ids.
        tenant: Tenant of each request, shape (n,).
        prompt_tokens: Shape (n,).
        hash_block_tokens: Tokens of a block.
        seed: The workload's seed.

    Returns:
        ceil(prompt / hash_block_tokens) ids for each of the n requests; without any document an
        empty tuple.
    """
    if not any(prefixes):
        return ()
    uniform = generator(seed, Stream.PREFIXES).random(len(tenant))
    first, shared, own = (np.zeros(len(tenant), np.int64) for _ in range(3))
    next_id = 0
    for index, prefix in enumerate(prefixes):
        if prefix is None:
            continue
        rows = np.flatnonzero(tenant == index)
        prompt, blocks = prompt_tokens[rows], prefix.tokens // hash_block_tokens
        first[rows] = next_id + blocks * pick(_popularity(prefix), uniform[rows])
        shared[rows] = np.minimum(prefix.tokens, prompt) // hash_block_tokens
        own[rows] = -(-prompt // hash_block_tokens) - shared[rows]
        next_id += blocks * prefix.num_prefixes
    own_end = next_id + np.cumsum(own)
    bounds = np.column_stack([first, first + shared, own_end - own, own_end])
    ids: list[tuple[int, ...]] = [()] * len(tenant)
    rows = np.flatnonzero(shared + own)
    for row, (a, b, c, d) in zip(rows.tolist(), bounds[rows].tolist(), strict=True):
        ids[row] = (*range(a, b), *range(c, d))
    return tuple(ids)


def _popularity(prefix: PrefixConfig) -> NDArray[np.float64]:
    """Zipf's law: the k-th document is asked for in proportion to k^-zipf."""
    return np.arange(1.0, prefix.num_prefixes + 1) ** -prefix.zipf
