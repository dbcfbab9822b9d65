"""When reward is earned: before the first decision, step by step, and up to a horizon."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.request import Tenant
from tests.episodes import Seen, make_env, play, random_legal
from tests.test_env_rewards import accepted
from tests.tiny import tiny_config, tiny_workload

THREE = [(0.0, 4, 2), (0.5, 4, 2), (1.5, 4, 1)]
"""A, B, C; every step takes 1 s, and the step that ends a prefill makes the first token.

Only ADMIT is asked. A alone has no alternative (the batch is empty), so it begins at 0. At 1, B is
asked about; at 2, when A is done, C. A ends at 2, B and C at 3.
"""


def three() -> tuple[OpalVLLMEnv, list[Seen]]:
    env = OpalVLLMEnv(tiny_config(), decisions=("ADMIT",))
    return env, play(env, options={"workload": tiny_workload(THREE)})


def test_the_hand_worked_episode_has_the_hand_worked_times() -> None:
    _, episode = three()
    assert [seen.info["time"] for seen in episode] == [1.0, 2.0, 3.0]
    assert [seen.info["dt"] for seen in episode] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("term", "first", "second"),
    [
        # In the system up to 2: A 2 s, B 1.5 s, C 0.5 s; then B and C for 1 s.
        ("latency", -4 / 3, -2 / 3),
        # Without a first token up to 2: A 1 s, B 1.5 s, C 0.5 s; then C for 1 s.
        ("ttft", -3 / 3, -1 / 3),
        # Unloaded: A 2 s, B 2 s, C 1 s. Up to 2: 2/2 + 1.5/2 + 0.5/1; then 1/2 + 1/1.
        ("slowdown", -2.25 / 3, -1.5 / 3),
        # Of 5 tokens, A's 2 are complete at 2, and the rest at 3.
        ("throughput", 2 / 5, 3 / 5),
        # No objectives: whoever completes is good.
        ("goodput", 1 / 3, 2 / 3),
        ("preemption", 0.0, 0.0),
    ],
)
def test_reward_before_the_first_decision_belongs_to_the_first_step(
    term: str, first: float, second: float
) -> None:
    _, (begin, *steps) = three()
    assert begin.info["rewards"][term] == 0.0
    earned = [seen.info["rewards"][term] for seen in steps]
    assert earned == pytest.approx([first, second], abs=1e-12)


def test_rejected_requests_count_neither_in_n_nor_in_the_system() -> None:
    """D needs 404 of 400 tokens of KV: n stays 3."""
    env = OpalVLLMEnv(tiny_config(), decisions=("ADMIT",))
    workload = tiny_workload([*THREE[:2], (0.75, 400, 4), THREE[2]])
    episode = play(env, options={"workload": workload})
    earned = [seen.info["rewards"]["latency"] for seen in episode]
    assert earned == pytest.approx([0, -4 / 3, -2 / 3], abs=1e-12)


def test_weights_and_objectives_of_tenants_count() -> None:
    """A weighs 3, B and C 1 (Σ = 5). B's and C's TTFT, 1.5 s, misses their objective of 1.4 s."""
    env = OpalVLLMEnv(tiny_config(), decisions=("ADMIT",))
    workload = tiny_workload(
        THREE,
        tenants=(Tenant("a", 3.0), Tenant("b", 1.0, ttft_slo_s=1.4, tpot_slo_s=9.0)),
        tenant=[0, 1, 1],
    )
    _, first, second = play(env, options={"workload": workload})
    assert first.info["rewards"]["slowdown"] == pytest.approx(-(3 * 1 + 0.75 + 0.5) / 5)
    assert second.info["rewards"]["slowdown"] == pytest.approx(-(0.5 + 1) / 5)
    assert first.info["rewards"]["goodput"] == pytest.approx(3 / 5)
    assert second.info["rewards"]["goodput"] == 0.0


def test_an_eviction_is_charged_to_the_step_in_which_it_happens() -> None:
    """7 blocks of 4: at 5, A (14 tokens next) and B (13) need 8 blocks, and one must go."""
    env = OpalVLLMEnv(tiny_config(num_gpu_blocks_override=7), decisions=("PREEMPT",))
    workload = tiny_workload([(0.0, 8, 10), (0.5, 8, 10)])
    episode = play(env, options={"workload": workload})
    assert episode[0].info["time"] == 5.0
    evictions = [seen.info["rewards"]["preemption"] * 2 for seen in episode]
    assert evictions[:2] == [0.0, -1.0]
    assert -sum(evictions) == env.simulation.ledger.preemptions


@pytest.mark.parametrize("name", ["busy", "busy-completion", "opal-docs", "slot8-chat"])
def test_dt_sums_to_the_time_passed_since_reset(name: str) -> None:
    episode = play(make_env(name), random_legal(0), seed=1)
    assert episode[0].info["dt"] == 0.0
    times = [seen.info["time"] for seen in episode]
    deltas = [seen.info["dt"] for seen in episode]
    assert all(dt >= 0 for dt in deltas)
    assert deltas[1:] == pytest.approx([b - a for a, b in pairwise(times)])
    assert math.fsum(deltas) == pytest.approx(times[-1] - times[0], rel=1e-12)


# ------------------------------------------------------------------------ horizons


@pytest.mark.parametrize("policy", ["baseline", "random"])
@pytest.mark.parametrize("share", [0.2, 0.7])
@pytest.mark.parametrize("name", ["busy", "busy-completion", "opal-docs", "mem-chat-burst"])
def test_truncated_episodes_pay_for_everybody_who_arrived(
    name: str, share: float, policy: str
) -> None:
    """−(1/n) Σ over the arrived of (min(end, horizon) − arrival), ends from the whole episode."""
    choose = {} if policy == "baseline" else {"choose": random_legal(4)}
    whole = make_env(name)
    end = play(whole, **choose, seed=2)[-1].info["time"]
    horizon = share * end
    table = whole.simulation.records.table
    ends = dict(zip(table["request_id"].tolist(), table["decode_done_time"], strict=True))
    token_times = dict(
        zip(table["request_id"].tolist(), whole.simulation.records.token_times(), strict=True)
    )

    choose = {} if policy == "baseline" else {"choose": random_legal(4)}
    env = make_env(name, horizon_s=horizon)
    episode = play(env, **choose, seed=2)
    assert episode[-1].truncated
    assert not episode[-1].terminated
    assert episode[-1].info["time"] == horizon

    arrival, ids = env.simulation.workload.arrival_time, accepted(env.simulation)
    arrived = [i for i in ids if arrival[i] <= horizon]
    latency = math.fsum(min(ends[i], horizon) - arrival[i] for i in arrived) / len(ids)
    assert math.fsum(seen.reward for seen in episode) == pytest.approx(-latency, abs=1e-9)
    ttft = math.fsum(min(token_times[i][0], horizon) - arrival[i] for i in arrived) / len(ids)
    paid = math.fsum(seen.info["rewards"]["ttft"] for seen in episode)
    assert paid == pytest.approx(-ttft, abs=1e-9)


def test_a_hand_worked_truncation() -> None:
    """`THREE` up to 2.25: A 2 s, B 1.75 s, C 0.75 s; n = 3 all the same."""
    env = OpalVLLMEnv(tiny_config(), decisions=("ADMIT",), horizon_s=2.25)
    episode = play(env, options={"workload": tiny_workload(THREE)})
    assert [seen.info["time"] for seen in episode] == [1.0, 2.0, 2.25]
    assert [seen.truncated for seen in episode] == [False, False, True]
    assert [seen.reward for seen in episode] == pytest.approx([0, -4 / 3, -0.5 / 3])


def test_requests_after_the_horizon_count_in_n_alone() -> None:
    env = OpalVLLMEnv(tiny_config(), decisions=("ADMIT",), horizon_s=2.25)
    episode = play(env, options={"workload": tiny_workload([*THREE, (50.0, 4, 1)])})
    assert sum(seen.reward for seen in episode) == pytest.approx(-4.5 / 4)
