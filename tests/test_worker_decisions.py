"""The questions of a rebuild: which are asked, who is asked about, and in which order (DESIGN §3).

Every step takes 1 s and computes at most 16 tokens; a block holds 4 tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from opal_gym.config import ConfigError, LengthInformation
from opal_gym.sim.decision import STOP, Decision, DecisionKind, Policy
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import make_workload
from tests.driving import BASELINE, Asked, Script, kv_cache, note, play, simulate, watch
from tests.tiny import by_id, tiny_config

BUDGETS = (16, 8, 4, 2, 1)

PAIR = [(0, 8, 6), (0, 4, 6)]
"""With a pool of 5 blocks: at 4 r0 holds 12 and needs 4, r1 holds 8 and needs 3."""


# -------------------------------------------------------------------------------------- CHUNK


def test_chunk_offers_the_budget_and_its_halves() -> None:
    policy = Script()
    play(simulate([(0, 4, 2)], policy=policy))
    (question,) = policy.asked
    assert question == Asked("CHUNK", 0.0, 1, BUDGETS, stop_allowed=False, baseline=0)


@pytest.mark.parametrize(
    ("params", "budgets"),
    [
        # 4, 2, 1, 0 → 1, 0 → 1, without duplicates
        ({"max_num_batched_tokens": 4}, (4, 2, 1)),
        ({"max_num_batched_tokens": 5}, (5, 2, 1)),
        ({"chunk_budgets": [16, 6]}, (16, 6)),
    ],
)
def test_chunk_budgets_have_no_duplicates_and_can_be_configured(
    params: dict[str, Any], budgets: tuple[int, ...]
) -> None:
    policy = Script()
    play(simulate([(0, 4, 2)], policy=policy, **params))
    assert policy.ids("CHUNK")[0] == (0.0, budgets)


def test_a_single_budget_is_no_question() -> None:
    policy = Script()
    play(simulate([(0, 20, 2)], policy=policy, chunk_budgets=[16]))
    assert policy.asked == []


def test_a_chosen_budget_holds_until_the_next_rebuild() -> None:
    """Prompt 10 in chunks of at most 4: 4, 4, 2; no rebuild before the prefill's end at 3."""
    policy = Script(chunk=[4])
    simulation = simulate([(0, 10, 2)], stepwise=True, policy=policy)
    seen = watch(simulation, [0.5, 1.5, 2.5, 3.5])
    records = play(simulation)
    assert [state.tokens for state in seen.values()] == [{0: 4}, {0: 4}, {0: 2}, {0: 1}]
    assert [state.rebuilds for state in seen.values()] == [1, 1, 1, 2]
    assert records[0]["token_times"] == [3, 4]


def test_the_chunk_budget_bounds_all_prefills_of_a_step_together() -> None:
    """Budget 6 for r0 (4, 5) and r1 (9, 5): 4 + 2, then 6 beside r0's decode, then 1. Not asked at
    3, where only decodes run: the full budget again."""
    policy = Script(chunk=[6, 6])
    simulation = simulate(
        [(0, 4, 5), (0, 9, 5)], stepwise=True, policy=policy, chunk_budgets=[16, 6]
    )
    seen = watch(simulation, [0.5, 1.5, 2.5])
    play(simulation)
    assert [state.tokens for state in seen.values()] == [{0: 4, 1: 2}, {0: 1, 1: 6}, {0: 1, 1: 1}]
    assert policy.ids("CHUNK") == [(0.0, (16, 6)), (1.0, (16, 6))]
    assert simulation.worker.chunk_budget == 16


def test_chunk_is_not_asked_where_all_budgets_give_the_same_step_and_nobody_waits() -> None:
    """r0 (4, 2), r1 (28, 2) at 0.

    0  they wait: asked; r0 4 tokens, r1 12
    1  r0's prefill has ended, r1 has 16 left and 15 are allowed: asked
    2  r0 completes, r1 has 1 token left: every budget gives 1
    3  r1's prefill has ended: no prefill, nobody waits
    """
    policy = Script()
    play(simulate([(0, 4, 2), (0, 28, 2)], policy=policy))
    assert [question.time for question in policy.of("CHUNK")] == [0, 1]


def test_chunk_is_asked_for_the_same_step_where_somebody_waits() -> None:
    """As above, with r2 (1.5, 4, 1): at 2 the budget decides about its tokens."""
    policy = Script()
    play(simulate([(0, 4, 2), (0, 28, 2), (1.5, 4, 1)], policy=policy))
    assert [question.time for question in policy.of("CHUNK")] == [0, 1, 2]


def test_chunk_is_not_asked_without_a_prefill_and_a_free_slot() -> None:
    """One slot: at 2 (r1's arrival) r0 decodes; at 4 (its completion) the slot is free."""
    policy = Script()
    play(simulate([(0, 4, 4), (1.5, 4, 2)], policy=policy, max_num_seqs=1))
    assert [question.time for question in policy.of("CHUNK")] == [0, 4]


def test_chunk_is_not_asked_for_requests_that_are_being_fetched() -> None:
    """r0's fetch lasts from 10 to 12; r1 (10, 4, 4) decodes from 11 on.

    10  both wait: asked
    11  r1's prefill has ended; only r0 waits, in FETCH_KVC
    12  r0 is READY: asked
    """
    policy = Script()
    simulation = simulate(
        [(10, 12, 2), (10, 4, 4)],
        policy=policy,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(1, 2, 3), ()],
    )
    seen = watch(simulation, [11.5])
    play(simulation)
    assert seen[11.5].rebuilds == 2
    assert [question.time for question in policy.of("CHUNK")] == [10, 12]


# ------------------------------------------------------------------------------------ PREEMPT


def test_a_rebuild_asks_chunk_then_preempt_and_admit_only_if_nobody_was_evicted() -> None:
    """`PAIR` and r2 (3.5, 3, 1). 4: r1 is evicted. 5: 1 block is free, r1 (in front) needs 2, r2
    1."""
    policy = Script()
    simulation = simulate([*PAIR, (3.5, 3, 1)], policy=policy, num_gpu_blocks_override=5)
    play(simulation)
    asked = [(q.kind, q.time) for q in policy.asked if 4 <= q.time <= 5]
    assert asked == [("CHUNK", 4), ("PREEMPT", 4), ("CHUNK", 5), ("ADMIT", 5)]
    first, second = [q for q in policy.asked if q.time == 4]
    assert first.rebuild_id == second.rebuild_id
    assert policy.of("PREEMPT")[0].stop_allowed is False


def test_preempt_is_not_asked_with_one_candidate() -> None:
    """`(0, 8, 16), (0.5, 28, 2)`, pool 8, r1 evicted at 2, 4 and 6: at 8 only r0 is below the cap
    (see test_worker_preemption)."""
    policy = Script(preempt=[1, 1, 1])
    simulation = simulate([(0, 8, 16), (0.5, 28, 2)], policy=policy, num_gpu_blocks_override=8)
    records = play(simulation)
    assert [question.time for question in policy.of("PREEMPT")] == [2, 4, 6]
    assert records[0]["preemptions"] == 1


def test_more_victims_than_the_table_holds() -> None:
    """Six requests at 0, pool 14, a table of 4. At 1 they hold 10, 9, 8, 7, 6, 5 and need 3 + 3 + 3
    + 2 + 2 + 2 = 15. The half with the least work: 5, 4; then the longest predicted remaining of 3
    (10 - 1), 2 (30 - 1), 1 (40 - 1), 0 (20 - 1)."""
    policy = Script()
    simulation = simulate(
        [(0, prompt, 4) for prompt in (9, 8, 7, 6, 5, 4)],
        policy=policy,
        predicted=[20, 40, 30, 10, 50, 50],
        max_num_seqs=6,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=14,
        overrides={"env.max_candidates": 4},
    )
    play(simulation)
    assert policy.ids("PREEMPT")[0] == (1.0, (5, 4, 1, 2))


def test_the_preempt_table_says_what_an_eviction_costs_and_frees() -> None:
    """`PAIR`, pool 5, at 4: r1 holds 8 tokens in 2 blocks, r0 12 in 3; 2 of 6 outputs remain."""
    tables = tables_of(
        DecisionKind.PREEMPT,
        simulate(PAIR, outside=DecisionKind, num_gpu_blocks_override=5),
        ["work_lost", "blocks_freed", "predicted_remaining", "nearly_finished", "preemptions"],
    )
    assert tables[0] == {
        "work_lost": [8, 12],
        "blocks_freed": [2 / 5, 3 / 5],
        "predicted_remaining": [2, 2],
        "nearly_finished": [0, 0],
        "preemptions": [0, 0],
    }


def tables_of(
    kind: DecisionKind, simulation: Simulation, features: list[str]
) -> list[dict[str, list[float]]]:
    """Runs a simulation, baseline outside; columns of the candidate tables of one kind."""
    tables = []
    while decision := simulation.advance():
        if decision.kind is kind:
            table = decision.candidates
            tables.append({feature: table[feature].tolist() for feature in features})
        simulation.answer(decision.baseline)
    return tables


# -------------------------------------------------------------------------------------- ADMIT


def test_admit_is_asked_once_per_admission_until_nobody_fits() -> None:
    """Three at 0: an empty batch with nothing in flight must take one; then STOP is allowed, and
    one candidate is a question, too."""
    policy = Script(admit=[2, 0, 1])
    simulation = simulate([(0, 4, 2), (0, 4, 2), (0, 4, 2)], policy=policy)
    records = play(simulation)
    assert policy.of("ADMIT") == [
        Asked("ADMIT", 0.0, 1, (0, 1, 2), stop_allowed=False, baseline=0),
        Asked("ADMIT", 0.0, 1, (0, 1), stop_allowed=True, baseline=0),
        Asked("ADMIT", 0.0, 1, (1,), stop_allowed=True, baseline=0),
    ]
    assert [records[i]["gpu_start_time"] for i in range(3)] == [0, 0, 0]


def test_stop_ends_the_admissions_of_a_rebuild() -> None:
    """r1 (4, 2) alone is taken at 0; the next rebuild is its prefill's end at 1."""
    policy = Script(admit=[1, STOP])
    simulation = simulate([(0, 4, 2), (0, 4, 2), (0, 4, 2)], policy=policy)
    seen = watch(simulation, [0.5, 1.5])
    records = play(simulation)
    assert [question.time for question in policy.of("ADMIT")] == [0, 0, 1, 1]
    assert [state.tokens for state in seen.values()] == [{1: 4}, {0: 4, 1: 1, 2: 4}]
    assert [records[i]["token_times"] for i in range(3)] == [[2, 3], [1, 2], [2, 3]]


def test_left_over_tokens_do_not_reopen_what_a_stop_ended() -> None:
    """r0 (40, 2), r1 (4, 2) and r2 (12, 2; 8 tokens resident) at 10. r0 takes all 16 tokens; r2
    could be fetched: STOP. At 12 r0 leaves 8 tokens, but the next rebuild is its prefill's end at
    13."""
    policy = Script(admit=[0, STOP])
    simulation = simulate(
        [(10, 40, 2), (10, 4, 2), (10, 12, 2)],
        policy=policy,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(), (), (1, 2, 3)],
    )
    records = play(simulation)
    assert policy.ids("ADMIT")[:3] == [(10.0, (0, 1, 2)), (10.0, (2,)), (13.0, (1, 2))]
    assert records[1]["gpu_start_time"] == 13


def test_an_idle_worker_takes_a_single_request_without_a_question() -> None:
    policy = Script()
    play(simulate([(0, 4, 2)], policy=policy))
    assert policy.of("ADMIT") == []


def test_stop_is_allowed_on_an_empty_batch_while_a_fetch_is_in_flight() -> None:
    """r0 and r1 (10, 12, 2) match 8 tokens each. At 10 the batch is empty: with nothing in flight
    STOP is no answer; once r0's fetch is issued it is."""
    policy = Script(admit=[BASELINE, STOP])
    simulation = simulate(
        [(10, 12, 2), (10, 12, 2)],
        policy=policy,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(1, 2, 3), (1, 2, 4)],
    )
    seen = watch(simulation, [10.5])
    play(simulation)
    assert policy.of("ADMIT")[:2] == [
        Asked("ADMIT", 10.0, 1, (0, 1), stop_allowed=False, baseline=0),
        Asked("ADMIT", 10.0, 1, (1,), stop_allowed=True, baseline=0),
    ]
    assert seen[10.5].phases == {0: "FETCH_KVC", 1: "WAITING"}


BLOCKED = [(0, 4, 10), (2.5, 16, 1), (2.5, 3, 1)]
"""Pool 5. At 3 r0 holds 7 and needs 2 blocks: 3 are free. r1's first chunk is 15 tokens (r0 takes
one of the 16): 4 blocks. r2 needs ceil((3 + 1) / 4) = 1."""


def test_the_baseline_stops_where_fifos_walk_ends_before_the_first_candidate() -> None:
    """`BLOCKED`: r1 lacks blocks and ends the walk; r0 completes at 10, then r1 (needs all 5
    blocks) and r2 (at 11)."""
    policy = Script()
    simulation = simulate(BLOCKED, policy=policy, num_gpu_blocks_override=5)
    records = play(simulation)
    assert policy.of("ADMIT") == [
        Asked("ADMIT", 3.0, 3, (2,), stop_allowed=True, baseline=STOP),
        Asked("ADMIT", 10.0, 4, (1, 2), stop_allowed=False, baseline=0),
    ]
    assert [records[i]["gpu_start_time"] for i in range(3)] == [0, 10, 11]


def test_a_policy_may_take_a_candidate_behind_the_end_of_fifos_walk() -> None:
    """`BLOCKED`: r2 runs from 3 to 4."""
    policy = Script(admit=[2])
    simulation = simulate(BLOCKED, policy=policy, num_gpu_blocks_override=5)
    records = play(simulation)
    assert records[2]["token_times"] == [4]
    assert records[1]["gpu_start_time"] == 10


def test_a_smaller_chunk_lets_a_blocked_request_fit() -> None:
    """`BLOCKED`: with 8 tokens a step r1's first chunk needs 2 of the 3 free blocks."""
    policy = Script(chunk=[BASELINE, 8])
    simulation = simulate(BLOCKED, policy=policy, num_gpu_blocks_override=5)
    records = play(simulation)
    assert policy.ids("ADMIT")[0] == (3.0, (1, 2))
    assert records[1]["gpu_start_time"] == 3


def test_where_stop_is_not_allowed_the_baseline_is_the_first_candidate() -> None:
    """Pool 5. r0 and r1 (10, 12, 2) match 8 tokens each: r0 is READY at 12, r1 at 14; both hold 2
    blocks and need 2 more, 1 is free. r2 and r3 (13.5, 3, 1) need 1.

    13.5  arrivals at an empty batch: FIFO's walk ends at r0; r1's fetch is in flight: STOP
    14    nothing is in flight any more: somebody must be taken
    """
    policy = Script()
    simulation = simulate(
        [(10, 12, 2), (10, 12, 2), (13.5, 3, 1), (13.5, 3, 1)],
        policy=policy,
        num_gpu_blocks_override=5,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(1, 2, 3), (1, 2, 4), (), ()],
    )
    records = play(simulation)
    asked = [(q.time, q.ids, q.stop_allowed, q.baseline) for q in policy.of("ADMIT")]
    assert [question for question in asked if 13 < question[0] <= 14] == [
        (13.5, (2, 3), True, STOP),
        (14.0, (2, 3), False, 0),
    ]
    assert records[2]["token_times"] == [15]


def test_more_waiting_requests_than_the_table_holds() -> None:
    """Seven at 0, a table of 4: the first half in queue order, r0 and r1; of the rest the smallest
    predicted KV areas, r5 (3 outputs) and r3 (5), in queue order. True outputs say otherwise."""
    policy = Script()
    simulation = simulate(
        [(0, 2, output) for output in (3, 3, 1, 9, 1, 9, 1)],
        policy=policy,
        predicted=[9, 9, 8, 5, 9, 3, 7],
        max_num_seqs=8,
        overrides={"env.max_candidates": 4},
    )
    play(simulation)
    assert policy.ids("ADMIT")[0] == (0.0, (0, 1, 3, 5))


def test_no_decision_holds_more_than_max_candidates() -> None:
    """Also where more budgets than that could be offered (a configuration may refuse that)."""
    policy = Script()
    try:
        simulation = simulate([(0, 2, 3)] * 6, policy=policy, overrides={"env.max_candidates": 2})
    except ConfigError:
        return
    play(simulation)
    assert max(len(question.ids) for question in policy.asked) <= 2


def test_the_admit_table_says_what_an_admission_costs() -> None:
    """`BLOCKED` at 3, r2 (3, predicted 1), waiting for 0.5 s, needs 1 of 5 blocks. r0 has 7 tokens
    and 7 outputs to come: it peaks at 14 of 20 tokens; with r2 it holds 7 + 1 when r2 is done,
    which has 3 + 1: 12 together, so that the peak stays 14."""
    tables = tables_of(
        DecisionKind.ADMIT,
        simulate(BLOCKED, outside=DecisionKind, num_gpu_blocks_override=5),
        [
            "prompt_tokens",
            "predicted_output_tokens",
            "waiting_time",
            "blocks_needed",
            "predicted_peak_kv",
            "is_fetch",
        ],
    )
    assert tables[0] == {
        "prompt_tokens": [3],
        "predicted_output_tokens": [1],
        "waiting_time": [0.5],
        "blocks_needed": [1 / 5],
        "predicted_peak_kv": [14 / 20],
        "is_fetch": [0],
    }


def test_the_admit_table_predicts_the_peak_of_the_batch_with_each_candidate() -> None:
    """`PAIR` at 0, pool 5 (20 tokens), predicted outputs 6 and 3. Alone r0 peaks at 8 + 6, r1 at
    4 + 3. With r0 in the batch, r1 is done first: 8 + 4 and 3 outputs of each, 18 tokens."""
    simulation = simulate(PAIR, outside=DecisionKind, predicted=[6, 3], num_gpu_blocks_override=5)
    tables = tables_of(DecisionKind.ADMIT, simulation, ["predicted_peak_kv"])
    assert tables[0]["predicted_peak_kv"] == [14 / 20, 7 / 20]
    assert tables[1]["predicted_peak_kv"] == [18 / 20]


def test_the_admit_table_tells_a_fetch_from_an_admission() -> None:
    """At 10 r0 (8, 2) matches all its 8 tokens, of which 7 are fetched to 2 blocks; r1 (4, 2) needs
    2 blocks for 5 tokens."""
    simulation = simulate(
        [(10, 8, 2), (10, 4, 2)],
        outside=DecisionKind,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(1, 2), ()],
    )
    tables = tables_of(
        DecisionKind.ADMIT, simulation, ["is_fetch", "prefix_hit_tokens", "blocks_needed"]
    )
    assert tables[0] == {
        "is_fetch": [1, 0],
        "prefix_hit_tokens": [7, 0],
        "blocks_needed": [2 / 100, 2 / 100],
    }


# ------------------------------------------------------------------------------------ answers


class Constant(Policy):
    """Always answers the same to one kind of question; the baseline answers the others."""

    def __init__(self, kind: str, answer: int) -> None:
        self._kind, self._answer = kind, answer

    def choose(self, decision: Decision) -> int:
        return self._answer if decision.kind.name == self._kind else decision.baseline


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("CHUNK", 5),
        ("CHUNK", STOP),
        ("PREEMPT", 2),
        ("PREEMPT", STOP),
        ("ADMIT", 2),
        ("ADMIT", STOP),
        ("ADMIT", -2),
    ],
)
def test_an_illegal_answer_is_an_error(kind: str, answer: int) -> None:
    """`PAIR`, pool 5: 5 budgets, 2 victims at 4, 2 to admit at 0 to an empty batch (no STOP)."""
    simulation = simulate(PAIR, policy=Constant(kind, answer), num_gpu_blocks_override=5)
    with pytest.raises(ValueError, match=rf"{kind}.*got {answer}"):
        simulation.run()


def test_an_illegal_answer_from_outside_is_an_error() -> None:
    simulation = simulate([(0, 4, 2)], outside=[DecisionKind.CHUNK])
    assert simulation.advance() is not None
    simulation.answer(5)
    with pytest.raises(ValueError, match="CHUNK"):
        simulation.advance()


BEHIND_BLOCKED = [*BLOCKED, *[(15 + time, prompt, output) for time, prompt, output in PAIR]]

SAME_INSTANT = [(0, 8, 2), (0, 4, 6), (0.5, 8, 1)]
"""Pool 7. At 2 r0 completes; CHUNK is asked in the rebuild of that boundary, for r2 waits."""


@pytest.mark.parametrize(
    "scenario",
    [
        {"requests": BEHIND_BLOCKED, "num_gpu_blocks_override": 5},
        # r0's store ends at the boundary at which it begins: nothing to store, or no room.
        {
            "requests": SAME_INSTANT,
            "num_gpu_blocks_override": 7,
            "overrides": kv_cache(),
            "hash_ids": [(), (), ()],
        },
        {
            "requests": SAME_INSTANT,
            "num_gpu_blocks_override": 7,
            "overrides": kv_cache(blocks=1),
            "hash_ids": [(1, 2), (), ()],
        },
        # At 12 r0's store evicts what r1 would match, or r1's fetch pins it.
        {
            "requests": [(10, 8, 2), (11.5, 12, 2)],
            "overrides": kv_cache(blocks=2),
            "resident": (1, 2),
            "hash_ids": [(8, 9), (1, 2, 3)],
        },
    ],
    ids=["no cache", "nothing to store", "no room", "store against lookup"],
)
def test_decisions_are_the_same_in_process_and_from_outside(scenario: dict[str, Any]) -> None:
    policy = Script()
    inside = simulate(policy=policy, **scenario)
    play(inside)
    outside = simulate(outside=DecisionKind, **scenario)
    asked = []
    while decision := outside.advance():
        asked.append(note(decision))
        outside.answer(decision.baseline)
    assert asked == policy.asked
    assert by_id(outside) == by_id(inside)
    assert outside.metrics()["decisions"] == len(asked)


def test_kinds_that_are_not_outside_are_answered_in_process() -> None:
    simulation = simulate(PAIR, outside=[DecisionKind.PREEMPT], num_gpu_blocks_override=5)
    kinds = []
    while decision := simulation.advance():
        kinds.append(decision.kind)
        simulation.answer(decision.baseline)
    assert kinds == [DecisionKind.PREEMPT]


# -------------------------------------------------------------------------- length information


@pytest.mark.parametrize("information", ["oracle", "none"])
def test_schedulers_see_the_truth_or_nothing(information: LengthInformation) -> None:
    config = tiny_config(
        {
            "workload.num_requests": 50,
            "workload.tenants": [
                {
                    "prompt": {"kind": "fixed", "tokens": 4},
                    "output": {"kind": "lognormal", "median": 20, "sigma": 1.0},
                }
            ],
        }
    )
    workload = make_workload(config.workload, 1, length_information=information)
    noisy = make_workload(config.workload, 1, length_information="predicted")
    truth = workload.output_tokens.tolist()
    assert noisy.output_tokens.tolist() == truth
    assert noisy.predicted_output_tokens.tolist() != truth
    expected = truth if information == "oracle" else [0] * 50
    assert workload.predicted_output_tokens.tolist() == expected


def test_without_length_information_no_column_depends_on_the_output() -> None:
    """Two pairs of requests that differ in true outputs only; predictions are 0. At 0 one waits in
    each table; at 4 the pair is short of blocks, with 4 tokens made."""
    features = [
        "predicted_output_tokens",
        "predicted_remaining",
        "predicted_kv_area",
        "predicted_peak_kv",
        "nearly_finished",
    ]
    for kind in (DecisionKind.ADMIT, DecisionKind.PREEMPT):
        short, long = (
            tables_of(
                kind,
                simulate(
                    [(0, 8, output), (0, 4, output)],
                    outside=DecisionKind,
                    predicted=[0, 0],
                    num_gpu_blocks_override=5,
                ),
                features,
            )[0]
            for output in (6, 9)
        )
        assert short == long
        assert short["predicted_output_tokens"] == [0, 0]
        assert short["nearly_finished"] == [0, 0]
