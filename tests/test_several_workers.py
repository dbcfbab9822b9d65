"""Several workers in one simulation and in one environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from opal_gym.config import Config, load_config
from opal_gym.sim.decision import Decision, DecisionKind, Policy
from opal_gym.sim.features import Scaler
from opal_gym.sim.gauges import GAUGES, read_gauges
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import Workload, make_workload
from tests.episodes import BUSY, assert_same, digest, make_env, play, random_legal
from tests.tiny import by_id, tiny_config, tiny_workload

REQUESTS = 12
"""Requests for each worker."""

POLICIES = ("RoundRobin", "LeastLoaded", "Random", "MaxPrefix")


def several(workers: int, policy: str = "RoundRobin", **more: Any) -> dict[str, Any]:
    """Overrides of `BUSY`: as many times the requests, at as many times the rate, as workers."""
    return {
        "simulation.num_workers": workers,
        "router.policy": policy,
        "workload.num_requests": REQUESTS * workers,
        "workload.arrivals.rate_per_s": 5.0 * workers,
        "worker.worker_params.periodic_infra_update_time": 0.25,
        **more,
    }


def workload_of(config: Config, seed: int = 0) -> Workload:
    return make_workload(
        config.workload,
        seed,
        length_information=config.simulation.length_information,
        hash_block_tokens=config.kvc.hash_block_tokens,
    )


def config_of(workers: int, policy: str = "RoundRobin", **more: Any) -> Config:
    return load_config(BUSY, several(workers, policy, **more))


# ------------------------------------------------------------------------------ the environment


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_worker_asks_and_says_who_it_is(workers: int) -> None:
    env = make_env("busy", overrides=several(workers))
    _, info = env.reset(seed=0)
    asked = []
    over = False
    while not over:
        decision = env.decision
        assert decision is not None
        asked.append(decision.worker_id)
        assert info["worker_id"] == decision.worker_id
        assert info["rebuild_id"] == env.simulation.workers[decision.worker_id].rebuild_id
        _, _, terminated, truncated, info = env.step(int(info["baseline_action"]))
        over = terminated or truncated
    assert set(asked) == set(range(workers))


def test_a_worker_alone_has_no_others() -> None:
    env = make_env("busy")
    observation, _ = env.reset(seed=0)
    assert set(observation) == set(env.observation_space.spaces) == {"kind", "worker", "candidates"}


def scaled(gauges: NDArray[np.float64]) -> NDArray[np.float32]:
    """Gauges as an agent observes them."""
    return Scaler(GAUGES).scale(gauges, out=np.empty(len(GAUGES), np.float32))


def test_others_are_the_mean_of_the_other_workers() -> None:
    """Each gauge scaled after the mean was taken; checked at every decision of three workers."""
    env = make_env("busy", overrides=several(3))
    observation, info = env.reset(seed=1)
    simulation, decisions, different = env.simulation, 0, 0
    while (decision := env.decision) is not None:
        mine = read_gauges(simulation.workers[decision.worker_id]).values
        others = [
            read_gauges(worker).values
            for worker in simulation.workers
            if worker.worker_id != decision.worker_id
        ]
        assert env.observation_space.contains(observation)
        expected = scaled((others[0] + others[1]) / 2)
        assert observation["others"].tobytes() == expected.tobytes()
        expected = scaled(mine)
        assert observation["worker"].tobytes() == expected.tobytes()
        decisions += 1
        different += not np.array_equal(observation["worker"], observation["others"])
        observation, *_, info = env.step(int(info["baseline_action"]))
    assert different > decisions / 2 > 20


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [2, 4])
def test_rewards_sum_to_minus_the_mean_latency(workers: int, policy: str) -> None:
    """Little's law over all workers; rejected requests do not count."""
    env = make_env("busy", overrides=several(workers, policy))
    episode = play(env, random_legal(3), seed=2)
    assert episode[-1].terminated
    table = env.simulation.records.table
    e2e = table["decode_done_time"] - table["arrival_time"]
    assert sum(seen.reward for seen in episode) == pytest.approx(-e2e.mean())
    assert len(table) + len(env.simulation.records.rejected) == REQUESTS * workers
    metrics = episode[-1].info["episode_metrics"]
    assert metrics["e2e_s"]["mean"] == pytest.approx(e2e.mean())
    assert 0 < metrics["gpu_busy_share"] <= 1
    assert 0 < metrics["kv_utilisation"] <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_episodes(policy: str) -> None:
    """And other seeds others, random routing included."""
    overrides = several(3, policy)
    one, two = (
        play(make_env("busy", overrides=overrides), random_legal(5), seed=4) for _ in range(2)
    )
    assert_same(one, two)
    assert digest(play(make_env("busy", overrides=overrides), seed=5)) != digest(one)


class Recorder(Policy):
    """The baseline, which notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def choose(self, decision: Decision) -> int:
        self.asked.append(note(decision))
        return decision.baseline


def note(decision: Decision) -> tuple[Any, ...]:
    return (
        decision.worker_id,
        decision.kind,
        decision.rebuild_id,
        decision.time,
        decision.num_candidates,
        decision.baseline,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [2, 4])
def test_the_baseline_in_process_is_the_baseline_through_the_environment(
    workers: int, policy: str
) -> None:
    """Question for question, and every request to the last bit."""
    config = config_of(workers, policy)
    workload, recorder = workload_of(config), Recorder()
    simulation = Simulation(config, workload, recorder)
    simulation.run()

    env = make_env("busy", overrides=several(workers, policy))
    _, info = env.reset(options={"workload": workload})
    asked, over = [], False
    while not over:
        assert env.decision is not None
        asked.append(note(env.decision))
        _, _, terminated, truncated, info = env.step(int(info["baseline_action"]))
        over = terminated or truncated
    assert asked == recorder.asked
    assert env.simulation.records.table.tobytes() == simulation.records.table.tobytes()


def test_a_snapshot_remembers_all_workers() -> None:
    env = make_env("busy", overrides=several(3, "Random"))
    choose = random_legal(1)
    _, info = env.reset(seed=6)
    for _ in range(60):
        *_, info = env.step(choose(info))
    snapshot = env.snapshot()
    action = choose(info)
    after = env.step(action)
    other = make_env("busy", overrides=several(3, "Random"))
    other.restore(snapshot)
    assert_same(after, other.step(action))


# --------------------------------------------------------------------------------- the simulation


def test_workers_that_share_nothing_are_as_many_simulations() -> None:
    """Round robin: worker k serves requests k, k + n, …, as it would alone."""
    n = 3
    config = config_of(n)
    workload = workload_of(config)
    together = Simulation(config, workload)
    together.run()
    records = by_id(together)
    for worker in range(n):
        rows = slice(worker, None, n)
        share = replace(
            workload,
            hash_ids=workload.hash_ids[rows],
            **{
                column: getattr(workload, column)[rows]
                for column in (
                    "arrival_time",
                    "prompt_tokens",
                    "output_tokens",
                    "predicted_output_tokens",
                    "tenant",
                    "priority",
                )
            },
        )
        alone = Simulation(config_of(1), share)
        alone.run()
        assert len(alone.records) > 6
        for request_id, record in by_id(alone).items():
            expected = {**record, "request_id": n * request_id + worker, "worker_id": worker}
            assert records[n * request_id + worker] == expected


def test_two_workers_that_ask_at_one_instant_ask_in_turn() -> None:
    """Four requests at 0, two for each worker: one token budget of 4, so that somebody waits."""
    simulation = Simulation(
        tiny_config({"simulation.num_workers": 2}, max_num_batched_tokens=4),
        tiny_workload([(0.0, 4, 2)] * 4),
        outside=tuple(DecisionKind),
    )
    asked = []
    while (decision := simulation.advance()) is not None:
        asked.append((decision.time, decision.worker_id, decision.kind.name))
        simulation.answer(decision.baseline)
    at_once = [question for question in asked if question[0] == 0]
    assert [worker for _, worker, _ in at_once] == sorted(worker for _, worker, _ in at_once)
    assert {worker for _, worker, _ in at_once} == {0, 1}
    # Both batches go the same way: 4 tokens in step 1, 3 and 1 in steps 2 and 3.
    records = by_id(simulation)
    assert [records[i]["token_times"] for i in range(4)] == [[1, 2], [1, 2], [3, 4], [3, 4]]


@pytest.mark.parametrize("policy", POLICIES)
def test_spans_change_nothing_for_several_workers(policy: str) -> None:
    tables = []
    for step_by_step in (False, True):
        config = config_of(3, policy, **{"simulation.step_by_step": step_by_step})
        simulation = Simulation(config, workload_of(config))
        simulation.run()
        tables.append(simulation.records.table.tobytes())
    assert tables[0] == tables[1]


def test_a_workers_free_blocks_are_seen_in_the_middle_of_its_span() -> None:
    """r0 (0, 4, 20) at worker 0 alone: the step from 8 to 9 makes 13 tokens in 4 blocks of 100."""
    seen = []
    for step_by_step in (False, True):
        config = tiny_config({"simulation.num_workers": 2, "simulation.step_by_step": step_by_step})
        simulation = Simulation(config, tiny_workload([(0.0, 4, 20)]))
        while simulation.env.peek() < 8.5:
            simulation.env.step()
        simulation.env.run(until=8.5)
        seen.append(read_gauges(simulation.worker)["free_blocks"])
    assert seen == [0.96, 0.96]
