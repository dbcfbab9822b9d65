"""Metrics of an episode, worked out by hand on a few requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from opal_gym.sim.metrics import Metrics, episode_metrics, good_requests, jain_index, latencies
from opal_gym.sim.records import GAP_LIMIT_S, RequestRecords
from opal_gym.sim.request import LLMRequest, Tenant
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.steps import StepLog
from opal_gym.sim.workloads import SLOS
from tests.tiny import tiny_config, tiny_workload

CHAT = Tenant("chat", 1.0, ttft_slo_s=0.5, tpot_slo_s=0.1)
BULK = Tenant("bulk", 0.25)


class Bench:
    """Records that are written by hand."""

    def __init__(self, *tenants: Tenant) -> None:
        self.records = RequestRecords(tenants or (CHAT, BULK))
        self.steps = StepLog()
        self._made = 0

    def add(
        self,
        arrival: float,
        token_times: Sequence[float],
        *,
        tenant: Tenant = CHAT,
        unloaded: float = 1.0,
        prompt: int = 10,
        admitted: float | None = None,
        **stats: int,
    ) -> bool:
        """A completed request; returns whether it was counted as good."""
        request = LLMRequest(self._made, arrival, prompt, len(token_times), 7, tenant)
        self._made += 1
        request.stats.steps = self.steps
        request.stats.token_runs.append((self.steps.count, len(token_times)))
        self.steps.extend(np.array(token_times, np.float64))
        request.stats.gpu_start_time = arrival if admitted is None else admitted
        request.stats.first_token_time = token_times[0]
        request.stats.decode_done_time = token_times[-1]
        for name, value in stats.items():
            setattr(request.stats, name, value)
        return self.records.complete(request, unloaded, worker_id=0)

    def metrics(self, **changes: Any) -> Metrics:
        numbers: dict[str, Any] = {
            "arrived": len(self.records),
            "duration_s": 10.0,
            "gpu_busy_s": 4.0,
            "kv_block_s": 25.0,
            "total_blocks": 10,
            **changes,
        }
        return episode_metrics(self.records, **numbers)


# ------------------------------------------------------------------ Jain's index


@pytest.mark.parametrize(
    ("shares", "index"),
    [
        # (1 + 2 + 3)² / (3 · (1 + 4 + 9)).
        ([1.0, 2.0, 3.0], 36 / 42),
        ([5.0, 5.0, 5.0, 5.0], 1.0),
        # One of four has everything.
        ([1.0, 0.0, 0.0, 0.0], 0.25),
        ([0.2], 1.0),
        ([], 0.0),
    ],
)
def test_jain_index(shares: list[float], index: float) -> None:
    assert jain_index(np.array(shares)) == pytest.approx(index)


def test_the_episodes_jain_index_is_of_the_unloaded_share_of_the_latency() -> None:
    """E2E 2 s and 4 s of requests that would take 1 s alone: 1/2 and 1/4.

    (3/4)² / (2 · (1/4 + 1/16)) = 0.5625 / 0.625 = 0.9.
    """
    bench = Bench()
    bench.add(0.0, [2.0])
    bench.add(0.0, [4.0])
    assert bench.metrics()["jain_index"] == pytest.approx(0.9)


# ------------------------------------------------------------------ latencies


def test_latencies_by_hand() -> None:
    """Arrival 1 s, tokens at 2, 2.5 and 5 s: TTFT 1, TPOT 3/2, E2E 4, largest gap 2.5 s."""
    bench = Bench()
    bench.add(1.0, [2.0, 2.5, 5.0])
    ttft, tpot, e2e = latencies(bench.records.table)
    assert (ttft.tolist(), tpot.tolist(), e2e.tolist()) == ([1.0], [1.5], [4.0])
    assert bench.records.table["max_gap"].tolist() == [2.5]


def test_one_token_has_no_pace_and_no_gap() -> None:
    bench = Bench()
    bench.add(1.0, [2.0])
    assert latencies(bench.records.table)[1].tolist() == [0.0]
    assert bench.records.table["max_gap"].tolist() == [0.0]
    assert bench.metrics()["tpot_s"] == dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)


def test_tpot_leaves_out_outputs_of_one_token() -> None:
    bench = Bench()
    bench.add(0.0, [1.0])
    bench.add(0.0, [1.0, 3.0, 5.0])
    assert bench.metrics()["tpot_s"]["mean"] == 2.0


def test_itl_is_of_all_gaps_not_of_requests() -> None:
    """Gaps 1, 1, 1, 5: mean 2, median 1, though the requests' means are 1 and 5."""
    bench = Bench()
    bench.add(0.0, [1.0, 2.0, 3.0, 4.0])
    bench.add(0.0, [1.0, 6.0])
    itl = bench.metrics()["itl_s"]
    assert (itl["mean"], itl["p50"]) == (2.0, 1.0)


def test_percentiles_interpolate_by_hand() -> None:
    """E2E 1, 2, 3, 4, 10: at 0.9 · 4 = 3.6, 4 + 0.6 · 6 = 7.6; at 3.96, 4 + 0.96 · 6 = 9.76."""
    bench = Bench()
    for e2e in (10.0, 1.0, 3.0, 2.0, 4.0):
        bench.add(0.0, [e2e])
    summary = bench.metrics()["e2e_s"]
    assert summary == pytest.approx({"mean": 4.0, "p50": 3.0, "p90": 7.6, "p99": 9.76})


def test_queueing_normalised_latency_and_slowdown_by_hand() -> None:
    """Arrival 1 s, admitted 3 s, 4 tokens until 9 s: 2 s, 8/4 s a token, 8/2 times 2 s alone."""
    bench = Bench()
    bench.add(1.0, [4.0, 5.0, 6.0, 9.0], admitted=3.0, unloaded=2.0)
    metrics = bench.metrics()
    assert metrics["queueing_s"]["mean"] == 2.0
    assert metrics["normalised_latency_s"]["mean"] == 2.0
    assert metrics["slowdown"]["mean"] == 4.0


def test_weighted_slowdown_by_hand() -> None:
    """4 with weight 1 and 10 with weight 1/4: (4 + 2.5) / 1.25 = 5.2; unweighted 7."""
    bench = Bench()
    bench.add(0.0, [4.0])
    bench.add(0.0, [10.0], tenant=BULK)
    assert bench.metrics()["slowdown"]["mean"] == 7.0
    assert bench.metrics()["weighted_slowdown"] == pytest.approx(5.2)


# ------------------------------------------------------------------ strict goodput


def even(first: float, gap: float, tokens: int) -> list[float]:
    """Times of tokens, evenly spaced; sums of halves are exact."""
    return [first + gap * number for number in range(tokens)]


def test_the_gap_limit_is_half_a_second() -> None:
    assert GAP_LIMIT_S == 0.5


def test_objectives_by_name_are_those_of_mlperf() -> None:
    assert dict(SLOS) == {"conversational": (2.0, 0.1), "interactive": (0.5, 0.03)}


EVERYTHING_AT_ITS_LIMIT = Tenant("limits", 1.0, ttft_slo_s=0.5, tpot_slo_s=0.25)


@pytest.mark.parametrize(
    ("token_times", "good"),
    [
        # TTFT 0.5, TPOT 0.25, no gap above 0.25: all three limits may be reached.
        (even(0.5, 0.25, 5), True),
        # TTFT a little late.
        (even(0.5625, 0.25, 5), False),
        # TPOT a little slow: 1.0625 s for 4 gaps.
        ([0.5, 0.75, 1.0, 1.25, 1.5625], False),
        # A gap of exactly 0.5, made good by two of 0.125: TPOT 1/4 of 1 s.
        ([0.5, 0.625, 1.125, 1.25, 1.5], True),
        # TPOT 0.25 as before, but a gap of 0.5625.
        ([0.5, 0.625, 1.1875, 1.25, 1.5], False),
        # One token has neither pace nor gap.
        ([0.5], True),
        ([0.75], False),
    ],
    ids=["at-limits", "ttft", "tpot", "gap-at-limit", "gap", "one-token", "one-late-token"],
)
def test_strict_goodput(token_times: list[float], good: bool) -> None:
    bench = Bench(EVERYTHING_AT_ITS_LIMIT)
    assert bench.add(0.0, token_times, tenant=EVERYTHING_AT_ITS_LIMIT) is good
    assert good_requests(bench.records).tolist() == [good]
    assert bench.metrics()["goodput"] == float(good)


def test_a_first_token_and_then_a_long_eviction_is_not_good() -> None:
    """DESIGN §8: 200 tokens in 6 s are 0.03 s a token, though 5 s of these were one gap."""
    interactive = Tenant("interactive", 1.0, *SLOS["interactive"])
    times = [0.25, *even(5.25, 1 / 256, 199)]
    assert (times[-1] - times[0]) / 199 < 0.03
    assert not Bench(interactive).add(0.0, times, tenant=interactive)


def test_who_has_no_objective_never_misses_it() -> None:
    bench = Bench()
    assert bench.add(0.0, [100.0, 200.0], tenant=BULK)
    assert good_requests(bench.records).tolist() == [True]


@pytest.mark.parametrize(
    ("slos", "times", "good"),
    [
        ((0.5, math.inf), [0.5, 0.75], True),
        ((0.5, math.inf), [0.625, 0.75], False),
        ((math.inf, 0.25), [9.0, 9.25], True),
        ((math.inf, 0.25), [9.0, 9.375], False),
        # One objective is enough for the gap limit to hold.
        ((0.5, math.inf), [0.5, 1.125], False),
    ],
)
def test_one_objective_alone(slos: tuple[float, float], times: list[float], good: bool) -> None:
    tenant = Tenant("half", 1.0, *slos)
    bench = Bench(tenant)
    assert bench.add(0.0, times, tenant=tenant) is good
    assert good_requests(bench.records).tolist() == [good]


def test_goodput_counts_those_that_have_not_completed_as_missed() -> None:
    """2 of 3 completed are good, 5 have arrived: 2/5; in 4 s, 0.5 a second."""
    bench = Bench()
    bench.add(0.0, [0.25])
    bench.add(0.0, [0.25, 0.3125])
    bench.add(0.0, [0.75])
    metrics = bench.metrics(arrived=5, duration_s=4.0)
    assert metrics["goodput"] == pytest.approx(0.4)
    assert metrics["goodput_per_s"] == 0.5
    assert (metrics["requests"], metrics["completed"]) == (5.0, 3.0)


def test_weighted_goodput_by_hand() -> None:
    """Good: one chat (1) and two bulk (1/4 each); missed: one chat: 1.5 / 2.5 = 0.6."""
    bench = Bench()
    bench.add(0.0, [0.25])
    bench.add(0.0, [0.75])
    bench.add(0.0, [9.0], tenant=BULK)
    bench.add(0.0, [9.0], tenant=BULK)
    metrics = bench.metrics()
    assert metrics["weighted_goodput"] == pytest.approx(0.6)
    assert metrics["goodput"] == 0.75
    assert metrics["tenants"]["chat"]["goodput"] == 0.5
    assert metrics["tenants"]["bulk"]["goodput"] == 1.0


def test_weighted_goodput_of_equal_weights_is_goodput_also_before_the_end() -> None:
    """1 of 4 that arrived is good, 2 have not completed: 1/4, whatever the weights count."""
    bench = Bench(CHAT)
    bench.add(0.0, [0.25])
    bench.add(0.0, [0.75])
    metrics = bench.metrics(arrived=4)
    assert metrics["goodput"] == 0.25
    assert metrics["weighted_goodput"] == metrics["goodput"]


# ------------------------------------------------------------------ totals


def test_totals_and_rates_by_hand() -> None:
    """5 tokens and 2 requests in 10 s; 4 s busy; 25 of 10 · 10 block-seconds."""
    bench = Bench()
    bench.add(0.0, [1.0, 2.0], prompt=30, preemptions=2, recomputed_tokens=7, prefix_hit_tokens=8)
    bench.add(0.0, [1.0, 2.0, 3.0], prompt=10, preemptions=1, recomputed_tokens=5)
    metrics = bench.metrics()
    assert metrics["tokens_per_s"] == 0.5
    assert metrics["requests_per_s"] == 0.2
    assert metrics["gpu_busy_share"] == 0.4
    assert metrics["kv_utilisation"] == 0.25
    assert metrics["preemptions"] == 3.0
    assert metrics["recomputed_tokens"] == 12.0
    assert metrics["prefix_hit_tokens"] == 8.0
    assert metrics["prefix_hit_rate"] == 0.2
    assert metrics["duration_s"] == 10.0


def test_tenants_are_summarised_apart() -> None:
    bench = Bench()
    bench.add(0.0, [1.0])
    bench.add(1.0, [4.0, 5.0], tenant=BULK, unloaded=2.0)
    tenants = bench.metrics()["tenants"]
    assert list(tenants) == ["chat", "bulk"]
    assert tenants["chat"]["completed"] == tenants["bulk"]["completed"] == 1.0
    assert tenants["chat"]["e2e_s"]["mean"] == 1.0
    assert tenants["bulk"]["ttft_s"]["mean"] == 3.0
    assert tenants["bulk"]["slowdown"]["mean"] == 2.0


def every_number(metrics: Metrics) -> list[float]:
    """All leaves of nested metrics."""
    leaves: list[float] = []
    for value in metrics.values():
        leaves += every_number(value) if isinstance(value, dict) else [value]
    return leaves


@pytest.mark.parametrize("completed", [0, 1])
def test_metrics_are_nested_dictionaries_of_finite_floats(completed: int) -> None:
    """Also where nothing has completed, and in an episode of no length."""
    bench = Bench()
    for _ in range(completed):
        bench.add(0.0, [1.0])
    numbers = every_number(bench.metrics(duration_s=0.0, gpu_busy_s=0.0, kv_block_s=0.0))
    assert all(type(number) is float and math.isfinite(number) for number in numbers)
    assert len(numbers) > 40


def test_where_nothing_completed_everything_is_nought() -> None:
    metrics = Bench().metrics(arrived=3, gpu_busy_s=0.0, kv_block_s=0.0)
    assert metrics["requests"] == 3.0
    assert sum(every_number({**metrics, "requests": 0.0, "duration_s": 0.0})) == 0.0


def test_a_simulations_metrics_by_hand() -> None:
    """One request of 4 + 3 tokens at 2 s, steps of 1 s, and one that is rejected.

    Steps end at 3, 4 and 5 s, each with a token; the first ends the prefill. E2E 3 s, as alone.
    Held are ceil(5/4), ceil(6/4), ceil(7/4) = 2 blocks of 100 for 3 s.
    """
    simulation = Simulation(tiny_config(), tiny_workload([(2.0, 4, 3), (2.5, 4, 400)]))
    metrics = simulation.run()
    assert (metrics["requests"], metrics["completed"], metrics["rejected"]) == (1.0, 1.0, 1.0)
    assert metrics["ttft_s"]["mean"] == 1.0
    assert metrics["tpot_s"]["mean"] == metrics["itl_s"]["p99"] == 1.0
    assert metrics["e2e_s"]["mean"] == 3.0
    assert metrics["slowdown"]["mean"] == 1.0
    assert metrics["queueing_s"]["mean"] == 0.0
    assert metrics["duration_s"] == 3.0
    assert metrics["gpu_busy_share"] == 1.0
    assert metrics["kv_utilisation"] == pytest.approx(0.02)
    assert metrics["tokens_per_s"] == 1.0
    assert all(type(number) is float for number in every_number(metrics))
