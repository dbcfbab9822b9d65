"""Random small workloads and worker configurations, in which memory and tokens bind hard.

The same generator draws from a seed (fast, thousands of cases) and from Hypothesis (shrinks).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from opal_gym.config import Config
from opal_gym.sim.request import Tenant
from opal_gym.sim.workloads import Workload
from tests.tiny import tiny_config, tiny_workload

T = TypeVar("T")

KV_BYTES_PER_TOKEN = 131072
"""Of the default model, llama-3.1-8b: 2 · 32 layers · 8 heads · 128 · 2 bytes."""

SYNTHETIC_TIMES: tuple[dict[str, Any], ...] = (
    {"base_s": 1.0},
    {"base_s": 0.5, "per_prefill_token_s": 0.125, "per_decode_s": 0.0625},
    {"base_s": 0.1, "per_prefill_token_s": 0.013, "per_context_token_s": 0.0007},
)
TENANTS = (Tenant("chat", 1.0, 4.0, 1.5), Tenant("batch", 0.25))


class Source(Protocol):
    """Where a case's numbers come from."""

    def integer(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""


class SeededSource:
    """Draws from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, options: Sequence[T]) -> T:
        return options[self._random.randrange(len(options))]


class DrawnSource:
    """Draws from Hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def pick(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))


@dataclass(frozen=True)
class Case:
    """One random simulation.

    Attributes:
        overrides: Of `tests.tiny.TINY`, by dotted key.
        requests: (arrival in s, prompt tokens, output tokens) of each request.
        predicted: Predicted output tokens of each request.
        hash_ids: Chained hashes of each request's prompt; empty without any cache.
        tenant: Rows of `TENANTS`.
    """

    overrides: dict[str, Any]
    requests: list[tuple[float, int, int]]
    predicted: list[int]
    hash_ids: list[tuple[int, ...]]
    tenant: list[int]

    def config(self, **more: Any) -> Config:
        """The configuration; more overrides by keyword, with `__` for dots."""
        return tiny_config({**self.overrides, **{k.replace("__", "."): v for k, v in more.items()}})

    def workload(self) -> Workload:
        """The requests."""
        return tiny_workload(
            self.requests,
            predicted=self.predicted,
            hash_ids=self.hash_ids,
            tenants=TENANTS,
            tenant=self.tenant,
        )

    @property
    def has_tier(self) -> bool:
        """Whether there is a KV-cache tier."""
        return "kvc.tiers" in self.overrides


def draw_case(
    source: Source,
    *,
    tier: bool | None = None,
    sharing: bool = False,
    max_requests: int = 10,
) -> Case:
    """One random case.

    Args:
        source: Where its numbers come from.
        tier: Whether it has a KV-cache tier, or two; None: drawn.
        sharing: Whether prompts share GPU blocks (`enable_prefix_caching`).
        max_requests: Most requests.
    """
    integer, pick = source.integer, source.pick
    block_size = pick((1, 2, 4, 4))
    blocks = integer(3, 14)
    pool_tokens = block_size * blocks
    chunked = pick((True, True, True, False))
    max_model_len = pick((None, pool_tokens, max(2, pool_tokens // 2))) if chunked else pool_tokens
    budget = pick((1, 2, 4, 6, 8, 16)) if chunked else pool_tokens + integer(0, 8)
    prefix = "worker.vllm_params."
    overrides: dict[str, Any] = {
        prefix + "block_size": block_size,
        prefix + "num_gpu_blocks_override": blocks,
        prefix + "chunked_prefill": chunked,
        prefix + "max_num_batched_tokens": budget,
        prefix + "max_num_seqs": pick((min(6, budget), min(6, budget), integer(1, min(6, budget)))),
        prefix + "max_model_len": max_model_len,
        prefix + "rebuild_on": pick(("change", "completion")),
        prefix + "first_token_at_prefill_end": pick((True, False)),
        prefix + "lookahead_reqs": pick((1, 2, 3, 256)),
        prefix + "chunk_budgets": pick(
            (None, None, [budget], sorted({1, budget}), [integer(1, budget), integer(1, budget)])
        ),
        "env.max_candidates": pick((1, 2, 3, 64)),
        "worker.inference_params": _draw_timing(source),
    }
    if pick((True, False)) if tier is None else tier:
        overrides.update(_draw_tiers(source))
    if sharing:
        overrides[prefix + "enable_prefix_caching"] = True
        overrides["kvc.hash_block_tokens"] = block_size * pick((1, 1, 2))
        overrides["kvc.chunk_size"] = None
    requests, predicted, hash_ids, tenant = [], [], [], []
    time = 0.0
    hash_tokens = overrides.get("kvc.hash_block_tokens", 0)
    # Nobody hits what nobody has left there.
    fewest = max_requests // 2 if hash_tokens else 1
    for number in range(integer(fewest, max_requests)):
        time += pick((0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 4.0, 40.0))
        longest = pick((4, 8, pool_tokens // 2, pool_tokens // 2, pool_tokens))
        prompt = min(longest, hash_tokens + 1) if hash_tokens and pick((True, False)) else 0
        prompt = integer(max(1, prompt), longest)
        rest = max(1, pool_tokens - prompt)
        output = pick((1, integer(1, 4), integer(1, rest), (rest + 1) // 2, rest, integer(1, 20)))
        requests.append((time, prompt, output))
        predicted.append(pick((output, output, 0, 1, integer(1, 40))))
        hash_ids.append(_draw_hash_ids(source, number, prompt, hash_tokens) if hash_tokens else ())
        tenant.append(integer(0, 1))
    return Case(overrides, requests, predicted, hash_ids if hash_tokens else [], tenant)


def seeded_case(
    seed: int, *, tier: bool | None = None, sharing: bool = False, max_requests: int = 10
) -> Case:
    """The case of a seed."""
    return draw_case(SeededSource(seed), tier=tier, sharing=sharing, max_requests=max_requests)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A case whose failures shrink."""
    return draw_case(DrawnSource(draw), sharing=draw(st.booleans()), max_requests=6)


def _draw_timing(source: Source) -> dict[str, Any]:
    model = source.pick(("synthetic", "synthetic", "synthetic", "roofline", "calibrated"))
    return {"model": model, **(source.pick(SYNTHETIC_TIMES) if model == "synthetic" else {})}


def _draw_tiers(source: Source) -> dict[str, Any]:
    """One or two tiers of a few hash blocks, with transfers from instantaneous to very slow."""
    hash_tokens = source.pick((1, 2, 2, 4))
    block_bytes = hash_tokens * KV_BYTES_PER_TOKEN

    def draw_tier(name: str) -> dict[str, Any]:
        return {
            "name": name,
            # Half a block more, so that rounding cannot take one away.
            "capacity_GB": (source.pick((2, 4, 8, 16, 64)) + 0.5) * block_bytes / 1e9,
            "bandwidth_GBps": block_bytes / source.pick((1e-9, 1e-9, 0.25, 1.0, 3.0)) / 1e9,
            "latency_nsec": source.pick((0.0, 0.0, 0.5e9, 1e9, 4e9)),
            "concurrency": source.pick((1, 1, 2)),
        }

    names = ("CPUMemory", "LocalNVMe")[: source.pick((1, 1, 2))]
    return {
        "kvc.hash_block_tokens": hash_tokens,
        "kvc.chunk_size": source.pick((None, None, 2 * hash_tokens)),
        "kvc.save_unfull_chunk": source.pick((False, False, True)),
        "kvc.tiers": [draw_tier(name) for name in names],
        "worker.vllm_params.max_kvc_ready_requests": source.integer(1, 4),
    }


def _draw_hash_ids(source: Source, number: int, prompt: int, hash_tokens: int) -> tuple[int, ...]:
    """A chain that follows one of two documents up to some depth, then goes its own way."""
    full = prompt // hash_tokens + source.pick((0, 0, int(prompt % hash_tokens > 0)))
    length = source.pick((full, full, full, full, 0))
    shared = source.pick((length, length, source.integer(0, length)))
    document = source.pick((0, 0, 1))
    return tuple(
        (document if depth < shared else 2 + number) * 1000 + depth for depth in range(length)
    )
