"""What a learned policy reads of a decision: the environment's observation, without padding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from opal_gym.envs.observations import KINDS
from opal_gym.sim.candidates import FEATURES
from opal_gym.sim.decision import Decision
from opal_gym.sim.features import Scaler
from opal_gym.sim.gauges import GAUGES

CONTEXT = len(KINDS) + len(GAUGES)
"""Numbers of a context: the kind of decision, one-hot, and the worker's gauges."""

_KIND_COLUMN = {kind: column for column, kind in enumerate(KINDS)}
_FEATURES, _GAUGES = Scaler(FEATURES), Scaler(GAUGES)


class Inputs(NamedTuple):
    """What is read of one decision of n candidates, scaled as in the environment's observation.

    Attributes:
        context: `kind` and `worker` of the observation, shape (CONTEXT,), float32.
        rows: Its candidate table, shape (n, len(FEATURES)), float32.
    """

    context: NDArray[np.float32]
    rows: NDArray[np.float32]


def inputs_of(decision: Decision) -> Inputs:
    """Reads a decision."""
    context = np.zeros(CONTEXT, np.float32)
    context[_KIND_COLUMN[decision.kind]] = 1
    _GAUGES.scale(decision.gauges.values, out=context[len(KINDS) :])
    values = decision.candidates.values
    rows = _FEATURES.scale(values, out=np.empty(values.shape, np.float32))
    return Inputs(context, rows)
