"""Decisions of tiny episodes, compared with features worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.candidates import FEATURES
from opal_gym.sim.features import Feature
from opal_gym.sim.gauges import GAUGES


class Watched:
    """An environment, with its last observation and info."""

    def __init__(self, config: Any, workload: Any, **kwargs: Any) -> None:
        self.env = OpalVLLMEnv(config, **kwargs)
        self.observation, self.info = self.env.reset(options={"workload": workload})

    def step(self, action: int) -> None:
        self.observation, _, _, _, self.info = self.env.step(action)

    def expect(self, kind: str, time: float, rebuild_id: int, request_ids: list[int]) -> None:
        decision = self.env.decision
        assert decision is not None
        assert (decision.kind.name, decision.rebuild_id) == (kind, rebuild_id)
        assert decision.time == pytest.approx(time)
        assert decision.candidates.request_ids.tolist() == request_ids

    def row(self, row: int, **features: float) -> None:
        """Raw features of a candidate; those not given are 0."""
        assert self.env.decision is not None
        _check(self.env.decision.candidates.values[row], FEATURES, {"present": 1.0, **features})

    def gauges(self, **gauges: float) -> None:
        """Raw gauges; those not given are 0."""
        assert self.env.decision is not None
        _check(self.env.decision.gauges.values, GAUGES, gauges)

    def seen(self, row: int, **features: float) -> None:
        """Observed features of a candidate."""
        table = self.observation["candidates"].reshape(-1, len(FEATURES))
        shown = dict(zip((feature.name for feature in FEATURES), table[row], strict=True))
        assert {name: shown[name] for name in features} == pytest.approx(features, abs=1e-6)

    def seen_gauges(self, **gauges: float) -> None:
        """Observed gauges."""
        shown = dict(zip((gauge.name for gauge in GAUGES), self.observation["worker"], strict=True))
        assert {name: shown[name] for name in gauges} == pytest.approx(gauges, abs=1e-6)


def _check(values: Any, features: tuple[Feature, ...], given: Mapping[str, float]) -> None:
    names = [feature.name for feature in features]
    assert set(given) <= set(names)
    expected = {name: given.get(name, 0.0) for name in names}
    assert dict(zip(names, values.tolist(), strict=True)) == pytest.approx(expected, abs=1e-9)
