"""Features of decisions around the KV cache, worked out by hand."""

from __future__ import annotations

import math

import pytest

from tests.tiny import tiny_config, tiny_workload
from tests.watched import Watched

PROMPT_LOG = math.log1p(131072)

TIER = {
    # A hash block is 4 tokens, 512 KiB; one takes 0.262144 s.
    "kvc.hash_block_tokens": 4,
    "kvc.tiers": [{"name": "CPUMemory", "capacity_GB": 1.0, "bandwidth_GBps": 0.002}],
}


def test_features_of_a_fetch() -> None:
    """A's two hash blocks are stored from 1 to 1.52; B and C, at 3, begin with them.

    C's prompt is no longer than they are: its last token is computed, so that 7 of 8 tokens hit.
    Rebuilds: at 0, at A's end (1), when its blocks are released (1.52), and at 3.
    """
    workload = tiny_workload(
        [(0.0, 8, 1), (3.0, 12, 2), (3.0, 8, 2)], hash_ids=[(1, 2), (1, 2, 3), (1, 2)]
    )
    it = Watched(tiny_config(TIER), workload, decisions=("ADMIT",))
    it.expect("ADMIT", 3.0, 4, [1, 2])
    for row, (prompt, hit) in enumerate([(12, 8), (8, 7)]):
        it.row(
            row,
            prompt_tokens=prompt,
            prompt_remaining=prompt,
            predicted_output_tokens=2,
            predicted_remaining=2,
            predicted_kv_area=2 * (prompt + 1),
            blocks_needed=0.02,
            predicted_peak_kv=(prompt + 2) / 400,
            prefix_hit_tokens=hit,
            is_fetch=1,
            weight=1,
            ttft_slack=math.inf,
            tpot_slack=math.inf,
        )
    it.seen(0, is_fetch=1.0, prefix_hit_tokens=math.log1p(8) / PROMPT_LOG)
    it.step(0)
    it.expect("ADMIT", 3.0, 4, [2])
    assert it.env.decision is not None
    assert it.env.decision.gauges["kvc_ready"] == 1 / 4
    assert it.env.decision.gauges["free_blocks"] == 0.98
    assert it.env.decision.gauges["waiting"] == 2
    assert it.info["action_mask"][-1] == 1, "with a fetch in flight, STOP is allowed"


def test_a_holder_of_a_fetched_prefix_needs_only_what_is_left() -> None:
    """B's 8 tokens arrive 0.52 s after 3; its rest is 4 tokens, and the first token, 13 in all.

    Rebuilds: at 0, 1, 1.52, 2.9 (the runner), 3.9 (the runner decodes, B waits), 4.9 (READY).
    """
    workload = tiny_workload(
        [(0.0, 8, 1), (2.9, 4, 40), (3.0, 12, 2)], hash_ids=[(1, 2), (), (1, 2, 3)]
    )
    it = Watched(tiny_config(TIER), workload, decisions=("ADMIT",))
    it.expect("ADMIT", 3.9, 5, [2])
    it.step(0)  # the fetch, from 3.9 to 4.42
    it.expect("ADMIT", 4.9, 6, [2])
    it.row(
        0,
        prompt_tokens=12,
        prompt_remaining=4,
        predicted_output_tokens=2,
        predicted_remaining=2,
        predicted_kv_area=26,
        waiting_time=1.9,
        blocks_needed=(4 - 2) / 100,
        # The runner has made 2 of 40 tokens; when the holder ends, both have grown by 2: 22.
        # When the runner ends, it alone holds 44.
        predicted_peak_kv=44 / 400,
        prefix_hit_tokens=8,
        weight=1,
        ttft_slack=math.inf,
        tpot_slack=math.inf,
    )
    assert it.env.decision is not None
    assert it.env.decision.gauges["kvc_ready"] == 1 / 4


def test_gauge_of_stores_under_way() -> None:
    """A's store lasts from 1 to 1.52, and B and C arrive at 1.25.

    Rebuilds: at 0, at A's end, and at 1.25.
    """
    workload = tiny_workload(
        [(0.0, 8, 1), (1.25, 4, 2), (1.25, 4, 2)], hash_ids=[(1, 2), (7,), (8,)]
    )
    it = Watched(tiny_config(TIER), workload, decisions=("ADMIT",))
    it.expect("ADMIT", 1.25, 3, [1, 2])
    assert it.env.decision is not None
    assert it.env.decision.gauges["storing"] == 1.0
    # A still holds its 3 blocks.
    assert it.env.decision.gauges["free_blocks"] == pytest.approx(0.97)
    it.seen_gauges(storing=math.log1p(1) / math.log1p(1024))
