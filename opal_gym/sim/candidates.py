"""The candidate table of a decision: what schedulers see of each choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.table import Column, State

if TYPE_CHECKING:
    from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler


class Feature(NamedTuple):
    """A column of the candidate table."""

    name: str
    unit: str
    meaning: str
    scaling: Literal["linear", "log"]
    scale: float
    low: float = 0.0


FEATURES: tuple[Feature, ...] = (
    Feature("present", "0 or 1", "the row holds a candidate", "linear", 1),
    Feature("prompt_tokens", "tokens", "length of the prompt", "log", 131072),
    Feature("prompt_remaining", "tokens", "prompt tokens not yet in KV", "log", 131072),
    Feature("predicted_output_tokens", "tokens", "predicted output length", "log", 16384),
    Feature("predicted_remaining", "tokens", "predicted output still to come", "log", 16384),
    Feature("predicted_kv_area", "token·steps", "output · (prompt + output / 2)", "log", 1e9),
    Feature("waiting_time", "s", "time since arrival", "log", 600),
    Feature("blocks_needed", "share of the pool", "for the first chunk or fetch", "linear", 1),
    Feature("predicted_peak_kv", "share of the pool", "of the batch if admitted", "linear", 2),
    Feature("prefix_hit_tokens", "tokens", "prompt tokens found in the KV cache", "log", 131072),
    Feature("is_fetch", "0 or 1", "admitting it issues a KV-cache fetch", "linear", 1),
    Feature("preemptions", "count", "how often it was evicted", "linear", 8),
    Feature("weight", "–", "weight of its tenant", "linear", 4),
    Feature("ttft_slack", "s", "until the TTFT objective is missed", "linear", 10, -10),
    Feature("tpot_slack", "s", "ahead of the TPOT objective's pace", "linear", 10, -10),
    Feature("work_lost", "tokens", "KV tokens that an eviction throws away", "log", 131072),
    Feature("blocks_freed", "share of the pool", "that an eviction frees", "linear", 1),
    Feature("nearly_finished", "0 or 1", "95 % of the predicted output is made", "linear", 1),
    Feature("budget_tokens", "tokens", "prefill tokens per step", "log", 131072),
    Feature("step_time", "s", "predicted time of the coming step", "linear", 0.5),
)
"""Columns of the candidate table; a row's last ones are for PREEMPT and CHUNK."""

INDEX = {feature.name: column for column, feature in enumerate(FEATURES)}


@dataclass(frozen=True)
class CandidateTable:
    """The candidates of one decision, n rows.

    Attributes:
        values: Raw values in the features' units, shape (n, len(FEATURES)), float64. A feature
            that has no meaning for the kind of decision is 0.
        request_ids: Ids of the candidates' requests, shape (n,), int64; -1 for chunk budgets.
    """

    values: NDArray[np.float64]
    request_ids: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self.values)

    def __getitem__(self, feature: str) -> NDArray[np.float64]:
        """A feature's column in its unit, shape (n,)."""
        return self.values[:, INDEX[feature]]


def chunk_table(worker: LLMWorkerVLLMScheduler, budgets: Sequence[int]) -> CandidateTable:
    """The table of a CHUNK question: the budgets, with the step time that each would give."""
    values = np.zeros((len(budgets), len(FEATURES)))
    values[:, INDEX["present"]] = 1
    values[:, INDEX["budget_tokens"]] = budgets
    values[:, INDEX["step_time"]] = [worker.predicted_step_time(budget) for budget in budgets]
    return CandidateTable(values, np.full(len(budgets), -1))


def preempt_table(
    worker: LLMWorkerVLLMScheduler, rows: NDArray[np.intp], request_ids: NDArray[np.int64]
) -> CandidateTable:
    """The table of a PREEMPT question: running requests, by their rows of the request table."""
    values, put = _request_values(worker, rows)
    data = worker.table.data[rows]
    held = data[:, Column.PROCESSED] + generated_tokens(worker, data)
    put("work_lost", held)
    put("blocks_freed", np.ceil(held / worker.block_size) / worker.pool.total)
    put("nearly_finished", nearly_finished(worker, data))
    return CandidateTable(values, request_ids)


def admit_table(
    worker: LLMWorkerVLLMScheduler,
    rows: NDArray[np.intp],
    request_ids: NDArray[np.int64],
    blocks_needed: NDArray[np.float64],
) -> CandidateTable:
    """The table of an ADMIT question: waiting requests, by their rows of the request table."""
    values, put = _request_values(worker, rows)
    data = worker.table.data[rows]
    peaks = worker.peak_kv().with_candidates(
        data[:, Column.PROMPT], np.maximum(1, data[:, Column.PREDICTED_OUTPUT])
    )
    put("blocks_needed", blocks_needed / worker.pool.total)
    put("predicted_peak_kv", peaks / (worker.pool.total * worker.block_size))
    put("prefix_hit_tokens", data[:, Column.LOOKUP])
    put("is_fetch", data[:, Column.STATE] == State.MATCHED)
    return CandidateTable(values, request_ids)


def _request_values(
    worker: LLMWorkerVLLMScheduler, rows: NDArray[np.intp]
) -> tuple[NDArray[np.float64], Callable[[str, NDArray[np.float64] | NDArray[np.bool_]], None]]:
    """The features that all requests have."""
    data = worker.table.data[rows]
    values = np.zeros((len(data), len(FEATURES)))

    def put(feature: str, column: NDArray[np.float64] | NDArray[np.bool_]) -> None:
        values[:, INDEX[feature]] = column

    now, generated = worker.env.now, generated_tokens(worker, data)
    waiting = now - data[:, Column.ARRIVAL_TIME]
    served = np.isfinite(data[:, Column.FIRST_TOKEN_TIME])
    made = np.maximum(1, np.maximum(generated, data[:, Column.DELIVERED]))
    pace = data[:, Column.FIRST_TOKEN_TIME] + data[:, Column.TPOT_SLO] * made - now
    put("present", np.ones(len(data)))
    put("prompt_tokens", data[:, Column.PROMPT])
    put("prompt_remaining", data[:, Column.PROMPT] - data[:, Column.PROCESSED])
    put("predicted_output_tokens", data[:, Column.PREDICTED_OUTPUT])
    put("predicted_remaining", np.maximum(1, data[:, Column.PREDICTED_OUTPUT] - generated))
    put("predicted_kv_area", data[:, Column.KV_AREA])
    put("waiting_time", waiting)
    put("preemptions", data[:, Column.PREEMPTIONS])
    put("weight", data[:, Column.WEIGHT])
    put("ttft_slack", np.where(served, np.inf, data[:, Column.TTFT_SLO] - waiting))
    put("tpot_slack", np.where(served, pace, np.inf))
    return values, put


def generated_tokens(
    worker: LLMWorkerVLLMScheduler, data: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Tokens generated since the last (re)start, for rows of the request table."""
    decoding = data[:, Column.STATE] == State.DECODE
    return np.where(decoding, worker.steps.count - data[:, Column.ORIGIN_STEP], 0)


def nearly_finished(worker: LLMWorkerVLLMScheduler, data: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether 95 % of the predicted output is made (seed, "Preemption Strategy")."""
    predicted = data[:, Column.PREDICTED_OUTPUT]
    done: NDArray[np.bool_] = generated_tokens(worker, data) >= 0.95 * predicted
    return done & (predicted > 0)
