"""The tables of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from agents.comparison import LEVEL, Difference
from agents.summary import ILLEGAL, MEAN_E2E, Evaluation

ILLEGAL_SHARE_LIMIT = 0.01
"""A policy with a larger share of illegal actions is marked."""


def print_tables(evaluation: Evaluation, console: Console) -> None:
    """Prints means over the workloads, then paired differences against the first policy."""
    seeds = len(evaluation.workload_seeds)
    title = f"Means over {seeds} workload{'s' if seeds > 1 else ''}"
    finished = evaluation.finished_policies
    for policies in _side_by_side(finished, console.width, cell=13):
        console.print(_means_table(evaluation, policies, title))
    _print_illegal(evaluation, console)
    others = [policy for policy in finished if policy != evaluation.policies[0]]
    title = f"Difference from {evaluation.policies[0]}"
    if seeds > 1:
        title += f" ({LEVEL:.0%} bootstrap interval over workloads; *: 0 is outside)"
    for policies in _side_by_side(others, console.width, cell=34):
        console.print(_differences_table(evaluation, policies, title))


def _side_by_side(policies: Sequence[str], width: int, cell: int) -> Iterator[Sequence[str]]:
    """The policies, as many at a time as have room beside the labels."""
    columns = max(1, (width - 22) // cell)
    for start in range(0, len(policies), columns):
        yield policies[start : start + columns]


def _means_table(evaluation: Evaluation, policies: Sequence[str], title: str) -> Table:
    table = _table(title, policies)
    for measure in evaluation.measures:
        cells = [
            format_number(measure.scale * evaluation.mean(policy, measure)) for policy in policies
        ]
        table.add_row(measure.label, *cells)
        if measure == MEAN_E2E and evaluation.bounds:
            _add_bounds(table, evaluation, policies)
    return table


def _add_bounds(table: Table, evaluation: Evaluation, policies: Sequence[str]) -> None:
    """What no scheduler's mean is below, and by how much each policy's is above it."""
    bounds = [evaluation.bound(policy) for policy in policies]
    gaps = [evaluation.gap(policy) for policy in policies]
    table.add_row(
        "  lower bound (s)", *("–" if bound is None else format_number(bound) for bound in bounds)
    )
    table.add_row(
        "  gap to it (%)", *("–" if gap is None else f"{100 * gap:+,.1f}" for gap in gaps)
    )


def _differences_table(evaluation: Evaluation, policies: Sequence[str], title: str) -> Table:
    table = _table(title, policies)
    for measure in evaluation.measures:
        cells = [
            format_difference(evaluation.difference(policy, measure), measure.scale)
            for policy in policies
        ]
        table.add_row(measure.label, *cells)
    return table


def _table(title: str, policies: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("metric", no_wrap=True)
    for policy in policies:
        table.add_column(policy, justify="right")
    return table


def format_number(value: float, sign: str = "") -> str:
    """At least three significant digits, and thousands separated."""
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:{sign},.{min(decimals, 6)}f}"


def format_difference(difference: Difference | None, scale: float) -> str:
    """Mean, interval and relative difference of a table's cell."""
    if difference is None:
        return "–"
    text = format_number(scale * difference.mean, "+")
    if difference.low is not None and difference.high is not None:
        ends = (format_number(scale * end, "+") for end in (difference.low, difference.high))
        text += f" [{', '.join(ends)}]"
    if difference.relative is not None:
        decimals = 1 if abs(difference.relative) < 1 else 0
        text += f" {difference.relative:+,.{decimals}%}"
    return text + ("*" if difference.is_clear else " ")


def _print_illegal(evaluation: Evaluation, console: Console) -> None:
    if ILLEGAL not in evaluation.measures:
        return
    for policy in evaluation.finished_policies:
        share = evaluation.mean(policy, ILLEGAL)
        if share > ILLEGAL_SHARE_LIMIT:
            console.print(
                f"{policy}: {share:.1%} of its actions were illegal and replaced by the first "
                "candidate; its numbers are not its own",
                style="bold red",
                soft_wrap=True,
            )
