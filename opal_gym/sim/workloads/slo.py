"""Service-level objectives by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

SLOS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"conversational": (2.0, 0.1), "interactive": (0.5, 0.03)}
)
"""Limits of TTFT and TPOT in seconds: MLPerf Inference's for Llama-3.1-8B."""


def objectives(name: str | None) -> tuple[float, float]:
    """Limits of TTFT and TPOT in seconds; without a name infinite, so never missed."""
    return (math.inf, math.inf) if name is None else SLOS[name]
