"""The gauges of a worker: what schedulers see beside the candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.features import Feature

if TYPE_CHECKING:
    from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler

RATE_WINDOW_S = 10.0
"""Time constant of the arrival and preemption rates, s."""

GAUGES: tuple[Feature, ...] = (
    Feature("waiting", "requests", "requests in the waiting queue", "log", 16384),
    Feature("waiting_prompt_tokens", "tokens", "their prompts", "log", 1e7),
    Feature("storing", "requests", "completed, their KV store under way", "log", 1024),
    Feature("arrival_rate", "requests/s", "over about the last 10 s", "log", 1000),
    Feature("preemption_rate", "evictions/s", "over about the last 10 s", "log", 1000),
    Feature("oldest_age", "s", "age of the oldest waiting request", "log", 600),
    Feature("free_blocks", "share of the pool", "blocks that nobody holds", "linear", 1),
    Feature("running", "share of max_num_seqs", "requests in the batch", "linear", 1),
    Feature("prefilling", "share of max_num_seqs", "of these, in prefill", "linear", 1),
    Feature("kvc_ready", "share of the rate limit", "waiting holders of fetched KV", "linear", 1),
    Feature("decode_tokens", "share of the budget", "decodes of the coming step", "linear", 1),
    Feature("prefill_tokens", "share of the budget", "prefill tokens scheduled", "linear", 1),
    Feature("chunk_budget", "share of the budget", "prefill tokens allowed per step", "linear", 1),
    Feature("predicted_peak_kv", "share of the pool", "of the batch as it is", "linear", 2),
    Feature("step_time", "s", "duration of the last step", "linear", 0.5),
)
"""The gauges, the logarithmic ones first."""

INDEX = {gauge.name: column for column, gauge in enumerate(GAUGES)}


@dataclass(frozen=True)
class WorkerGauges:
    """The gauges of one worker at a decision.

    Attributes:
        values: Raw values in the gauges' units, shape (len(GAUGES),), float64.
    """

    values: NDArray[np.float64]

    def __getitem__(self, gauge: str) -> float:
        """A gauge's value in its unit."""
        return float(self.values[INDEX[gauge]])


def read_gauges(worker: LLMWorkerVLLMScheduler) -> WorkerGauges:
    """Reads all gauges of a worker."""
    params, pool, batch, queue = worker.params, worker.pool, worker.batch, worker.waiting_requests
    budget, now = params.max_num_batched_tokens, worker.env.now
    return WorkerGauges(
        np.array(
            [
                len(queue),
                queue.prompt_tokens,
                len(worker.completed_requests),
                worker.arrival_rate.at(now),
                worker.preemption_rate.at(now),
                now - queue.oldest().arrival_time if queue else 0.0,
                worker.free_gpu_blocks / pool.total,
                len(batch) / params.max_num_seqs,
                len(batch.prefill_requests) / params.max_num_seqs,
                worker.kvc_ready_count / params.max_kvc_ready_requests,
                batch.decode_tokens / budget,
                batch.prefill_tokens / budget,
                worker.chunk_budget / budget,
                worker.peak_kv().tokens / (pool.total * worker.block_size),
                worker.last_step_s,
            ]
        )
    )


class EventRate:
    """Events per second, exponentially forgotten with a time constant of `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._since = 0.0

    def count(self, now: float) -> None:
        """Counts one event."""
        self._rate = self.at(now) + 1 / RATE_WINDOW_S
        self._since = now

    def at(self, now: float) -> float:
        """The rate at `now`, 1/s."""
        return self._rate * math.exp((self._since - now) / RATE_WINDOW_S)
