"""Chooses the best of a grid of heuristics for a scenario, on validation workloads.

python scripts/tune.py --scenario mem-longctx --workers 2
python scripts/tune.py --scenario rich-azconv --load 0.7 --metric goodput --workers 2
python scripts/evaluate.py --scenario mem-longctx --policies fifo-lwd preset:mem-longctx-e2e-0.9
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from agents.cluster import RayAddress, connect
from agents.comparison import paired_difference
from agents.evaluation import draw_workload
from agents.files import check_writable, write_atomically
from agents.grid import ADMISSION, CHUNKS, GATES, ORDERS, VICTIMS, Heuristic, grid
from agents.presets import PREFIX, PRESETS
from agents.progress import progress_bar
from agents.provenance import provenance
from agents.report import format_difference, format_number
from agents.results import to_json
from agents.seeds import VALIDATION, validation_seeds
from agents.sources import SCENARIO_REQUESTS, Source, load_source, parse_override
from agents.tuning import METRICS, MetricName, Round, Search, Standing, plan_rounds
from opal_gym.config import Config, ConfigError
from opal_gym.sim.workloads import TraceError

RULES = tuple(field.name for field in fields(Heuristic))
SHOWN = 10
BAD_INPUT, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Arguments:
    """Choose the best of a grid of heuristics for a scenario, by successive halving.

    The grid is an admission order × a gate × a victim rule × a chunk rule. All members run the
    first workloads, the best of them all the others, too. The best of the last round is written as
    a preset, which evaluate.py takes as a policy.
    """

    scenario: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "mem-chat-burst"
    """Scenario, by name or as a JSON file."""
    metric: MetricName = "e2e"
    """What the members are ranked by."""
    load: float | None = None
    """Share of the saturated FIFO service rate; default: the scenario's, of a range the highest."""
    length_information: Literal["predicted", "oracle", "none"] | None = None
    """What is known of output lengths; default: as the scenario says."""
    requests: int = SCENARIO_REQUESTS
    """Requests of a workload."""
    workloads: tuple[int, ...] = (2, 20)
    """Workloads that a member has run at the end of each round."""
    keep: tuple[int, ...] = (30,)
    """Members of each round but the first."""
    seed: int = VALIDATION.start
    """Seed of the first workload; all are validation seeds, 10000 to 19999."""
    admit: tuple[str, ...] = ()
    """Admission orders; default: fifo, spf, sjf, mem-sjf, aged, and weighted-sjf where the tenants'
    weights differ."""
    gate: tuple[str, ...] = GATES
    """Gates: none, watermark, or the largest predicted peak KV as a share of the pool."""
    victim: tuple[str, ...] = tuple(VICTIMS)
    """Victim rules."""
    chunk: tuple[str, ...] = CHUNKS
    """Chunk rules: full, 1/N of the token budget, or slack-Nms."""
    set: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Changes of the configuration, as key=value with dotted keys and JSON values."""
    workers: int = 1
    """Processes; the result does not depend on it."""
    ray: RayAddress = None
    """Spread the runs over a Ray cluster instead; ADDRESS as for evaluate.py."""
    name: str | None = None
    """Name of the preset; default: scenario, metric, load, and the length information if given."""
    out: Path = PRESETS
    """Directory of the preset."""


def main(arguments: Arguments) -> int:
    console = Console()
    started = time.time()
    try:
        config = load(arguments)
        members = members_of(arguments, config)
        search, rounds, seeds = prepare(arguments, config, members)
        name = name_of(arguments, config)
        check_writable(arguments.out)
        if arguments.ray is not None:
            connect(arguments.ray)
    except (ValueError, ConfigError, TraceError, OSError, ImportError) as error:
        for line in str(error).splitlines():
            Console(stderr=True).print(f"error: {line}", markup=False, soft_wrap=True)
        return BAD_INPUT
    console.print(
        f"{config.name}: {len(members)} heuristics by {METRICS[arguments.metric].measure.label}, "
        f"{search.total_runs} runs",
        highlight=False,
    )
    workers = None if arguments.ray is not None else arguments.workers
    interrupted = run_all(search, rounds, workers)
    rankings = search.rankings()
    if not rankings:
        console.print("interrupted before any run had finished; nothing was written")
        return INTERRUPTED
    print_ranking(rankings[-1], arguments, console)
    preset = {
        "policy": rankings[-1][0].policy,
        "scenario": config.name,
        "metric": arguments.metric,
        "seeds": list(seeds),
        "rounds": [each._asdict() for each in rounds],
        "rankings": [[asdict(each) for each in ranking] for ranking in rankings],
        "config": config.model_dump(mode="json"),
        "meta": {
            **provenance(started, complete=not interrupted),
            "workers": arguments.workers,
            "ray": arguments.ray,
        },
    }
    # What an interrupt leaves never takes the place of a whole search.
    path = arguments.out / (f"{name}.incomplete.json" if interrupted else f"{name}.json")
    write_atomically(path, to_json(preset))
    if interrupted:
        console.print(f"interrupted: {search.runs} of {search.total_runs} runs had finished")
    console.print(f"written: {path}, for --policies {policy_name(path)}", soft_wrap=True)
    return INTERRUPTED if interrupted else 0


# --- before anything runs ------------------------------------------------------------------------


def load(arguments: Arguments) -> Config:
    for name in ("requests", "workers"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}: got {getattr(arguments, name)}; allowed: at least 1")
    if arguments.ray is not None and arguments.workers != 1:
        raise ValueError(f"--workers: got {arguments.workers}; allowed: without --ray")
    overrides: dict[str, Any] = dict(
        parse_override(text) for group in arguments.set for text in group
    )
    if arguments.length_information:
        overrides["simulation.length_information"] = arguments.length_information
    return load_source(
        Source(
            scenario=arguments.scenario,
            requests=arguments.requests,
            load=arguments.load,
            overrides=overrides,
        )
    )


def members_of(arguments: Arguments, config: Config) -> tuple[Heuristic, ...]:
    weights = {tenant.weight for tenant in getattr(config.workload, "tenants", ())}
    orders = ORDERS if len(weights) < 2 else tuple(ADMISSION)
    given = (arguments.admit or orders, arguments.gate, arguments.victim, arguments.chunk)
    for name, rules in zip(RULES, given, strict=True):
        if len(set(rules)) < max(1, len(rules)):
            raise ValueError(f"--{name}: got {list(rules)}; allowed: at least one, each once")
    try:
        return grid(*given)
    except ValueError as error:
        raise ValueError(f"--{error}") from None


def prepare(
    arguments: Arguments, config: Config, members: tuple[Heuristic, ...]
) -> tuple[Search, list[Round], range]:
    try:
        rounds = plan_rounds(len(members), arguments.workloads, arguments.keep)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    try:
        seeds = validation_seeds(rounds[-1].workloads, arguments.seed)
    except ValueError as error:
        raise ValueError(f"--seed: {error}") from None
    draw_workload(config, seeds.start)
    names = [member.name for member in members]
    return Search(config, names, METRICS[arguments.metric], rounds, seeds), rounds, seeds


def name_of(arguments: Arguments, config: Config) -> str:
    arrivals = config.workload.arrivals
    parts = [
        config.name,
        arguments.metric,
        *([f"{arrivals.load:g}"] if arrivals is not None else []),
        *([arguments.length_information] if arguments.length_information else []),
    ]
    name = arguments.name or "-".join(parts)
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"--name: got {name!r}; allowed: letters, digits, '_', '-' and '.'")
    return name


def policy_name(path: Path) -> str:
    """How evaluate.py calls the preset of a file."""
    return PREFIX + (path.stem if path.parent == PRESETS else str(path))


# --- running -------------------------------------------------------------------------------------


def run_all(search: Search, rounds: list[Round], workers: int | None) -> bool:
    """Runs the search; returns whether the user interrupted it."""
    try:
        with progress_bar("runs") as progress, closing(search.run(workers)) as finished:
            task = progress.add_task(f"round 1 of {len(rounds)}", total=search.total_runs)
            for number in finished:
                progress.update(task, description=f"round {number} of {len(rounds)}", advance=1)
    except KeyboardInterrupt:
        return True
    return False


def print_ranking(ranking: list[Standing], arguments: Arguments, console: Console) -> None:
    best, label = ranking[0], METRICS[arguments.metric].measure.label
    table = Table(
        title=f"The best of {len(ranking)} over {len(best.values)} validation workload(s)",
        title_justify="left",
    )
    for rule in RULES:
        table.add_column(rule, no_wrap=True)
    table.add_column(label, justify="right")
    table.add_column("against the best", justify="right")
    for each in ranking[:SHOWN]:
        difference = paired_difference(list(each.values.values()), list(best.values.values()))
        heuristic = Heuristic.parse(each.policy)
        table.add_row(
            *(getattr(heuristic, rule) for rule in RULES),
            format_number(each.mean),
            "" if each is best else format_difference(difference, 1),
        )
    console.print(table)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Arguments, config=(tyro.conf.FlagCreatePairsOff,))))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
