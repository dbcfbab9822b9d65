"""The published comparisons: who is compared, what is said of it, and the page."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agents.cards import card
from agents.evaluation import Run
from agents.learning.policy_file import TrainedPolicy
from agents.learning.scoring import ScoringWeights
from agents.learning_curves import learning_curves
from agents.published import CASES, Case, Outcome, entries, jobs
from agents.published_page import as_json, curve_row, label, page, table
from agents.seeds import TEST

ROOT = Path(__file__).parents[1]
CASE = Case("rich-azconv", 0.9, floor=0.02, goal=-0.05, learned="rich-azconv")


def run(policy: str, seed: int, e2e: float) -> Run:
    return Run(
        policy,
        seed,
        {
            "e2e_s": {"mean": e2e, "p99": 4 * e2e},
            "ttft_s": {"mean": 0.5},
            "tpot_s": {"mean": 0.25},
            "goodput": 0.25,
            "tokens_per_s": 100.0,
            "jain_index": 0.5,
            "weighted_goodput": 0.25,
            "weighted_slowdown": 2.0,
        },
    )


def outcome(grid: list[float], learned: list[float], case: Case = CASE) -> Outcome:
    columns = {"baseline": [2 * value for value in grid], "grid": grid, "learned": learned}
    return Outcome(
        case,
        {name: [run(name, i, x) for i, x in enumerate(xs)] for name, xs in columns.items()},
        [0.5] * len(grid),
    )


@pytest.mark.parametrize(
    ("learned", "verdict"),
    [([1.9, 3.8], "goal"), ([2.0, 4.0], "floor"), ([2.03, 4.06], "floor"), ([2.1, 4.1], "missed")],
)
def test_verdicts(learned: list[float], verdict: str) -> None:
    """The grid's mean is 3: -5 % is the goal, +2 % the floor."""
    assert outcome([2.0, 4.0], learned).verdict() == verdict


def test_a_control_is_held_against_the_baseline() -> None:
    case = replace(CASE, against="fifo-lwd")
    assert outcome([2.0, 4.0], [4.0, 8.0], case).verdict() == "floor"


def test_who_is_missing_is_not_measured() -> None:
    whole = outcome([2.0, 4.0], [1.9, 3.8])
    without = replace(whole, runs={"baseline": whole.runs["baseline"]})
    assert without.verdict() == "not measured"
    assert "not measured" in page([without], "make results")


def test_a_scenario_without_headroom_is_labelled() -> None:
    """Learned 1 % better than the grid: none; 10 % better: 10 %."""
    assert label(outcome([2.0, 4.0], [1.98, 3.96])) == "none"
    assert label(outcome([2.0, 4.0], [1.8, 3.6])) == "10.0%"


def test_the_page_says_what_was_measured() -> None:
    text = page([outcome([2.0, 4.0], [1.9, 3.8])], "make results")
    row = "| rich-azconv, load 0.9 | mean E2E (s) | 3 | 2.85 | -5.0% [-6.7%, -3.3%] | +2% | -5% |"
    assert f"{row} goal |" in text
    assert "| rich-azconv, load 0.9 | mean E2E (s) | 6 | 3 | – | – | 0.5 | 5.0% |" in text
    assert "| rich-azconv, load 0.9 | learned | 2.85 | 11.4 | 0.5 | 25 |" in text


def test_transfer_is_held_against_the_grid_or_else_the_baseline() -> None:
    """The other policy takes 3 s: as long as the grid, half as long as the baseline."""
    whole = outcome([3.0, 3.0], [3.0, 3.0])
    runs = {**whole.runs, "from elsewhere": [run("x", seed, 3.0) for seed in (0, 1)]}
    row = "| rich-azconv, load 0.9{} | {} |"
    text = page([replace(whole, runs=runs)], "make results")
    zero = "+0.0% [+0.0%, +0.0%]"
    assert row.format("", f"{zero} | {zero}") in text
    del runs["grid"], runs["learned"]
    text = page([replace(whole, runs=runs)], "make results")
    assert row.format(" *", "– | -50.0% [-50.0%, -50.0%]") in text


def test_a_mean_that_is_bought_with_starvation_is_said_so() -> None:
    """p99 is four times the mean here: 3 times the grid's where the learned mean is."""
    text = page([outcome([2.0, 4.0], [6.0, 12.0])], "make results")
    assert "load 0.9: the learned policy lets some wait.** Its p99 of E2E is 3.0 times" in text
    assert "lets some wait" not in page([outcome([2.0, 4.0], [2.0, 4.0])], "make results")


def test_tables() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_numbers_can_be_read_again() -> None:
    told = as_json([outcome([2.0, 4.0], [1.9, 3.8])])["cases"][0]
    assert told["verdict"] == "goal"
    assert json.loads(json.dumps(told["bounds"])) == [0.5, 0.5]
    assert told["columns"]["baseline"]["runs"][1]["e2e"] == 8.0


def test_the_runs_are_the_first_test_seeds() -> None:
    made = jobs(CASES[0], entries(CASES[0])["baseline"], 3)
    assert [job.workload_seed for job in made] == list(TEST[:3])
    assert made[0].config.workload.num_requests == 1000
    assert made[0].config.workload.arrivals.load == 1.05


def test_a_card_tells_how_and_how_good() -> None:
    training = {
        "name": "rich-azconv",
        "description": "About it.",
        "scenario": "rich-azconv",
        "reward": {"latency": 1.0},
        "loads": None,
        "requests": [250, 500],
        "seed": 0,
        "algorithm": {"kind": "cma-es", "iterations": 7},
    }
    about = {"training": training, "validation": {"iteration": 5, "value": 1.25}}
    trained = TrainedPolicy(ScoringWeights.named({}), ("ADMIT",), about)
    text = card("rich-azconv", trained, [outcome([2.0, 4.0], [1.9, 3.8])])
    assert "| algorithm: iterations | 7 |" in text
    assert "| kept | iteration 5, validation 1.25 |" in text
    assert "| -5.0% [-6.7%, -3.3%] |" in text


@pytest.mark.slow
def test_the_script_writes_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/results.py", "--cases", "rich-chat", "--workloads", "1"]
    subprocess.run([*command, "--out", tmp_path], cwd=ROOT, check=True, capture_output=True)
    told = json.loads((tmp_path / "results.json").read_text())
    assert [case["scenario"] for case in told["cases"]] == ["rich-chat"]
    assert np.isfinite(told["cases"][0]["bounds"]).all()
    assert "# Results" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "nope"], "--cases: got 'nope'; allowed: mem-chat-burst, "),
        (["--workloads", "0"], "--workloads: got 0; allowed: 1 to 10000"),
        (["--workers", "0"], "--workers: got 0; allowed: at least 1"),
    ],
)
def test_the_script_refuses(arguments: list[str], message: str) -> None:
    command = [sys.executable, "scripts/results.py", *arguments]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}")


def test_learning_curves_over_seeds(tmp_path: Path) -> None:
    """Of 20 iterations, validated at 0, 10 and 20: a tenth lies at iteration 2."""
    for seed, values in ((1, [4.0, 3.0, 2.0]), (0, [5.0, 2.0, 1.0])):
        run = {
            "training": {"name": "x", "seed": seed, "algorithm": {"iterations": 20}},
            "validations": [
                {"iteration": 10 * i, "value": value} for i, value in enumerate(values)
            ],
        }
        (tmp_path / f"x-{seed}.json").write_text(json.dumps(run))
    (curve,) = learning_curves(tmp_path)
    assert curve.seeds == (0, 1)
    assert np.array(curve.values) == pytest.approx(
        np.array([[5, 4], [4.4, 3.8], [3.5, 3.5], [2, 3], [1.5, 2.5], [1, 2]])
    )
    assert curve_row(curve)[:3] == ["x", "0, 1", "4.5 (4–5)"]
