"""Which workload seeds are for what: nothing is tested on what it was chosen or trained on.

The ranges are disjoint. Equal seeds give equal workloads, different seeds independent ones.
`scripts/evaluate.py` begins at `TEST[0]`; selection (`scripts/tune.py`, checkpoints) takes
`VALIDATION`, learning `TRAINING`.
"""

from __future__ import annotations

TEST = range(10_000)
"""Published comparisons."""

VALIDATION = range(10_000, 20_000)
"""Choices between policies: tuning, checkpoints."""

TRAINING = range(20_000, 2**31)
"""Episodes that are learned from."""


def validation_seeds(count: int, first: int = VALIDATION.start) -> range:
    """`count` consecutive validation seeds.

    Raises:
        ValueError: Some of them are not in `VALIDATION`.
    """
    seeds = range(first, first + count)
    if not (seeds.start in VALIDATION and seeds[-1] in VALIDATION):
        raise ValueError(
            f"seeds {seeds.start} to {seeds[-1]}; allowed: validation seeds, {VALIDATION.start} to "
            f"{VALIDATION[-1]}"
        )
    return seeds
