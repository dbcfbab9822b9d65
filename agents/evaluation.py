"""Runs of policies on workloads, in one or several processes."""

from __future__ import annotations

import gzip
import multiprocessing
import signal
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import gymnasium

from agents.files import write_atomically
from agents.policies import SINGLE_STAGE, make_policy, policy_names
from opal_gym.config import Config, DecisionName, load_config
from opal_gym.envs.opal_vllm import OpalVLLMEnv
from opal_gym.sim.decision import STOP, Policy
from opal_gym.sim.metrics import Metrics
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import Workload, make_workload

Files = dict[Path, bytes]
"""Contents by path."""


@dataclass(frozen=True)
class Job:
    """One policy on one workload.

    Attributes:
        config: What is simulated.
        policy: Name of the policy.
        workload_seed: Seed of the workload; the policy's own randomness comes from it, too.
        through_env: Drive `OpalVLLM-v0` instead of answering in process.
        records: File of the requests' records; None: none are written.
    """

    config: Config
    policy: str
    workload_seed: int
    through_env: bool = False
    records: Path | None = None


@dataclass(frozen=True)
class Run:
    """What became of a job.

    Attributes:
        policy: Name of the policy.
        workload_seed: Seed of the workload.
        metrics: `opal_gym.sim.metrics`, and the illegal actions where the environment was driven.
        rejections: Rejected requests by reason.
    """

    policy: str
    workload_seed: int
    metrics: Metrics
    rejections: dict[str, int] = field(default_factory=dict)


def draw_workload(config: Config, seed: int) -> Workload:
    """The workload that every policy gets for a seed.

    Raises:
        TraceError: The trace is not usable.
    """
    return make_workload(
        config.workload,
        seed,
        length_information=config.simulation.length_information,
        hash_block_tokens=config.kvc.hash_block_tokens,
    )


def run_job(job: Job) -> Run:
    """Runs a job, and writes its records and its time series."""
    run, files = simulate(job)
    write_files(files)
    return run


def simulate(job: Job) -> tuple[Run, Files]:
    """Runs a job and writes nothing; the run, and its records and its time series as files."""
    changes: dict[str, object] = {"simulation.record_time_series": job.records is not None}
    policy = job.policy
    if policy == SINGLE_STAGE:
        changes["worker.kind"] = "single_stage"
        policy = policy_names()[0]
    drive = run_through_env if job.through_env else run_in_process
    config = load_config(job.config, changes)
    simulation, metrics = drive(config, make_policy(policy), job.workload_seed)
    files: Files = {}
    if job.records is not None:
        files[job.records] = compressed(simulation.records.export())
        if simulation.time_series:
            files[time_series_path(job.records)] = compressed(simulation.time_series.export())
    return Run(job.policy, job.workload_seed, metrics, dict(simulation.ledger.rejections)), files


def run_in_process(
    config: Config, policy: Policy, workload_seed: int
) -> tuple[Simulation, Metrics]:
    """Runs an episode in which the policy answers all decisions in process."""
    simulation = Simulation(
        config,
        draw_workload(config, workload_seed),
        policy,
        policy_seed=workload_seed,
        horizon_s=config.env.horizon_s,
    )
    return simulation, simulation.run()


def run_through_env(
    config: Config, policy: Policy, workload_seed: int
) -> tuple[Simulation, Metrics]:
    """Runs the same episode by `reset` and `step` of the environment."""
    env = gymnasium.make("OpalVLLM-v0", scenario=config, decisions=get_args(DecisionName))
    inner = env.unwrapped
    assert isinstance(inner, OpalVLLMEnv)
    policy.reset(workload_seed)
    env.reset(seed=workload_seed, options={"workload_seed": workload_seed})
    over = False
    while not over:
        decision = inner.decision
        answer = STOP if decision is None else policy.choose(decision)
        _, _, terminated, truncated, info = env.step(inner.action_of(answer))
        over = terminated or truncated
    simulation = inner.simulation
    env.close()
    return simulation, info["episode_metrics"]


def time_series_path(records: Path) -> Path:
    """Where the time series lies that belongs to a file of records."""
    return records.parent.parent / "time-series" / records.name


def compressed(lines: Iterable[str]) -> bytes:
    """Compresses lines; equal lines give equal bytes."""
    text = "".join(f"{line}\n" for line in lines)
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def write_files(files: Files) -> None:
    """Writes what `simulate` gave."""
    for path, content in files.items():
        write_atomically(path, content)


def run_jobs(jobs: Sequence[Job], workers: int | None = 1) -> Generator[Run, None, None]:
    """Runs jobs, and yields each run when it has finished, in any order.

    Args:
        jobs: What to run.
        workers: Processes; with 1 all runs in this one; None: those of the Ray cluster that
            `agents.cluster.connect` connected to.
    """
    if workers is None:
        from agents.cluster import run_on_cluster

        yield from run_on_cluster(jobs)
    elif workers == 1:
        yield from map(run_job, jobs)
    else:
        yield from _run_in_processes(jobs, workers)


def _run_in_processes(jobs: Sequence[Job], workers: int) -> Generator[Run, None, None]:
    others = multiprocessing.active_children()
    executor = ProcessPoolExecutor(
        min(workers, len(jobs)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_ignore_interrupts,
    )
    try:
        for future in as_completed([executor.submit(run_job, job) for job in jobs]):
            yield future.result()
    except BaseException:
        # Nobody waits for the runs under way.
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; this one's parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
