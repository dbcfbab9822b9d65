"""A scoring policy: weights in the place of the grid's choices, for an evolution strategy.

Most members of the grid are a point of it (not the baseline's victim rule, with its exceptions),
and the points between them are policies, too. It has few enough weights to be searched, and they
can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.candidates import INDEX
from opal_gym.sim.decision import STOP, Decision, DecisionKind, Policy
from opal_gym.sim.gauges import INDEX as GAUGE

FloatArray = NDArray[np.float64]

ADMIT = (
    "predicted_output_tokens",
    "prompt_tokens",
    "prompt_remaining",
    "predicted_kv_area",
    "waiting_time",
    "preemptions",
    "weight",
    "is_fetch",
)
"""Features whose log(1 + x) is weighed in the cost of admitting a request; the least is chosen."""
SLACK_S = 2.0
"""TTFT slack is clipped at so many seconds."""
GATE = ("waiting", "running")
"""Gauges that move the gate."""
PREEMPT = (
    "work_lost",
    "predicted_remaining",
    "prompt_tokens",
    "preemptions",
    "admission_rank",
    "weight",
)
"""Features whose log(1 + x) is weighed in the cost of evicting a request; the least is chosen."""
CHUNK = (
    "waiting",
    "waiting_prompt_tokens",
    "arrival_rate",
    "preemption_rate",
    "running",
    "free_blocks",
)
"""Gauges whose log(1 + x) moves the logarithm of the longest step."""

PARAMETERS: Mapping[str, float] = {
    **{f"admit.{name}": 0.3 for name in ADMIT},
    "admit.ttft_slack": 0.3,
    "admit.ttft_missed": 0.3,
    "gate": 0.1,
    "gate.predicted_output_tokens": 0.05,
    **{f"gate.{name}": 0.05 for name in GATE},
    **{f"preempt.{name}": 0.3 for name in PREEMPT},
    "chunk": 0.3,
    **{f"chunk.{name}": 0.2 for name in CHUNK},
}
"""The weights, in their order, with the step in which each is searched."""

_PLACE = {name: place for place, name in enumerate(PARAMETERS)}


@dataclass(frozen=True)
class ScoringWeights:
    """The weights of a scoring policy.

    Attributes:
        values: In the order of `PARAMETERS`, shape (len(PARAMETERS),), float64.
    """

    values: FloatArray

    def __post_init__(self) -> None:
        if self.values.shape != (len(PARAMETERS),) or self.values.dtype != np.float64:
            raise ValueError(
                f"values: got {self.values.dtype} of shape {self.values.shape}; "
                f"allowed: float64 of shape {(len(PARAMETERS),)}"
            )

    @classmethod
    def named(cls, weights: Mapping[str, float]) -> ScoringWeights:
        """Weights by name; those that are not named are 0.

        Raises:
            ValueError: A name is not known.
        """
        for name in weights:
            if name not in PARAMETERS:
                raise ValueError(f"got {name!r}; allowed: {', '.join(PARAMETERS)}")
        return cls(np.array([float(weights.get(name, 0.0)) for name in PARAMETERS]))

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> ScoringWeights:
        """The weights of `arrays`.

        Raises:
            ValueError: They have another form.
        """
        if set(arrays) != {"values"}:
            raise ValueError(f"got weights {sorted(arrays)}; allowed: ['values']")
        return cls(np.asarray(arrays["values"]))

    def arrays(self) -> dict[str, FloatArray]:
        """The weights by name, for a file."""
        return {"values": self.values}

    def policy(self) -> ScoringPolicy:
        """The policy."""
        return ScoringPolicy(self)

    def by_name(self) -> dict[str, float]:
        """The weights, to be read."""
        return dict(zip(PARAMETERS, map(float, self.values), strict=True))

    def group(self, prefix: str, names: tuple[str, ...]) -> FloatArray:
        """The weights `prefix.name` of some names."""
        return self.values[[_PLACE[f"{prefix}.{name}"] for name in names]]

    def __getitem__(self, name: str) -> float:
        """A weight."""
        return float(self.values[_PLACE[name]])


class ScoringPolicy(Policy):
    """Admits the least cost, or STOPs at a gate; evicts the least cost; chunks by a time limit.

    Args:
        weights: The weights.
    """

    def __init__(self, weights: ScoringWeights) -> None:
        self._admit = _Cost(weights, "admit", ADMIT)
        self._preempt = _Cost(weights, "preempt", PREEMPT)
        self._gate = _Level(weights, "gate", GATE)
        self._limit = _Level(weights, "chunk", CHUNK)
        self._slack = weights["admit.ttft_slack"] / SLACK_S
        self._missed = weights["admit.ttft_missed"]
        self._gate_output = weights["gate.predicted_output_tokens"]

    def choose(self, decision: Decision) -> int:
        """A candidate's index, or STOP."""
        if decision.kind is DecisionKind.ADMIT:
            return self._admission(decision)
        if decision.kind is DecisionKind.PREEMPT:
            return int(self._preempt.of(decision).argmin())
        allowed = decision.candidates["step_time"] <= np.exp(self._limit.of(decision))
        return int(allowed.argmax()) if allowed.any() else len(allowed) - 1

    def _admission(self, decision: Decision) -> int:
        table = decision.candidates
        slack = table["ttft_slack"]
        cost = self._admit.of(decision)
        cost += self._slack * np.clip(slack, -SLACK_S, SLACK_S) + self._missed * (slack < 0)
        best = int(cost.argmin())
        if not decision.stop_allowed:
            return best
        output = np.log1p(table["predicted_output_tokens"][best])
        gate = self._gate.of(decision) + self._gate_output * output
        return STOP if table["predicted_peak_kv"][best] > gate else best


class _Cost:
    """The weighed logarithms of candidates' features."""

    def __init__(self, weights: ScoringWeights, prefix: str, names: tuple[str, ...]) -> None:
        self._weights = weights.group(prefix, names)
        self._columns = [INDEX[name] for name in names]

    def of(self, decision: Decision) -> FloatArray:
        cost: FloatArray = np.log1p(decision.candidates.values[:, self._columns]) @ self._weights
        return cost


class _Level:
    """A number that gauges move."""

    def __init__(self, weights: ScoringWeights, name: str, gauges: tuple[str, ...]) -> None:
        self._level = weights[name]
        self._weights = weights.group(name, gauges)
        self._columns = [GAUGE[gauge] for gauge in gauges]

    def of(self, decision: Decision) -> float:
        gauges = decision.gauges.values[self._columns]
        return self._level + float(np.log1p(gauges) @ self._weights)
