"""Learning curves of the published trainings, over their seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agents.learning.policy_file import PRETRAINED

CURVES = PRETRAINED / "runs"
"""Where the `run.json` of published trainings lie, as NAME-SEED.json."""

PARTS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Parts of a training at which its curve is told."""


@dataclass(frozen=True)
class LearningCurve:
    """Validation results of one training with several seeds.

    Attributes:
        name: Name of the training.
        seeds: Its seeds.
        values: At each of `PARTS`, the result of each seed, shape (len(PARTS), len(seeds)).
    """

    name: str
    seeds: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]


def learning_curves(directory: Path = CURVES) -> list[LearningCurve]:
    """The curves of the runs in a directory, by name."""
    runs: dict[str, dict[int, list[float]]] = {}
    for path in sorted(directory.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        training = run["training"]
        iterations = training["algorithm"]["iterations"]
        points = {v["iteration"] / iterations: v["value"] for v in run["validations"]}
        seeds = runs.setdefault(training["name"], {})
        seeds[training["seed"]] = [_at(part, points) for part in PARTS]
    return [_curve(name, seeds) for name, seeds in sorted(runs.items())]


def _at(part: float, points: Mapping[float, float]) -> float:
    """The curve between two validations."""
    return float(np.interp(part, list(points), list(points.values())))


def _curve(name: str, seeds: Mapping[int, Sequence[float]]) -> LearningCurve:
    order = tuple(sorted(seeds))
    values = tuple(zip(*(seeds[seed] for seed in order), strict=True))
    return LearningCurve(name, order, values)
