"""What holds for every workload and policy under `vllm_v1`."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opal_gym.config import Config, load_config
from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.candidates import FEATURES
from opal_gym.sim.decision import Decision, DecisionKind, Policy
from opal_gym.sim.policies import FifoLeastWorkPolicy
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.vllm_v1.worker import STALEMATE_EVICTIONS
from opal_gym.sim.workloads import Workload, make_workload
from tests.policies import RandomPolicy, StopPolicy
from tests.tiny import WorkerLog, tiny_config, tiny_workload
from tests.vllm_v1_cases import V1Case, drawn, seeded

EVENT_LIMIT = 60_000
"""SimPy events of one tiny simulation, which needs some hundreds, and some thousands more for a
stalemate: more is a livelock."""


NEVER_NEGATIVE = [place for place, feature in enumerate(FEATURES) if feature.low == 0]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the worker's log from pytest's own handlers, which would be slow."""
    monkeypatch.setattr(logging.getLogger("opal_gym.sim.vllm_worker"), "propagate", False)


class LastPolicy(Policy):
    """The last candidate: smallest chunks, the first of `running` evicted, the queue's tail."""

    def choose(self, decision: Decision) -> int:
        return decision.num_candidates - 1


POLICIES = {
    "baseline": FifoLeastWorkPolicy,
    "random": RandomPolicy,
    "stop": StopPolicy,
    "last": LastPolicy,
}


class Noted(Policy):
    """Notes every question with its table, and the answer."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.asked: list[tuple[Any, ...]] = []

    def reset(self, seed: int) -> None:
        self._policy.reset(seed)

    def choose(self, decision: Decision) -> int:
        table, gauges = decision.candidates, decision.gauges
        assert np.isfinite(gauges.values).all()
        assert (table.values[:, NEVER_NEGATIVE] >= 0).all()
        if decision.kind is DecisionKind.PREEMPT:
            # vLLM's own choice comes first; a policy may evict a request three times.
            assert (table["preemptions"][1:] < 3).all()
        answer = self._policy.choose(decision)
        self.asked.append(
            (
                decision.kind,
                decision.rebuild_id,
                decision.time,
                decision.stop_allowed,
                decision.baseline,
                table.request_ids.tolist(),
                table.values.tobytes(),
                answer,
            )
        )
        return answer


class Run:
    """A simulation that ran to its end, with its log, questions and events."""

    def __init__(self, config: Config, workload: Workload, policy: Policy, seed: int = 0) -> None:
        self.policy = Noted(policy)
        self.simulation = Simulation(config, workload, self.policy, policy_seed=seed)
        self.events = 0
        with WorkerLog() as log:
            while self.simulation.env.peek() < float("inf"):
                self.simulation.env.step()
                self.events += 1
                assert self.events < EVENT_LIMIT, "livelock"
        self.log = log.events

    def check(self) -> None:
        """All blocks are free again, and every request ended once."""
        simulation, worker = self.simulation, self.simulation.worker
        assert worker.pool.free == worker.pool.total
        assert worker.pool.shared == 0
        assert worker.in_flight == worker.kvc_fetch_blocks_in_flight == worker.kvc_ready_count == 0
        assert not worker.waiting_requests
        assert not worker.batch
        assert not worker.completed_requests
        records = simulation.records
        ended = records.table["request_id"].tolist()
        ended += [request.request_id for request, _ in records.rejected]
        assert sorted(ended) == list(range(len(simulation.workload)))
        ends = set(worker.steps.times(0, worker.steps.count).tolist())
        for record, times in zip(records.table, records.token_times(), strict=True):
            assert len(times) == record["output_tokens"], "a token was lost or made twice"
            assert (np.diff(times) > 0).all()
            assert ends.issuperset(times.tolist())
            assert times[0] == record["first_token_time"]
            assert times[-1] == record["decode_done_time"]
            assert bool(record["recomputed_tokens"]) <= bool(record["preemptions"])


def run(case: V1Case, policy: str, seed: int = 0, **overrides: Any) -> Run:
    result = Run(case.config(**overrides), case.workload(), POLICIES[policy](), seed)
    result.check()
    return result


def assert_spans_change_nothing(case: V1Case, policy: str, seed: int) -> None:
    spans = run(case, policy, seed)
    steps = run(case, policy, seed, simulation__step_by_step=True)
    assert spans.policy.asked == steps.policy.asked
    assert spans.log == steps.log
    one, other = spans.simulation, steps.simulation
    assert one.records.table.tobytes() == other.records.table.tobytes()
    assert [times.tobytes() for times in one.records.token_times()] == [
        times.tobytes() for times in other.records.token_times()
    ]
    mine, reference = one.worker, other.worker
    assert mine.rebuild_id == reference.rebuild_id
    assert mine.steps.count == reference.steps.count == reference.spans
    assert mine.pool.block_seconds() == pytest.approx(reference.pool.block_seconds())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_workload_drains_and_spans_change_nothing(policy: str) -> None:
    for seed in range(25):
        try:
            assert_spans_change_nothing(seeded(seed), policy, seed)
        except Exception as error:
            raise AssertionError(f"seeded({seed}) under {policy}: {error}") from error


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(list(POLICIES)), st.integers(0, 3))
def test_every_drawn_workload_drains_and_spans_change_nothing(
    data: st.DataObject, policy: str, seed: int
) -> None:
    assert_spans_change_nothing(drawn(data.draw), policy, seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_a_thousand_workloads_drain_and_spans_change_nothing(chunk: int) -> None:
    policies = list(POLICIES)
    for seed in range(1000 + 100 * chunk, 1100 + 100 * chunk):
        policy = policies[seed % len(policies)]
        try:
            assert_spans_change_nothing(seeded(seed), policy, seed)
        except Exception as error:
            raise AssertionError(f"seeded({seed}) under {policy}: {error}") from error


def test_the_random_cases_reach_every_corner() -> None:
    """Every question, evictions, loads, shared blocks, rejections: something of each happens."""
    seen: set[str] = set()
    for seed in range(60):
        result = run(seeded(seed), "random", seed)
        seen |= {str(question[0].name) for question in result.policy.asked}
        table = result.simulation.records.table
        seen |= {name for name in ("preemptions", "recomputed_tokens") if table[name].any()}
        seen |= {"load" for _, message in result.log if "async KVC retrieve" in message}
        seen |= {"hit" for record in table if record["prefix_hit_tokens"]}
        seen |= {"rejected"} if result.simulation.records.rejected else set()
    corners = {"CHUNK", "PREEMPT", "ADMIT", "preemptions", "recomputed_tokens", "load", "hit"}
    assert seen == corners | {"rejected"}


def test_a_stalemate_of_vllm_s_rules_ends() -> None:
    """Evicting each other for ever, by turns: in the end the oldest one is protected."""
    stalemates = 0
    for seed in (262, 291):
        table = run(seeded(seed), "baseline", seed).simulation.records.table
        stalemates += table["preemptions"].sum() > STALEMATE_EVICTIONS
    assert stalemates == 2


# ------------------------------------------------------------------ events


def test_tokens_cost_no_events() -> None:
    """A token of a batch of decodes is no event: 40 or 4,000 of them take as many."""

    def events(output: int) -> int:
        config = tiny_config(engine="vllm_v1", num_gpu_blocks_override=4000)
        workload = tiny_workload([(0.0, 4, output), (0.0, 4, output), (1.0, 4, output)])
        return Run(config, workload, FifoLeastWorkPolicy()).events

    assert events(40) == events(4000)


def test_somebody_who_waits_for_blocks_costs_no_events() -> None:
    """The head needs 3 of the 2 blocks that are left; it is looked at when the first one ends."""

    def run_with(output: int) -> Run:
        config = tiny_config(engine="vllm_v1", num_gpu_blocks_override=output // 4 + 4)
        return Run(config, tiny_workload([(0.0, 4, output), (0.0, 12, 1)]), FifoLeastWorkPolicy())

    short, long = run_with(40), run_with(4000)
    assert short.events == long.events
    assert short.simulation.worker.rebuild_id == long.simulation.worker.rebuild_id


@pytest.mark.parametrize("name", ["mem-chat-burst", "slot8-chat", "prod-mix"])
def test_a_scenario_takes_few_events_per_request(name: str) -> None:
    """Some hundreds of tokens a request, in some tens of events."""
    config = load_config(name, {"worker.vllm_params.engine": "vllm_v1"})
    workload = draw(config, 60)
    result = Run(config, workload, FifoLeastWorkPolicy())
    tokens = int(workload.output_tokens.sum())
    assert result.events <= 30 * len(workload)
    assert tokens > 100 * len(workload)


# ------------------------------------------------------------------ through the environment


def draw(config: Config, requests: int | None = None, seed: int = 0) -> Workload:
    update = {} if requests is None else {"num_requests": requests}
    return make_workload(
        config.workload.model_copy(update=update),
        seed,
        length_information=config.simulation.length_information,
        hash_block_tokens=config.kvc.hash_block_tokens,
    )


@pytest.mark.parametrize("policy", ["baseline", "random"])
@pytest.mark.parametrize("name", ["mem-chat-burst", "mem-longctx", "prod-mix"])
def test_the_same_answers_give_the_same_episode_in_process_and_through_the_env(
    name: str, policy: str
) -> None:
    config = load_config(
        name, {"worker.vllm_params.engine": "vllm_v1", "simulation.check_invariants": True}
    )
    workload = draw(config, 60)
    inside = Run(config, workload, POLICIES[policy]())
    answers = [asked[-1] for asked in inside.policy.asked]

    env = OpalVLLMEnv(config)
    with WorkerLog() as log:
        _, info = env.reset(options={"workload": workload})
        for place, answer in enumerate(answers):
            assert env.decision is not None
            assert env.decision.time == inside.policy.asked[place][2]
            if policy == "baseline":
                assert env.action_of(answer) == info["baseline_action"]
            observation, _, over, _, info = env.step(env.action_of(answer))
            assert env.observation_space.contains(observation)
        assert over
        env.simulation.drain()
    assert log.events == inside.log
    records = inside.simulation.records
    assert env.simulation.records.table.tobytes() == records.table.tobytes()
