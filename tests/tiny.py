"""Tiny simulations whose timeline can be worked out by hand."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opal_gym.config import Config, load_config
from opal_gym.sim.request import DEFAULT_TENANT, Tenant
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import Workload

TINY: dict[str, Any] = {
    "name": "tiny",
    "simulation": {"check_invariants": True},
    "worker": {
        "vllm_params": {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "block_size": 4,
            "num_gpu_blocks_override": 100,
            "rebuild_on": "change",
            "first_token_at_prefill_end": True,
        },
        "inference_params": {"model": "synthetic", "base_s": 1.0},
    },
    "workload": {
        "kind": "synthetic",
        "num_requests": 1,
        "arrivals": {"rate_per_s": 1.0},
        "tenants": [
            {
                "prompt": {"kind": "fixed", "tokens": 4},
                "output": {"kind": "fixed", "tokens": 2},
            }
        ],
    },
}
"""Every step takes 1 s; 16 tokens a step; blocks of 4 tokens."""


def tiny_config(overrides: Mapping[str, Any] | None = None, **vllm_params: Any) -> Config:
    """`TINY`, with overrides by dotted key, or by keyword for the scheduler's parameters."""
    keys = {f"worker.vllm_params.{name}": value for name, value in vllm_params.items()}
    return load_config(TINY, {**keys, **(overrides or {})})


def tiny_workload(
    requests: Sequence[tuple[float, int, int]],
    *,
    predicted: Sequence[int] | None = None,
    hash_ids: Sequence[tuple[int, ...]] = (),
    tenants: tuple[Tenant, ...] = (DEFAULT_TENANT,),
    tenant: Sequence[int] | None = None,
) -> Workload:
    """Requests of (arrival time in s, prompt tokens, output tokens), with ids 0, 1, ….

    Predictions are the truth unless given.
    """
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    n = len(requests)
    return Workload(
        arrival_time=arrival.astype(np.float64),
        prompt_tokens=prompt.astype(np.int64),
        output_tokens=output.astype(np.int64),
        predicted_output_tokens=np.array(output if predicted is None else predicted, np.int64),
        tenant=np.array([0] * n if tenant is None else tenant, np.int64),
        priority=np.zeros(n, np.int64),
        tenants=tenants,
        hash_ids=tuple(hash_ids),
    )


class WorkerLog(logging.Handler):
    """Collects (simulated time, message) of everything that the worker logs."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record."""
        self.events.append((record.__dict__["sim_time"], record.getMessage()))

    def __enter__(self) -> WorkerLog:
        logger = logging.getLogger("opal_gym.sim.vllm_worker")
        self._level = logger.level
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("opal_gym.sim.vllm_worker")
        logger.removeHandler(self)
        logger.setLevel(self._level)


def by_id(simulation: Simulation) -> dict[int, dict[str, Any]]:
    """Completed requests' records by request id, with `token_times` as a list."""
    records = simulation.records
    return {
        int(record["request_id"]): {
            **{name: record[name].item() for name in record.dtype.names},
            "token_times": times.tolist(),
        }
        for record, times in zip(records.table, records.token_times(), strict=True)
    }
