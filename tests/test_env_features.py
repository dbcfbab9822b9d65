"""Features of tiny decisions, worked out by hand: raw, and as they are observed."""

from __future__ import annotations

import math

import numpy as np

from opal_gym.sim.request import Tenant
from tests.tiny import tiny_config, tiny_workload
from tests.watched import Watched

PROMPT_LOG, OUTPUT_LOG = math.log1p(131072), math.log1p(16384)
AREA_LOG, WAIT_LOG, RATE_LOG = math.log1p(1e9), math.log1p(600), math.log1p(1000)


# --------------------------------------------------------------------------------- CHUNK


def test_chunk_features() -> None:
    """A (6 + 3) and B (10 + 2) wait at 0; a step takes 0.1 s and 0.01 s a prefill token.

    With 16 tokens both prompts fit (6 + 10), with 8 there are A's 6 and 2 of B's.
    """
    config = tiny_config(
        {
            "worker.inference_params": {
                "model": "synthetic",
                "base_s": 0.1,
                "per_prefill_token_s": 0.01,
            }
        }
    )
    it = Watched(config, tiny_workload([(0.0, 6, 3), (0.0, 10, 2)]))
    it.expect("CHUNK", 0.0, 1, [-1] * 5)
    for row, (budget, step_time) in enumerate(
        [(16, 0.26), (8, 0.18), (4, 0.14), (2, 0.12), (1, 0.11)]
    ):
        it.row(row, budget_tokens=budget, step_time=step_time)
        it.seen(row, budget_tokens=math.log1p(budget) / PROMPT_LOG, step_time=step_time / 0.5)
    # Both arrived just now: 2 events at 1/10 s each.
    it.gauges(
        free_blocks=1.0, waiting=2, waiting_prompt_tokens=16, chunk_budget=1.0, arrival_rate=0.2
    )
    it.seen_gauges(
        free_blocks=1.0,
        waiting=math.log1p(2) / OUTPUT_LOG,
        waiting_prompt_tokens=math.log1p(16) / math.log1p(1e7),
        arrival_rate=math.log1p(0.2) / RATE_LOG,
    )
    assert it.info["baseline_action"] == 0

    it.step(2)  # 4 tokens a step: the first chunk of either is 4 tokens, one block of 100
    it.expect("ADMIT", 0.0, 1, [0, 1])
    for row, (prompt, output, peak) in enumerate([(6, 3, 9), (10, 2, 12)]):
        it.row(
            row,
            prompt_tokens=prompt,
            prompt_remaining=prompt,
            predicted_output_tokens=output,
            predicted_remaining=output,
            predicted_kv_area=output * (prompt + output / 2),
            blocks_needed=0.01,
            predicted_peak_kv=peak / 400,
            weight=1.0,
            ttft_slack=math.inf,
            tpot_slack=math.inf,
        )

    it.step(0)  # A: 4 of its 6 tokens up to 0.14, so no tokens are left for B
    it.expect("CHUNK", 0.14, 2, [-1] * 5)
    # 16: A's last 2 and B's 10; 8: 2 + 6; 4: 2 + 2; 2: 2; 1: 1.
    for row, (budget, tokens) in enumerate([(16, 12), (8, 8), (4, 4), (2, 2), (1, 1)]):
        it.row(row, budget_tokens=budget, step_time=0.1 + 0.01 * tokens)
    it.gauges(
        free_blocks=0.99,
        running=1 / 4,
        prefilling=1 / 4,
        waiting=1,
        waiting_prompt_tokens=10,
        chunk_budget=4 / 16,
        predicted_peak_kv=9 / 400,
        arrival_rate=0.2 * math.exp(-0.014),
        oldest_age=0.14,
        step_time=0.14,
    )

    it.step(1)  # 8 tokens: A's 2 and its first token (7 tokens, 2 blocks); 6 are left for B
    it.expect("ADMIT", 0.14, 2, [1])
    it.gauges(
        free_blocks=0.98,
        running=1 / 4,
        prefilling=1 / 4,
        waiting=1,
        waiting_prompt_tokens=10,
        prefill_tokens=2 / 16,
        chunk_budget=8 / 16,
        predicted_peak_kv=9 / 400,
        arrival_rate=0.2 * math.exp(-0.014),
        oldest_age=0.14,
        step_time=0.14,
    )
    # Peak: A (6 + 3) outlives B (10 + 2): 6 + 10 + 2 · 2.
    it.row(
        0,
        prompt_tokens=10,
        prompt_remaining=10,
        predicted_output_tokens=2,
        predicted_remaining=2,
        predicted_kv_area=22,
        waiting_time=0.14,
        blocks_needed=0.02,
        predicted_peak_kv=20 / 400,
        weight=1.0,
        ttft_slack=math.inf,
        tpot_slack=math.inf,
    )


# ----------------------------------------------------------------------- PREEMPT and ADMIT


def short_of_blocks() -> Watched:
    """7 blocks of 4 tokens; a step takes 0.25 s. A (8 + 10) at 0, B (8 + 10) at 0.125.

    B's output is predicted to be 12. Tenants' weight is 2, their objectives 1 s and 0.2 s.
    """
    config = tiny_config(
        {"worker.inference_params": {"model": "synthetic", "base_s": 0.25}},
        num_gpu_blocks_override=7,
    )
    workload = tiny_workload(
        [(0.0, 8, 10), (0.125, 8, 10)],
        predicted=[10, 12],
        tenants=(Tenant("t", weight=2.0, ttft_slo_s=1.0, tpot_slo_s=0.2),),
    )
    return Watched(config, workload, decisions=("PREEMPT", "ADMIT"))


def test_admit_features() -> None:
    """At 0.25, A has 9 tokens in KV and 9 to come, and needs 3 blocks for the next."""
    it = short_of_blocks()
    it.expect("ADMIT", 0.25, 2, [1])
    # First chunk: 8 tokens and the first of the output, so 3 blocks.
    # Peak: B 8 + 12 outlives A 9 + 9: 8 + 9 + 2 · 9 = 35 of 28 tokens.
    it.row(
        0,
        prompt_tokens=8,
        prompt_remaining=8,
        predicted_output_tokens=12,
        predicted_remaining=12,
        predicted_kv_area=168,
        waiting_time=0.125,
        blocks_needed=3 / 7,
        predicted_peak_kv=35 / 28,
        weight=2,
        ttft_slack=0.875,
        tpot_slack=math.inf,
    )
    it.seen(
        0,
        present=1,
        prompt_tokens=math.log1p(8) / PROMPT_LOG,
        prompt_remaining=math.log1p(8) / PROMPT_LOG,
        predicted_output_tokens=math.log1p(12) / OUTPUT_LOG,
        predicted_remaining=math.log1p(12) / OUTPUT_LOG,
        predicted_kv_area=math.log1p(168) / AREA_LOG,
        waiting_time=math.log1p(0.125) / WAIT_LOG,
        blocks_needed=3 / 7,
        predicted_peak_kv=35 / 56,
        weight=0.5,
        ttft_slack=0.0875,
        tpot_slack=1.0,
        work_lost=0,
    )
    rate = 0.1 * math.exp(-0.025) + 0.1 * math.exp(-0.0125)
    it.gauges(
        free_blocks=4 / 7,
        running=1 / 4,
        waiting=1,
        waiting_prompt_tokens=8,
        decode_tokens=1 / 16,
        chunk_budget=1.0,
        predicted_peak_kv=18 / 28,
        arrival_rate=rate,
        oldest_age=0.125,
        step_time=0.25,
    )
    it.seen_gauges(
        free_blocks=4 / 7,
        running=0.25,
        decode_tokens=1 / 16,
        predicted_peak_kv=18 / 56,
        arrival_rate=math.log1p(rate) / RATE_LOG,
        oldest_age=math.log1p(0.125) / WAIT_LOG,
        step_time=0.5,
    )
    assert it.info["action_mask"].tolist() == [1] + [0] * 63 + [1]


def test_preempt_features() -> None:
    """At 1.25, A has 13 tokens (5 of output), B 12 (4); the next of each needs a 4th block: 8 > 7.

    B has less work done, so it comes first.
    """
    it = short_of_blocks()
    it.step(0)
    it.expect("PREEMPT", 1.25, 4, [1, 0])
    # B's first token came at 0.5, so that its 4 tokens are good until 0.5 + 4 · 0.2 = 1.3 s.
    it.row(
        0,
        prompt_tokens=8,
        predicted_output_tokens=12,
        predicted_remaining=8,
        predicted_kv_area=168,
        waiting_time=1.125,
        weight=2,
        ttft_slack=math.inf,
        tpot_slack=0.05,
        work_lost=12,
        blocks_freed=3 / 7,
        admission_rank=1,
    )
    # A's came at 0.25, and 5 tokens are good until 1.25 s.
    it.row(
        1,
        prompt_tokens=8,
        predicted_output_tokens=10,
        predicted_remaining=5,
        predicted_kv_area=130,
        waiting_time=1.25,
        weight=2,
        ttft_slack=math.inf,
        tpot_slack=0.0,
        work_lost=13,
        blocks_freed=4 / 7,
    )
    it.seen(
        0,
        ttft_slack=1.0,
        tpot_slack=0.005,
        work_lost=math.log1p(12) / PROMPT_LOG,
        blocks_freed=3 / 7,
    )
    # Peak: B 12 + 8 outlives A 13 + 5: 12 + 13 + 2 · 5.
    it.gauges(
        running=2 / 4,
        decode_tokens=2 / 16,
        chunk_budget=1.0,
        predicted_peak_kv=35 / 28,
        arrival_rate=0.1 * math.exp(-0.125) + 0.1 * math.exp(-0.1125),
        step_time=0.25,
    )
    assert it.info["baseline_action"] == 0
    assert it.info["action_mask"].tolist() == [1, 1] + [0] * 63


def test_admit_features_of_an_evicted_request() -> None:
    """B, evicted at 1.25, fits again at 1.5: A holds 4 of 7 blocks, with 14 tokens, 4 to come."""
    it = short_of_blocks()
    it.step(0)
    it.step(0)
    it.expect("ADMIT", 1.5, 5, [1])
    # Its 4 tokens are delivered: the TTFT counts no more, and they were good until 1.3 s.
    # Peak: B 8 + 12 outlives A 14 + 4: 8 + 14 + 2 · 4.
    it.row(
        0,
        prompt_tokens=8,
        prompt_remaining=8,
        predicted_output_tokens=12,
        predicted_remaining=12,
        predicted_kv_area=168,
        waiting_time=1.375,
        blocks_needed=3 / 7,
        predicted_peak_kv=30 / 28,
        preemptions=1,
        weight=2,
        ttft_slack=math.inf,
        tpot_slack=-0.2,
    )
    it.seen(0, preemptions=1 / 8, tpot_slack=-0.02, ttft_slack=1.0)
    it.gauges(
        free_blocks=3 / 7,
        running=1 / 4,
        waiting=1,
        waiting_prompt_tokens=8,
        decode_tokens=1 / 16,
        chunk_budget=1.0,
        predicted_peak_kv=18 / 28,
        arrival_rate=0.1 * math.exp(-0.15) + 0.1 * math.exp(-0.1375),
        preemption_rate=0.1 * math.exp(-0.025),
        oldest_age=1.375,
        step_time=0.25,
    )


def test_nearly_finished_requests_are_marked_and_sort_last() -> None:
    """As above, but of B's output 4 tokens were predicted, all of which it has made."""
    config = tiny_config(num_gpu_blocks_override=7)
    workload = tiny_workload([(0.0, 8, 10), (0.5, 8, 10)], predicted=[10, 4])
    it = Watched(config, workload, decisions=("PREEMPT",))
    it.expect("PREEMPT", 5.0, 4, [0, 1])
    assert it.env.decision is not None
    table = it.env.decision.candidates
    assert table["nearly_finished"].tolist() == [0.0, 1.0]
    assert table["work_lost"].tolist() == [13.0, 12.0]
    assert table["predicted_remaining"].tolist() == [5.0, 1.0]
    it.seen(1, nearly_finished=1.0)


def test_a_decision_is_the_same_in_and_outside_of_the_environment() -> None:
    """What is observed is what an in-process policy would see."""
    it = short_of_blocks()
    decision = it.env.decision
    assert decision is not None
    first = decision.candidates.values
    assert decision.candidates.values is first
    assert np.array_equal(decision.gauges.values, it.env.simulation.pending.gauges.values)  # type: ignore[union-attr]
