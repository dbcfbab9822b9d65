"""A Ray cluster: the same results as in process, files, interrupts, and addresses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agents.missing
from agents.cluster import connect
from agents.evaluation import Job, Run, run_job, run_jobs
from opal_gym.config import CONFIGS, load_config
from tests.ray_cluster import cluster

__all__ = ["cluster"]

ROOT = CONFIGS.parent
CONFIG = load_config("mem-chat-burst", {"workload.num_requests": 30})


def by_job(runs: Iterator[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (run.policy, run.workload_seed))


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_runs_and_files_are_those_of_this_process(cluster: None, tmp_path: Path) -> None:
    def jobs(out: Path) -> list[Job]:
        return [
            Job(CONFIG, policy, seed, records=out / "records" / f"{policy}-{seed}.jsonl.gz")
            for policy in ("fifo-lwd", "sjf")
            for seed in (0, 1)
        ]

    here, there = tmp_path / "here", tmp_path / "there"
    assert by_job(run_jobs(jobs(there), None)) == by_job(run_jobs(jobs(here)))
    assert contents(there) == contents(here)
    assert len(contents(here)) == 8  # of each of four jobs the records and the time series


def test_relative_paths_begin_where_the_jobs_were_made(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's processes were started in another directory."""
    sample = "azure_like.csv"
    (tmp_path / sample).write_bytes((CONFIGS / "samples" / sample).read_bytes())
    monkeypatch.chdir(tmp_path)
    config = load_config("trace-azure-conv", {"workload.path": str(tmp_path / sample)})
    workload = config.workload.model_copy(update={"path": sample})
    relative = Job(config.model_copy(update={"workload": workload}), "fifo-lwd", 0)
    assert list(run_jobs([relative], None)) == [run_job(replace(relative, config=config))]


def test_an_error_of_a_job_is_raised(cluster: None) -> None:
    with pytest.raises(ValueError, match="policy: got 'nope'"):
        list(run_jobs([Job(CONFIG, "nope", 0)], None))


def test_runs_under_way_are_cancelled_when_nobody_waits_any_more(cluster: None) -> None:
    """Fifty runs; after the first nothing of the others keeps the cluster's two CPUs."""
    import ray

    runs = run_jobs([Job(CONFIG, "fifo-lwd", seed) for seed in range(50)], None)
    next(runs)
    runs.close()
    free = ray.remote(num_cpus=2)(lambda: None).remote()
    assert ray.wait([free], timeout=60)[0] == [free]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_an_address_without_a_cluster_is_refused(address: str) -> None:
    pytest.importorskip("ray", reason="needs the extra `rllib`")
    with pytest.raises(ValueError, match=f"got '{address}'; allowed: host:port of a running"):
        connect(address)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents.missing, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=r"needs the extra 'rllib' \(ray\): pip install"):
        connect("local")


class TestScripts:
    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
        return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    @pytest.mark.slow
    def test_evaluate_writes_the_same_results(self, tmp_path: Path) -> None:
        pytest.importorskip("ray", reason="needs the extra `rllib`")
        given = ["--policies", "fifo-lwd", "sjf", "--requests", "30", "--workloads", "2"]
        ways: dict[str, list[str]] = {"here": [], "there": ["--ray", "local"]}
        results: dict[str, Any] = {}
        for name, how in ways.items():
            out = tmp_path / name
            result = self.run("evaluate.py", *given, "--no-bound", "--out", str(out), *how)
            assert result.returncode == 0, result.stderr
            results[name] = json.loads((out / "results.json").read_text())
        metas = [results[name].pop("meta") for name in ways]
        assert [meta["ray"] for meta in metas] == [None, "local"]
        assert json.dumps(results["here"]) == json.dumps(results["there"])

    @pytest.mark.parametrize("script", ["evaluate.py", "tune.py"])
    def test_processes_and_a_cluster_exclude_each_other(self, script: str, tmp_path: Path) -> None:
        result = self.run(script, "--workers", "2", "--ray", "--out", str(tmp_path / "out"))
        assert (result.returncode, result.stderr) == (
            2,
            "error: --workers: got 2; allowed: without --ray\n",
        )

    @pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
    @pytest.mark.parametrize("script", ["evaluate.py", "tune.py"])
    def test_a_script_says_what_is_missing(self, script: str, tmp_path: Path) -> None:
        result = self.run(script, "--ray", "--out", str(tmp_path / "out"))
        assert result.returncode == 2
        assert result.stderr.startswith("error: this needs the extra 'rllib' (ray)")
