"""Workloads drawn from distributions: statistics, independent streams, determinism."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from opal_gym.config import OnOffModulation, PrefixConfig, SineModulation, SyntheticWorkload
from opal_gym.sim.workloads import SLOS, Workload, make_workload
from opal_gym.sim.workloads.modulation import on_off_path, simulated_time
from opal_gym.sim.workloads.prefixes import prompt_hash_ids
from opal_gym.sim.workloads.streams import Stream, generator

COLUMNS = ("arrival_time", "prompt_tokens", "output_tokens", "predicted_output_tokens", "tenant")

CHAT = {
    "name": "chat",
    "share": 3,
    "prompt": {"kind": "lognormal", "median": 80, "sigma": 1.2},
    "output": {"kind": "lognormal", "median": 220, "sigma": 0.95},
    "slo": "interactive",
}
RAG = {
    "name": "rag",
    "share": 1,
    "prompt": {"kind": "lognormal", "median": 3000, "sigma": 0.5},
    "output": {"kind": "fixed", "tokens": 150},
    "prefix": {"num_prefixes": 20, "tokens": 2048},
    "slo": "conversational",
    "weight": 0.5,
    "priority": 7,
}
SWINGS = [
    {"kind": "sine", "period_s": 120, "amplitude": 0.53},
    {"kind": "on_off", "on_factor": 1.3, "off_factor": 0.7, "mean_on_s": 10, "mean_off_s": 10},
]


def synthetic(
    tenants: list[Any] | None = None, num_requests: int = 256, **arrivals: Any
) -> SyntheticWorkload:
    return SyntheticWorkload.model_validate(
        {
            "num_requests": num_requests,
            "arrivals": {"rate_per_s": 10, **arrivals},
            "tenants": tenants or [CHAT, RAG],
        }
    )


def tenant(prompt: dict[str, Any], output: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"prompt": prompt, "output": output or {"kind": "fixed", "tokens": 10}}


def make(config: SyntheticWorkload, seed: int = 0, **arguments: Any) -> Workload:
    return make_workload(config, seed, **{"length_information": "predicted", **arguments})


def prompts(length: dict[str, Any], num_requests: int = 20_000) -> NDArray[np.int64]:
    return make(synthetic([tenant(length)], num_requests)).prompt_tokens


# --- lengths -------------------------------------------------------------------------------------


def test_lognormal_lengths_have_the_configured_median_and_mean() -> None:
    """Mean = median · exp(σ²/2) = 1000 · 1.13315; sd = mean · sqrt(exp(σ²) − 1) = 604."""
    tokens = prompts({"kind": "lognormal", "median": 1000, "sigma": 0.5, "max": 10**6})
    assert tokens.dtype == np.int64
    assert tokens.mean() == pytest.approx(1133.15, abs=4 * 604 / math.sqrt(20_000))
    assert np.median(tokens) == pytest.approx(1000, rel=0.02)
    assert np.log(tokens).std() == pytest.approx(0.5, abs=0.01)


def test_lognormal_lengths_are_clipped() -> None:
    tokens = prompts({"kind": "lognormal", "median": 10, "sigma": 2, "min": 4, "max": 20})
    # ln(4.5/10)/2 = −0.4 and ln(19.5/10)/2 = 0.33 standard deviations: 34.5 % and 36.9 % clipped.
    assert (tokens.min(), tokens.max()) == (4, 20)
    assert np.mean(tokens == 4) == pytest.approx(0.345, abs=0.02)
    assert np.mean(tokens == 20) == pytest.approx(0.369, abs=0.02)


def test_lengths_without_spread_are_the_median() -> None:
    assert set(prompts({"kind": "lognormal", "median": 221, "sigma": 0}, 100)) == {221}
    assert set(prompts({"kind": "fixed", "tokens": 77}, 100)) == {77}


def test_mixtures_may_hold_mixtures() -> None:
    """1 : 3 of 10 and (2 : 1 of 20 and 30) tokens: 1/4, 3/4 · 2/3 = 1/2 and 3/4 · 1/3 = 1/4."""
    inner = {"kind": "mixture", "parts": [part(0.2, fixed(20)), part(0.1, fixed(30))]}
    tokens = prompts({"kind": "mixture", "parts": [part(1, fixed(10)), part(3, inner)]})
    values, counts = np.unique(tokens, return_counts=True)
    assert values.tolist() == [10, 20, 30]
    # Standard errors: sqrt(p (1 − p) / n) ≤ 0.0035.
    assert counts / len(tokens) == pytest.approx([0.25, 0.5, 0.25], abs=0.014)


def test_prompts_and_outputs_are_independent() -> None:
    """A correlation of 0 has the standard error 1/√n = 0.007."""
    workload = make(synthetic([{**CHAT, "output": CHAT["prompt"]}], 20_000))
    logs = np.log([workload.prompt_tokens, workload.output_tokens])
    assert np.corrcoef(logs)[0, 1] == pytest.approx(0.0, abs=0.028)


def fixed(tokens: int) -> dict[str, Any]:
    return {"kind": "fixed", "tokens": tokens}


def part(share: float, length: dict[str, Any]) -> dict[str, Any]:
    return {"share": share, "length": length}


# --- predictions ---------------------------------------------------------------------------------


def test_predictions_have_a_lognormal_error_with_median_one() -> None:
    output = {"kind": "fixed", "tokens": 10_000}
    workload = make(synthetic([tenant(fixed(1), output)], 20_000))
    error = np.log(workload.predicted_output_tokens / workload.output_tokens)
    # Standard errors: 0.6/√n = 0.0042 and 0.6/√(2n) = 0.003.
    assert error.mean() == pytest.approx(0.0, abs=0.017)
    assert error.std() == pytest.approx(0.6, abs=0.012)


def test_predictions_are_at_least_one_token() -> None:
    workload = make(synthetic([tenant(fixed(1), fixed(1))], 1000))
    assert workload.predicted_output_tokens.min() == 1
    assert workload.predicted_output_tokens.max() > 1


def test_length_information() -> None:
    config = synthetic()
    oracle = make(config, length_information="oracle")
    assert np.array_equal(oracle.predicted_output_tokens, oracle.output_tokens)
    assert not make(config, length_information="none").predicted_output_tokens.any()


# --- tenants -------------------------------------------------------------------------------------


def test_tenants_come_by_share_with_their_own_attributes() -> None:
    workload = make(synthetic(num_requests=20_000))
    # Share 1 of 4; standard error 0.0031.
    assert workload.tenant.mean() == pytest.approx(0.25, abs=0.012)
    chat, rag = workload.tenants
    assert (chat.name, chat.weight, chat.ttft_slo_s, chat.tpot_slo_s) == ("chat", 1.0, 0.5, 0.03)
    assert (rag.name, rag.weight, rag.ttft_slo_s, rag.tpot_slo_s) == ("rag", 0.5, 2.0, 0.1)
    assert np.array_equal(workload.priority, 7 * workload.tenant)
    assert set(workload.output_tokens[workload.tenant == 1]) == {150}


def test_tenants_without_an_objective_never_miss_it() -> None:
    (default,) = make(synthetic([tenant(fixed(1))])).tenants
    assert default.ttft_slo_s == default.tpot_slo_s == math.inf


def test_objectives_are_those_of_mlperf() -> None:
    assert dict(SLOS) == {"conversational": (2.0, 0.1), "interactive": (0.5, 0.03)}


# --- prefixes ------------------------------------------------------------------------------------


def test_hash_ids_of_a_toy_instance() -> None:
    """Blocks of 4 tokens; a document of 10 tokens has 2 full ones, with the ids 0 and 1.

    Nobody asks for tenant 0's other document, 2 and 3. Tenant 2's document (5 tokens, 1 full
    block) has the id 4; the requests' own ids begin at 5.
    13 tokens: 4 blocks, the first two shared. 8: both shared. 6: one shared, one partial. 3: its
    only block is partial. 4, all of it in tenant 2's document: shared.
    """
    prefixes = [
        PrefixConfig(num_prefixes=2, tokens=10, zipf=1000.0),
        None,
        PrefixConfig(num_prefixes=1, tokens=5),
    ]
    rows = [(0, 13), (1, 9), (0, 8), (0, 6), (2, 9), (0, 3), (2, 4)]
    tenants, tokens = (np.array(column) for column in zip(*rows, strict=True))
    assert prompt_hash_ids(prefixes, tenants, tokens, 4, seed=0) == (
        (0, 1, 5, 6),
        (),
        (0, 1),
        (0, 7),
        (4, 8, 9),
        (10,),
        (4,),
    )


def test_no_prefixes_no_hash_ids() -> None:
    assert make(synthetic([CHAT])).hash_ids == ()


def test_every_prompt_has_an_id_for_each_block_and_only_documents_are_shared() -> None:
    workload = make(synthetic(num_requests=2000), hash_block_tokens=512)
    owners: dict[int, set[int]] = {}
    for request in workload:
        has_prefix = request.tenant.name == "rag"
        assert len(request.hash_ids) == has_prefix * -(-request.prompt_tokens // 512)
        for hash_id in request.hash_ids:
            owners.setdefault(hash_id, set()).add(request.request_id)
    shared = [hash_id for hash_id, requests in owners.items() if len(requests) > 1]
    assert max(shared) < 20 * 4 <= max(owners)  # 20 documents of 2048 / 512 = 4 blocks


@pytest.mark.parametrize("zipf", [0.0, 1.1])
def test_documents_are_zipf_popular(zipf: float) -> None:
    n = 20_000
    prefix = PrefixConfig(num_prefixes=20, tokens=1, zipf=zipf)
    ids = prompt_hash_ids([prefix], np.zeros(n, np.int64), np.ones(n, np.int64), 1, seed=0)
    share = np.bincount([document for (document,) in ids], minlength=20) / n
    # zipf 0: 1/20 each. zipf 1.1: the first has 1 / Σ k^−1.1 = 1 / 3.191, the second 2^−1.1 of it.
    first, second = (0.05, 0.05) if zipf == 0 else (0.3133, 0.1462)
    assert share[:2] == pytest.approx([first, second], abs=4 * 0.0033)
    assert share[19] == pytest.approx(first * 20**-zipf, abs=4 * 0.0015)


# --- arrivals ------------------------------------------------------------------------------------


def gaps(num_requests: int = 50_000, **arrivals: Any) -> NDArray[np.float64]:
    workload = make(synthetic([tenant(fixed(1))], num_requests, **arrivals))
    return np.diff(workload.arrival_time, prepend=0.0)


def test_poisson_gaps() -> None:
    """Rate 10/s at load 0.8: mean gap and standard deviation 1/8 s; 4 standard errors."""
    observed = gaps(load=0.8)
    assert observed.mean() == pytest.approx(0.125, rel=4 / math.sqrt(50_000))
    assert observed.std() == pytest.approx(0.125, rel=0.03)


@pytest.mark.parametrize("cv", [0.25, 2.0])
def test_gamma_gaps_have_the_configured_coefficient_of_variation(cv: float) -> None:
    observed = gaps(process={"kind": "gamma", "cv": cv})
    assert observed.mean() == pytest.approx(0.1, rel=4 * cv / math.sqrt(50_000))
    assert observed.std() / observed.mean() == pytest.approx(cv, rel=0.04)


def test_a_load_range_is_drawn_uniformly_for_each_seed() -> None:
    config = synthetic(load=[0.7, 0.9], num_requests=1)
    loads = np.array([make(config, seed).load for seed in range(400)])
    assert loads.min() > 0.7
    assert loads.max() < 0.9
    # sd of a uniform: 0.2/√12 = 0.0577; of the mean of 400: 0.0029.
    assert loads.mean() == pytest.approx(0.8, abs=0.012)
    assert loads.std() == pytest.approx(0.0577, rel=0.1)


def test_rate_scale_speeds_up_arrivals_and_is_part_of_the_load() -> None:
    slow, fast = make(synthetic()), make(synthetic(), rate_scale=2.0)
    assert np.array_equal(fast.arrival_time, slow.arrival_time / 2)
    assert (slow.load, fast.load) == (1.0, 2.0)


@pytest.mark.parametrize("rate_scale", [0.0, -1.0, math.inf, math.nan])
def test_rate_scale_must_be_positive(rate_scale: float) -> None:
    with pytest.raises(ValueError, match=r"rate_scale: got .*; allowed: a finite number above 0"):
        make(synthetic(), rate_scale=rate_scale)


# --- modulation ----------------------------------------------------------------------------------


def test_sine_of_a_toy_instance() -> None:
    """∫ 1 + a sin(2πt/P) dt is P/2 + aP/π after half a period and P after a whole one."""
    sine = SineModulation(kind="sine", period_s=10.0, amplitude=0.5, phase=0.0)
    operational = np.array([0.0, 5 + 5 / math.pi, 10.0, 15 + 5 / math.pi, 1e4])
    times = simulated_time(operational, [sine], seed=0)
    assert times == pytest.approx([0.0, 5.0, 10.0, 15.0, 1e4], rel=1e-12, abs=1e-12)


def test_sine_phase_is_drawn_for_each_seed_unless_given() -> None:
    def last_arrivals(**phase: float) -> list[float]:
        sine = SineModulation(kind="sine", period_s=100.0, amplitude=0.9, **phase)
        return [simulated_time(np.array([30.0]), [sine], seed)[0] for seed in range(5)]

    assert len(set(last_arrivals())) == 5
    assert len(set(last_arrivals(phase=1.0))) == 1


def test_on_off_phases_have_their_mean_dwells_and_a_stationary_start() -> None:
    config = on_off(mean_on_s=10.0, mean_off_s=20.0)
    paths = [on_off_path(config, 10, np.random.default_rng(seed)) for seed in range(600)]
    begins_on = [factor[0] == config.on_factor for _, factor in paths]
    # On for 10 of 30 s; standard error of 600 draws: 0.019.
    assert np.mean(begins_on) == pytest.approx(1 / 3, abs=0.077)
    dwells = np.concatenate([np.diff(ends, prepend=0.0) for ends, _ in paths])
    on = np.concatenate([factor for _, factor in paths]) == config.on_factor
    # 6,000 dwells of each kind; standard error 1.3 % of the mean.
    assert dwells[on].mean() == pytest.approx(10.0, rel=0.052)
    assert dwells[~on].mean() == pytest.approx(20.0, rel=0.052)


def on_off(**values: float) -> OnOffModulation:
    defaults = {"on_factor": 7 / 3, "off_factor": 1 / 3, "mean_on_s": 0.1, "mean_off_s": 0.2}
    return OnOffModulation.model_validate({"kind": "on_off", **defaults, **values})


def test_a_longer_on_off_path_begins_like_a_shorter_one() -> None:
    short, long = (on_off_path(on_off(), n, np.random.default_rng(1)) for n in (16, 64))
    assert np.array_equal(short[0], long[0][:32])
    assert np.array_equal(short[1], long[1][:32])


def test_on_off_arrivals_keep_the_mean_rate() -> None:
    """On 1/3 of the time at 7/3, off at 1/3: mean 1, so 50,000 requests at 10/s take 5,000 s.

    sd of the modulation's integral over T: sqrt(2 p (1 − p) Δ² τ T) with p = 1/3, Δ = 2 and
    τ = 1/(1/0.1 + 1/0.2) s: 24 s. sd of the requests: √50,000 / 10 = 22 s. Together 33 s.
    """
    assert gaps(modulation=[on_off().model_dump()]).sum() == pytest.approx(5000, abs=4 * 33)


def test_nothing_arrives_while_the_rate_is_zero() -> None:
    config = on_off(on_factor=2.0, off_factor=0.0, mean_on_s=3.0, mean_off_s=3.0)
    arrivals = gaps(1000, modulation=[config.model_dump()]).cumsum()
    ends, factor = on_off_path(config, 100, generator(0, Stream.MODULATION, 0))
    assert ends[-1] > arrivals[-1]
    margin = 1e-9  # an arrival may round onto the end of its phase
    assert (factor[np.searchsorted(ends, arrivals - margin)] > 0).all()


def test_modulations_multiply() -> None:
    """The product is integrated here by the midpoint rule, between the ends of the phases."""
    modulation = [
        SineModulation(kind="sine", period_s=7.0, amplitude=0.8, phase=0.3),
        on_off(mean_on_s=2.0, mean_off_s=5.0),
        SineModulation(kind="sine", period_s=40.0, amplitude=0.95, phase=2.0),
        on_off(on_factor=1.5, off_factor=0.0, mean_on_s=4.0, mean_off_s=3.0),
        SineModulation(kind="sine", period_s=7.0, amplitude=0.5, phase=4.0),
    ]
    operational = np.linspace(0.5, 200.0, 40)
    times = simulated_time(operational, modulation, seed=5)
    paths = [on_off_path(modulation[i], 500, generator(5, Stream.MODULATION, i)) for i in (1, 3)]
    grid = np.unique(
        np.concatenate([times, *(ends for ends, _ in paths), np.arange(0, times[-1], 1e-3)])
    )
    grid = grid[grid <= times[-1]]
    middle = (grid[1:] + grid[:-1]) / 2
    rate = np.ones_like(middle)
    for sine in modulation[::2]:
        rate *= 1 + sine.amplitude * np.sin(2 * np.pi * middle / sine.period_s + sine.phase)
    for ends, factor in paths:
        rate *= factor[np.searchsorted(ends, middle)]
    integral = np.concatenate([[0.0], np.cumsum(rate * np.diff(grid))])
    assert integral[np.searchsorted(grid, times)] == pytest.approx(operational, abs=1e-5)


@settings(deadline=None, max_examples=200)
@given(
    amplitudes=st.lists(st.floats(0, 1, exclude_max=True), max_size=3),
    period_s=st.floats(1e-3, 1e6),
    factors=st.tuples(st.floats(0, 10), st.floats(0.01, 10)),
    seed=st.integers(0, 2**64),
)
def test_arrivals_are_finite_and_in_order_under_any_modulation(
    amplitudes: list[float], period_s: float, factors: tuple[float, float], seed: int
) -> None:
    modulation: list[Any] = [
        {"kind": "sine", "period_s": period_s * (i + 1), "amplitude": amplitude}
        for i, amplitude in enumerate(amplitudes)
    ]
    modulation.append(on_off(on_factor=factors[0], off_factor=factors[1]).model_dump())
    workload = make(synthetic(modulation=modulation), seed)
    assert np.isfinite(workload.arrival_time).all()
    assert workload.arrival_time[0] >= 0
    assert (np.diff(workload.arrival_time) >= 0).all()


# --- common random numbers -----------------------------------------------------------------------


def test_streams_are_the_children_of_the_seed() -> None:
    children = np.random.SeedSequence(7).spawn(len(Stream))
    for stream, child in zip(Stream, children, strict=True):
        assert generator(7, stream).random() == np.random.default_rng(child).random()


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"load": 0.5}, {"arrival_time"}),
        ({"process": {"kind": "gamma", "cv": 3}}, {"arrival_time"}),
        ({"modulation": SWINGS}, {"arrival_time"}),
        ({"tenants": [{**CHAT, "prompt": fixed(9)}, RAG]}, {"prompt_tokens"}),
        (
            {"tenants": [{**CHAT, "output": fixed(9)}, RAG]},
            {"output_tokens", "predicted_output_tokens"},
        ),
        ({"tenants": [CHAT, {**RAG, "prefix": None}]}, set()),
    ],
)
def test_a_change_moves_only_what_it_is_about(change: dict[str, Any], moved: set[str]) -> None:
    before, after = make(synthetic()), make(synthetic(**change))
    differ = {c for c in COLUMNS if not np.array_equal(getattr(before, c), getattr(after, c))}
    assert differ == moved
    if differ == {"arrival_time"}:
        assert before.hash_ids == after.hash_ids


def test_a_load_drawn_from_a_range_leaves_the_arrivals_in_operational_time() -> None:
    given_load, drawn = make(synthetic()), make(synthetic(load=[0.7, 0.9]))
    assert drawn.arrival_time * drawn.load == pytest.approx(given_load.arrival_time, rel=1e-12)


def test_the_modulation_is_the_same_function_of_time_at_any_load() -> None:
    """At a rate of 0 there are no arrivals, and both loads share these gaps."""
    config = synthetic(modulation=[on_off(off_factor=0.0, mean_on_s=4.0).model_dump()])
    arrivals = [make(config, 3, rate_scale=scale).arrival_time for scale in (1.0, 0.6)]
    ends, factor = on_off_path(config.arrivals.modulation[0], 500, generator(3, Stream(1), 0))
    for times in arrivals:
        assert (factor[np.searchsorted(ends, times - 1e-9)] > 0).all()


def test_the_first_requests_do_not_depend_on_the_number_of_requests() -> None:
    few, many = (make(synthetic(num_requests=n, modulation=SWINGS)) for n in (50, 5000))
    assert few.arrival_time == pytest.approx(many.arrival_time[:50], rel=1e-12)
    for column in COLUMNS[1:]:
        assert np.array_equal(getattr(few, column), getattr(many, column)[:50])
    assert few.hash_ids == many.hash_ids[:50]


def test_seeds_differ() -> None:
    first, second = make(synthetic(), 0), make(synthetic(), 1)
    for column in COLUMNS:
        assert not np.array_equal(getattr(first, column), getattr(second, column))


def digest(workload: Workload) -> str:
    columns = [getattr(workload, column).tobytes() for column in COLUMNS]
    return hashlib.sha256(b"".join(columns) + repr(workload.hash_ids).encode()).hexdigest()


def test_another_process_makes_the_same_bits() -> None:
    config = synthetic(modulation=SWINGS, load=[0.7, 0.9])
    program = (
        "import json, sys; import test_workloads_synthetic as t\n"
        "config = t.SyntheticWorkload.model_validate(json.loads(sys.argv[1]))\n"
        "print(t.digest(t.make(config, 42)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    output = subprocess.run(
        [sys.executable, "-c", program, json.dumps(config.model_dump())],
        cwd=os.path.dirname(__file__),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.strip() == digest(make(config, 42))
