"""The candidate table of a decision: what schedulers see of each choice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.features import Feature

FEATURES: tuple[Feature, ...] = (
    Feature("prompt_tokens", "tokens", "length of the prompt", "log", 131072),
    Feature("prompt_remaining", "tokens", "prompt tokens not yet in KV", "log", 131072),
    Feature("predicted_output_tokens", "tokens", "predicted output length", "log", 16384),
    Feature("predicted_remaining", "tokens", "predicted output still to come", "log", 16384),
    Feature("predicted_kv_area", "token·steps", "output · (prompt + output / 2)", "log", 1e9),
    Feature("waiting_time", "s", "time since arrival", "log", 600),
    Feature("prefix_hit_tokens", "tokens", "prompt tokens found in a KV cache", "log", 131072),
    Feature("work_lost", "tokens", "KV tokens that an eviction throws away", "log", 131072),
    Feature("budget_tokens", "tokens", "prefill tokens per step", "log", 131072),
    Feature("present", "0 or 1", "the row holds a candidate", "linear", 1),
    Feature("blocks_needed", "share of the pool", "for the first chunk or fetch", "linear", 1),
    Feature("predicted_peak_kv", "share of the pool", "of the batch if admitted", "linear", 2),
    Feature("is_fetch", "0 or 1", "admitting it issues a KV-cache fetch", "linear", 1),
    Feature("preemptions", "count", "how often it was evicted", "linear", 8),
    Feature("weight", "–", "weight of its tenant", "linear", 4),
    Feature("ttft_slack", "s", "until the TTFT objective is missed", "linear", 10, -10),
    Feature("tpot_slack", "s", "ahead of the TPOT objective's pace", "linear", 10, -10),
    Feature("blocks_freed", "share of the pool", "that an eviction frees", "linear", 1),
    Feature("admission_rank", "count", "candidates admitted before it", "linear", 256),
    Feature("nearly_finished", "0 or 1", "95 % of the predicted output is made", "linear", 1),
    Feature("step_time", "s", "predicted time of the coming step", "linear", 0.5),
)
"""Columns of the candidate table, the logarithmic ones first.

ADMIT knows no `work_lost`, `blocks_freed`, `admission_rank`,
`nearly_finished`; PREEMPT no `blocks_needed`,
`predicted_peak_kv`; CHUNK knows `present`, `budget_tokens` and `step_time` alone. What a kind of
decision does not know is 0.
"""

INDEX = {feature.name: column for column, feature in enumerate(FEATURES)}


@dataclass(frozen=True)
class CandidateTable:
    """The candidates of one decision, n rows.

    Attributes:
        values: Raw values in the features' units, shape (n, len(FEATURES)), float64.
        request_ids: Ids of the candidates' requests, shape (n,); -1 for chunk budgets.
    """

    values: NDArray[np.float64]
    request_ids: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self.values)

    def __getitem__(self, feature: str) -> NDArray[np.float64]:
        """A feature's column in its unit, shape (n,)."""
        return self.values[:, INDEX[feature]]
