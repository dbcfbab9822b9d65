"""Reward terms: what their sums over an episode are, worked out from the records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from opal_gym.config import ConfigError
from opal_gym.envs import OpalVLLMEnv
from opal_gym.envs.rewards import TERMS
from opal_gym.sim.request import Tenant
from opal_gym.sim.simulation import Simulation, make_gpu_model
from tests.episodes import (
    SCENARIOS,
    Chooser,
    Seen,
    baseline,
    make_env,
    play,
    random_any,
    random_legal,
)
from tests.tiny import tiny_config, tiny_workload

GAP_LIMIT_S = 0.5


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-9)


def accepted(simulation: Simulation) -> list[int]:
    """Ids of the requests that can ever run (DESIGN §2, "On arrival")."""
    config, workload = simulation.config, simulation.workload
    block_size = config.worker.vllm_params.block_size
    lengths = (workload.prompt_tokens + workload.output_tokens).tolist()
    return [
        request
        for request, tokens in enumerate(lengths)
        if tokens <= config.max_model_len
        and math.ceil(tokens / block_size) <= config.total_gpu_blocks
    ]


def expected_sums(simulation: Simulation) -> dict[str, float]:
    """What each term sums to over a terminated episode, from workload and token times."""
    workload, ids = simulation.workload, accepted(simulation)
    params = simulation.config.worker.vllm_params
    gpu = make_gpu_model(simulation.config)
    weights = {i: workload.tenants[workload.tenant[i]].weight for i in ids}
    sums = dict.fromkeys(TERMS, 0.0)
    records = zip(simulation.records.table, simulation.records.token_times(), strict=True)
    for record, times in records:
        i = int(record["request_id"])
        arrival, output = workload.arrival_time[i], int(workload.output_tokens[i])
        assert len(times) == output
        e2e, ttft = times[-1] - arrival, times[0] - arrival
        unloaded = gpu.unloaded_latency(
            int(workload.prompt_tokens[i]),
            output,
            params.max_num_batched_tokens,
            params.first_token_at_prefill_end,
        )
        sums["latency"] -= e2e
        sums["ttft"] -= ttft
        sums["slowdown"] -= weights[i] * e2e / unloaded
        sums["throughput"] += output
        sums["preemption"] -= int(record["preemptions"])
        sums["goodput"] += weights[i] * _is_good(simulation, i, times)
    assert sorted(simulation.records.table["request_id"]) == ids
    total_weight = math.fsum(weights.values())
    tokens = sum(int(workload.output_tokens[i]) for i in ids)
    divisors = {"slowdown": total_weight, "goodput": total_weight, "throughput": tokens}
    return {name: value / divisors.get(name, len(ids)) for name, value in sums.items()}


def _is_good(simulation: Simulation, request: int, times: Any) -> bool:
    """Strict goodput (DESIGN §8); a tenant without objectives never misses one."""
    workload = simulation.workload
    tenant = workload.tenants[workload.tenant[request]]
    if math.isinf(tenant.ttft_slo_s) and math.isinf(tenant.tpot_slo_s):
        return True
    tpot = (times[-1] - times[0]) / max(1, len(times) - 1)
    gaps = np.diff(times)
    return bool(
        times[0] - workload.arrival_time[request] <= tenant.ttft_slo_s
        and tpot <= tenant.tpot_slo_s
        and (gaps <= GAP_LIMIT_S).all()
    )


def summed(episode: list[Seen]) -> dict[str, float]:
    return {
        name: math.fsum(seen.info["rewards"][name] for seen in episode)
        for name in episode[0].info["rewards"]
    }


def chooser(driver: str) -> Chooser:
    return {"baseline": baseline, "random": random_legal(1), "any": random_any(2)}[driver]


@pytest.mark.parametrize(("driver", "seed"), [("baseline", 1), ("random", 0), ("any", 2)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_terms_sum_is_what_its_name_says(name: str, driver: str, seed: int) -> None:
    env = make_env(name)
    episode = play(env, chooser(driver), seed=seed)
    assert episode[-1].terminated
    total = math.fsum(seen.reward for seen in episode)
    table = env.simulation.records.table
    mean_e2e = float(np.mean(table["decode_done_time"] - table["arrival_time"]))
    assert total == pytest.approx(-mean_e2e, rel=0, abs=1e-9)
    metrics = episode[-1].info["episode_metrics"]
    assert total == pytest.approx(-metrics["e2e_s"]["mean"], rel=0, abs=1e-9)
    expected = expected_sums(env.simulation)
    sums = summed(episode)
    assert sums.keys() == expected.keys()
    for term, value in expected.items():
        assert sums[term] == close(value), term


def test_the_identities_are_tested_where_terms_differ() -> None:
    """Non-vacuity: evictions, missed objectives and rejections all occur in `busy`."""
    episodes = [play(make_env("busy"), seed=seed) for seed in (0, 1)]
    metrics = [episode[-1].info["episode_metrics"] for episode in episodes]
    assert sum(one["preemptions"] for one in metrics) > 10
    assert sum(one["rejected"] for one in metrics) > 0
    assert 0 < summed(episodes[0])["goodput"] < 0.9
    assert summed(episodes[0])["throughput"] == close(1.0)


def test_terms_are_the_documented_ones_and_never_change_sign() -> None:
    episode = play(make_env("busy"), random_legal(0), seed=0)
    for seen in episode:
        rewards = seen.info["rewards"]
        assert set(rewards) == {
            "latency",
            "slowdown",
            "ttft",
            "goodput",
            "throughput",
            "preemption",
        }
        for name, value in rewards.items():
            assert value >= 0 if name in ("goodput", "throughput") else value <= 0


def test_strict_goodput_counts_a_long_gap_as_missed() -> None:
    """Both decode at 0.4 s a step with loose objectives; one is evicted and made to wait."""
    config = tiny_config(
        {"worker.inference_params": {"model": "synthetic", "base_s": 0.4}},
        num_gpu_blocks_override=7,
    )
    workload = tiny_workload(
        [(0.0, 8, 10), (0.1, 8, 10)], tenants=(Tenant("t", 1.0, ttft_slo_s=99, tpot_slo_s=99),)
    )
    env = OpalVLLMEnv(config)
    episode = play(env, options={"workload": workload})
    assert env.simulation.ledger.preemptions > 0
    assert summed(episode)["goodput"] == close(0.5)


# ------------------------------------------------------------------ choosing terms


@pytest.mark.parametrize("term", TERMS)
def test_a_term_by_name_is_the_reward(term: str) -> None:
    episode = play(make_env("busy", reward=term), seed=1)
    assert [seen.reward for seen in episode] == [seen.info["rewards"][term] for seen in episode]
    assert any(seen.reward for seen in episode)


def test_latency_is_the_default() -> None:
    episode = play(make_env("busy"), seed=1)
    assert [seen.reward for seen in episode[1:]] == [
        seen.info["rewards"]["latency"] for seen in episode[1:]
    ]


@pytest.mark.parametrize("how", ["argument", "override"])
def test_weights_add_terms_up(how: str) -> None:
    weights = {"goodput": 2.0, "preemption": 0.5, "ttft": -1.0}
    if how == "argument":
        env = make_env("busy", reward=weights)
    else:
        env = make_env("busy", overrides={"env.reward": weights})
    for seen in play(env, seed=1):
        terms = seen.info["rewards"]
        expected = 2 * terms["goodput"] + 0.5 * terms["preemption"] - terms["ttft"]
        assert seen.reward == pytest.approx(expected, rel=1e-12)


def test_a_function_sees_each_steps_terms() -> None:
    given: list[dict[str, float]] = []

    def reward(terms: Mapping[str, float]) -> float:
        given.append(dict(terms))
        return float(len(given))

    episode = play(make_env("busy", reward=reward), seed=1)
    assert [seen.reward for seen in episode[1:]] == [float(k) for k in range(1, len(episode))]
    assert given == [seen.info["rewards"] for seen in episode[1:]]
    assert all(type(seen.reward) is float for seen in episode)


def test_the_choice_of_reward_does_not_change_the_episode() -> None:
    one = play(make_env("busy"), seed=1)
    other = play(make_env("busy", reward="goodput"), seed=1)
    assert [seen.info["time"] for seen in one] == [seen.info["time"] for seen in other]
    assert [seen.info["rewards"] for seen in one] == [seen.info["rewards"] for seen in other]


@pytest.mark.parametrize("reward", ["latencies", {"latency": 1.0, "speed": 1.0}, {}])
def test_unknown_or_no_terms_are_refused(reward: Any) -> None:
    with pytest.raises(ConfigError, match="reward") as refused:
        make_env("busy", reward=reward)
    if reward:
        assert "throughput" in str(refused.value), "the message names what is allowed"
