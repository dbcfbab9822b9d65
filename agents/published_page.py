"""The page of the published comparisons, in Markdown, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from agents.comparison import Difference
from agents.evaluation import Run
from agents.learning_curves import PARTS, LearningCurve, learning_curves
from agents.published import KINDS, REQUESTS, TRANSFER, Outcome, entries
from agents.tuning import METRICS, MetricName

NOTHING = "–"
HEADROOM = 0.02
"""A scenario has headroom if anything is better than the grid by so much."""
STARVED = 1.2
"""Where p99 is so many times the opponent's, the page says so."""
COLUMNS = ("baseline", "grid", "grid, true lengths", "search", "learned")


def page(outcomes: Sequence[Outcome], command: str) -> str:
    """The whole page.

    Args:
        outcomes: The cases.
        command: What made it.
    """
    workloads = len(next(iter(outcomes[0].runs.values())))
    learned = [outcome for outcome in outcomes if "learned" in outcome.runs]
    cases = [outcome for outcome in outcomes if not outcome.case.trace]
    sections = [
        "# Results",
        f"Made by `{command}` from `agents/presets` and `agents/pretrained`. Numbers are means "
        f"over {workloads} test workloads of {REQUESTS:,} requests (seeds 0 to {workloads - 1}), "
        "which no training, tuning or choice of a checkpoint has seen; step times are those of the "
        "`calibrated` model; differences are paired by workload, with 95 % bootstrap intervals. "
        "Policies see predicted output lengths (σ = 0.6) unless the column says otherwise.",
        "## Headroom",
        "What better decisions can gain at most, before anything is learned: the baseline "
        "(`fifo-lwd`), the best member of the tuned grid (`scripts/tune.py`, chosen on validation "
        "workloads), the same member told the true output lengths (or the best that was tuned "
        "with them: see the last table), a scoring policy found by CMA-ES, and the lower bound on "
        "the mean E2E latency that no scheduler is below. A scenario is labelled "
        "*none* where neither true lengths, nor the search, nor a learned policy gain "
        f"{HEADROOM:.0%} on the grid.",
        table(["case", "metric", *COLUMNS[:4], "lower bound", "headroom"], map(headroom, cases)),
        "## Learned policies against the tuned grid",
        "The opponent is the grid's best member for this scenario and load (of `rich-chat`, the "
        "baseline). Negative is better.",
        table(
            ["case", "metric", "opponent", "learned", "difference", "floor", "goal", "verdict"],
            map(comparison, cases),
        ),
        "## Who pays for it",
        "A mean can be bought with the starvation of a few. p99 of E2E, Jain's index of the "
        "requests' speeds (1: all are slowed alike), and strict goodput, weighted by tenant.",
        table(
            ["case", "policy", "mean E2E (s)", "p99 E2E (s)", "Jain index", "weighted goodput (%)"],
            [row for outcome in outcomes for row in fairness(outcome)],
        ),
        *(sentence for outcome in learned if (sentence := starvation(outcome))),
        "## What the lengths are worth",
        "The same learned policy, told nothing of output lengths (every prediction is the same), "
        "predictions, or the truth.",
        table(
            ["case", "metric", "none", "predicted", "true"],
            [
                columns_of(outcome, ["learned, no lengths", "learned", "learned, true lengths"])
                for outcome in learned
            ],
        ),
        "## What each decision is worth",
        "The learned policy without one kind of decision, which the baseline makes.",
        table(
            ["case", "metric", "all", *(f"without {kind}" for kind in KINDS)],
            [
                columns_of(outcome, ["learned", *(f"learned, without {kind}" for kind in KINDS)])
                for outcome in learned
            ],
        ),
        "## Transfer",
        "Policies on scenarios that they were not trained on, and on windows of recorded traces "
        "(not part of this repository): difference from the tuned grid's best, or from the "
        "baseline where no grid was tuned (marked *).",
        transfer(outcomes),
        "## Learning curves",
        "Results on the validation workloads in the course of the training (the metric of the "
        "case, a geometric mean over the training's loads); the mean over the seeds, and their "
        "smallest and greatest.",
        table(
            ["training", "seeds", *(f"{part:.0%}" for part in PARTS)],
            [curve_row(curve) for curve in learning_curves()],
        ),
        "## Who took part",
        table(
            ["case", "column", "policy", "lengths"],
            [
                [outcome.case.title, column, f"`{entry.policy}`", entry.length_information]
                for outcome in outcomes
                for column, entry in entries(outcome.case).items()
                if column in outcome.runs
            ],
        ),
    ]
    return "\n\n".join(sections) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def headroom(outcome: Outcome) -> list[str]:
    """A row of the headroom map."""
    case = outcome.case
    means = [mean(outcome, column) for column in COLUMNS[:4]]
    bound = NOTHING
    if case.metric == "e2e" and outcome.bounds:
        bound = number(float(np.mean(outcome.bounds)))
    return [case.title, METRICS[case.metric].measure.label, *means, bound, label(outcome)]


def label(outcome: Outcome) -> str:
    """Whether there is anything to be learned."""
    better = [c for c in ("grid, true lengths", "search", "learned") if c in outcome.runs]
    if "grid" not in outcome.runs or not better:
        return NOTHING
    grid = outcome.mean("grid")
    gain = 1 - min(outcome.mean(column) for column in better) / grid
    return f"{gain:.1%}" if gain >= HEADROOM else "none"


def comparison(outcome: Outcome) -> list[str]:
    """A row of the learned policies' table."""
    case = outcome.case
    return [
        case.title,
        METRICS[case.metric].measure.label,
        mean(outcome, outcome.opponent),
        mean(outcome, "learned"),
        difference(outcome.difference("learned", outcome.opponent)),
        NOTHING if case.floor is None else f"{case.floor:+.0%}",
        NOTHING if case.goal is None else f"{case.goal:+.0%}",
        outcome.verdict(),
    ]


def curve_row(curve: LearningCurve) -> list[str]:
    """A row of the learning curves."""
    cells = [
        f"{number(float(np.mean(values)))} ({number(min(values))}–{number(max(values))})"
        for values in curve.values
    ]
    return [curve.name, ", ".join(map(str, curve.seeds)), *cells]


def columns_of(outcome: Outcome, columns: Sequence[str]) -> list[str]:
    """A row of the case's metric in some columns."""
    label = METRICS[outcome.case.metric].measure.label
    return [outcome.case.title, label, *(mean(outcome, column) for column in columns)]


def transfer(outcomes: Sequence[Outcome]) -> str:
    """The table of policies on the other scenarios."""
    names = sorted({c for outcome in outcomes for c in outcome.runs if c.startswith(TRANSFER)})
    rows = []
    for outcome in outcomes:
        mark = "" if outcome.reference == "grid" else " *"
        cells = [
            difference(outcome.difference(name, outcome.reference)) for name in ("learned", *names)
        ]
        rows.append([outcome.case.title + mark, *cells])
    return table(["case", "its own", *(name.removeprefix(TRANSFER) for name in names)], rows)


def fairness(outcome: Outcome) -> list[list[str]]:
    """The rows of a case."""
    columns = [column for column in COLUMNS if column in outcome.runs]
    measured: tuple[Callable[[str], float], ...] = (
        lambda column: outcome.mean(column, "e2e"),
        lambda column: outcome.mean(column, "e2e-p99"),
        lambda column: float(np.mean([r.metrics["jain_index"] for r in outcome.runs[column]])),
        lambda column: 100 * outcome.mean(column, "weighted-goodput"),
    )
    return [
        [outcome.case.title, column, *(number(measure(column)) for measure in measured)]
        for column in columns
    ]


def starvation(outcome: Outcome) -> str | None:
    """What the page says where a learned policy's p99 is much worse than its opponent's."""
    if outcome.opponent not in outcome.runs:
        return None
    times = outcome.mean("learned", "e2e-p99") / outcome.mean(outcome.opponent, "e2e-p99")
    if times < STARVED:
        return None
    return (
        f"**{outcome.case.title}: the learned policy lets some wait.** Its p99 of E2E is "
        f"{times:.1f} times its opponent's."
    )


def mean(outcome: Outcome, column: str, metric: MetricName | None = None) -> str:
    """A column's mean, or that it did not take part."""
    return number(outcome.mean(column, metric)) if column in outcome.runs else NOTHING


def difference(of: Difference | None) -> str:
    """A relative difference with its interval."""
    if of is None or of.relative is None:
        return NOTHING
    if of.low is None or of.high is None:
        return f"{of.relative:+.1%}"
    scale = of.relative / of.mean if of.mean else 0.0
    return f"{of.relative:+.1%} [{of.low * scale:+.1%}, {of.high * scale:+.1%}]"


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def numbers(run: Run) -> dict[str, float]:
    """What the page needs of a run."""
    return {
        "workload_seed": run.workload_seed,
        "jain_index": run.metrics["jain_index"],
        **{name: metric.measure.of(run.metrics) for name, metric in METRICS.items()},
    }


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All numbers of the page."""
    return {
        "cases": [
            {
                **asdict(outcome.case),
                "opponent": outcome.opponent,
                "verdict": outcome.verdict(),
                "bounds": list(outcome.bounds),
                "columns": {
                    column: {
                        **asdict(entry),
                        "runs": [numbers(run) for run in outcome.runs[column]],
                    }
                    for column, entry in entries(outcome.case).items()
                    if column in outcome.runs
                },
            }
            for outcome in outcomes
        ]
    }
