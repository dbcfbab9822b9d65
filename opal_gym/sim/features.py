"""Features: the named, scaled numbers that schedulers see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Feature(NamedTuple):
    """A feature.

    Attributes:
        name: Its name.
        unit: Its unit.
        meaning: What it says.
        scaling: `linear`: x / scale; `log`: log(1 + x) / log(1 + scale).
        scale: The value that is observed as 1.
        low: The smallest value that is observed; less is clipped.
    """

    name: str
    unit: str
    meaning: str
    scaling: Literal["linear", "log"]
    scale: float
    low: float = 0.0


class Scaler:
    """Scales rows of raw values into [low / scale, 1]; what lies outside is clipped.

    Args:
        features: The columns, the logarithmic ones first.

    Attributes:
        low: The smallest scaled values, shape (features,).
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        logarithmic = [feature.scaling == "log" for feature in features]
        logs = sum(logarithmic)
        assert all(logarithmic[:logs]), "logarithmic features come first"
        self._log_part = (..., slice(logs))
        scale = np.array([feature.scale for feature in features])
        self._factor = 1 / np.where(logarithmic, np.log1p(scale), scale)
        self.low = np.array([feature.low / feature.scale for feature in features])

    def scale(self, values: NDArray[np.float64], out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scales `values`, shape (…, features), into `out` of the same shape, and returns it."""
        scaled = values.copy()
        logs = scaled[self._log_part]
        np.log1p(logs, out=logs)
        scaled *= self._factor
        np.maximum(scaled, self.low, out=scaled)
        np.minimum(scaled, 1.0, out=scaled)
        out[...] = scaled
        return out
