"""The predicted peak of KV memory, against a batch that is run step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opal_gym.sim.peak import PeakKV

Batch = list[tuple[int, int]]
"""(current tokens, remaining output tokens) of each request."""


def run_peak(batch: Batch) -> int:
    """Most tokens held at once: every step gives each a token, and whoever has all leaves."""
    peak, step = 0, 0
    while batch:
        step += 1
        held = sum(current + step for current, remaining in batch if remaining >= step)
        peak = max(peak, held)
        batch = [request for request in batch if request[1] > step]
    return peak


def peak_kv(batch: Batch) -> PeakKV:
    columns = np.array(batch, np.float64).reshape(-1, 2)
    return PeakKV(columns[:, 0], columns[:, 1])


def with_candidates(batch: Batch, candidates: Batch) -> list[float]:
    columns = np.array(candidates, np.float64).reshape(-1, 2)
    return list(peak_kv(batch).with_candidates(columns[:, 0], columns[:, 1]).tolist())


def test_a_batch_of_one_peaks_at_its_end() -> None:
    assert peak_kv([(10, 5)]).tokens == 15


def test_an_empty_batch_holds_nothing() -> None:
    assert peak_kv([]).tokens == 0
    assert with_candidates([], [(10, 5), (1, 1)]) == [15, 2]


def test_a_big_short_request_peaks_before_a_small_long_one() -> None:
    """(100, 2) and (10, 50): at step 2 102 + 12 = 114; at step 50 only 60."""
    assert peak_kv([(100, 2), (10, 50)]).tokens == 114


def test_a_small_short_request_matters_less_than_the_growth_of_the_others() -> None:
    """(1, 1) and twice (10, 50): at step 1 2 + 22 = 24; at step 50 120."""
    assert peak_kv([(1, 1), (10, 50), (10, 50)]).tokens == 120


def test_requests_that_end_together_count_together() -> None:
    """Three times (10, 5): 45 at step 5."""
    assert peak_kv([(10, 5)] * 3).tokens == 45


def test_candidates_by_hand() -> None:
    """Batch (100, 2), (10, 50), whose peak is 114 at step 2.

    One more (20, 1): 101 + 11 + 21 = 133 at step 1, then 114. (20, 2): 102 + 12 + 22 = 136.
    (20, 60): 102 + 12 + 22 = 136 at step 2, 60 + 70 = 130 at step 50, 80 at the end.
    (0, 200): 102 + 12 + 2 = 116, 60 + 50 = 110, and 200 at its own end.
    """
    batch = [(100, 2), (10, 50)]
    candidates = [(20, 1), (20, 2), (20, 60), (0, 200)]
    assert with_candidates(batch, candidates) == [133, 136, 136, 200]


def test_no_candidates_have_no_peaks() -> None:
    assert with_candidates([(1, 1)], []) == []


def test_asking_about_candidates_changes_nothing() -> None:
    peak = peak_kv([(100, 2), (10, 50)])
    first = peak.with_candidates(np.array([5.0]), np.array([5.0])).tolist()
    assert peak.with_candidates(np.array([5.0]), np.array([5.0])).tolist() == first
    assert peak.tokens == 114


requests = st.tuples(st.integers(0, 60), st.integers(1, 25))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(batch=st.lists(requests, max_size=9), candidates=st.lists(requests, max_size=5))
def test_the_peak_is_that_of_the_run(batch: Batch, candidates: Batch) -> None:
    assert peak_kv(batch).tokens == run_peak(batch)
    expected = [run_peak([*batch, candidate]) for candidate in candidates]
    assert with_candidates(batch, candidates) == expected


@pytest.mark.parametrize("seed", range(5))
def test_a_large_batch_agrees_with_its_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.integers(1, 2000, 200).tolist(), rng.integers(1, 300, 200).tolist()
    batch = list(zip(*columns, strict=True))
    assert peak_kv(batch).tokens == run_peak(batch)
    candidates = batch[:20]
    assert with_candidates(batch, candidates) == [run_peak([*batch, one]) for one in candidates]
