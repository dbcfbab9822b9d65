"""The grid of heuristics: what each rule answers, names, and named members."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from agents import make_policy, policy_names
from agents.grid import ADMISSION, CHUNKS, GATES, VICTIMS, Heuristic, grid
from agents.policies import POLICIES
from agents.presets import PRESETS, preset_names
from opal_gym.config import load_config
from opal_gym.sim.decision import STOP, Decision, DecisionKind
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import make_workload
from tests.test_heuristics import decision
from tests.tiny import by_id, tiny_config, tiny_workload


def answer(name: str, asked: Decision) -> int:
    return make_policy(name).choose(asked)


def admit(
    *,
    stop_allowed: bool = True,
    baseline: int = 0,
    free: float = 0.5,
    peaks: Sequence[float] = (0.9, 1.0, 0.97, 1.05),
) -> Decision:
    """Four waiting requests; the batch's peak with each of them is in `peaks`."""
    output, prompt = [100, 40, 50, 60], [200, 3000, 700, 100]
    return decision(
        DecisionKind.ADMIT,
        {
            "predicted_output_tokens": output,
            "prompt_tokens": prompt,
            "predicted_kv_area": [o * (p + o / 2) for o, p in zip(output, prompt, strict=True)],
            "waiting_time": [40, 1, 3, 0],
            "weight": [4, 0.2, 1, 1],
            "predicted_peak_kv": peaks,
            "blocks_needed": [0.1, 0.45, 0.44, 0.46],
        },
        stop_allowed=stop_allowed,
        baseline=baseline,
        gauges={"free_blocks": free},
    )


PREEMPT = decision(
    DecisionKind.PREEMPT,
    {
        "work_lost": [10, 20, 50, 40],
        "admission_rank": [2, 3, 0, 1],
        "predicted_remaining": [5, 9, 80, 80],
    },
)
CHUNK = decision(
    DecisionKind.CHUNK,
    {
        "budget_tokens": [2048, 1024, 512, 256, 128],
        "step_time": [0.040, 0.029, 0.015, 0.0101, 0.009],
    },
)


class TestAdmissionOrders:
    @pytest.mark.parametrize(
        ("order", "row"),
        [
            ("spf", 3),  # a prompt of 100
            ("sjf", 1),  # an output of 40
            # 100·(200 + 50) = 25,000; 40·(3000 + 20) = 120,800; 50·(700 + 25) = 36,250;
            # 60·(100 + 30) = 7,800.
            ("mem-sjf", 3),
            # 100 / (1 + 40/5) = 11.1; 40 / 1.2 = 33.3; 50 / 1.6 = 31.3; 60 / 1 = 60.
            ("aged", 0),
            # 100²/4 = 2,500; 40²/.2 = 8,000; 50² = 2,500; 60² = 3,600: the first of two.
            ("weighted-sjf", 0),
        ],
    )
    def test_choose_the_least(self, order: str, row: int) -> None:
        assert answer(f"admit={order}", admit(baseline=STOP)) == row

    @pytest.mark.parametrize("baseline", [0, STOP])
    def test_fifo_is_blocked_by_the_head_of_the_line(self, baseline: int) -> None:
        assert answer("admit=fifo", admit(baseline=baseline)) == baseline


class TestGates:
    @pytest.mark.parametrize(
        ("order", "gate", "expected"),
        [
            ("fifo", "0.95", 0),  # peak .9
            ("fifo", "0.8", STOP),
            ("sjf", "none", 1),
            ("sjf", "1.0", 1),  # peak 1.0: it just fits
            ("sjf", "0.95", STOP),  # not the next best
            ("mem-sjf", "1.0", STOP),  # peak 1.05
            ("mem-sjf", "1.1", 3),
        ],
    )
    def test_stop_unless_the_predicted_peak_fits(
        self, order: str, gate: str, expected: int
    ) -> None:
        assert answer(f"admit={order},gate={gate}", admit()) == expected

    @pytest.mark.parametrize(
        ("order", "expected"),
        [
            ("fifo", 0),  # leaves .4
            ("sjf", 1),  # leaves .05
            ("spf", STOP),  # leaves .04
        ],
    )
    def test_watermark_leaves_five_percent_free(self, order: str, expected: int) -> None:
        assert answer(f"admit={order},gate=watermark", admit(free=0.5)) == expected

    @pytest.mark.parametrize("gate", ["0.8", "watermark"])
    def test_where_nobody_may_stop_the_order_decides(self, gate: str) -> None:
        idle = admit(stop_allowed=False, free=0.0)
        assert answer(f"admit=spf,gate={gate}", idle) == 3
        assert answer(f"admit=fifo,gate={gate}", idle) == 0

    @pytest.mark.parametrize("gate", ["1.1", "watermark"])
    def test_fifos_own_stop_stays(self, gate: str) -> None:
        assert answer(f"gate={gate}", admit(baseline=STOP)) == STOP

    @pytest.mark.parametrize("gate", [*GATES, "watermark"])
    def test_every_gate_drains_a_worker(self, gate: str) -> None:
        """Even where every request is predicted to be larger than the pool."""
        requests = [(0.1 * i, 4 + i % 5, 4 + (3 * i) % 12) for i in range(20)]
        simulation = Simulation(
            tiny_config(num_gpu_blocks_override=8),
            tiny_workload(requests, predicted=[1000] * 20),
            make_policy(f"admit=sjf,gate={gate}"),
        )
        assert simulation.run()["completed"] == 20


def test_a_gate_keeps_from_an_eviction() -> None:
    """Two requests of 4 + 8 tokens in a pool of 5 blocks of 4 tokens, 1 s a step.

    Together they hold 2 blocks after the first step, 4 after 2, and need a 5th and a 6th when each
    holds 9 tokens: the later one is evicted. The predicted peak of both is 2·4 + 2·8 = 24 tokens,
    1.2 of the pool's 20: behind a gate the second waits for the first to end at 8 s, and ends at
    16 s.
    """
    ends = {}
    for gate in ("none", "1.0", "1.2"):
        simulation = Simulation(
            tiny_config(num_gpu_blocks_override=5),
            tiny_workload([(0.0, 4, 8), (0.0, 4, 8)]),
            make_policy(f"gate={gate}"),
        )
        preemptions = simulation.run()["preemptions"]
        ends[gate] = preemptions, by_id(simulation)[1]["decode_done_time"]
    assert ends["1.0"] == (0, 16)
    assert ends["none"][0] > 0
    assert ends["1.2"] == ends["none"]


class TestVictims:
    @pytest.mark.parametrize(
        ("victim", "row"),
        [
            ("lwd", 0),
            ("latest", 1),  # three were admitted before
            ("longest", 2),  # 80 tokens twice: the first
        ],
    )
    def test_of_each_rule(self, victim: str, row: int) -> None:
        assert answer(f"victim={victim}", PREEMPT) == row


class TestChunks:
    @pytest.mark.parametrize(
        ("chunk", "row"),
        [
            ("full", 0),
            ("1/2", 1),
            ("1/4", 2),
            ("1/8", 3),
            ("1/16", 4),
            ("1/3", 2),  # at most 682
            ("1/64", 4),  # none is that small: the smallest
            ("slack-29ms", 1),
            ("slack-15ms", 2),
            ("slack-10ms", 4),  # 10.1 ms is too long
            ("slack-5ms", 4),  # none is that short: the smallest
            ("slack-10.5ms", 3),
        ],
    )
    def test_of_each_rule(self, chunk: str, row: int) -> None:
        assert answer(f"chunk={chunk}", CHUNK) == row


class TestNames:
    def test_the_grid_has_six_hundred_members(self) -> None:
        members = grid()
        assert len(members) == 5 * 5 * 3 * 8 == len({member.name for member in members})
        assert members[0].name == "admit=fifo,gate=none,victim=lwd,chunk=full"

    def test_of_all_members_are_read_back(self) -> None:
        for member in grid(tuple(ADMISSION), (*GATES, "watermark"), tuple(VICTIMS), CHUNKS):
            assert Heuristic.parse(member.name) == member

    def test_what_is_left_out_is_the_baselines(self) -> None:
        given = Heuristic.parse("chunk=1/8,admit=mem-sjf")
        assert given == Heuristic("mem-sjf", "none", "lwd", "1/8")
        assert given.name == "admit=mem-sjf,gate=none,victim=lwd,chunk=1/8"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("admit=sfj", "admit: got 'sfj'; allowed: one of fifo, spf, sjf, mem-sjf, aged"),
            ("victim=me", "victim: got 'me'; allowed: one of lwd, latest, longest"),
            ("gate=0", "gate: got '0'; allowed: none, watermark or a number above 0"),
            ("gate=nan", "gate: got 'nan'"),
            ("gate=inf", "gate: got 'inf'"),
            ("chunk=1/0", "chunk: got '1/0'; allowed: full, 1/N or slack-Nms"),
            ("chunk=slack-29", "chunk: got 'slack-29'"),
            ("order=sjf", "got 'order=sjf'; allowed: admit=fifo"),
            ("admit=sjf,gate=1,admit=spf", "got 'admit=spf'; allowed: .*each key at most once"),
            ("admit=sjf,", "got ''; allowed: admit=fifo"),
        ],
    )
    def test_bad_ones_are_refused_with_what_is_allowed(self, name: str, message: str) -> None:
        with pytest.raises(ValueError, match=f"policy {name!r}: {message}"):
            make_policy(name)

    def test_an_unknown_policy_is_told_of_the_grammar(self) -> None:
        with pytest.raises(ValueError, match=r"'mem'.*mem-sjf-gate.*preset:NAME.*chunk=full"):
            make_policy("mem")


class TestNamedMembers:
    @pytest.mark.parametrize(
        ("name", "rules"),
        [
            ("vllm-fcfs", "victim=latest"),
            ("sjf", "admit=sjf"),
            ("mem-sjf", "admit=mem-sjf"),
            ("spf", "admit=spf"),
            ("aged-sjf", "admit=aged"),
            ("weighted-sjf", "admit=weighted-sjf"),
            ("gate", "gate=1.0"),
            ("mem-sjf-gate", "admit=mem-sjf,gate=1.0"),
            ("spf-slack", "admit=spf,chunk=slack-29ms"),
            ("watermark", "gate=watermark"),
            ("oracle-combo", "admit=mem-sjf,gate=1.0,victim=longest,chunk=1/16"),
        ],
    )
    def test_answer_as_their_rules_do(self, name: str, rules: str) -> None:
        asked = [admit(free=free, peaks=[peak] * 4) for free in (0.3, 0.8) for peak in (0.9, 1.05)]
        for each in [*asked, admit(baseline=STOP), admit(stop_allowed=False), PREEMPT, CHUNK]:
            assert answer(name, each) == answer(rules, each)

    def test_the_default_heuristic_is_the_reference_baseline(self) -> None:
        """Event for event: the same requests in the same steps."""
        config = load_config(
            "mem-chat-burst",
            {"workload.num_requests": 150, "worker.vllm_params.num_gpu_blocks_override": 700},
        )
        ends = []
        for policy in (make_policy("fifo-lwd"), Heuristic().policy()):
            workload = make_workload(config.workload, 3, length_information="predicted")
            simulation = Simulation(config, workload, policy)
            assert simulation.run()["preemptions"] > 0
            ends.append(simulation.records.table.tobytes())
        assert ends[0] == ends[1]

    def test_are_all_there(self) -> None:
        table = (
            "fifo-lwd vllm-fcfs sjf mem-sjf spf gate mem-sjf-gate spf-slack watermark oracle-combo "
            "random always-first always-stop"
        )
        assert set(table.split()) <= set(policy_names())
        assert list(POLICIES) == policy_names()


class TestPresets:
    def test_a_file_names_its_heuristic(self, tmp_path: Path) -> None:
        path = tmp_path / "best.json"
        path.write_text(json.dumps({"policy": "admit=spf,chunk=1/4"}))
        name = f"preset:{path}"
        assert (answer(name, admit()), answer(name, CHUNK)) == (3, 2)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "allowed: JSON with a key 'policy'"),
            ("{}", "allowed: JSON with a key 'policy'"),
            ('{"policy": 3}', "policy: got 3"),
            ('{"policy": "admit=x"}', "admit: got 'x'"),
        ],
    )
    def test_a_file_that_is_none_is_refused(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            make_policy(f"preset:{path}")

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"'nope'.*scripts/tune\.py"):
            make_policy("preset:nope")

    @pytest.mark.parametrize("name", preset_names())
    def test_every_shipped_one_is_whole_and_makes_a_policy(self, name: str) -> None:
        make_policy(f"preset:{name}")
        assert json.loads((PRESETS / f"{name}.json").read_text())["meta"]["complete"]
