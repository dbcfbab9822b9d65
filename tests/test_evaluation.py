"""Evaluation: pairing, intervals, tables, files, and the command line."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agents import make_policy
from agents.comparison import Difference, bootstrap_interval, paired_difference
from agents.evaluation import Job, Run, run_in_process, run_jobs, run_through_env
from agents.files import write_atomically
from agents.lower_bound import LowerBound
from agents.report import format_difference, format_number, print_tables
from agents.results import results
from agents.sources import Source, detect_format, load_source
from agents.summary import Evaluation, Measure
from opal_gym.config import CONFIGS, ConfigError, load_config
from opal_gym.sim.workloads import TraceError
from tests.tiny import tiny_config

SCRIPT = CONFIGS.parent / "scripts" / "evaluate.py"
AZURE = CONFIGS / "samples" / "azure_like.csv"
MOONCAKE = CONFIGS / "samples" / "mooncake_like.jsonl.gz"
E2E = Measure("E2E mean (s)", "e2e_s.mean")


def summary(value: float) -> dict[str, float]:
    return dict.fromkeys(("mean", "p50", "p90", "p99"), value)


def a_run(policy: str, seed: int, e2e: float, **metrics: Any) -> Run:
    """A run of which only the E2E latency is interesting."""
    zeros = ("goodput", "tokens_per_s", "preemptions", "recomputed_tokens", "rejected")
    times = {"ttft_s": summary(0.0), "tpot_s": summary(0.0), "e2e_s": summary(e2e)}
    return Run(policy, seed, {**dict.fromkeys(zeros, 0.0), **times, **metrics})


def printed(evaluation: Evaluation) -> str:
    text = io.StringIO()
    print_tables(evaluation, Console(width=100, file=text))
    return text.getvalue()


def rows_of(text: str) -> dict[str, list[str]]:
    """Cells of the printed tables by label; the first table comes first in each list."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("│"):
            label, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            rows.setdefault(label, []).extend(cells)
    return rows


class TestBootstrap:
    def test_of_one_value_among_five(self) -> None:
        """The mean of a resample of (5, 0, 0, 0, 0) is how often the 5 is in it: binomial(5, 0.2).

        P(0) = 0.328 > 2.5 %; P(at most 2) = 0.942 < 97.5 % < P(at most 3) = 0.993.
        """
        assert bootstrap_interval(np.array([5.0, 0, 0, 0, 0])) == (0, 3)

    def test_of_two_values_reaches_both(self) -> None:
        """Each of the two comes twice in a quarter of the resamples."""
        assert bootstrap_interval(np.array([-2.0, -1.0])) == (-2, -1)

    def test_of_equal_values_has_no_width(self) -> None:
        assert bootstrap_interval(np.full(7, 0.25)) == (0.25, 0.25)

    def test_has_its_own_seeded_generator(self) -> None:
        values = np.random.default_rng(0).normal(size=9)
        np.random.seed(1)
        first = bootstrap_interval(values)
        np.random.seed(2)
        assert bootstrap_interval(values) == first
        assert bootstrap_interval(values, seed=1) != first

    def test_covers_the_mean_of_many_normal_values_as_theory_says(self) -> None:
        values = np.random.default_rng(0).normal(size=400)
        half = 1.96 * values.std() / 20
        expected = (values.mean() - half, values.mean() + half)
        assert bootstrap_interval(values) == pytest.approx(expected, abs=0.01)


class TestPairing:
    def test_differences_are_taken_workload_by_workload(self) -> None:
        # 9 - 10 = -1 and 18 - 20 = -2: mean -1.5, a tenth of (10 + 20) / 2.
        expected = Difference(mean=-1.5, low=-2, high=-1, relative=-0.1)
        assert paired_difference([9, 18], [10, 20]) == expected
        assert expected.is_clear

    def test_runs_are_paired_by_seed_and_those_without_a_partner_left_out(self) -> None:
        runs = [a_run("b", 1, 18), a_run("a", 0, 10), a_run("b", 2, 99), a_run("b", 0, 9)]
        evaluation = Evaluation.of(tiny_config(), ["a", "b"], [*runs, a_run("a", 1, 20)])
        assert evaluation.difference("b", E2E) == Difference(-1.5, -2, -1, -0.1)

    def test_one_workload_has_no_interval(self) -> None:
        difference = paired_difference([3.0], [2.0])
        assert difference == Difference(1, None, None, 0.5)
        assert not difference.is_clear

    def test_nothing_is_relative_to_zero(self) -> None:
        assert paired_difference([1.0, 1.0], [0.0, 0.0]).relative is None

    def test_an_interval_with_zero_is_not_clear(self) -> None:
        assert not paired_difference([1.0, 0.0], [0.0, 1.0]).is_clear

    def test_policies_get_the_same_requests(self) -> None:
        config = load_config("mem-chat-burst", {"workload.num_requests": 60})
        columns = ["request_id", "arrival_time", "prompt_tokens", "output_tokens"]
        tables = []
        for name in ("fifo-lwd", "random"):
            simulation, _ = run_in_process(config, make_policy(name), 3)
            tables.append(np.sort(simulation.records.table[columns], order="request_id"))
        np.testing.assert_array_equal(*tables)


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0, "0"),
            (1234.5, "1,234"),
            (12.345, "12.3"),
            (1.0, "1.00"),
            (0.01234, "0.0123"),
            (-0.5, "-0.500"),
        ],
    )
    def test_have_three_digits(self, value: float, text: str) -> None:
        assert format_number(value) == text

    def test_of_a_difference_are_signed_and_scaled(self) -> None:
        difference = Difference(-0.0015, -0.002, -0.001, -0.1)
        assert format_difference(difference, 1000) == "-1.50 [-2.00, -1.00] -10.0%*"
        assert format_difference(Difference(0.5, None, None, None), 1).strip() == "+0.500"


class TestTables:
    def test_of_a_hand_worked_run(self) -> None:
        """One request of 4 prompt and 3 output tokens, 1 s a step.

        The prefill's step makes the first token: TTFT 1 s, then 2 tokens in 2 s: TPOT 1 s, E2E 3 s,
        and 3 tokens in 3 s.
        """
        tenant = {
            "prompt": {"kind": "fixed", "tokens": 4},
            "output": {"kind": "fixed", "tokens": 3},
            "slo": "conversational",
        }
        config = tiny_config({"workload.tenants": [tenant]})
        runs = run_jobs([Job(config, "fifo-lwd", seed) for seed in (0, 1)])
        rows = rows_of(printed(Evaluation.of(config, ["fifo-lwd"], runs)))
        assert {label: cells for label, (*cells,) in rows.items()} == {
            **{f"TTFT {name} (s)": ["1.00"] for name in ("mean", "p50", "p99")},
            **{f"TPOT {name} (ms)": ["1,000"] for name in ("mean", "p50", "p99")},
            **{f"E2E {name} (s)": ["3.00"] for name in ("mean", "p50", "p99")},
            "strict goodput (%)": ["0"],  # TPOT 1 s is above 0.1 s
            "output tokens/s": ["1.00"],
            "preemptions": ["0"],
            "recomputed tokens": ["0"],
            "rejected": ["0"],
        }

    def test_show_means_and_paired_differences(self) -> None:
        runs = [a_run("a", 0, 10), a_run("a", 1, 20), a_run("b", 0, 9), a_run("b", 1, 18)]
        rows = rows_of(printed(Evaluation.of(tiny_config(), ["a", "b"], runs)))
        assert rows["E2E mean (s)"] == ["15.0", "13.5", "-1.50 [-2.00, -1.00] -10.0%*"]

    def test_put_many_policies_into_several_tables(self) -> None:
        names = [f"policy-{i}" for i in range(12)]
        runs = [a_run(name, seed, 1.0) for name in names for seed in (0, 1)]
        text = printed(Evaluation.of(tiny_config(), names, runs))
        assert len(rows_of(text)["E2E mean (s)"]) == 12 + 11
        assert max(map(len, text.splitlines())) <= 100

    def test_mark_a_policy_with_more_than_one_percent_of_illegal_actions(self) -> None:
        runs = [
            a_run("good", 0, 1.0, illegal_action_share=0.01),
            a_run("bad", 0, 1.0, illegal_action_share=0.02),
        ]
        text = printed(Evaluation.of(tiny_config(), ["good", "bad"], runs))
        assert rows_of(text)["illegal actions (%)"][:2] == ["1.00", "2.00"]
        marks = re.findall(r"(\w+): (\S+) of its actions were illegal", text)
        assert marks == [("bad", "2.0%")]

    def test_show_prefix_hits_and_weights_where_there_are_any(self) -> None:
        config = load_config("prod-mix", {"workload.num_requests": 30})
        runs = run_jobs([Job(config, "fifo-lwd", 0)])
        labels = [m.label for m in Evaluation.of(config, ["fifo-lwd"], runs).measures]
        assert {"prefix hit rate (%)", "weighted slowdown"} <= set(labels)


class TestThroughTheEnvironment:
    @pytest.mark.parametrize(
        ("scenario", "name", "requests"),
        [
            ("mem-chat-burst", "fifo-lwd", 120),
            ("mem-chat-burst", "sjf", 120),
            ("mem-chat-burst", "random", 120),
            ("mem-chat-burst", "most-work", 120),
            ("mem-chat-burst", "always-stop", 30),
            ("prod-mix", "fifo-lwd", 60),
            ("prod-mix", "random", 60),
        ],
    )
    def test_numbers_are_those_in_process(self, scenario: str, name: str, requests: int) -> None:
        tight = {"worker.vllm_params.num_gpu_blocks_override": 900}
        config = load_config(scenario, {"workload.num_requests": requests, **tight})
        _, direct = run_in_process(config, make_policy(name), 4)
        simulation, driven = run_through_env(config, make_policy(name), 4)
        assert driven.pop("illegal_actions") == 0
        assert driven.pop("illegal_action_share") == 0
        assert driven == direct
        assert driven["decisions"] > requests / 2
        assert driven["completed"] == len(simulation.records) == requests

    def test_the_horizon_ends_both_alike(self) -> None:
        config = load_config(
            "mem-chat-burst", {"workload.num_requests": 100, "env.horizon_s": 12.0}
        )
        _, direct = run_in_process(config, make_policy("sjf"), 0)
        _, driven = run_through_env(config, make_policy("sjf"), 0)
        assert 0 < driven["completed"] < 100
        assert {key: driven[key] for key in direct} == direct


class TestSources:
    def test_the_default_is_mem_chat_burst_at_its_highest_load(self) -> None:
        config = load_source(Source())
        assert config.name == "mem-chat-burst"
        assert config.workload.arrivals.load == 0.9
        assert config.workload.num_requests == 1000

    def test_load_and_overrides_are_the_users(self) -> None:
        overrides = {"worker.vllm_params.max_num_seqs": 3}
        config = load_source(Source("rich-azconv", load=0.5, requests=7, overrides=overrides))
        assert config.workload.arrivals.load == 0.5
        assert config.workload.num_requests == 7
        assert config.worker.vllm_params.max_num_seqs == 3

    def test_formats_are_found_out(self, tmp_path: Path) -> None:
        lengths = tmp_path / "lengths.csv.gz"
        lengths.write_bytes(gzip.compress(b"input_length,output_length\n5,6\n"))
        assert [detect_format(path) for path in (AZURE, MOONCAKE, lengths)] == [
            "azure",
            "mooncake",
            "lengths",
        ]

    def test_an_unknown_format_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        path.write_text("time,tokens\n1,2\n")
        with pytest.raises(TraceError, match="'time,tokens'"):
            detect_format(path)

    @pytest.mark.parametrize(
        ("trace", "worker"), [(AZURE, "trace-azure-conv"), (MOONCAKE, "trace-mooncake")]
    )
    def test_a_trace_is_whole_and_as_recorded_on_the_worker_of_its_scenario(
        self, trace: Path, worker: str
    ) -> None:
        config, scenario = load_source(Source(trace=trace)), load_config(worker)
        assert (config.worker, config.kvc) == (scenario.worker, scenario.kvc)
        workload = config.workload
        assert (workload.path, workload.rate_scale) == (str(trace), 1.0)
        assert (workload.window_s, workload.window_start_s) == (None, 0.0)
        assert workload.num_requests is None

    def test_a_trace_runs_on_the_worker_of_a_named_scenario(self) -> None:
        config = load_source(Source("slot8-chat", trace=AZURE))
        assert config.worker == load_config("slot8-chat").worker
        assert config.workload.path == str(AZURE)

    def test_a_window_without_a_start_is_drawn_for_each_workload(self) -> None:
        workload = load_source(Source(trace=AZURE, window_s=9.0)).workload
        assert (workload.window_s, workload.window_start_s) == (9.0, None)
        fixed = load_source(Source(trace=AZURE, window_s=9.0, window_start_s=3.0)).workload
        assert fixed.window_start_s == 3.0

    def test_lengths_arrive_as_in_a_synthetic_scenario(self, tmp_path: Path) -> None:
        path = tmp_path / "lengths.csv"
        path.write_text("input_length,output_length\n" + "5,6\n" * 50)
        config = load_source(Source(trace=path, load=0.4))
        arrivals = load_config("mem-chat-burst").workload.arrivals
        assert config.workload.arrivals == arrivals.model_copy(update={"load": 0.4})
        with pytest.raises(ConfigError, match="no times"):
            load_source(Source("trace-mooncake", trace=path))

    @pytest.mark.parametrize(
        ("source", "flag"),
        [
            (Source(window_s=3.0), "--window"),
            (Source(rate_scale=2.0), "--rate-scale"),
            (Source(max_tokens=3), "--max-tokens"),
            (Source(skip_malformed=True), "--on-error"),
            (Source(trace=AZURE, load=0.5), "--load"),
        ],
    )
    def test_what_does_not_apply_is_refused(self, source: Source, flag: str) -> None:
        with pytest.raises(ConfigError, match=f"{flag}: got"):
            load_source(source)


class TestFiles:
    def test_a_failed_write_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        path = tmp_path / "results.json"
        write_atomically(path, b"old")
        with pytest.raises(TypeError):
            write_atomically(path, "not bytes")  # type: ignore[arg-type]
        assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
        assert path.read_bytes() == b"old"


# --- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("evaluate_script", SCRIPT)
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


def without_meta(out: Path) -> dict[str, Any]:
    results = json.loads((out / "results.json").read_text())
    del results["meta"]
    return results


def record_bytes(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "records").iterdir())}


TINY = {"requests": 40, "workloads": 2, "policies": ("fifo-lwd", "random")}


class TestCommand:
    def test_in_a_process_of_its_own(self, tmp_path: Path) -> None:
        out = tmp_path / "results"
        command = [sys.executable, str(SCRIPT), "--out", str(out), "--workers", "2"]
        options = ["--requests", "40", "--workloads", "2", "--policies", "fifo-lwd", "random"]
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, check=False, env={"COLUMNS": "99"}
        )
        assert done.returncode == 0, done.stderr
        results = json.loads((out / "results.json").read_text())
        rows = rows_of(done.stdout)
        for label, key, scale in (
            ("E2E mean (s)", "e2e_s.mean", 1),
            ("TPOT p99 (ms)", "tpot_s.p99", 1000),
            ("strict goodput (%)", "goodput", 100),
        ):
            means = [results["means"][policy][key] for policy in ("fifo-lwd", "random")]
            assert rows[label][:2] == [format_number(scale * mean) for mean in means]
            (entry,) = (each for each in results["differences"] if each["metric"] == key)
            fields = {name: entry[name] for name in ("mean", "low", "high", "relative")}
            difference = format_difference(Difference(**fields), scale).strip()
            assert rows[label][2] == difference
        assert results["meta"]["complete"]
        assert "--requests 40" in results["meta"]["command"]
        assert results["config"]["name"] == "mem-chat-burst"
        assert results["meta"]["versions"].keys() >= {"opal-gym", "numpy", "simpy", "python"}

        one = tmp_path / "one"
        again = [sys.executable, str(SCRIPT), "--out", str(one), *options]
        subprocess.run(again, capture_output=True, check=True)
        assert without_meta(one) == without_meta(out)
        assert record_bytes(one) == record_bytes(out)

    def test_bad_input_ends_the_process_with_2_and_a_line(self, tmp_path: Path) -> None:
        command = [sys.executable, str(SCRIPT), "--scenario", "mem-chat-brust"]
        done = subprocess.run(
            [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert "did you mean 'mem-chat-burst'?" in done.stderr
        assert not (tmp_path / "out").exists()

    def test_writes_a_record_of_every_request(self, main: Main, tmp_path: Path) -> None:
        assert main(out=tmp_path, **TINY)[0] == 0
        names = [f"{policy}-{seed}.jsonl.gz" for policy in TINY["policies"] for seed in (0, 1)]
        assert sorted(record_bytes(tmp_path)) == sorted(names)
        results = without_meta(tmp_path)
        assert [run["records"] for run in results["runs"]] == [f"records/{name}" for name in names]
        for run in results["runs"]:
            lines = gzip.decompress((tmp_path / run["records"]).read_bytes()).splitlines()
            records = [json.loads(line) for line in lines]
            assert sorted(record["request_id"] for record in records) == list(range(40))
            ends = [record["_7_decode_done_time"] for record in records]
            e2e = np.subtract(ends, [record["arrival_time"] for record in records])
            assert run["metrics"]["e2e_s"]["mean"] == pytest.approx(e2e.mean())

    def test_writes_a_time_series_beside_the_records(self, main: Main, tmp_path: Path) -> None:
        """Of the vLLM worker alone, in order of time, until the worker is empty."""
        assert main(**{**TINY, "out": tmp_path, "policies": ("fifo-lwd", "single-stage")})[0] == 0
        names = [path.name for path in sorted((tmp_path / "time-series").iterdir())]
        assert names and all(name.startswith("fifo-lwd-") for name in names)
        lines = gzip.decompress((tmp_path / "time-series" / names[0]).read_bytes()).splitlines()
        samples = [json.loads(line) for line in lines]
        times = [sample["time"] for sample in samples]
        assert times == sorted(times)
        assert samples[-1]["running_requests"] == samples[-1]["waiting_requests"] == 0

    def test_writes_no_records_if_told_so(self, main: Main, tmp_path: Path) -> None:
        assert main(out=tmp_path, no_records=True, **TINY)[0] == 0
        assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
        assert without_meta(tmp_path)["runs"][0]["records"] is None

    def test_through_the_environment_writes_the_same_numbers(
        self, main: Main, tmp_path: Path
    ) -> None:
        assert main(out=tmp_path / "direct", **TINY)[0] == 0
        code, text, _ = main(out=tmp_path / "env", through_env=True, **TINY)
        assert code == 0
        assert rows_of(text)["illegal actions (%)"][:2] == ["0", "0"]
        assert record_bytes(tmp_path / "direct") == record_bytes(tmp_path / "env")
        direct, driven = without_meta(tmp_path / "direct"), without_meta(tmp_path / "env")
        for policy, means in direct["means"].items():
            assert driven["means"][policy].items() >= means.items()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"scenario": "nope"}, "'nope'"),
            ({"policies": ("fifo-lwd", "sfj")}, "'sfj'.*vllm-fcfs"),
            ({"policies": ("sjf", "sjf")}, "'sjf' twice"),
            ({"policies": ()}, "--policies: got none"),
            ({"trace": Path("/no/such/file.csv")}, "No such file"),
            ({"workloads": 0}, "--workloads: got 0"),
            ({"workers": 0}, "--workers: got 0"),
            ({"requests": -1}, "--requests: got -1"),
            ({"load": 0.0}, "--load: got 0"),
            ({"set": (("workload.num_requests",),)}, "--set: got 'workload.num_requests'"),
            ({"set": (("worker.vllm_params.max_num_seq=3",),)}, "'max_num_seqs'"),
            ({"set": (("worker.vllm_params.num_gpu_blocks_override=1",),)}, "all too long"),
            ({"scenario": "trace-mooncake"}, "conversation_trace.jsonl.*No such file"),
            ({"window": 5.0}, "--window: got 5.0"),
        ],
    )
    def test_bad_input_gets_one_line(
        self, main: Main, tmp_path: Path, arguments: dict[str, Any], message: str
    ) -> None:
        code, out, err = main(**{"out": tmp_path / "out", **arguments})
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert re.search(message, line)
        assert not (tmp_path / "out").exists()

    def test_a_place_that_cannot_be_written_to_is_refused(self, main: Main, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        code, _, err = main(out=tmp_path / "file")
        assert code == 2
        assert re.fullmatch("error: --out: cannot write to .*: File exists\n", err)

    def test_a_fixed_window_is_run_once_unless_more_is_asked_for(
        self, main: Main, tmp_path: Path
    ) -> None:
        fixed = {"trace": AZURE, "window": 5.0, "window_start": 10.0, "out": tmp_path}
        code, text, _ = main(**fixed)
        assert code == 0
        assert "nothing but the predicted lengths" in text
        assert len(without_meta(tmp_path)["runs"]) == 1
        main(workloads=2, **fixed)
        assert len(without_meta(tmp_path)["runs"]) == 2

    def test_drawn_windows_are_run_five_times(self, main: Main, tmp_path: Path) -> None:
        code, text, _ = main(trace=AZURE, window=5.0, out=tmp_path)
        assert code == 0
        assert "nothing but the predicted lengths" not in text
        assert len(without_meta(tmp_path)["runs"]) == 5

    def test_says_what_was_left_out_and_rejected(self, main: Main, tmp_path: Path) -> None:
        rows = ["1,100,5", "2,300,5", "3,x,5", "4,90,5"]
        path = tmp_path / "trace.csv"
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            + "".join(f"2024-01-01 00:00:0{row}\n" for row in rows)
        )
        trace = {"trace": path, "out": tmp_path / "out"}
        assert "x" in main(**trace)[2]
        # 96 tokens: room for 90 + 5, not for 100 + 5.
        pool = ("worker.vllm_params.num_gpu_blocks_override=6",)
        code, text, _ = main(on_error="skip", max_tokens=200, set=(pool,), **trace)
        assert code == 0
        assert "left out of a workload: 1 rows, malformed" in text
        assert "left out of a workload: 1 rows, more than 200 tokens" in text
        assert "rejected: 1 requests of all workloads, such as: 105 tokens exceed" in text
        assert rows_of(text)["rejected"] == ["1.00"]

    def test_an_interrupt_keeps_what_has_finished(
        self, script: ModuleType, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(jobs: Sequence[Job], workers: int) -> Iterator[Run]:
            yield from run_jobs(jobs[:3], workers)
            raise KeyboardInterrupt

        monkeypatch.setattr(script, "run_jobs", interrupted)
        code, text, _ = main(out=tmp_path, **TINY)
        assert code == 130
        assert "interrupted: 3 of 4 runs had finished" in text
        results = json.loads((tmp_path / "results.json").read_text())
        assert not results["meta"]["complete"]
        assert len(results["runs"]) == len(record_bytes(tmp_path)) == 3

    def test_an_interrupt_before_the_first_run_writes_nothing(
        self, script: ModuleType, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(jobs: Sequence[Job], workers: int) -> Iterator[Run]:
            raise KeyboardInterrupt
            yield

        monkeypatch.setattr(script, "run_jobs", interrupted)
        code, text, _ = main(out=tmp_path, **TINY)
        assert (code, list(tmp_path.iterdir())) == (130, [])
        assert "nothing was written" in text


def test_processes_end_when_nobody_waits_for_them_any_more() -> None:
    config = load_config("mem-chat-burst", {"workload.num_requests": 20})
    runs = run_jobs([Job(config, "fifo-lwd", seed) for seed in range(50)], workers=2)
    before = multiprocessing.active_children()
    next(runs)
    runs.close()
    assert multiprocessing.active_children() == before


class TestLowerBounds:
    def test_stand_beside_the_means_with_each_gap(self) -> None:
        """Bounds of 8 and 12, mean 10: means of 15 and 11 are 50 % and 10 % above."""
        runs = [a_run("a", 0, 10), a_run("a", 1, 20), a_run("b", 0, 9), a_run("b", 1, 13)]
        bounds = {0: LowerBound(7.0, prices=8.0), 1: LowerBound(12.0)}
        evaluation = Evaluation.of(tiny_config(), ["a", "b"], runs, bounds)
        rows = rows_of(printed(evaluation))
        assert rows["lower bound (s)"] == ["10.0", "10.0"]
        assert rows["gap to it (%)"] == ["+50.0", "+10.0"]
        written = results(evaluation, {(run.policy, run.workload_seed): {} for run in runs})
        assert written["gaps"] == pytest.approx({"a": 0.5, "b": 0.1})
        assert [bound["mean"] for bound in written["lower_bounds"]] == [8, 12]

    def test_say_nothing_about_the_single_stage_worker(self) -> None:
        runs = [a_run("a", 0, 10), a_run("single-stage", 0, 90)]
        evaluation = Evaluation.of(tiny_config(), ["a", "single-stage"], runs, {0: LowerBound(8)})
        assert rows_of(printed(evaluation))["gap to it (%)"] == ["+25.0", "–"]

    def test_are_computed_unless_told_otherwise(self, main: Main, tmp_path: Path) -> None:
        _, out, _ = main(out=tmp_path / "a", no_records=True, **TINY)
        assert "lower bound (s)" in out
        assert len(without_meta(tmp_path / "a")["lower_bounds"]) == 2
        _, out, _ = main(out=tmp_path / "b", no_records=True, no_bound=True, **TINY)
        assert "lower bound" not in out

    def test_a_horizon_has_none_and_says_so(self, main: Main, tmp_path: Path) -> None:
        changes = (("env.horizon_s=30",),)
        _, out, _ = main(out=tmp_path, no_records=True, set=changes, **TINY)
        assert "no lower bound: a horizon" in out
