"""Several workers behind one policy, and sessions whose turns follow one another."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.gauges import GAUGES, read_gauges
from opal_gym.sim.policies import FifoLeastWorkPolicy
from opal_gym.sim.workloads import Workload
from tests.episodes import Seen, assert_same, make_env, play, random_legal
from tests.test_env_baseline import TIER, RandomLegal, compare, random_tiny
from tests.test_env_observation import boxes_of, scaled_rows
from tests.tiny import tiny_config, tiny_workload

ROUTING = ["RoundRobin", "LeastLoaded", "Random", "MaxPrefix"]


def differences(seeds: int, think_times: list[float] | None, **overrides: Any) -> dict[Any, str]:
    """Where random tiny workloads differ in process and through the environment."""
    found = {}
    for seed in range(seeds):
        config, workload = random_tiny(seed, **overrides)
        if think_times is not None:
            workload = in_sessions(workload, np.random.default_rng(seed).choice(think_times, 99))
        for name, policy in (("baseline", FifoLeastWorkPolicy()), ("random", RandomLegal(seed))):
            if different := compare(config, workload, policy):
                found[seed, name] = different
    return found


def in_sessions(workload: Workload, think_time: np.ndarray) -> Workload:
    """The last third of the requests follow the first third, after think times."""
    n = len(workload)
    later = n // 3
    arrival = workload.arrival_time.copy()
    arrival[n - later :] = math.inf
    next_rows = np.full(n, -1)
    next_rows[:later] = np.arange(n - later, n)
    return replace(
        workload, arrival_time=arrival, next_rows=next_rows, think_time=think_time[:n] * 1.0
    )


def session(*turns: tuple[int, int], think_time: float) -> Workload:
    """One session from 0 s: (prompt, output) of each turn."""
    n = len(turns)
    return replace(
        tiny_workload([(0.0, prompt, output) for prompt, output in turns]),
        arrival_time=np.array([0.0] + [math.inf] * (n - 1)),
        next_rows=np.array([*range(1, n), -1]),
        think_time=np.full(n, think_time),
    )


# -------------------------------------------------------------------- several workers


@pytest.mark.parametrize("tier", [False, True], ids=["without-tier", "tier"])
@pytest.mark.parametrize("routing", ROUTING)
def test_several_workers_are_the_same_in_process_and_through_the_env(
    routing: str, tier: bool
) -> None:
    overrides = {"simulation.num_workers": 3, "router.policy": routing}
    assert not differences(6, None, **overrides, **(TIER if tier else {}))


def test_others_are_the_mean_gauges_of_the_other_workers() -> None:
    env = make_env("busy", overrides={"simulation.num_workers": 3, "router.policy": "RoundRobin"})
    assert boxes_of(env)["others"].shape == (len(GAUGES),)
    assert "others" not in boxes_of(make_env("busy"))
    choose = random_legal(0)
    observation, info = env.reset(seed=0)
    asking: set[float] = set()
    over = False
    while not over:
        asking.add(info["worker_id"])
        assert env.decision is not None
        assert info["worker_id"] == env.decision.worker_id
        workers = env.simulation.workers
        others = [
            read_gauges(worker).values  # type: ignore[arg-type]
            for worker_id, worker in enumerate(workers)
            if worker_id != env.decision.worker_id
        ]
        expected = scaled_rows([np.mean(others, axis=0)], GAUGES)[0]
        np.testing.assert_allclose(observation["others"], expected, rtol=1e-6, atol=1e-7)
        assert env.observation_space.contains(observation)
        observation, _, over, _, info = env.step(choose(info))
    assert asking == {0.0, 1.0, 2.0}


def test_each_worker_asks_for_itself() -> None:
    """Four requests in turn: A and C run on worker 0, B and D on worker 1, two at a time."""
    env = OpalVLLMEnv(tiny_config({"simulation.num_workers": 2}), decisions=("ADMIT",))
    workload = tiny_workload([(0.0, 4, 3), (0.0, 4, 3), (0.5, 4, 1), (0.5, 4, 1)])
    asked = []
    _, info = env.reset(options={"workload": workload})
    over = False
    while not over:
        assert env.decision is not None
        asked.append((info["time"], info["worker_id"], *env.decision.candidates.request_ids))
        _, _, over, _, info = env.step(0)
    assert asked == [(1.0, 0.0, 2), (1.0, 1.0, 3)]
    assert info["time"] == 3.0
    assert info["episode_metrics"]["e2e_s"]["mean"] == pytest.approx((3 + 3 + 1.5 + 1.5) / 4)


@pytest.mark.parametrize("options", [{}, {"rate_scale": 2.0}, {"workload_seed": 4}], ids=str)
def test_random_routing_is_part_of_seeds_and_snapshots(options: dict[str, Any]) -> None:
    kwargs = {"overrides": {"simulation.num_workers": 3, "router.policy": "Random"}}
    env = make_env("busy", **kwargs)
    episode = play(env, seed=3, options=options)
    assert_same(play(make_env("busy", **kwargs), seed=3, options=options), episode)

    _, info = env.reset(seed=3, options=options)
    for _ in range(20):
        _, _, _, _, info = env.step(int(info["baseline_action"]))
    snapshot = pickle.loads(pickle.dumps(env.snapshot()))
    other = make_env("busy", **kwargs)
    _, info = other.restore(snapshot)
    rest: list[Seen] = []
    while not (rest and rest[-1].terminated):
        rest.append(Seen(*other.step(int(info["baseline_action"]))))
        info = rest[-1].info
    assert_same(rest, episode[21:])


# --------------------------------------------------------------------------- sessions


def test_turns_follow_one_another() -> None:
    """Turn 1: 0 to 2. Turn 2: from 2 + 1.5 to 4.5. Turn 3: from 6 to 9. Mean E2E = 2."""
    env = OpalVLLMEnv(tiny_config())
    workload = session((4, 2), (8, 1), (12, 3), think_time=1.5)
    episode = play(env, options={"workload": workload})
    table = env.simulation.records.table
    assert table["arrival_time"].tolist() == [0.0, 3.5, 6.0]
    assert table["decode_done_time"].tolist() == [2.0, 4.5, 9.0]
    assert math.fsum(seen.reward for seen in episode) == pytest.approx(-2.0, abs=1e-12)


def test_a_rejected_turn_does_not_end_its_session() -> None:
    """Turn 2 needs 101 of 100 blocks: it is rejected at 3, and turn 3 arrives at 4."""
    env = OpalVLLMEnv(tiny_config())
    workload = session((4, 2), (400, 4), (4, 1), think_time=1.0)
    last = play(env, options={"workload": workload})[-1]
    assert last.terminated
    assert last.info["time"] == 5.0
    assert last.info["episode_metrics"]["rejected"] == 1.0
    assert last.info["episode_metrics"]["e2e_s"]["mean"] == pytest.approx(1.5)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("tier", [False, True], ids=["without-tier", "tier"])
def test_sessions_are_the_same_in_process_and_through_the_env(tier: bool, workers: int) -> None:
    overrides = {"simulation.num_workers": workers, **(TIER if tier else {})}
    assert not differences(12, [0.5, 1.0, 1.25], **overrides)


@pytest.mark.parametrize("tier", [False, True], ids=["without-tier", "tier"])
def test_turns_without_think_time_are_the_same_in_process_and_through_the_env(tier: bool) -> None:
    """They arrive at the very boundary at which the turn before completes."""
    assert not differences(12, [0.0, 0.5], **(TIER if tier else {}))


def test_a_turn_without_think_time_is_seen_by_the_rebuild_at_its_arrival() -> None:
    """Turn 1 ends at 2; turn 2 arrives at 2, and runs to 3, beside a request that runs to 9.

    DESIGN §2: a rebuild sees everything with time ≤ the boundary, arrivals among it.
    """
    workload = replace(
        tiny_workload([(0.0, 4, 9), (0.0, 4, 2), (0.0, 4, 1)]),
        arrival_time=np.array([0.0, 0.0, math.inf]),
        next_rows=np.array([-1, 2, -1]),
        think_time=np.zeros(3),
    )
    config = tiny_config()
    env = OpalVLLMEnv(config)
    play(env, options={"workload": workload})
    in_process = OpalVLLMEnv(config, decisions=())
    play(in_process, options={"workload": workload})
    for driven in (env, in_process):
        ends = driven.simulation.records.table["decode_done_time"]
        assert ends.tolist() == [2.0, 3.0, 9.0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rewards_of_sessions_sum_to_the_mean_latency(seed: int) -> None:
    config, workload = random_tiny(seed, **TIER)
    env = OpalVLLMEnv(config)
    think_time = np.random.default_rng(seed).choice([0.0, 0.75, 2.0], 99)
    episode = play(env, random_legal(seed), options={"workload": in_sessions(workload, think_time)})
    table = env.simulation.records.table
    mean = float(np.mean(table["decode_done_time"] - table["arrival_time"]))
    assert math.fsum(seen.reward for seen in episode) == pytest.approx(-mean, abs=1e-9)
    assert len(table) == len(workload)
