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
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        logarithmic = [feature.scaling == "log" for feature in features]
        self._logs = sum(logarithmic)
        assert all(logarithmic[: self._logs]), "logarithmic features come first"
        scale = np.array([feature.scale for feature in features])
        self._factor = 1 / np.where(logarithmic, np.log1p(scale), scale)
        self.low = np.array([feature.low / feature.scale for feature in features])

    def scale(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Scales `values`, shape (…, features), in place, and returns them."""
        logs = values[..., : self._logs]
        np.log1p(logs, out=logs)
        values *= self._factor
        np.maximum(values, self.low, out=values)
        np.minimum(values, 1.0, out=values)
        return values
