"""Heuristics: what each rule answers, and that they compose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from agents import make_policy, policy_names
from agents.heuristics import RulePolicy, least, most
from opal_gym.sim.candidates import FEATURES, INDEX, CandidateTable
from opal_gym.sim.decision import STOP, Decision, DecisionKind
from opal_gym.sim.gauges import GAUGES, WorkerGauges
from opal_gym.sim.simulation import Simulation
from tests.tiny import by_id, tiny_config, tiny_workload


def decision(
    kind: DecisionKind,
    columns: Mapping[str, Sequence[float]],
    *,
    stop_allowed: bool = False,
    baseline: int = 0,
    request_ids: Sequence[int] | None = None,
    gauges: Mapping[str, float] | None = None,
) -> Decision:
    """A decision whose candidates and worker have these features, and 0 for all others."""
    worker = np.array([(gauges or {}).get(gauge.name, 0.0) for gauge in GAUGES])
    n = len(next(iter(columns.values())))
    values = np.zeros((n, len(FEATURES)))
    for feature, column in columns.items():
        values[:, INDEX[feature]] = column
    ids = np.arange(n) if request_ids is None else np.array(request_ids)
    return Decision(
        kind,
        rebuild_id=1,
        worker_id=0,
        time=0.0,
        num_candidates=lambda: n,
        stop_allowed=stop_allowed,
        baseline=baseline,
        candidates=lambda: CandidateTable(values, ids),
        gauges=lambda: WorkerGauges(worker),
    )


ADMIT = decision(
    DecisionKind.ADMIT,
    {
        "predicted_output_tokens": [30, 10, 20, 10],
        "prompt_tokens": [7, 9, 5, 6],
        "waiting_time": [4, 3, 2, 1],
    },
    stop_allowed=True,
    baseline=STOP,
)
PREEMPT = decision(
    DecisionKind.PREEMPT,
    {"work_lost": [10, 20, 50, 40], "admission_rank": [2, 3, 0, 1]},
    baseline=3,
    request_ids=[2, 7, 4, 8],
)
CHUNK = decision(DecisionKind.CHUNK, {"budget_tokens": [2048, 1024]}, baseline=1)


class TestAnswers:
    """The baseline answers STOP, 3 and 1 to ADMIT, PREEMPT and CHUNK."""

    @pytest.mark.parametrize(
        ("name", "answers"),
        [
            ("fifo-lwd", (STOP, 3, 1)),
            ("sjf", (1, 3, 1)),  # 10 tokens twice: the first of them
            ("spf", (2, 3, 1)),  # 5 tokens
            ("vllm-fcfs", (STOP, 1, 1)),  # rank 3: the tail of running
            ("most-work", (STOP, 2, 1)),  # 50 tokens
            ("always-first", (0, 0, 0)),
            ("always-stop", (STOP, 3, 1)),
        ],
    )
    def test_of_each_policy(self, name: str, answers: tuple[int, int, int]) -> None:
        policy = make_policy(name)
        policy.reset(0)
        assert tuple(policy.choose(each) for each in (ADMIT, PREEMPT, CHUNK)) == answers

    def test_always_stop_admits_the_first_where_it_must_not_stop(self) -> None:
        must_admit = decision(DecisionKind.ADMIT, {"prompt_tokens": [1, 2]}, baseline=1)
        assert make_policy("always-stop").choose(must_admit) == 0

    def test_rules_compose(self) -> None:
        policy = RulePolicy(
            admit=most("waiting_time"), preempt=most("work_lost"), chunk=least("budget_tokens")
        )
        assert [policy.choose(each) for each in (ADMIT, PREEMPT, CHUNK)] == [0, 2, 1]


class TestRandom:
    def answers(self, seed: int, n: int = 200) -> list[int]:
        policy = make_policy("random")
        policy.reset(seed)
        return [policy.choose(ADMIT) for _ in range(n)]

    def test_covers_exactly_the_legal_answers(self) -> None:
        assert set(self.answers(0)) == {0, 1, 2, 3, STOP}
        policy = make_policy("random")
        policy.reset(0)
        assert {policy.choose(PREEMPT) for _ in range(200)} == {0, 1, 2, 3}

    def test_depends_on_the_seed_alone(self) -> None:
        np.random.seed(1)
        first = self.answers(5)
        np.random.seed(2)
        assert self.answers(5) == first
        assert self.answers(6) != first

    def test_reset_begins_the_stream_again(self) -> None:
        policy = make_policy("random")
        policy.reset(3)
        first = [policy.choose(ADMIT) for _ in range(50)]
        policy.reset(3)
        assert [policy.choose(ADMIT) for _ in range(50)] == first


class TestNames:
    def test_the_reference_baseline_is_the_first(self) -> None:
        assert policy_names()[0] == "fifo-lwd"

    def test_an_unknown_name_is_refused_with_all_names(self) -> None:
        with pytest.raises(ValueError, match="'sfj'") as error:
            make_policy("sfj")
        assert all(name in str(error.value) for name in policy_names())

    def test_policies_are_not_shared(self) -> None:
        assert make_policy("random") is not make_policy("random")


class TestInASimulation:
    """One sequence at a time, 1 s a step, and the prefill's step makes the first token.

    So a request of n output tokens runs for n seconds. Request 0 runs from 0 to 5; then 1, 2 and
    3, which arrived at 0.5, wait for the worker.
    """

    REQUESTS = ((0.0, 4, 5), (0.5, 8, 4), (0.5, 12, 2), (0.5, 4, 3))

    def ends(self, name: str) -> list[float]:
        simulation = Simulation(
            tiny_config(max_num_seqs=1), tiny_workload(self.REQUESTS), make_policy(name)
        )
        simulation.run()
        records = by_id(simulation)
        return [records[row]["decode_done_time"] for row in range(4)]

    def test_fifo_serves_in_order_of_arrival(self) -> None:
        assert self.ends("fifo-lwd") == [5, 9, 11, 14]

    def test_sjf_serves_the_shortest_output_first(self) -> None:
        # 2 (2 tokens) to 7, 3 (3 tokens) to 10, 1 to 14.
        assert self.ends("sjf") == [5, 14, 7, 10]

    def test_spf_serves_the_shortest_prompt_first(self) -> None:
        # 3 (4 tokens) to 8, 1 (8 tokens) to 12, 2 to 14.
        assert self.ends("spf") == [5, 12, 14, 8]

    @pytest.mark.parametrize("name", policy_names())
    def test_every_policy_drains_a_tight_pool(self, name: str) -> None:
        # 8 blocks of 4 tokens; each request comes to 8 to 20 tokens, 2 to 5 blocks.
        requests = [(0.1 * i, 4 + i % 5, 4 + (3 * i) % 12) for i in range(30)]
        simulation = Simulation(
            tiny_config(num_gpu_blocks_override=8), tiny_workload(requests), make_policy(name)
        )
        metrics = simulation.run()
        assert metrics["completed"] == 30
        if name not in ("always-stop", "oracle-combo"):  # one runs alone, the other's gate suffices
            assert metrics["preemptions"] > 0
