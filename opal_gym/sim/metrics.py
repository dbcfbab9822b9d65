"""Metrics of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opal_gym.sim.records import GAP_LIMIT_S, RequestRecords

Metrics = dict[str, Any]
"""Nested dictionaries of floats."""


def episode_metrics(
    records: RequestRecords,
    *,
    arrived: int,
    duration_s: float,
    gpu_busy_s: float,
    kv_block_s: float,
    total_blocks: int,
    num_workers: int = 1,
    arrived_weight: float | None = None,
) -> Metrics:
    """Summarises an episode.

    Args:
        records: The finished requests.
        arrived: Requests that arrived and were not rejected; those not completed are not good.
        duration_s: From the first arrival to the last completion, s.
        gpu_busy_s: Seconds in which GPUs computed, summed over workers.
        kv_block_s: Integral of the held KV blocks, blocks·s, summed over workers.
        total_blocks: KV blocks of all workers.
        num_workers: Number of workers.
        arrived_weight: Weight of all that arrived; default: as the completed ones on average.

    Returns:
        Times in s as `{"mean", "p50", "p90", "p99"}`: `ttft_s`, `tpot_s` (requests of more than
        one token), `itl_s` (all gaps between tokens), `e2e_s`, `queueing_s` (arrival to first
        admission), `normalised_latency_s` (E2E per output token), `slowdown` (E2E over unloaded
        latency). Then scalars; 0 where nothing completed.
    """
    table = records.table
    weights = np.array([tenant.weight for tenant in records.tenants])[table["tenant"]]
    ttft, tpot, e2e = latencies(table)
    slowdown = e2e / table["unloaded_latency"]
    good = good_requests(records)
    several = table["output_tokens"] > 1
    span = duration_s or 1.0
    if arrived_weight is None:
        arrived_weight = arrived * float(weights.mean()) if len(weights) else 0.0
    return {
        "requests": float(arrived),
        "completed": float(len(table)),
        "rejected": float(len(records.rejected)),
        "ttft_s": _summary(ttft),
        "tpot_s": _summary(tpot[several]),
        "itl_s": _summary(_token_gaps(records)),
        "e2e_s": _summary(e2e),
        "queueing_s": _summary(table["gpu_start_time"] - table["arrival_time"]),
        "normalised_latency_s": _summary(e2e / table["output_tokens"]),
        "slowdown": _summary(slowdown),
        "weighted_slowdown": _weighted(slowdown, weights),
        "goodput": float(good.sum()) / max(1, arrived),
        "weighted_goodput": float(np.dot(good, weights)) / (arrived_weight or 1.0),
        "goodput_per_s": float(good.sum()) / span,
        "tokens_per_s": float(table["output_tokens"].sum()) / span,
        "requests_per_s": len(table) / span,
        "preemptions": float(table["preemptions"].sum()),
        "recomputed_tokens": float(table["recomputed_tokens"].sum()),
        "prefix_hit_tokens": float(table["prefix_hit_tokens"].sum()),
        "prefix_hit_rate": float(table["prefix_hit_tokens"].sum())
        / max(1.0, float(table["prompt_tokens"].sum())),
        "gpu_busy_share": gpu_busy_s / (span * num_workers),
        "kv_utilisation": kv_block_s / (span * total_blocks),
        "jain_index": jain_index(1 / slowdown),
        "duration_s": float(duration_s),
        "tenants": {
            tenant.name: _tenant_metrics(table["tenant"] == row, ttft, e2e, slowdown, good)
            for row, tenant in enumerate(records.tenants)
        },
    }


def latencies(
    table: NDArray[np.void],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """TTFT, TPOT (0 for an output of one token) and E2E of each record, s."""
    ttft = table["first_token_time"] - table["arrival_time"]
    gaps = np.maximum(1, table["output_tokens"] - 1)
    tpot = (table["decode_done_time"] - table["first_token_time"]) / gaps
    return ttft, tpot, table["decode_done_time"] - table["arrival_time"]


def good_requests(records: RequestRecords) -> NDArray[np.bool_]:
    """Which completed requests met TTFT, TPOT and the gap limit (strict goodput)."""
    table = records.table
    ttft, tpot, _ = latencies(table)
    limits = np.array([(t.ttft_slo_s, t.tpot_slo_s) for t in records.tenants])[table["tenant"]]
    within = (ttft <= limits[:, 0]) & (tpot <= limits[:, 1]) & (table["max_gap"] <= GAP_LIMIT_S)
    good: NDArray[np.bool_] = within | np.isinf(limits).all(axis=1)
    return good


def jain_index(shares: NDArray[np.float64]) -> float:
    """Jain's fairness index (Σx)² / (n Σx²): 1 if all get the same; 0 if there is nobody."""
    if not len(shares):
        return 0.0
    return float(shares.sum() ** 2 / (len(shares) * (shares**2).sum()))


def _tenant_metrics(
    mine: NDArray[np.bool_],
    ttft: NDArray[np.float64],
    e2e: NDArray[np.float64],
    slowdown: NDArray[np.float64],
    good: NDArray[np.bool_],
) -> Metrics:
    return {
        "completed": float(mine.sum()),
        "ttft_s": _summary(ttft[mine]),
        "e2e_s": _summary(e2e[mine]),
        "slowdown": _summary(slowdown[mine]),
        "goodput": _weighted(good[mine], np.ones(int(mine.sum()))),
    }


def _token_gaps(records: RequestRecords) -> NDArray[np.float64]:
    gaps: Sequence[NDArray[np.float64]] = [np.diff(times) for times in records.token_times()]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _summary(values: NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _weighted(values: ArrayLike, weights: NDArray[np.float64]) -> float:
    total = float(weights.sum())
    return float(np.dot(np.asarray(values, float), weights)) / total if total else 0.0
