"""Through the environment or in process: the same answers give the same events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from opal_gym.config import Config
from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.decision import Decision, Policy
from opal_gym.sim.policies import FifoLeastWorkPolicy
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import Workload, make_workload
from tests.episodes import SCENARIOS, assert_same, make_env
from tests.tiny import WorkerLog, tiny_config, tiny_workload

TIER: dict[str, Any] = {
    # A block of 4 tokens is 512 KiB: 19 of them fit, and one takes 0.26 s.
    "kvc.hash_block_tokens": 4,
    "kvc.tiers": [{"name": "CPUMemory", "capacity_GB": 0.01, "bandwidth_GBps": 0.002}],
}


class Recorder(Policy):
    """Notes a policy's answers, and what was asked."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.asked: list[tuple[str, int, float, int, bool, int]] = []
        self.answers: list[int] = []

    def choose(self, decision: Decision) -> int:
        self.asked.append(question(decision))
        self.answers.append(self._policy.choose(decision))
        return self.answers[-1]


class RandomLegal(Policy):
    """Legal answers, equally likely."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def choose(self, decision: Decision) -> int:
        return int(self._rng.choice(decision.legal_answers()))


def question(decision: Decision) -> tuple[str, int, float, int, bool, int]:
    return (
        decision.kind.name,
        decision.rebuild_id,
        decision.time,
        decision.num_candidates,
        decision.stop_allowed,
        decision.baseline,
    )


def compare(config: Config, workload: Workload, policy: Policy) -> str:
    """Runs a policy in process and its answers through the environment.

    Returns:
        Where they first differ; empty: nowhere.
    """
    recorder = Recorder(policy)
    simulation = Simulation(config, workload, recorder)
    with WorkerLog() as inside:
        inside_metrics = simulation.run()

    env = OpalVLLMEnv(config)
    answers: Iterator[int] = iter(recorder.answers)
    asked = []
    with WorkerLog() as outside:
        _, info = env.reset(options={"workload": workload})
        over = False
        while not over:
            decision = env.decision
            if decision is None:
                action = len(info["action_mask"]) - 1
            else:
                asked.append(question(decision))
                if asked != recorder.asked[: len(asked)]:
                    break
                action = env.action_of(next(answers))
            _, _, over, _, info = env.step(action)
    for k, (one, other) in enumerate(zip(inside.events, outside.events, strict=False)):
        if one != other:
            return f"event {k}: in process {one}, through the environment {other}"
    if len(inside.events) != len(outside.events):
        return f"{len(inside.events)} events in process, {len(outside.events)} through the env"
    if asked != recorder.asked:
        return f"{len(recorder.asked)} questions in process, {len(asked)} through the environment"
    assert_same(env.simulation.records.table, simulation.records.table)
    assert_same(list(env.simulation.records.token_times()), list(simulation.records.token_times()))
    metrics = dict(info["episode_metrics"])
    assert metrics.pop("illegal_actions") == metrics.pop("illegal_action_share") == 0.0
    assert_same(metrics, inside_metrics)
    return ""


def drawn(name: str, seed: int) -> tuple[Config, Workload]:
    config = make_env(name).config
    workload = make_workload(
        config.workload,
        seed,
        length_information=config.simulation.length_information,
        hash_block_tokens=config.kvc.hash_block_tokens,
    )
    return config, workload


def random_tiny(seed: int, **overrides: Any) -> tuple[Config, Workload]:
    """A tight worker and up to 14 requests, many of which arrive at a step's boundary."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 15))
    arrivals = np.sort(rng.integers(0, 40, n)) * 0.25
    prompts, outputs = rng.integers(1, 21, n), rng.integers(1, 13, n)
    # Documents of up to 5 hash blocks; a request's prompt begins with all of its own whole blocks.
    document = rng.integers(0, 3, n)
    hash_ids = [
        tuple(100 * d + block for block in range(p // 4))
        for d, p in zip(document.tolist(), prompts.tolist(), strict=True)
    ]
    config = tiny_config(
        overrides,
        num_gpu_blocks_override=int(rng.integers(8, 14)),
        max_num_seqs=int(rng.integers(2, 6)),
        rebuild_on=str(rng.choice(["change", "completion"])),
        first_token_at_prefill_end=bool(rng.integers(2)),
        max_kvc_ready_requests=int(rng.integers(1, 3)),
    )
    workload = tiny_workload(
        list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)),
        predicted=np.maximum(1, outputs + rng.integers(-3, 4, n)).tolist(),
        hash_ids=hash_ids,
    )
    return config, workload


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SCENARIOS)
def test_driven_by_the_baseline_the_env_is_the_in_process_baseline(name: str, seed: int) -> None:
    different = compare(*drawn(name, seed), FifoLeastWorkPolicy())
    assert not different


@pytest.mark.parametrize("seed", [3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_random_answers_give_the_same_events_in_process_and_through_the_env(
    name: str, seed: int
) -> None:
    different = compare(*drawn(name, seed), RandomLegal(seed))
    assert not different


@pytest.mark.parametrize("policy", ["baseline", "random"])
@pytest.mark.parametrize("tier", [False, True], ids=["without-tier", "tier"])
def test_twenty_random_tiny_workloads_in_process_and_through_the_env(
    tier: bool, policy: str
) -> None:
    different = {}
    for seed in range(20):
        config, workload = random_tiny(seed, **(TIER if tier else {}))
        chosen = FifoLeastWorkPolicy() if policy == "baseline" else RandomLegal(seed)
        if found := compare(config, workload, chosen):
            different[seed] = found
    assert not different


def test_the_random_tiny_workloads_are_not_trivial() -> None:
    """Non-vacuity: questions of all kinds, evictions and fetches all occur."""
    kinds: set[str] = set()
    hits = preemptions = 0.0
    for seed in range(20):
        recorder = Recorder(RandomLegal(seed))
        metrics = Simulation(*random_tiny(seed, **TIER), recorder).run()
        kinds |= {asked[0] for asked in recorder.asked}
        hits += metrics["prefix_hit_tokens"]
        preemptions += metrics["preemptions"]
    assert kinds == {"CHUNK", "PREEMPT", "ADMIT"}
    assert hits > 0
    assert preemptions > 10


def test_a_store_with_nothing_to_write_releases_its_blocks_for_the_rebuild() -> None:
    """A is done at 2; its KV needs no store, so B is admitted at 2 and done at 3.

    6 blocks of 4 tokens. C (1 + 12) holds one block up to 3, A (8 + 2) three, and B (8 + 1) needs
    three. DESIGN §2: everything with time ≤ the boundary, block releases first, is seen by it.
    """
    workload = tiny_workload([(0.0, 1, 12), (0.0, 8, 2), (0.5, 8, 1)], hash_ids=[(), (), ()])
    config = tiny_config(TIER, num_gpu_blocks_override=6)
    inside = Simulation(config, workload)
    inside.run()
    env = OpalVLLMEnv(config)
    _, info = env.reset(options={"workload": workload})
    over = False
    while not over:
        _, _, over, _, info = env.step(int(info["baseline_action"]))
    ends = [2.0, 3.0, 12.0]
    assert env.simulation.records.table["decode_done_time"].tolist() == ends
    assert inside.records.table["decode_done_time"].tolist() == ends
