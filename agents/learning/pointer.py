"""The pointer network in NumPy: one logit for each candidate and one for STOP.

Source: ``reference/policies.md``, "Learning": a shared encoder per candidate, plus the worker's
gauges; STOP is scored as a candidate with its own flag.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.learning.inputs import CONTEXT, Inputs, inputs_of
from opal_gym.sim.candidates import FEATURES
from opal_gym.sim.decision import STOP, Decision, Policy

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class PointerNetwork:
    """The weights of a pointer network with H₁ and H₂ hidden units.

    A choice is encoded as h₁ = tanh(features · `features` + context · `context` + `bias`), STOP
    with `stop` in the place of its features. h₂ = tanh(h₁ · `own` + max h₁ · `pooled` +
    `hidden_bias`), where the maximum is over the choices, and the logit is h₂ · `logit`. So the
    logits follow the candidates when these change places, and there may be any number of them.

    Attributes:
        features: Shape (len(FEATURES), H₁), float32 as all of them.
        context: Shape (CONTEXT, H₁).
        bias: Shape (H₁,).
        stop: Shape (H₁,).
        own: Shape (H₁, H₂).
        pooled: Shape (H₁, H₂).
        hidden_bias: Shape (H₂,).
        logit: Shape (H₂,).
    """

    features: FloatArray
    context: FloatArray
    bias: FloatArray
    stop: FloatArray
    own: FloatArray
    pooled: FloatArray
    hidden_bias: FloatArray
    logit: FloatArray

    def __post_init__(self) -> None:
        units, hidden = self.own.shape if self.own.ndim == 2 else (0, 0)
        shapes = {
            "features": (len(FEATURES), units),
            "context": (CONTEXT, units),
            "bias": (units,),
            "stop": (units,),
            "own": (units, hidden),
            "pooled": (units, hidden),
            "hidden_bias": (hidden,),
            "logit": (hidden,),
        }
        for name, shape in shapes.items():
            weights = getattr(self, name)
            if weights.shape != shape or weights.dtype != np.float32:
                raise ValueError(
                    f"{name}: got {weights.dtype} of shape {weights.shape}; "
                    f"allowed: float32 of shape {shape}"
                )

    def logits(self, inputs: Inputs, *, stop_allowed: bool) -> FloatArray:
        """The logits of the candidates and, if it is allowed, of STOP; shape (n or n + 1,)."""
        n = len(inputs.rows)
        encoded = np.empty((n + stop_allowed, len(self.bias)), np.float32)
        np.matmul(inputs.rows, self.features, out=encoded[:n])
        if stop_allowed:
            encoded[n] = self.stop
        encoded += inputs.context @ self.context + self.bias
        np.tanh(encoded, out=encoded)
        hidden: FloatArray = encoded @ self.own
        hidden += encoded.max(axis=0) @ self.pooled + self.hidden_bias
        np.tanh(hidden, out=hidden)
        logits: FloatArray = hidden @ self.logit
        return logits

    def policy(self) -> PointerPolicy:
        """The policy that takes the choice with the greatest logit."""
        return PointerPolicy(self)

    def arrays(self) -> dict[str, FloatArray]:
        """The weights by name, for a file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, arrays: dict[str, Any]) -> PointerNetwork:
        """The network of weights by name, as `arrays` gives them.

        Raises:
            ValueError: A name is missing or too much, or an array has another shape.
        """
        names = [field.name for field in fields(cls)]
        if set(arrays) != set(names):
            raise ValueError(f"got weights {sorted(arrays)}; allowed: {sorted(names)}")
        return cls(**{name: np.asarray(arrays[name]) for name in names})


class PointerPolicy(Policy):
    """Takes the choice with the greatest logit; ties: the first candidate, STOP last.

    Args:
        network: The weights.
    """

    def __init__(self, network: PointerNetwork) -> None:
        self._network = network

    def choose(self, decision: Decision) -> int:
        """A candidate's index, or STOP."""
        logits = self._network.logits(inputs_of(decision), stop_allowed=decision.stop_allowed)
        best = int(logits.argmax())
        return STOP if best == decision.num_candidates else best
