"""Records of finished requests, in one NumPy record array, and their export."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.request import LLMRequest, Tenant
from opal_gym.sim.steps import RunLists, StepLog

GAP_LIMIT_S = 0.5
"""Strict goodput: no two tokens of a request are further apart than this."""

RECORD = np.dtype(
    [
        ("request_id", np.int64),
        ("tenant", np.int32),
        ("worker_id", np.int32),
        ("prompt_tokens", np.int32),
        ("output_tokens", np.int32),
        ("predicted_output_tokens", np.int32),
        ("prefix_hit_tokens", np.int32),
        ("preemptions", np.int32),
        ("recomputed_tokens", np.int64),
        ("arrival_time", np.float64),
        ("worker_arrival_time", np.float64),
        ("start_processing_time", np.float64),
        ("request_ready_time", np.float64),
        ("gpu_start_time", np.float64),
        ("first_token_time", np.float64),
        ("decode_done_time", np.float64),
        ("max_gap", np.float64),
        ("unloaded_latency", np.float64),
    ]
)

SEED_NAMES = {
    "start_processing_time": "_3_start_processing_time",
    "request_ready_time": "_4_request_ready_time",
    "gpu_start_time": "_5_gpu_start_time",
    "decode_done_time": "_7_decode_done_time",
}
"""Names of the seed's "Per-Request Statistics" where they differ from ours."""


class RequestRecords:
    """Finished requests.

    Attributes:
        tenants: The tenants; a record's `tenant` is a row of it.
        rejected: Rejected requests with the reason.
    """

    def __init__(self, tenants: tuple[Tenant, ...]) -> None:
        self.tenants = tenants
        self.rejected: list[tuple[LLMRequest, str]] = []
        self._tenant_rows = {tenant: row for row, tenant in enumerate(tenants)}
        self._table = np.empty(256, RECORD)
        self._token_runs = RunLists()
        self._step_runs = RunLists()
        self._step_logs: dict[int, StepLog] = {}

    def __len__(self) -> int:
        """Number of completed requests."""
        return len(self._token_runs)

    @property
    def table(self) -> NDArray[np.void]:
        """Completed requests in order of completion, shape (len(self),), dtype `RECORD`."""
        return self._table[: len(self)]

    def token_times(self) -> Iterator[NDArray[np.float64]]:
        """For each completed request, when its output tokens were first made, s."""
        return self._expand(self._token_runs)

    def scheduler_timestamps(self) -> Iterator[NDArray[np.float64]]:
        """For each completed request, the end times of all steps that it took part in, s."""
        return self._expand(self._step_runs)

    def _expand(self, run_lists: RunLists) -> Iterator[NDArray[np.float64]]:
        for worker_id, runs in zip(self.table["worker_id"].tolist(), run_lists, strict=True):
            yield self._step_logs[worker_id].expand(runs)

    def reject(self, request: LLMRequest, reason: str) -> None:
        """Notes a request that can never run."""
        self.rejected.append((request, reason))

    def complete(self, request: LLMRequest, unloaded_latency: float, worker_id: int) -> bool:
        """Notes a completed request; returns whether it met its objectives."""
        if len(self) == len(self._table):
            more = np.empty(max(256, len(self) // 4), RECORD)
            self._table = np.concatenate([self._table, more])
        stats = request.stats
        assert stats.steps is not None
        self._step_logs[worker_id] = stats.steps
        times = stats.steps.expand(stats.token_runs)
        max_gap = float((times[1:] - times[:-1]).max()) if len(times) > 1 else 0.0
        self._table[len(self)] = (
            request.request_id,
            self._tenant_rows[request.tenant],
            worker_id,
            request.prompt_tokens,
            request.output_tokens,
            request.predicted_output_tokens,
            stats.prefix_hit_tokens,
            stats.preemptions,
            stats.recomputed_tokens,
            request.arrival_time,
            stats.worker_arrival_time,
            stats.start_processing_time,
            stats.request_ready_time,
            stats.gpu_start_time,
            stats.first_token_time,
            stats.decode_done_time,
            max_gap,
            unloaded_latency,
        )
        self._token_runs.append(stats.token_runs)
        self._step_runs.append(stats.step_runs)
        return is_good(request, max_gap)

    def export(self) -> Iterator[str]:
        """One JSON object a request, under the seed's names; rejected ones last."""
        for record, timestamps in zip(self.table, self.scheduler_timestamps(), strict=True):
            row: dict[str, Any] = {
                SEED_NAMES.get(name, name): value
                for name, value in zip(RECORD.names or (), record.item(), strict=True)
            }
            row["tenant"] = self.tenants[row["tenant"]].name
            row["scheduler_timestamps"] = timestamps.tolist()
            yield json.dumps(row)
        for request, reason in self.rejected:
            yield json.dumps(
                {
                    "request_id": request.request_id,
                    "tenant": request.tenant.name,
                    "prompt_tokens": request.prompt_tokens,
                    "output_tokens": request.output_tokens,
                    "arrival_time": request.arrival_time,
                    "worker_arrival_time": request.stats.worker_arrival_time,
                    "rejected": reason,
                }
            )


def is_good(request: LLMRequest, max_gap: float) -> bool:
    """Strict goodput of a completed request: TTFT, TPOT and every token gap within limits.

    A mean TPOT alone can be met by emitting the first token and evicting. A tenant without
    objectives never misses one.
    """
    tenant, stats = request.tenant, request.stats
    if math.isinf(tenant.ttft_slo_s) and math.isinf(tenant.tpot_slo_s):
        return True
    ttft = stats.first_token_time - request.arrival_time
    gaps = max(1, request.output_tokens - 1)
    tpot = (stats.decode_done_time - stats.first_token_time) / gaps
    return ttft <= tenant.ttft_slo_s and tpot <= tenant.tpot_slo_s and max_gap <= GAP_LIMIT_S
