"""Tuning: successive halving, seed ranges, and the command line."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import agents.tuning
from agents import make_policy
from agents.evaluation import Job, Run, run_in_process, run_jobs
from agents.seeds import TEST, TRAINING, VALIDATION, validation_seeds
from agents.tuning import METRICS, Round, Search, Standing, plan_rounds
from opal_gym.config import CONFIGS, load_config
from tests.test_evaluation import a_run
from tests.tiny import tiny_config

SCRIPT = CONFIGS.parent / "scripts" / "tune.py"
ROUNDS = [Round(4, 1), Round(2, 3)]
SEEDS = range(10_000, 10_003)

E2E = {
    "a": (5.0, 0.0, 0.0),
    "b": (3.0, 3.0, 3.0),
    "c": (2.0, 4.0, 6.0),
    "d": (3.0, 1.0, 1.0),
}
"""Mean E2E of four policies on three workloads.

On the first: c 2, b 3, d 3 (ties keep their order), a 5; so c and b go on. On all three: b 3, c 4;
a would have been the best, d the second.
"""


def run_with(monkeypatch: pytest.MonkeyPatch, order: Callable[[list[Job]], list[Job]]) -> list[Job]:
    """Replaces the simulation by `E2E`; jobs finish in an order of their own. Returns the jobs."""
    done: list[Job] = []

    def run(jobs: Sequence[Job], workers: int) -> Iterator[Run]:
        for job in order(list(jobs)):
            done.append(job)
            value = E2E[job.policy][SEEDS.index(job.workload_seed)]
            yield a_run(job.policy, job.workload_seed, value)

    monkeypatch.setattr(agents.tuning, "run_jobs", run)
    return done


def search(metric: Any = METRICS["e2e"]) -> Search:
    return Search(tiny_config(), list(E2E), metric, ROUNDS, SEEDS)


class TestSuccessiveHalving:
    @pytest.mark.parametrize("order", [list, lambda jobs: jobs[::-1]], ids=["first", "last"])
    def test_keeps_the_best_of_each_round(
        self, monkeypatch: pytest.MonkeyPatch, order: Callable[[list[Job]], list[Job]]
    ) -> None:
        done = run_with(monkeypatch, order)
        halving = search()
        assert list(halving.run()) == [1] * 4 + [2] * 4
        assert halving.total_runs == halving.runs == len(done) == 4 + 2 * 2
        first, second = halving.rankings()
        assert [(each.policy, each.mean) for each in first] == [
            ("c", 2.0),
            ("b", 3.0),
            ("d", 3.0),
            ("a", 5.0),
        ]
        assert second == [
            Standing("b", 3.0, dict.fromkeys(SEEDS, 3.0)),
            Standing("c", 4.0, {10_000: 2.0, 10_001: 4.0, 10_002: 6.0}),
        ]

    def test_runs_no_policy_twice_on_a_workload(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done = run_with(monkeypatch, list)
        list(search().run())
        assert len({(job.policy, job.workload_seed) for job in done}) == len(done)

    def test_more_is_better_for_goodput(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run_with(monkeypatch, list)
        metric = METRICS["e2e"]._replace(sign=METRICS["goodput"].sign)
        halving = search(metric)
        list(halving.run())
        # On the first workload a 5 and b 3 (before d) are the greatest.
        assert [each.policy for each in halving.rankings()[-1]] == ["b", "a"]

    @pytest.mark.parametrize(
        ("runs", "rankings"),
        [
            (0, []),
            (2, [[("b", 3.0), ("a", 5.0)]]),  # a and b have run the first workload
            # Both have run the second workload, one of them the third, which does not count:
            # (2 + 4) / 2 and (3 + 3) / 2, a tie that keeps the order of the round before.
            (7, [[("c", 2.0), ("b", 3.0), ("d", 3.0), ("a", 5.0)], [("c", 3.0), ("b", 3.0)]]),
        ],
    )
    def test_what_has_finished_can_be_ranked(
        self, monkeypatch: pytest.MonkeyPatch, runs: int, rankings: list[list[tuple[str, float]]]
    ) -> None:
        run_with(monkeypatch, list)
        halving = search()
        running = halving.run()
        for _ in range(runs):
            next(running)
        assert [
            [(each.policy, each.mean) for each in ranking] for ranking in halving.rankings()
        ] == rankings

    @pytest.mark.parametrize(("name", "sign"), [("e2e", 1), ("goodput", -1), ("throughput", -1)])
    def test_every_metric_has_its_direction(self, name: Any, sign: int) -> None:
        assert METRICS[name].sign == sign

    def test_every_metric_is_measured(self) -> None:
        _, metrics = run_in_process(
            load_config("prod-mix", {"workload.num_requests": 5}), make_policy("fifo-lwd"), 0
        )
        assert all(metric.measure.applies_to(metrics) for metric in METRICS.values())
        assert METRICS["e2e-p99"].measure.of(metrics) == metrics["e2e_s"]["p99"]


class TestRounds:
    def test_of_the_reference(self) -> None:
        assert plan_rounds(600, (2, 20), (30,)) == [(600, 2), (30, 20)]
        assert plan_rounds(10, (2, 20), (30,)) == [(10, 2), (10, 20)]

    @pytest.mark.parametrize(
        ("workloads", "keep", "message"),
        [
            ((), (), r"workloads: got \[\]"),
            ((0,), (), r"workloads: got \[0\]"),
            ((3, 2), (5,), r"workloads: got \[3, 2\]; allowed: at least 1, ascending"),
            ((2, 20), (), r"keep: got \[\]; allowed: 1 number"),
            ((1, 2, 3), (5, 6), r"keep: got \[5, 6\]; allowed: at least 1, descending"),
            ((1, 2), (0,), r"keep: got \[0\]"),
        ],
    )
    def test_impossible_ones_are_refused(
        self, workloads: Sequence[int], keep: Sequence[int], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            plan_rounds(40, workloads, keep)


class TestSeeds:
    def test_ranges_are_disjoint_and_begin_with_the_default_of_evaluate(self) -> None:
        assert TEST.start == 0
        assert TEST.stop <= VALIDATION.start
        assert VALIDATION.stop <= TRAINING.start

    def test_validation_seeds_stay_in_their_range(self) -> None:
        assert list(validation_seeds(3)) == [10_000, 10_001, 10_002]
        assert validation_seeds(2, 19_998)[-1] == 19_999
        for count, first in ((2, 9_999), (3, 19_998), (1, 0)):
            with pytest.raises(ValueError, match=f"seeds {first} to .*10000 to 19999"):
                validation_seeds(count, first)


# --- the command line ----------------------------------------------------------------------------

SMALL: Mapping[str, Any] = {
    "scenario": "slot8-heavy",
    "requests": 40,
    "workloads": (1, 2),
    "keep": (2,),
    "admit": ("fifo", "sjf"),
    "gate": ("none",),
    "victim": ("lwd",),
    "chunk": ("full", "1/8"),
}
NAME = "slot8-heavy-e2e-0.9"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("tune_script", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> Main:
    """Runs the script's main function; returns exit code, stdout and stderr."""

    def call(**arguments: Any) -> tuple[int, str, str]:
        code = script.main(script.Arguments(**arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def preset(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


class TestCommand:
    def test_writes_the_best_with_the_values_that_it_was_chosen_by(
        self, main: Main, tmp_path: Path
    ) -> None:
        code, text, _ = main(out=tmp_path, **SMALL)
        assert code == 0
        (path,) = tmp_path.iterdir()
        assert path.name == f"{NAME}.json"
        written = preset(path)
        assert written["seeds"] == [10_000, 10_001]
        assert written["rounds"] == [
            {"members": 4, "workloads": 1},
            {"members": 2, "workloads": 2},
        ]
        first, second = written["rankings"]
        assert [each["policy"] for each in first[:2]] == sorted(
            (each["policy"] for each in second), key=lambda policy: first_place(first, policy)
        )
        assert written["policy"] == second[0]["policy"]
        assert second[0]["mean"] == min(each["mean"] for each in second)
        config = load_config(written["config"])
        for each in second:
            assert len(each["values"]) == 2
            for seed, value in each["values"].items():
                _, metrics = run_in_process(config, make_policy(each["policy"]), int(seed))
                assert metrics["e2e_s"]["mean"] == value
            assert each["mean"] == np.mean(list(each["values"].values()))
        assert written["meta"]["complete"]
        assert written["meta"]["versions"].keys() >= {"opal-gym", "numpy", "python"}
        assert f"--policies preset:{path}" in text.replace("\n", "")

    def test_in_processes_of_its_own_writes_the_same(self, main: Main, tmp_path: Path) -> None:
        command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "two"), "--workers", "2"]
        for name, value in SMALL.items():
            values = value if isinstance(value, tuple) else (value,)
            command += [f"--{name}", *map(str, values)]
        subprocess.run(command, capture_output=True, check=True)
        main(out=tmp_path / "one", **SMALL)
        one, two = (preset(tmp_path / each / f"{NAME}.json") for each in ("one", "two"))
        assert one.pop("meta")["workers"] == 1
        meta = two.pop("meta")
        assert meta["workers"] == 2
        assert "--requests 40" in meta["command"]
        assert one == two

    def test_scenario_metric_load_and_length_information_are_the_users(
        self, main: Main, tmp_path: Path
    ) -> None:
        settings = {"metric": "goodput", "load": 0.5, "length_information": "oracle"}
        assert main(out=tmp_path, **SMALL, **settings)[0] == 0
        written = preset(tmp_path / "slot8-heavy-goodput-0.5-oracle.json")
        assert written["metric"] == "goodput"
        assert written["config"]["workload"]["arrivals"]["load"] == 0.5
        assert written["config"]["simulation"]["length_information"] == "oracle"
        assert written["rankings"][-1][0]["mean"] == max(
            each["mean"] for each in written["rankings"][-1]
        )

    def test_tenants_of_different_weights_add_an_order(self, script: ModuleType) -> None:
        def orders(scenario: str) -> set[str]:
            arguments = script.Arguments(scenario=scenario)
            members = script.members_of(arguments, script.load(arguments))
            return {member.admit for member in members}

        assert orders("prod-mix") - orders("mem-longctx") == {"weighted-sjf"}
        assert len(orders("mem-longctx")) == 5

    def test_an_interrupt_keeps_what_has_finished_beside_a_whole_preset(
        self, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(jobs: Sequence[Job], workers: int) -> Iterator[Run]:
            yield from run_jobs(jobs[:3], workers)
            raise KeyboardInterrupt

        whole = tmp_path / f"{NAME}.json"
        whole.write_text("whole")
        monkeypatch.setattr(agents.tuning, "run_jobs", interrupted)
        code, text, _ = main(out=tmp_path, **SMALL)
        assert code == 130
        assert "interrupted: 3 of 6 runs had finished" in text
        assert whole.read_text() == "whole"
        written = preset(tmp_path / f"{NAME}.incomplete.json")
        assert not written["meta"]["complete"]
        (ranking,) = written["rankings"]
        assert len(ranking) == 3
        assert written["policy"] == ranking[0]["policy"]

    def test_an_interrupt_before_the_first_run_writes_nothing(
        self, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(jobs: Sequence[Job], workers: int) -> Iterator[Run]:
            raise KeyboardInterrupt
            yield

        monkeypatch.setattr(agents.tuning, "run_jobs", interrupted)
        code, text, _ = main(out=tmp_path, **SMALL)
        assert (code, list(tmp_path.iterdir())) == (130, [])
        assert "nothing was written" in text

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"scenario": "nope"}, "'nope'"),
            ({"admit": ("sfj",)}, "--admit: got 'sfj'; allowed: one of fifo"),
            ({"gate": ("none", "none")}, r"--gate: got \['none', 'none'\].*each once"),
            ({"victim": ()}, r"--victim: got \[\]"),
            ({"chunk": ("1/x",)}, "--chunk: got '1/x'"),
            ({"keep": (5, 4)}, r"--keep: got \[5, 4\]"),
            ({"workloads": (2, 1)}, r"--workloads: got \[2, 1\]"),
            ({"seed": 0}, "--seed: seeds 0 to 1; allowed: validation seeds"),
            ({"requests": 0}, "--requests: got 0"),
            ({"workers": 0}, "--workers: got 0"),
            ({"load": -1.0}, "load"),
            ({"set": (("x",),)}, "--set: got 'x'"),
            ({"name": "a/b"}, "--name: got 'a/b'"),
        ],
    )
    def test_bad_input_gets_one_line(
        self, main: Main, tmp_path: Path, arguments: dict[str, Any], message: str
    ) -> None:
        code, out, err = main(**{**SMALL, "out": tmp_path / "out", **arguments})
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert re.search(message, line)
        assert not (tmp_path / "out").exists()


def first_place(ranking: list[dict[str, Any]], policy: str) -> int:
    return [each["policy"] for each in ranking].index(policy)


def test_the_presets_name_is_a_policy_of_evaluate(script: ModuleType) -> None:
    """A preset where presets lie goes by its name, another by its path."""
    assert script.policy_name(script.PRESETS / "x-e2e-0.9.json") == "preset:x-e2e-0.9"
    assert script.policy_name(Path("/tmp/x.json")) == "preset:/tmp/x.json"
