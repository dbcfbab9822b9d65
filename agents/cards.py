"""Cards of the shipped policies: how each was trained, on what, its results and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agents.learning.policy_file import TrainedPolicy
from agents.published import TRANSFER, Outcome
from agents.published_page import comparison, difference, table

LIMITS = (
    "It knows the worker, the GPU model and the length predictions (σ = 0.6) of its training. On "
    "others it runs, but is held to nothing: see the transfers below, and evaluate it on your own "
    "workloads before you trust it. It reads one worker's state, not that of its neighbours. "
    "It was trained in a simulator: how far that agrees with vLLM is in `docs/trust.md`."
)


def card(name: str, trained: TrainedPolicy, outcomes: Sequence[Outcome]) -> str:
    """The card of a policy, in Markdown.

    Args:
        name: Its name in `agents/pretrained`.
        trained: The policy.
        outcomes: The published cases.
    """
    training = trained.card["training"]
    own = [outcome for outcome in outcomes if outcome.case.learned == name]
    foreign = [outcome for outcome in outcomes if TRANSFER + name in outcome.runs]
    sections = [
        f"# {name}",
        training["description"],
        f"`pretrained:{name}` in `scripts/evaluate.py`, `load_policy({name!r})` in Python.",
        "## Training",
        table(["setting", "value"], _settings(trained, training)),
        f"`python scripts/train.py {training['name']}` trains it again.",
        "## Results on test workloads",
        table(
            ["case", "metric", "opponent", "this policy", "difference", "floor", "goal", "verdict"],
            map(comparison, own),
        ),
        "## Limits",
        LIMITS,
        table(
            ["elsewhere", "difference from the tuned grid's best, or else the baseline"],
            [
                [
                    outcome.case.title,
                    difference(outcome.difference(TRANSFER + name, outcome.reference)),
                ]
                for outcome in foreign
            ],
        ),
    ]
    return "\n\n".join(sections) + "\n"


def _settings(trained: TrainedPolicy, training: Mapping[str, Any]) -> list[list[str]]:
    validation = trained.card["validation"]
    shown = {
        "scenario": training["scenario"],
        "decides": ", ".join(trained.decisions),
        "reward": training["reward"],
        "loads": training["loads"] or "the scenario's",
        "requests of an episode": training["requests"],
        "seed": training["seed"],
        **{f"algorithm: {key}": value for key, value in training["algorithm"].items()},
        "kept": f"iteration {validation['iteration']}, validation {validation['value']:.4g}",
        "weights": sum(array.size for array in trained.weights.arrays().values()),
    }
    return [[key, f"{value}"] for key, value in shown.items()]
