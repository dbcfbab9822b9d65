"""The published comparisons: which policies, on which workloads, by which metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import get_args

import numpy as np

from agents.comparison import Difference, paired_difference
from agents.evaluation import Job, Run
from agents.learning.policy_file import PREFIX as PRETRAINED
from agents.learning.policy_file import pretrained_names
from agents.presets import PREFIX as PRESET
from agents.presets import preset_names
from agents.seeds import TEST
from agents.sources import Source, load_source
from agents.tuning import METRICS, MetricName
from opal_gym.config import Config, DecisionName

WORKLOADS = 20
REQUESTS = 1000
BASELINE = "fifo-lwd"


@dataclass(frozen=True)
class Case:
    """A scenario at a load.

    Attributes:
        scenario: Name of the scenario.
        load: Share of the saturated FIFO service rate.
        metric: What is to be made small.
        against: The opponent of the learned policy; None: the tuned grid.
        floor: Most that the learned policy's metric may differ from the opponent's, as a share.
        goal: What is aimed at.
        learned: Name of the learned policy in `agents/pretrained`.
        trace: A trace file; `scenario` is then the worker that replays a window of it.
    """

    scenario: str
    load: float
    metric: MetricName = "e2e"
    against: str | None = None
    floor: float | None = None
    goal: float | None = None
    learned: str | None = None
    trace: Path | None = None

    @property
    def title(self) -> str:
        """How tables call it."""
        return self.scenario if self.trace else f"{self.scenario}, load {self.load:g}"

    @property
    def preset(self) -> str:
        """Name of the best grid member's preset, as scripts/tune.py gives it."""
        return f"{self.scenario}-{self.metric}-{self.load:g}"

    def config(self, length_information: str = "predicted") -> Config:
        """What is simulated."""
        return load_source(
            Source(
                scenario=self.scenario,
                trace=self.trace,
                requests=REQUESTS,
                load=None if self.trace else self.load,
                overrides={"simulation.length_information": length_information},
            )
        )


CASES = (
    Case("prod-mix", 1.05, "slowdown", floor=-0.05, goal=-0.15, learned="prod-mix"),
    Case("mem-chat-burst", 0.9, floor=-0.03, goal=-0.08, learned="mem-chat-burst"),
    *(
        Case("rich-azconv", load, floor=0.02, goal=0.0, learned="rich-azconv")
        for load in (0.5, 0.7, 0.9, 1.0)
    ),
    Case("slot8-heavy", 0.9, floor=0.0, goal=-0.03, learned="slot8-heavy"),
    Case("mem-longctx", 0.9, floor=0.01, learned="mem-longctx"),
    Case("rich-chat", 0.9, against=BASELINE, floor=0.02, learned="rich-chat"),
)
"""The comparisons of the published table."""

ORACLE, SEARCH = "-oracle", "-search"
"""Endings of the names of the grid tuned with true lengths, and of a searched scoring policy."""

KINDS = get_args(DecisionName)
TRANSFER = "from "
"""Begins the column of a policy that was trained on another scenario."""


@dataclass(frozen=True)
class Entry:
    """A policy in a case.

    Attributes:
        policy: Its name, as evaluate.py takes it.
        length_information: What it is told of output lengths.
    """

    policy: str
    length_information: str = "predicted"


def trace_cases(directory: Path) -> list[Case]:
    """Windows of recorded traces, for the transfer of policies; those that are there."""
    cases = [
        Case("trace-azure-conv", 1.0, trace=directory / "AzureLLMInferenceTrace_conv.csv"),
        Case("trace-mooncake", 1.0, trace=directory / "mooncake_conversation_trace.jsonl.gz"),
    ]
    return [case for case in cases if case.trace is not None and case.trace.is_file()]


def entries(case: Case) -> dict[str, Entry]:
    """Who takes part in a case, by the column; those whose files are not there are left out."""
    found = {"baseline": Entry(BASELINE)}
    presets, trained = preset_names(), pretrained_names()
    if case.preset in presets:
        found["grid"] = Entry(PRESET + case.preset)
        found["grid, true lengths"] = Entry(PRESET + case.preset, "oracle")
    if case.preset + ORACLE in presets:
        found["grid, true lengths"] = Entry(PRESET + case.preset + ORACLE, "oracle")
    if case.scenario + SEARCH in trained:
        found["search"] = Entry(PRETRAINED + case.scenario + SEARCH)
    if case.learned in trained:
        own = f"{PRETRAINED}{case.learned}"
        found["learned"] = Entry(own)
        found["learned, no lengths"] = Entry(own, "none")
        found["learned, true lengths"] = Entry(own, "oracle")
        for kind in KINDS:
            rest = "+".join(other for other in KINDS if other != kind)
            found[f"learned, without {kind}"] = Entry(f"{own},decisions={rest}")
    for name in trained:
        if name != case.learned and not name.endswith(SEARCH):
            found[TRANSFER + name] = Entry(PRETRAINED + name)
    return found


def jobs(case: Case, entry: Entry, workloads: int = WORKLOADS) -> list[Job]:
    """The runs of an entry on the test workloads."""
    config = case.config(entry.length_information)
    return [Job(config, entry.policy, seed) for seed in TEST[:workloads]]


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        case: The case.
        runs: The runs of each column, in the order of the workloads.
        bounds: The lower bound on the mean E2E latency of each workload, s; empty: none.
    """

    case: Case
    runs: Mapping[str, Sequence[Run]]
    bounds: Sequence[float] = field(default_factory=tuple)

    @cached_property
    def opponent(self) -> str:
        """The column that the learned policy is held against."""
        return "baseline" if self.case.against == BASELINE or self.case.trace else "grid"

    def values(self, column: str, metric: MetricName | None = None) -> list[float]:
        """The metric of each workload."""
        measure = METRICS[metric or self.case.metric].measure
        return [measure.of(run.metrics) for run in self.runs[column]]

    def mean(self, column: str, metric: MetricName | None = None) -> float:
        """The mean over the workloads."""
        return float(np.mean(self.values(column, metric)))

    @property
    def reference(self) -> str:
        """What policies of other scenarios are held against: the grid, if it took part."""
        return "grid" if "grid" in self.runs else "baseline"

    def difference(self, column: str, against: str) -> Difference | None:
        """Between two columns, paired; None where one of them did not take part."""
        if column not in self.runs or against not in self.runs:
            return None
        return paired_difference(self.values(column), self.values(against))

    def verdict(self) -> str:
        """Whether the learned policy reaches the floor and the goal."""
        difference, case = self.difference("learned", self.opponent), self.case
        if difference is None or difference.relative is None or case.floor is None:
            return "not measured"
        if case.goal is not None and difference.relative <= case.goal:
            return "goal"
        return "floor" if difference.relative <= case.floor else "missed"
