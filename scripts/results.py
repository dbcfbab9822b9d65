"""Measures the published comparisons on test workloads, and writes docs/results.md.

python scripts/results.py --workers 2
python scripts/results.py --workloads 4 --cases prod-mix --out results/quick
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import Progress, TaskID

from agents.cards import card
from agents.evaluation import Run, draw_workload, run_jobs
from agents.files import check_writable, write_atomically
from agents.learning.policy_file import PRETRAINED, load_trained, pretrained_names
from agents.lower_bound import lower_bound
from agents.progress import progress_bar
from agents.provenance import provenance
from agents.published import CASES, WORKLOADS, Case, Outcome, entries, jobs, trace_cases
from agents.published_page import as_json, page
from agents.results import to_json
from agents.seeds import TEST

ROOT = Path(__file__).parents[1]
DOCS, TRACES = ROOT / "docs", ROOT / "../shared/data/traces"
BAD_INPUT, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Arguments:
    """Measure the published comparisons on test workloads, and write docs/results.md.

    Takes the presets of agents/presets and the policies of agents/pretrained as they are; it tunes
    and trains nothing.
    """

    workloads: int = WORKLOADS
    """Test workloads of each case, with seeds from 0."""
    cases: tuple[str, ...] = ()
    """Scenarios; default: all of the published table."""
    traces: Path = TRACES
    """Directory of the recorded traces; without its files transfer to them is not measured."""
    workers: int = 1
    """Processes; the results do not depend on it."""
    out: Path = DOCS
    """Directory of results.md, results.json and, unless it is docs, the policies' cards."""


def main(arguments: Arguments) -> int:
    console = Console()
    started = time.time()
    try:
        cases = chosen(arguments)
        check_writable(arguments.out)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return BAD_INPUT
    try:
        outcomes = measure(cases, arguments.workloads, arguments.workers)
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written")
        return INTERRUPTED
    meta = {**provenance(started, complete=True), "workers": arguments.workers}
    write_atomically(arguments.out / "results.json", to_json({**as_json(outcomes), "meta": meta}))
    path = arguments.out / "results.md"
    write_atomically(path, page(outcomes, meta["command"]).encode())
    write_cards(outcomes, arguments.out)
    for outcome in outcomes:
        console.print(f"{outcome.case.title}: {outcome.verdict()}", highlight=False)
    console.print(f"written: {path}", soft_wrap=True)
    return 0


def write_cards(outcomes: Sequence[Outcome], out: Path) -> None:
    """The cards of the shipped policies: beside them if the page is the published one."""
    directory = PRETRAINED if out == DOCS else out
    for name in pretrained_names():
        text = card(name, load_trained(name), outcomes)
        write_atomically(directory / f"{name}.md", text.encode())


def chosen(arguments: Arguments) -> list[Case]:
    known = sorted({case.scenario for case in CASES})
    for scenario in arguments.cases:
        if scenario not in known:
            raise ValueError(f"--cases: got {scenario!r}; allowed: {', '.join(known)}")
    if not 1 <= arguments.workloads <= len(TEST):
        allowed = f"1 to {len(TEST)}, as many as there are test seeds"
        raise ValueError(f"--workloads: got {arguments.workloads}; allowed: {allowed}")
    if arguments.workers < 1:
        raise ValueError(f"--workers: got {arguments.workers}; allowed: at least 1")
    if arguments.cases:
        return [case for case in CASES if case.scenario in arguments.cases]
    return [*CASES, *trace_cases(arguments.traces)]


def measure(cases: Sequence[Case], workloads: int, workers: int) -> list[Outcome]:
    runs = sum(len(entries(case)) for case in cases) * workloads
    with progress_bar("runs") as progress:
        task = progress.add_task("", total=runs + workloads * len(cases))
        return [outcome_of(case, workloads, workers, progress, task) for case in cases]


def outcome_of(
    case: Case, workloads: int, workers: int, progress: Progress, task: TaskID
) -> Outcome:
    columns = {}
    for column in entries(case):
        progress.update(task, description=f"{case.title}: {column}")
        finished = run_all(case, column, workloads, workers)
        columns[column] = sorted(
            progress_of(finished, progress, task), key=lambda run: run.workload_seed
        )
    progress.update(task, description=f"{case.title}: lower bound")
    config = case.config()
    bounds = []
    for seed in TEST[:workloads]:
        bounds.append(lower_bound(config, draw_workload(config, seed)).mean)
        progress.advance(task)
    return Outcome(case, columns, bounds)


def run_all(case: Case, column: str, workloads: int, workers: int) -> Iterator[Run]:
    with closing(run_jobs(jobs(case, entries(case)[column], workloads), workers)) as finished:
        yield from finished


def progress_of(runs: Iterator[Run], progress: Progress, task: TaskID) -> Iterator[Run]:
    for run in runs:
        yield run
        progress.advance(task)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Arguments, config=(tyro.conf.FlagCreatePairsOff,))))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
