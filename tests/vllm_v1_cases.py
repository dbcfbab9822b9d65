"""Random small cases for the engine profile `vllm_v1`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from opal_gym.config import Config
from opal_gym.sim.workloads import Workload
from tests.random_cases import DrawnSource, SeededSource, Source, draw_case
from tests.tiny import tiny_config

PREFIX = "worker.vllm_params."
OF_THE_SEED = ("rebuild_on", "first_token_at_prefill_end", "max_kvc_ready_requests")


class V1Case:
    """A case of `tests.random_cases`, with vLLM's parameters and priorities."""

    def __init__(self, source: Source, *, sharing: bool = False, max_requests: int = 10) -> None:
        self._case = draw_case(source, sharing=sharing, max_requests=max_requests)
        overrides = self._case.overrides
        self.overrides: dict[str, Any] = {
            key: value
            for key, value in overrides.items()
            if key.removeprefix(PREFIX) not in OF_THE_SEED
        }
        # vLLM keeps one block to itself.
        blocks = overrides[PREFIX + "num_gpu_blocks_override"] + 1
        self.overrides |= {
            PREFIX + "engine": "vllm_v1",
            PREFIX + "num_gpu_blocks_override": blocks,
            PREFIX + "policy": source.pick(("fcfs", "priority")),
            PREFIX + "long_prefill_token_threshold": source.pick((0, 0, 1, 2, 5)),
            PREFIX + "scheduler_reserve_full_isl": source.pick((True, True, False)),
            PREFIX + "watermark": source.pick((0.0, 0.0, 0.1, 0.3)),
        }
        self._priorities = [source.integer(0, 2) for _ in self._case.requests]

    def config(self, **more: Any) -> Config:
        """The configuration; more overrides by keyword, with `__` for dots."""
        keys = {key.replace("__", "."): value for key, value in more.items()}
        return tiny_config({**self.overrides, **keys})

    def workload(self) -> Workload:
        """The requests."""
        return replace(self._case.workload(), priority=np.array(self._priorities, np.int64))


def seeded(seed: int) -> V1Case:
    """The case of a seed; every third one shares prompts' beginnings."""
    return V1Case(SeededSource(seed), sharing=seed % 3 == 2)


def drawn(draw: Any) -> V1Case:
    """A case whose failures shrink."""
    source = DrawnSource(draw)
    return V1Case(source, sharing=source.pick((False, True)), max_requests=6)
