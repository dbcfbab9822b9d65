"""Successive halving: many policies on a few workloads, the best of them on more."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from agents.evaluation import Job, run_jobs
from agents.summary import Measure
from opal_gym.config import Config

MetricName = Literal[
    "e2e", "e2e-p99", "ttft", "tpot", "slowdown", "goodput", "weighted-goodput", "throughput"
]


class Metric(NamedTuple):
    """What a policy is chosen by.

    Attributes:
        measure: Where it stands in `opal_gym.sim.metrics`.
        sign: 1: less is better; -1: more is.
    """

    measure: Measure
    sign: int = 1


METRICS: Mapping[MetricName, Metric] = {
    "e2e": Metric(Measure("mean E2E (s)", "e2e_s.mean")),
    "e2e-p99": Metric(Measure("p99 E2E (s)", "e2e_s.p99")),
    "ttft": Metric(Measure("mean TTFT (s)", "ttft_s.mean")),
    "tpot": Metric(Measure("mean TPOT (s)", "tpot_s.mean")),
    "slowdown": Metric(Measure("mean weighted slowdown", "weighted_slowdown")),
    "goodput": Metric(Measure("strict goodput", "goodput"), -1),
    "weighted-goodput": Metric(Measure("weighted strict goodput", "weighted_goodput"), -1),
    "throughput": Metric(Measure("output tokens/s", "tokens_per_s"), -1),
}


class Round(NamedTuple):
    """A round of successive halving.

    Attributes:
        members: Policies that take part.
        workloads: Workloads that each of them has run when the round ends, those of earlier
            rounds among them.
    """

    members: int
    workloads: int


@dataclass(frozen=True)
class Standing:
    """A policy in a ranking.

    Attributes:
        policy: Its name.
        mean: Mean of the metric over the ranking's workloads.
        values: The metric of each workload, by seed.
    """

    policy: str
    mean: float
    values: dict[int, float]


def plan_rounds(members: int, workloads: Sequence[int], keep: Sequence[int]) -> list[Round]:
    """The rounds: all members first, then the best `keep[0]`, `keep[1]`, ….

    Args:
        members: Number of policies.
        workloads: Workloads of each round, ascending.
        keep: Policies of each round but the first, descending.

    Raises:
        ValueError: The numbers make no rounds.
    """
    if list(workloads) != sorted(set(workloads)) or not workloads or workloads[0] < 1:
        raise ValueError(f"workloads: got {list(workloads)}; allowed: at least 1, ascending")
    if len(keep) != len(workloads) - 1:
        allowed = f"{len(workloads) - 1} number(s), one for each round but the first"
        raise ValueError(f"keep: got {list(keep)}; allowed: {allowed}")
    if list(keep) != sorted(set(keep), reverse=True) or any(number < 1 for number in keep):
        raise ValueError(f"keep: got {list(keep)}; allowed: at least 1, descending")
    sizes = (members, *(min(members, number) for number in keep))
    return [Round(*each) for each in zip(sizes, workloads, strict=True)]


class Search:
    """A search for the best of some policies; what has finished can be asked for at any time.

    The same runs give the same rankings, in whatever order they finish: a round's ranking is made
    of means over workloads that are the same for all its policies, and ties keep the given order.

    Args:
        config: What is simulated.
        policies: Names of the policies.
        metric: What they are chosen by.
        rounds: The rounds.
        seeds: Workload seeds; round r takes the first `rounds[r].workloads`.
    """

    def __init__(
        self,
        config: Config,
        policies: Sequence[str],
        metric: Metric,
        rounds: Sequence[Round],
        seeds: Sequence[int],
    ) -> None:
        self._config = config
        self._metric = metric
        self._rounds = rounds
        self._seeds = seeds
        self._policies = list(policies)
        self._values: dict[str, dict[int, float]] = {policy: {} for policy in policies}
        self._ended: list[list[Standing]] = []

    @property
    def total_runs(self) -> int:
        """Runs of the whole search."""
        before = [0, *(each.workloads for each in self._rounds)]
        return sum(
            each.members * (each.workloads - done)
            for each, done in zip(self._rounds, before, strict=False)
        )

    @property
    def runs(self) -> int:
        """Runs that have finished."""
        return sum(map(len, self._values.values()))

    def run(self, workers: int | None = 1) -> Generator[int, None, None]:
        """Runs all rounds; yields the number of the round, from 1, after each run.

        Args:
            workers: As `run_jobs` takes them.
        """
        for number, (members, workloads) in enumerate(self._rounds, start=1):
            if self._ended:
                self._policies = [each.policy for each in self._ended[-1][:members]]
            # All policies of one workload before the next, so that an interrupt leaves whole pairs.
            jobs = [
                Job(self._config, policy, seed)
                for seed in self._seeds[:workloads]
                for policy in self._policies
                if seed not in self._values[policy]
            ]
            with closing(run_jobs(jobs, workers)) as finished:
                for run in finished:
                    value = self._metric.measure.of(run.metrics)
                    self._values[run.policy][run.workload_seed] = value
                    yield number
            self._ended.append(self._rank())

    def rankings(self) -> list[list[Standing]]:
        """The ranking of each round that has finished a run, best first.

        A round that has not ended ranks the policies that have run its first workload, over the
        workloads that all of these have run.
        """
        if len(self._ended) == len(self._rounds):
            return self._ended
        begun = self._rank()
        return [*self._ended, begun] if begun else self._ended

    def _rank(self) -> list[Standing]:
        begun = [policy for policy in self._policies if self._seeds[0] in self._values[policy]]
        common = [
            seed for seed in self._seeds if all(seed in self._values[policy] for policy in begun)
        ]
        standings = [self._standing(policy, common) for policy in begun]
        return sorted(standings, key=lambda each: self._metric.sign * each.mean)

    def _standing(self, policy: str, seeds: Sequence[int]) -> Standing:
        values = {seed: self._values[policy][seed] for seed in seeds}
        return Standing(policy, float(np.mean(list(values.values()))), values)
