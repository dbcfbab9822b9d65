"""Trained policies as files: arrays of weights and a card, read without unpickling anything."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from agents.files import write_atomically
from agents.learning.pointer import PointerNetwork
from agents.learning.scoring import ScoringWeights
from opal_gym.config import DecisionName
from opal_gym.sim.decision import Decision, Policy

PRETRAINED = Path(__file__).parents[1] / "pretrained"
"""Where the shipped policies lie."""

ENDING = ".npz"
"""Ending of the files."""

PREFIX = "pretrained:"
"""Begins the name of a policy that is a file of weights."""


FORMS: Mapping[str, Any] = {"pointer": PointerNetwork, "scoring": ScoringWeights}
"""The forms of weights, by the name in the card."""


@dataclass(frozen=True)
class TrainedPolicy:
    """A trained policy.

    Attributes:
        weights: Its weights.
        decisions: What it decides; the baseline decides the rest.
        card: How it was trained, on what, and how good it was on validation workloads.
    """

    weights: PointerNetwork | ScoringWeights
    decisions: tuple[DecisionName, ...]
    card: Mapping[str, Any]

    def policy(self) -> Policy:
        """The policy."""
        own = self.weights.policy()
        return (
            own
            if len(self.decisions) == len(get_args(DecisionName))
            else PartialPolicy(own, self.decisions)
        )

    def save(self, path: Path) -> Path:
        """Writes a file and returns its path.

        Args:
            path: Without the ending, `ENDING`.
        """
        form = next(name for name, kind in FORMS.items() if isinstance(self.weights, kind))
        about = {"form": form, "decisions": list(self.decisions), "card": self.card}
        buffer = io.BytesIO()
        np.savez(buffer, about=np.array(json.dumps(about)), **self.weights.arrays())
        path = path.with_name(f"{path.name}{ENDING}")
        write_atomically(path, buffer.getvalue())
        return path

    @classmethod
    def load(cls, path: Path) -> TrainedPolicy:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: It is none.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            about = json.loads(str(arrays.pop("about")))
            weights = FORMS[about["form"]].of(arrays)
            return cls(weights, tuple(about["decisions"]), about["card"])
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path}: got {error!r}; allowed: a policy that scripts/train.py wrote"
            ) from None


class PartialPolicy(Policy):
    """Answers some kinds of decisions; the baseline answers the others.

    Args:
        policy: Answers the decisions of `decisions`.
        decisions: Names of these kinds.
    """

    def __init__(self, policy: Policy, decisions: tuple[str, ...]) -> None:
        self._policy, self._decisions = policy, decisions

    def choose(self, decision: Decision) -> int:
        """A candidate's index, or STOP."""
        if decision.kind.name not in self._decisions:
            return decision.baseline
        return self._policy.choose(decision)


def pretrained_names() -> list[str]:
    """Names of the shipped policies, sorted."""
    return sorted(path.stem for path in PRETRAINED.glob(f"*{ENDING}"))


def load_policy(name: str | Path) -> Policy:
    """A trained policy, ready to decide; it needs no torch.

    Args:
        name: One of `pretrained_names()`, or the path of a file that scripts/train.py wrote.
            `NAME,decisions=ADMIT+CHUNK` lets the policy decide these alone, and the baseline the
            rest.

    Raises:
        ValueError: There is no such policy, its file is none, or a decision is not known.
    """
    file, _, decisions = str(name).partition(",decisions=")
    trained = load_trained(file)
    if not decisions:
        return trained.policy()
    allowed = get_args(DecisionName)
    for kind in decisions.split("+"):
        if kind not in allowed:
            raise ValueError(f"decisions: got {kind!r}; allowed: {', '.join(allowed)}, joined by +")
    return PartialPolicy(trained.policy(), tuple(decisions.split("+")))


def load_trained(name: str | Path) -> TrainedPolicy:
    """A trained policy with its card; see `load_policy`."""
    path = Path(name) if str(name).endswith(ENDING) else PRETRAINED / f"{name}{ENDING}"
    if not path.is_file():
        known = ", ".join(pretrained_names()) or "none so far"
        raise ValueError(
            f"got {str(name)!r}; allowed: an {ENDING} file of scripts/train.py, or one of {known}"
        )
    return TrainedPolicy.load(path)
