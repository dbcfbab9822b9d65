"""What an evaluation measures of its runs: means, and paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from agents.comparison import Difference, paired_difference
from agents.evaluation import Run
from agents.lower_bound import LowerBound
from agents.policies import SINGLE_STAGE
from opal_gym.config import Config
from opal_gym.sim.metrics import Metrics


class Measure(NamedTuple):
    """A row of the tables.

    Attributes:
        label: What the row is called.
        key: Where the metric stands in `opal_gym.sim.metrics`, dotted; its name in results.json.
        scale: What the table multiplies the metric by.
    """

    label: str
    key: str
    scale: float = 1.0

    def of(self, metrics: Metrics) -> float:
        """The metric's value, in its own unit."""
        value: Any = metrics
        for part in self.key.split("."):
            value = value[part]
        return float(value)

    def applies_to(self, metrics: Metrics) -> bool:
        """Whether it was measured."""
        return self.key.split(".")[0] in metrics


LATENCIES = [
    Measure(f"{name} {statistic} ({unit})", f"{key}.{statistic}", scale)
    for name, key, unit, scale in (
        ("TTFT", "ttft_s", "s", 1.0),
        ("TPOT", "tpot_s", "ms", 1000.0),
        ("E2E", "e2e_s", "s", 1.0),
    )
    for statistic in ("mean", "p50", "p99")
]
MEAN_E2E = next(measure for measure in LATENCIES if measure.key == "e2e_s.mean")
GOODPUT = Measure("strict goodput (%)", "goodput", 100)
WEIGHTED = [
    Measure("weighted slowdown", "weighted_slowdown"),
    Measure("weighted goodput (%)", "weighted_goodput", 100),
]
WORK = [
    Measure("output tokens/s", "tokens_per_s"),
    Measure("preemptions", "preemptions"),
    Measure("recomputed tokens", "recomputed_tokens"),
]
PREFIX_HITS = Measure("prefix hit rate (%)", "prefix_hit_rate", 100)
REJECTED = Measure("rejected", "rejected")
ILLEGAL = Measure("illegal actions (%)", "illegal_action_share", 100)


def measures_of(config: Config) -> list[Measure]:
    """The rows that say something about a configuration."""
    has_weights = len(getattr(config.workload, "tenants", ())) > 1
    measures = [*LATENCIES, GOODPUT, *(WEIGHTED if has_weights else []), *WORK]
    return [*measures, *([PREFIX_HITS] if config.kvc.tiers else []), REJECTED, ILLEGAL]


@dataclass(frozen=True)
class Evaluation:
    """Finished runs, in the order of policies and then of workload seeds.

    Attributes:
        config: What was simulated.
        policies: Names of the policies; the others are compared with the first.
        runs: The runs.
        bounds: Lower bounds on the mean E2E latency, by workload seed; empty: none were computed.
    """

    config: Config
    policies: tuple[str, ...]
    runs: tuple[Run, ...]
    bounds: Mapping[int, LowerBound] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: Config,
        policies: Sequence[str],
        runs: Iterable[Run],
        bounds: Mapping[int, LowerBound] | None = None,
    ) -> Evaluation:
        """Runs that finished in any order."""

        def place(run: Run) -> tuple[int, int]:
            return policies.index(run.policy), run.workload_seed

        return cls(config, tuple(policies), tuple(sorted(runs, key=place)), bounds or {})

    @property
    def workload_seeds(self) -> list[int]:
        """Seeds of the workloads that a policy has run, ascending."""
        return sorted({run.workload_seed for run in self.runs})

    @property
    def finished_policies(self) -> list[str]:
        """Policies that have finished a run."""
        return [
            policy for policy in self.policies if any(run.policy == policy for run in self.runs)
        ]

    @property
    def measures(self) -> list[Measure]:
        """The rows of the tables."""
        return [
            measure
            for measure in measures_of(self.config)
            if any(measure.applies_to(run.metrics) for run in self.runs)
        ]

    def values(self, policy: str, measure: Measure) -> dict[int, float]:
        """A metric of each run of a policy, by workload seed."""
        return {
            run.workload_seed: measure.of(run.metrics) for run in self.runs if run.policy == policy
        }

    def mean(self, policy: str, measure: Measure) -> float:
        """The mean over a policy's runs, at least one."""
        return float(np.mean(list(self.values(policy, measure).values())))

    def difference(self, policy: str, measure: Measure) -> Difference | None:
        """How a policy differs from the first one, over the workloads that both have run."""
        values, reference = self.values(policy, measure), self.values(self.policies[0], measure)
        seeds = [seed for seed in reference if seed in values]
        if not seeds:
            return None
        return paired_difference(
            [values[seed] for seed in seeds], [reference[seed] for seed in seeds]
        )

    def bound(self, policy: str) -> float | None:
        """Mean of the lower bounds of a policy's workloads, s; None where there is none.

        The bounds are of the worker with a batch, so not of the single-stage worker.
        """
        seeds = self.values(policy, MEAN_E2E)
        if policy == SINGLE_STAGE or not self.bounds:
            return None
        return float(np.mean([self.bounds[seed].mean for seed in seeds]))

    def gap(self, policy: str) -> float | None:
        """By how much of the lower bound a policy's mean E2E latency is above it."""
        bound = self.bound(policy)
        return None if bound is None else self.mean(policy, MEAN_E2E) / bound - 1
