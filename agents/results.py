"""The file of an evaluation's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agents.summary import Evaluation


def results(evaluation: Evaluation, run_details: Mapping[tuple[str, int], Any]) -> dict[str, Any]:
    """The evaluation as JSON values, metrics in their own units.

    Args:
        evaluation: The finished runs.
        run_details: What else a run's entry says, by policy and workload seed.
    """
    measures, policies = evaluation.measures, evaluation.policies
    return {
        "config": evaluation.config.model_dump(mode="json"),
        "policies": list(policies),
        "means": {
            policy: {measure.key: evaluation.mean(policy, measure) for measure in measures}
            for policy in evaluation.finished_policies
        },
        "differences": [
            {"policy": policy, "against": policies[0], "metric": measure.key, **asdict(difference)}
            for policy in policies[1:]
            for measure in measures
            if (difference := evaluation.difference(policy, measure))
        ],
        "lower_bounds": [
            {"workload_seed": seed, "mean": bound.mean, **asdict(bound)}
            for seed, bound in evaluation.bounds.items()
        ],
        "gaps": {policy: evaluation.gap(policy) for policy in evaluation.finished_policies},
        "runs": [
            {**asdict(run), **run_details[run.policy, run.workload_seed]} for run in evaluation.runs
        ],
    }


def to_json(value: Mapping[str, Any]) -> bytes:
    """Indented JSON without NaN or infinities."""
    return (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()
