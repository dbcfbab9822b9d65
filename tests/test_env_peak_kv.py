"""Predicted peak KV: against a brute-force walk through the future, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opal_gym.sim.decision import Decision, DecisionKind
from opal_gym.sim.peak import PeakKV
from tests.episodes import make_env, random_legal

requests = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 40)), max_size=12
)  # (tokens now, remaining output)
candidates = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=6)


def brute_force(batch: list[tuple[float, float]]) -> float:
    """Largest sum of KV tokens over the coming steps, if each runs for its remaining steps."""
    peak = 0.0
    for step in range(int(max((remaining for _, remaining in batch), default=0)) + 1):
        present = [current + step for current, remaining in batch if remaining >= step]
        peak = max(peak, sum(present))
    return peak


def peak_of(batch: list[tuple[int, int]]) -> PeakKV:
    columns = np.array(batch, np.float64).reshape(-1, 2)
    return PeakKV(columns[:, 0], columns[:, 1])


@pytest.mark.parametrize(
    ("batch", "peak"),
    [
        ([], 0),
        ([(10, 5)], 15),
        # 10 + 2 and 20 + 2 after two steps; afterwards the first alone, 10 + 5.
        ([(10, 5), (20, 2)], 34),
        # The long one alone is larger than both together are at step 1: 11 + 6.
        ([(10, 30), (5, 1)], 40),
        # Equal remainders end at the same time: all three grow by 4.
        ([(1, 4), (2, 4), (3, 4)], 18),
    ],
)
def test_hand_worked_peaks(batch: list[tuple[int, int]], peak: int) -> None:
    assert brute_force([*batch]) == peak
    assert peak_of(batch).tokens == peak


@settings(max_examples=300, deadline=None)
@given(requests)
def test_peak_of_a_batch(batch: list[tuple[int, int]]) -> None:
    assert peak_of(batch).tokens == brute_force([*batch])


@settings(max_examples=300, deadline=None)
@given(requests, candidates)
def test_peak_with_one_more_request(
    batch: list[tuple[int, int]], more: list[tuple[int, int]]
) -> None:
    columns = np.array(more, np.float64)
    peaks = peak_of(batch).with_candidates(columns[:, 0], columns[:, 1])
    assert peaks.tolist() == [brute_force([*batch, one]) for one in more]


@pytest.mark.parametrize("information", ["predicted", "oracle", "none"])
@pytest.mark.parametrize("name", ["busy", "busy-without-tier", "mem-longctx"])
def test_decisions_show_the_peak_of_the_requests_as_they_are(name: str, information: str) -> None:
    env = make_env(name, length_information=information)
    choose = random_legal(3)
    admissions = 0
    _, info = env.reset(seed=2)
    over = False
    while not over:
        decision = env.decision
        assert decision is not None
        admissions += decision.kind is DecisionKind.ADMIT
        _check(env, decision)
        _, _, over, _, info = env.step(choose(info))
    assert admissions > 20


def _check(env: Any, decision: Decision) -> None:
    worker, workload = env.simulation.worker, env.simulation.workload
    predicted = workload.predicted_output_tokens
    capacity = worker.pool.total * worker.block_size
    batch = []
    for request in worker.batch:
        made = request.decode_tokens_generated
        # All of the prompt, whether it is in KV yet or not.
        remaining = max(1, int(predicted[request.request_id]) - made)
        batch.append((request.prompt_tokens + made, remaining))
    assert decision.gauges["predicted_peak_kv"] == pytest.approx(brute_force(batch) / capacity)
    if decision.kind is not DecisionKind.ADMIT:
        assert not decision.candidates["predicted_peak_kv"].any()
        return
    for row, request_id in enumerate(decision.candidates.request_ids):
        one = (int(workload.prompt_tokens[request_id]), max(1, int(predicted[request_id])))
        expected = brute_force([*batch, one]) / capacity
        assert decision.candidates["predicted_peak_kv"][row] == pytest.approx(expected)
