"""Compares policies over workloads that are the same for all of them.

python scripts/evaluate.py --policies fifo-lwd sjf spf --workers 2
python scripts/evaluate.py --trace configs/samples/azure_like.csv --policies fifo-lwd sjf
python scripts/evaluate.py --policies fifo-lwd sjf spf --ray 10.0.0.1:6379
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console

from agents import make_policy, policy_names
from agents.cluster import RayAddress, connect
from agents.evaluation import Job, Run, draw_workload, run_jobs
from agents.files import check_writable, write_atomically
from agents.lower_bound import LowerBound, lower_bound, no_bound_reason
from agents.policies import OTHERS, SINGLE_STAGE
from agents.progress import progress_bar
from agents.provenance import provenance
from agents.report import print_tables
from agents.results import results, to_json
from agents.seeds import TEST
from agents.sources import Source, load_source, parse_override
from agents.summary import Evaluation
from opal_gym.config import Config, ConfigError
from opal_gym.sim.simulation import accepted_requests
from opal_gym.sim.workloads import TraceError, Workload

DEFAULT_WORKLOADS = 5
BAD_INPUT, INTERRUPTED = 2, 130


class InputError(ValueError):
    """A mistake of the user's, found before anything ran."""


@dataclass(frozen=True)
class Arguments:
    """Compare policies over workloads that are the same for all of them.

    Prints means over the workloads and paired differences from the first policy, and writes
    results.json and every request's record.
    """

    scenario: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = None
    """Scenario, by name or as a JSON file; default: mem-chat-burst. With --trace only its worker
    is used; default then: the trace-* scenario of the trace's format (lengths: mem-chat-burst)."""
    policies: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="Policies; the others are compared with the first. One or more of "
            + ", ".join(policy_names())
            + f"; {OTHERS}; or {SINGLE_STAGE}, the worker that serves one request at a time"
        ),
    ] = (policy_names()[0],)
    workloads: int | None = None
    """Workloads, with consecutive seeds; default: 5, or 1 for a fixed window of a trace, in which
    another seed changes nothing but the predicted lengths."""
    seed: int = TEST.start
    """Seed of the first workload; 0 to 9999 are for tests, 10000 to 19999 for tuning, and the rest
    for training."""
    requests: int | None = None
    """Requests of a workload; default: 1000 for scenarios, the whole window for --trace."""
    load: float | None = None
    """Share of the saturated FIFO service rate; default: the scenario's, of a range the highest."""
    trace: Path | None = None
    """Trace to replay; arrivals as recorded unless --rate-scale."""
    format: Literal["azure", "mooncake", "lengths"] | None = None
    """Format of the trace; default: found out from its first line."""
    window: float | None = None
    """Seconds of the trace in a workload; default: all of it."""
    window_start: float | None = None
    """Start of the window in trace seconds, the same for all workloads; default: drawn for each
    workload if --window or --requests is given."""
    rate_scale: float | None = None
    """Arrivals are this much faster than recorded."""
    max_tokens: int | None = None
    """Leave out requests of the trace with more prompt + output tokens."""
    on_error: Literal["error", "skip"] = "error"
    """What a malformed row of the trace does; skipped rows are counted."""
    set: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Changes of the configuration, as key=value with dotted keys and JSON values."""
    workers: int = 1
    """Processes; the results do not depend on it."""
    ray: RayAddress = None
    """Spread the runs over a Ray cluster instead: host:port of its head, auto (the one begun on
    this machine) or local (a new one); without ADDRESS: that of RAY_ADDRESS, or else local."""
    through_env: bool = False
    """Drive OpalVLLM-v0 with the policies' answers, instead of answering in process."""
    out: Path | None = None
    """Directory of the results; default: results/<scenario>."""
    no_records: bool = False
    """Do not write the requests' records."""
    no_bound: bool = False
    """Do not compute the lower bound on the mean E2E latency (some seconds a workload)."""


def main(arguments: Arguments) -> int:
    console = Console()
    try:
        config, workloads, out = prepare(arguments)
    except (InputError, ConfigError, TraceError, ImportError) as error:
        for line in str(error).splitlines():
            Console(stderr=True).print(f"error: {line}", markup=False, soft_wrap=True)
        return BAD_INPUT
    is_fixed = len(workloads) > 1 and only_predictions_differ(list(workloads.values()))
    if is_fixed and arguments.workloads is None:
        workloads = {arguments.seed: workloads[arguments.seed]}
    started = time.time()
    print_what_runs(config, workloads, is_fixed, console)
    jobs = make_jobs(arguments, config, list(workloads), out)
    workers = None if arguments.ray is not None else arguments.workers
    runs, interrupted = run_all(jobs, workloads, workers)
    if not runs:
        console.print("interrupted before any run had finished; nothing was written")
        return INTERRUPTED
    wants_bounds = not (arguments.no_bound or interrupted)
    bounds = bounds_of(config, workloads, console) if wants_bounds else {}
    evaluation = Evaluation.of(config, arguments.policies, runs, bounds)
    print_tables(evaluation, console)
    print_rejections(evaluation, console)
    meta = meta_of(arguments, started, complete=not interrupted)
    path = write_results(evaluation, details_of(jobs, workloads, out), out, meta)
    if interrupted:
        console.print(f"interrupted: {len(runs)} of {len(jobs)} runs had finished; kept in {out}")
        return INTERRUPTED
    console.print(f"written: {path}", soft_wrap=True)
    return 0


# --- before anything runs ------------------------------------------------------------------------


def prepare(arguments: Arguments) -> tuple[Config, dict[int, Workload], Path]:
    """The configuration, the workloads by seed, and a directory that can be written to."""
    check_numbers(arguments)
    check_policies(arguments.policies, arguments.through_env)
    config = load_source(
        Source(
            scenario=arguments.scenario,
            trace=arguments.trace,
            trace_format=arguments.format,
            window_s=arguments.window,
            window_start_s=arguments.window_start,
            rate_scale=arguments.rate_scale,
            max_tokens=arguments.max_tokens,
            skip_malformed=arguments.on_error == "skip",
            requests=arguments.requests,
            load=arguments.load,
            overrides=dict(parse_override(text) for group in arguments.set for text in group),
        )
    )
    workloads = draw_workloads(config, arguments.seed, arguments.workloads)
    out = arguments.out or Path("results") / config.name
    try:
        check_writable(out)
    except OSError as error:
        raise InputError(f"--out: cannot write to {str(out)!r}: {error.strerror}") from None
    connect_to(arguments.ray)
    return config, workloads, out


def check_numbers(arguments: Arguments) -> None:
    least = {"workloads": 1, "seed": 0, "requests": 1, "workers": 1, "window_start": 0}
    above = {"load": 0, "window": 0, "rate_scale": 0}
    for name, bound in (least | above).items():
        value = getattr(arguments, name)
        if value is not None and not (value > bound or (value == bound and name in least)):
            allowed = "at least" if name in least else "above"
            flag = name.replace("_", "-")
            raise InputError(f"--{flag}: got {value}; allowed: {allowed} {bound}")
    if arguments.ray is not None and arguments.workers != 1:
        raise InputError(f"--workers: got {arguments.workers}; allowed: without --ray")


def connect_to(address: str | None) -> None:
    try:
        if address is not None:
            connect(address)
    except ValueError as error:
        raise InputError(f"--ray: {error}") from None


def check_policies(policies: Sequence[str], through_env: bool) -> None:
    if not policies:
        raise InputError("--policies: got none; allowed: at least one")
    if through_env and SINGLE_STAGE in policies:
        raise InputError(f"--policies: got {SINGLE_STAGE!r}; allowed: without --through-env")
    for name in policies:
        if name != SINGLE_STAGE:
            check_policy(name)
        if policies.count(name) > 1:
            raise InputError(f"--policies: got {name!r} twice; allowed: each once")


def check_policy(name: str) -> None:
    try:
        make_policy(name)
    except ValueError as error:
        raise InputError(f"--policies: {error}; or {SINGLE_STAGE}") from None


def draw_workloads(config: Config, first_seed: int, count: int | None) -> dict[int, Workload]:
    """The workloads by seed."""
    seeds = range(first_seed, first_seed + (count or DEFAULT_WORKLOADS))
    workloads = {seed: draw_workload(config, seed) for seed in seeds}
    for seed, workload in workloads.items():
        if not accepted_requests(config, workload).any():
            raise InputError(
                f"workload {seed}: got {len(workload)} requests that are all too long for the "
                f"worker; allowed: at least one that fits {config.total_gpu_blocks} blocks and "
                f"max_model_len = {config.max_model_len}"
            )
    return workloads


def only_predictions_differ(workloads: Sequence[Workload]) -> bool:
    first, *others = workloads
    return all(
        np.array_equal(first.arrival_time, other.arrival_time)
        and np.array_equal(first.output_tokens, other.output_tokens)
        for other in others
    )


def make_jobs(arguments: Arguments, config: Config, seeds: Sequence[int], out: Path) -> list[Job]:
    """All policies of one workload before the next, so that an interrupt leaves whole pairs."""
    return [
        Job(
            config,
            policy,
            seed,
            through_env=arguments.through_env,
            records=None if arguments.no_records else records_path(out, policy, seed),
        )
        for seed in seeds
        for policy in arguments.policies
    ]


def records_path(out: Path, policy: str, seed: int) -> Path:
    name = re.sub(r"[^\w=,.-]", "_", policy)
    return out / "records" / f"{name}-{seed}.jsonl.gz"


# --- running -------------------------------------------------------------------------------------


def run_all(
    jobs: Sequence[Job], workloads: Mapping[int, Workload], workers: int | None
) -> tuple[list[Run], bool]:
    """The runs that finished, and whether the user interrupted the others."""
    runs: list[Run] = []
    requests = sum(len(workloads[job.workload_seed]) for job in jobs)
    try:
        with progress_bar("requests") as progress, closing(run_jobs(jobs, workers)) as finished:
            task = progress.add_task(f"run 1 of {len(jobs)}", total=requests)
            for run in finished:
                runs.append(run)
                progress.update(
                    task,
                    description=f"run {min(len(runs) + 1, len(jobs))} of {len(jobs)}",
                    advance=len(workloads[run.workload_seed]),
                )
    except KeyboardInterrupt:
        return runs, True
    return runs, False


def bounds_of(
    config: Config, workloads: Mapping[int, Workload], console: Console
) -> dict[int, LowerBound]:
    """Lower bounds by workload seed; none, and the reason is printed, where none holds."""
    reason = no_bound_reason(config)
    if reason:
        console.print(f"no lower bound: {reason}", soft_wrap=True)
        return {}
    with progress_bar("workloads") as progress:
        seeds = progress.track(list(workloads), description="lower bound")
        return {seed: lower_bound(config, workloads[seed]) for seed in seeds}


# --- what is said about it -----------------------------------------------------------------------


def print_what_runs(
    config: Config, workloads: Mapping[int, Workload], is_fixed: bool, console: Console
) -> None:
    first, *_, last = [*workloads, *workloads]
    some = list(workloads.values())
    seeds = f"seeds {first} to {last}" if len(some) > 1 else f"seed {first}"
    size = span_of([len(workload) for workload in some])
    rate = np.mean([len(workload) / (workload.arrival_time[-1] or 1.0) for workload in some])
    load = "rate scale" if config.workload.kind == "trace" else "load"
    console.print(
        f"{config.name}: {len(some)} workload(s) of {size} requests ({seeds}), "
        f"{load} {some[0].load:.3g}, {rate:.3g} requests/s",
        soft_wrap=True,
        highlight=False,
    )
    if is_fixed:
        console.print("fixed window: another seed changes nothing but the predicted lengths")
    for reason in sorted({reason for workload in some for reason in workload.left_out}):
        rows = span_of([workload.left_out.get(reason, 0) for workload in some])
        console.print(f"left out of a workload: {rows} rows, {reason}", highlight=False)


def span_of(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def print_rejections(evaluation: Evaluation, console: Console) -> None:
    """A worker rejects a request on arrival, whatever the policy."""
    rejections: Counter[str] = Counter()
    for run in {run.workload_seed: run for run in evaluation.runs}.values():
        rejections.update(run.rejections)
    if rejections:
        console.print(
            f"rejected: {rejections.total():,} requests of all workloads, such as: "
            f"{rejections.most_common(1)[0][0]}",
            highlight=False,
            soft_wrap=True,
        )


def write_results(
    evaluation: Evaluation, details: Mapping[tuple[str, int], Any], out: Path, meta: dict[str, Any]
) -> Path:
    """Everything but `meta` depends on the input alone."""
    path = out / "results.json"
    write_atomically(path, to_json({**results(evaluation, details), "meta": meta}))
    return path


def details_of(
    jobs: Sequence[Job], workloads: Mapping[int, Workload], out: Path
) -> dict[tuple[str, int], Any]:
    return {
        (job.policy, job.workload_seed): {
            "left_out": dict(workloads[job.workload_seed].left_out),
            "records": job.records and job.records.relative_to(out).as_posix(),
        }
        for job in jobs
    }


def meta_of(arguments: Arguments, started: float, complete: bool) -> dict[str, Any]:
    return {
        **provenance(started, complete=complete),
        "workers": arguments.workers,
        "ray": arguments.ray,
        "through_env": arguments.through_env,
    }


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Arguments, config=(tyro.conf.FlagCreatePairsOff,))))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
