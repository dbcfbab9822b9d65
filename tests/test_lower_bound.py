"""The lower bound on the mean latency: worked by hand, against exact optima, against policies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from agents import make_policy
from agents.evaluation import draw_workload, run_in_process
from agents.lower_bound import LowerBound, keeping_seconds, lower_bound, no_bound_reason
from agents.price_bound import exact_value
from agents.residency import PrefillTimes, Residencies
from agents.shares_bound import smallest_work_first
from opal_gym.config import Config, load_config
from opal_gym.sim.decision import DecisionKind
from opal_gym.sim.gpu_model import SyntheticGPUModel
from opal_gym.sim.simulation import Simulation, accepted_requests, make_gpu_model
from opal_gym.sim.workloads import Workload
from tests.random_cases import Case, cases, seeded_case
from tests.tiny import tiny_config, tiny_workload

POLICIES = ("fifo-lwd", "sjf", "random")
EXACT = 1 + 1e-12

Requests = Sequence[tuple[float, int, int]]


def stays_of(config: Config, requests: Requests) -> Residencies:
    return Residencies.of(config, tiny_workload(requests), make_gpu_model(config))


class TestByHand:
    def test_alone_is_what_the_steps_take(self) -> None:
        """4 prompt and 3 output tokens, 1 s a step: the prefill makes the first token, so 3 s."""
        bound = lower_bound(tiny_config(), tiny_workload([(5.0, 4, 3)]))
        assert bound.alone == pytest.approx(3.0)
        assert bound.mean == pytest.approx(3.0)

    def test_one_slot_serves_the_short_one_first(self) -> None:
        """1 s and 4 s in one slot from t = 0: ends at 1 and 5, mean 3; alone (1 + 4) / 2 = 2.5.

        Shares: mean busy times 0.5 and 1 + 2, lags 0.5 and 2: 6 in all, which is the optimum.
        """
        config = tiny_config(max_num_seqs=1)
        bound = lower_bound(config, tiny_workload([(0.0, 4, 4), (0.0, 4, 1)]))
        assert bound.alone == pytest.approx(2.5)
        assert bound.shares == pytest.approx(3.0)
        assert bound.prices is not None
        assert 2.8 < bound.prices <= 3.0

    def test_memory_for_one_serves_one_at_a_time(self) -> None:
        """16 prompt and 4 output tokens hold 5 of 6 blocks of 4 in all of their 4 s.

        Share of the memory: work 4 · 5/6 = 10/3, lag 2. Mean busy times 5/3 and 5: the sum of
        the completions is at least 5/3 + 5 + 4 = 32/3, the mean 16/3; the truth is (4 + 8) / 2.
        """
        config = tiny_config(num_gpu_blocks_override=6, max_num_seqs=4)
        bound = lower_bound(config, tiny_workload([(0.0, 16, 4), (0.0, 16, 4)]))
        assert bound.alone == pytest.approx(4.0)
        assert bound.shares == pytest.approx(16 / 3)
        assert bound.mean <= 6

    def test_two_workers_have_twice_the_slots(self) -> None:
        config = tiny_config({"simulation.num_workers": 2}, max_num_seqs=1)
        bound = lower_bound(config, tiny_workload([(0.0, 4, 4), (0.0, 4, 1)]))
        assert bound.mean == pytest.approx(2.5)

    def test_rejected_requests_are_left_out(self) -> None:
        """The second one's 404 tokens exceed the pool of 400."""
        bound = lower_bound(tiny_config(), tiny_workload([(0.0, 4, 3), (0.0, 400, 4)]))
        assert bound.mean == pytest.approx(3.0)


class TestPrices:
    """Stays of 4 s and 1 s from t = 0, one slot, no price on memory."""

    def value(self, edges: list[float], prices: list[float]) -> float:
        stays = stays_of(tiny_config(max_num_seqs=1), [(0.0, 4, 4), (0.0, 4, 1)])
        rows = np.array([prices, [0.0] * len(prices)])
        return exact_value(stays, np.array([[1.0], [1.0]]), np.array(edges), rows)

    def test_no_prices_give_the_times_alone(self) -> None:
        assert self.value([0, 1], [0.0]) == pytest.approx(5)

    def test_the_best_prices_give_the_optimum(self) -> None:
        """Price 1 on [0, 1]: the long one pays 4 + 1 or waits to 5, the short one 1 + 1: 7 - 1."""
        assert self.value([0, 1], [1.0]) == pytest.approx(6)

    def test_minima_between_edges_are_found(self) -> None:
        """Price 10 on [2, 3]: the long one waits until it begins at 3 and ends at 7, past all
        edges; the short one ends at 1; 7 + 1 - 10."""
        assert self.value([2, 3], [10.0]) == pytest.approx(-2)


def test_smallest_work_first_preempts() -> None:
    """Work 4 from 0 and 1 from 1: the first one runs in [0, 1] and [2, 5].

    Its mean busy time is (0.5 + 3 · 3.5) / 4 = 2.75, the other's 1.5.
    """
    assert smallest_work_first(np.array([0.0, 1.0]), np.array([4.0, 1.0])) == 4.25


class TestPrefill:
    def test_takes_the_fewest_steps_where_only_they_count(self) -> None:
        """10 tokens in chunks of at most 4: 3 steps; with 6 of them cached: 1."""
        least = PrefillTimes(SyntheticGPUModel(1.0), 4, 10)
        assert least(np.array([10, 10]), np.array([10, 4])).tolist() == [3, 1]

    def test_even_chunks_can_be_faster_than_full_ones(self) -> None:
        """The calibrated time is convex in the tokens: 1,500 + 1,500 before 2,048 + 952."""
        config = load_config("mem-longctx")
        gpu = make_gpu_model(config)
        least = PrefillTimes(gpu, 2048, 3000)(np.array([3000]), np.array([3000])).item()
        even = sum(gpu.batch_latency(((p, 1500),), 0, 0) for p in (0, 1500))
        assert least <= even * EXACT
        assert least < 0.999 * gpu.unloaded_latency(3000, 1, 2048, True)

    @pytest.mark.parametrize("scenario", ["mem-longctx", "opal-docs"])
    def test_is_below_any_cut(self, scenario: str) -> None:
        rng = random.Random(scenario)
        gpu = make_gpu_model(load_config(scenario))
        prefill = PrefillTimes(gpu, 64, 300)
        for _ in range(100):
            prompt, cached = rng.randint(100, 300), rng.randint(0, 99)
            at, total = cached, 0.0
            while at < prompt:
                chunk = min(rng.randint(1, 64), prompt - at)
                total += gpu.batch_latency(((at, chunk),), 0, 0)
                at += chunk
            least = prefill(np.array([prompt]), np.array([prompt - cached])).item()
            assert least <= total * EXACT


class TestWhereBoundsHold:
    def test_a_horizon_and_the_single_stage_worker_have_none(self) -> None:
        for key, value in (("env.horizon_s", 9.0), ("worker.kind", "single_stage")):
            config = tiny_config({key: value})
            assert no_bound_reason(config)
            with pytest.raises(ValueError, match="lower bound: got none"):
                lower_bound(config, tiny_workload([(0.0, 4, 3)]))

    def test_sessions_have_the_times_alone(self) -> None:
        workload = replace(
            tiny_workload([(0.0, 4, 4), (np.inf, 4, 1)]),
            next_rows=np.array([1, -1]),
            think_time=np.array([0.0, 1.0]),
        )
        bound = lower_bound(tiny_config(max_num_seqs=1), workload)
        assert bound == LowerBound(pytest.approx(2.5))

    def test_kept_tokens_need_a_step_each(self) -> None:
        config = tiny_config()
        seconds = keeping_seconds(stays_of(config, [(0.0, 4, 3)]), make_gpu_model(config))
        assert seconds.tolist() == [3.0]

    def test_what_a_tier_may_have_is_not_counted(self) -> None:
        """8 of 12 prompt tokens are shared, 4 a step: 1 step of prefill instead of 3, then 1."""
        kvc = {"hash_block_tokens": 4, "tiers": [{"capacity_GB": 1.0, "bandwidth_GBps": 1.0}]}
        config = tiny_config({"kvc": kvc}, max_num_batched_tokens=4)
        requests = [(0.0, 12, 2), (0.0, 12, 2)]
        shared = tiny_workload(requests, hash_ids=[(1, 2, 3), (1, 2, 4)])
        apart = tiny_workload(requests, hash_ids=[(1, 2, 3), (5, 6, 7)])
        assert lower_bound(config, shared).alone == pytest.approx(2)
        assert lower_bound(config, apart).alone == pytest.approx(4)


# --- exact optima ------------------------------------------------------------------------------


def toy(seed: int) -> tuple[Config, Workload]:
    """Two to four requests that want the same slots or blocks."""
    rng = random.Random(seed)
    timing: dict[str, Any] = {
        "model": "synthetic",
        "base_s": 1.0,
        "per_prefill_token_s": rng.choice((0.0, 0.125)),
        "per_decode_s": rng.choice((0.0, 0.25)),
        "per_context_token_s": rng.choice((0.0, 0.0625)),
    }
    config = tiny_config(
        {"worker.inference_params": timing, "simulation.check_invariants": False},
        max_num_seqs=rng.choice((1, 2, 3)),
        max_num_batched_tokens=8,
        block_size=2,
        num_gpu_blocks_override=rng.choice((4, 5, 6)),
        chunk_budgets=rng.choice(([8], [8], [8, 2])),
        rebuild_on=rng.choice(("change", "completion")),
        first_token_at_prefill_end=rng.choice((True, False)),
    )
    requests = [
        (rng.choice((0.0, 0.0, 1.0, 2.5)), rng.randint(1, 4), rng.choice((1, 2, 4)))
        for _ in range(rng.randint(2, 4))
    ]
    return config, tiny_workload(sorted(requests))


MOST_RUNS = 1000


def optimum(config: Config, workload: Workload) -> float | None:
    """Least mean E2E latency over all sequences of decisions; None where they are too many."""
    best, open_paths = np.inf, [[]]  # type: ignore[var-annotated]
    for _ in range(MOST_RUNS):
        if not open_paths:
            return float(best)
        path = open_paths.pop()
        simulation = Simulation(config, workload, outside=tuple(DecisionKind))
        depth = 0
        while (decision := simulation.advance()) is not None:
            if depth == len(path):
                first, *others = decision.legal_answers()
                open_paths += [[*path, answer] for answer in others]
                path = [*path, first]
            simulation.answer(path[depth])
            depth += 1
        best = min(best, simulation.metrics()["e2e_s"]["mean"])
    return None


def test_never_above_the_exact_optimum() -> None:
    ratios, better_than_alone = [], 0
    for seed in range(50):
        config, workload = toy(seed)
        best = optimum(config, workload)
        if best is None:
            continue
        bound = lower_bound(config, workload)
        assert bound.mean <= best * EXACT, f"toy({seed})"
        ratios.append(bound.mean / best)
        better_than_alone += bound.mean > 1.001 * bound.alone
    print(f"{len(ratios)} toys: {np.mean(ratios):.3f} of the optimum, least {min(ratios):.3f}")
    assert len(ratios) >= 30
    assert better_than_alone >= 15
    assert np.mean(ratios) > 0.85


# --- policies ----------------------------------------------------------------------------------


def assert_below_policies(case: Case, label: str = "") -> None:
    config, workload = case.config(simulation__check_invariants=False), case.workload()
    if not accepted_requests(config, workload).any():
        return
    bound = lower_bound(config, workload)
    for name in POLICIES:
        mean = Simulation(config, workload, make_policy(name)).run()["e2e_s"]["mean"]
        assert bound.mean <= mean * EXACT, f"{label} {name}: {bound}"


@settings(max_examples=40, deadline=None)
@given(cases())
def test_never_above_a_policy(case: Case) -> None:
    assert_below_policies(case)


def test_never_above_a_policy_on_seeded_cases() -> None:
    for seed in range(60):
        assert_below_policies(seeded_case(seed, sharing=seed % 3 == 0), f"seeded_case({seed})")


@pytest.mark.parametrize(
    "timing",
    [
        {"model": "calibrated"},
        {"model": "roofline"},
        {"model": "simple", "mfu": 0.6, "mbu": 0.8, "overhead_s": 0.002},
    ],
    ids=lambda timing: timing["model"],
)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "scenario", ["slot8-heavy", "mem-chat-burst", "mem-longctx", "prod-mix", "opal-docs"]
)
def test_never_above_a_policy_on_scenarios(
    scenario: str, workers: int, timing: dict[str, Any]
) -> None:
    config = load_config(
        scenario,
        {
            "workload.num_requests": 60,
            "workload.arrivals.load": 2.0,
            "simulation.num_workers": workers,
            "worker.inference_params": timing,
            "worker.vllm_params.enable_prefix_caching": scenario == "opal-docs",
        },
    )
    bound = lower_bound(config, draw_workload(config, 1))
    for name in POLICIES:
        _, metrics = run_in_process(config, make_policy(name), 1)
        assert bound.mean <= metrics["e2e_s"]["mean"] * EXACT, name


def test_under_vllm_v1_only_the_times_alone_hold() -> None:
    """There a preempted request keeps its tokens, so its last stay may be short."""
    for seed in range(20):
        config = load_config(
            "mem-chat-burst",
            {
                "workload.num_requests": 40,
                "workload.arrivals.load": 3.0,
                "worker.vllm_params.engine": "vllm_v1",
                "worker.vllm_params.num_gpu_blocks_override": 600,
            },
        )
        bound = lower_bound(config, draw_workload(config, seed))
        assert (bound.prices, bound.shares) == (None, None)
        for name in POLICIES:
            _, metrics = run_in_process(config, make_policy(name), seed)
            assert bound.mean <= metrics["e2e_s"]["mean"] * EXACT, f"{seed} {name}"
