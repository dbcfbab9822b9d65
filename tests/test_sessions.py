"""Recorded sessions: the reader, which of them an episode has, and their replay in closed loop.

On the hand-worked timelines every step takes 1 s, and blocks hold 4 tokens.
"""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opal_gym.config import ConfigError, TraceWorkload, load_config
from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import TraceError, Workload, make_workload
from opal_gym.sim.workloads.sessions import read_sessions
from tests.driving import kv_cache
from tests.tiny import TINY, by_id, tiny_config, tiny_workload

RECORDED = Path(__file__).parents[2] / "shared/data/traces/claudecode_weka_sessions_blk512.jsonl.gz"

Turns = list[dict[str, Any]]
both_modes = pytest.mark.parametrize("stepwise", [False, True])


def turn(session_id: str, number: int, **values: Any) -> dict[str, Any]:
    """A row; prompts of 3 tokens, of which a hash stands for 512."""
    row = {
        "session_id": session_id,
        "turn": number,
        "t_session_s": 10.0 * number,
        "think_time_s": 2.0 if number else 0.0,
        "api_time_s": None,
        "input_length": 3,
        "output_length": 5,
        "hash_ids": [],
    }
    return {**row, **values}


def session(session_id: str, turns: int, **values: Any) -> Turns:
    return [turn(session_id, number, **values) for number in range(turns)]


def text(rows: Turns) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def config(path: Path, rows: Turns | str | bytes, **values: Any) -> TraceWorkload:
    """The configuration of a file with these rows; sessions start once a second on average."""
    content = rows if isinstance(rows, (str, bytes)) else text(rows)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = {"format": "sessions", "path": str(path), "arrivals": {"rate_per_s": 1.0}, **values}
    return TraceWorkload.model_validate(given)


def make(config: TraceWorkload, seed: int = 0, **arguments: Any) -> Workload:
    return make_workload(config, seed, **{"length_information": "predicted", **arguments})


def prompts(workload: Workload) -> list[list[int]]:
    """The prompt lengths of each session, turn by turn."""
    sessions = []
    for row in np.flatnonzero(np.isfinite(workload.arrival_time)).tolist():
        chain = [row]
        while workload.next_rows[chain[-1]] >= 0:
            chain.append(int(workload.next_rows[chain[-1]]))
        sessions.append(workload.prompt_tokens[chain].tolist())
    return sessions


def numbered(*lengths: int) -> Turns:
    """Sessions of these lengths; turn t of session s has a prompt of 10 s + t tokens, from 10."""
    return [
        turn(f"s{number}", t, input_length=10 * number + t)
        for number, turns in enumerate(lengths, 1)
        for t in range(turns)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.jsonl"


# --------------------------------------------------------------------------------------- the file


def test_sessions_are_read_turn_by_turn(path: Path) -> None:
    """First turns first; then the later ones, session after session, without an arrival time."""
    rows = [
        turn("a", 0, input_length=4, output_length=2, hash_ids=[1]),
        turn("a", 1, input_length=6, output_length=3, hash_ids=[1, 2], think_time_s=1.5),
        turn("b", 0, input_length=5, output_length=1, hash_ids=[7]),
        turn("c", 0, input_length=7, output_length=4, hash_ids=[8, 9]),
        turn("c", 1, input_length=8, output_length=5, hash_ids=[8, 10], think_time_s=0),
        turn("c", 2, input_length=9, output_length=6, hash_ids=[8, 10, 11], think_time_s=30.25),
    ]
    workload = make(
        config(path, rows, tenant="code", weight=2.0, slo="interactive", priority=3),
        hash_block_tokens=4,
        length_information="oracle",
    )
    assert workload.prompt_tokens.tolist() == [4, 5, 7, 6, 8, 9]
    assert workload.output_tokens.tolist() == [2, 1, 4, 3, 5, 6]
    assert workload.predicted_output_tokens.tolist() == [2, 1, 4, 3, 5, 6]
    assert workload.hash_ids == ((1,), (7,), (8, 9), (1, 2), (8, 10), (8, 10, 11))
    assert workload.next_rows.tolist() == [3, -1, 4, -1, 5, -1]
    assert workload.think_time.tolist()[3:] == [1.5, 0.0, 30.25]
    assert np.isfinite(workload.arrival_time[:3]).all()
    assert (np.diff(workload.arrival_time[:3]) >= 0).all()
    assert np.isinf(workload.arrival_time[3:]).all()
    assert workload.priority.tolist() == [3] * 6
    (tenant,) = workload.tenants
    assert (tenant.name, tenant.weight, tenant.ttft_slo_s) == ("code", 2.0, 0.5)
    assert workload.left_out == {}


def test_turns_of_several_sessions_may_be_interleaved(path: Path) -> None:
    a, b = session("a", 3, input_length=1), session("b", 2, input_length=2)
    workload = make(config(path, [a[0], b[0], a[1], b[1], a[2]]))
    assert prompts(workload) == [[1, 1, 1], [2, 2]]


@pytest.mark.parametrize("name", ["sessions.jsonl", "sessions.jsonl.gz"])
def test_gzip_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    rows = gzip.compress(text(session("a", 2)).encode())
    assert len(make(config(tmp_path / name, rows))) == 2


def test_a_think_time_that_was_not_recorded_is_the_time_from_turn_to_turn(path: Path) -> None:
    """Turns recorded at 0, 10 and 25 s."""
    rows = [
        turn("a", 0, think_time_s=None),
        turn("a", 1, think_time_s=None),
        turn("a", 2, t_session_s=25, think_time_s=None),
    ]
    assert make(config(path, rows)).think_time.tolist() == [0.0, 10.0, 15.0]


def test_a_last_partial_block_may_have_a_hash_or_none(path: Path) -> None:
    """1,030 tokens: two blocks of 512 and 6 tokens."""
    for hash_ids in ([1, 2], [1, 2, 3]):
        rows = [turn("a", 0, input_length=1030, hash_ids=hash_ids)]
        assert make(config(path, rows)).hash_ids == (tuple(hash_ids),)


def test_a_changed_file_is_read_again(path: Path) -> None:
    assert len(make(config(path, session("a", 2)))) == 2
    assert len(make(config(path, session("a", 3)))) == 3


def test_predictions_are_noisy_like_those_of_other_traces(path: Path) -> None:
    """Median 1, σ 0.6 of 4,000 logarithms; rounding to tokens of 1,000 does not matter."""
    rows = [turn(f"s{i}", t, output_length=1000) for i in range(400) for t in range(10)]
    noisy = config(path, rows)
    workload = make(noisy, 3)
    error = np.log(workload.predicted_output_tokens / workload.output_tokens)
    assert error.mean() == pytest.approx(0, abs=4 * 0.6 / math.sqrt(4000))
    assert error.std() == pytest.approx(0.6, rel=0.05)
    assert np.array_equal(make(noisy, 3).predicted_output_tokens, workload.predicted_output_tokens)
    assert make(noisy, 3, length_information="none").predicted_output_tokens.sum() == 0


# ------------------------------------------------------------------------- when, and which sessions


def test_the_arrival_process_starts_sessions(path: Path) -> None:
    """2,000 sessions of two turns at 5/s · 0.8 · 2 · 1.5 = 12/s; 4 standard errors of 1/√2000."""
    rows = [turn(f"s{i}", t) for i in range(2000) for t in range(2)]
    arrivals = {"rate_per_s": 5.0, "load": 0.8}
    fast = config(path, rows, arrivals=arrivals, rate_scale=2.0)
    workload = make(fast, rate_scale=1.5)
    assert workload.load == pytest.approx(2.4)
    starts = workload.arrival_time[:2000]
    assert np.isfinite(starts).all()
    assert starts[-1] == pytest.approx(2000 / 12, rel=4 / math.sqrt(2000))
    # The load moves the starts only.
    slow = make(fast)
    assert np.allclose(slow.arrival_time[:2000], 1.5 * starts)
    assert np.array_equal(slow.think_time, workload.think_time)
    assert np.array_equal(slow.predicted_output_tokens, workload.predicted_output_tokens)


def test_the_cap_keeps_sessions_whole(path: Path) -> None:
    """Sessions of 3, 2, 4 and 1 turns: the third does not fit into 8, and nothing is skipped."""
    rows = numbered(3, 2, 4, 1)
    for cap, lengths in ((10, [3, 2, 4, 1]), (9, [3, 2, 4]), (8, [3, 2]), (5, [3, 2]), (4, [3])):
        workload = make(config(path, rows, num_requests=cap))
        assert [len(turns) for turns in prompts(workload)] == lengths
        assert workload.left_out == {}
    assert [len(turns) for turns in prompts(make(config(path, rows)))] == [3, 2, 4, 1]


def test_a_first_session_that_alone_is_longer_is_cut(path: Path) -> None:
    assert prompts(make(config(path, numbered(5, 1), num_requests=3))) == [[10, 11, 12]]


def test_a_drawn_start_is_a_session_from_which_enough_turns_follow(path: Path) -> None:
    """Sessions of 2, 3, 1, 2, 2 and 4 turns; from the fourth on there are 8, from the fifth 6."""
    rows = numbered(2, 3, 1, 2, 2, 4)
    drawn = config(path, rows, num_requests=7, window_start_s=None)
    firsts = []
    for seed in range(400):
        workload = make(drawn, seed)
        sessions = prompts(workload)
        assert [turns[0] for turns in sessions] == list(
            range(sessions[0][0], sessions[0][0] + 10 * len(sessions), 10)
        )
        assert len(workload) <= 7
        firsts.append(sessions[0][0] // 10)
    # 100 of each, standard deviation √(400 · 1/4 · 3/4) = 8.7.
    counts = [firsts.count(number) for number in (1, 2, 3, 4)]
    assert sum(counts) == 400
    assert counts == pytest.approx([100] * 4, abs=4 * 8.7)
    assert prompts(make(drawn, 5)) == prompts(make(drawn, 5))


def test_without_a_cap_or_with_a_large_one_all_sessions_are_drawn(path: Path) -> None:
    for cap in ({}, {"num_requests": 6}, {"num_requests": 100}):
        for seed in range(5):
            workload = make(config(path, numbered(2, 3, 1), window_start_s=None, **cap), seed)
            assert [len(turns) for turns in prompts(workload)] == [2, 3, 1]


def test_sessions_have_no_windows_of_time(path: Path) -> None:
    for window in ({"window_s": 5.0}, {"window_start_s": 5.0}):
        with pytest.raises(ValueError, match=r"window_\w+: got .*`sessions`, which has no times"):
            config(path, session("a", 2), **window)


@pytest.mark.parametrize("arrivals", [None, "given"])
def test_sessions_need_an_arrival_process_and_recorded_times_refuse_one(arrivals: Any) -> None:
    workload = {
        "kind": "trace",
        "format": "azure" if arrivals else "sessions",
        "path": "x",
        **({"arrivals": {"rate_per_s": 1.0}} if arrivals else {}),
    }
    message = r"workload\.arrivals: got .*; allowed: given for the formats `lengths` and `sessions`"
    with pytest.raises(ConfigError, match=message):
        load_config({**TINY, "workload": workload})


# ----------------------------------------------------------------------------------- turns left out


def test_a_turn_that_is_too_long_ends_its_session(path: Path) -> None:
    """Prompt + output: the third of five turns has 106 tokens; b's first has 107, and c none."""
    rows = session("a", 5)
    rows[2]["input_length"] = 101
    rows += session("b", 2, input_length=102) + session("c", 2, input_length=7)
    workload = make(config(path, rows, max_tokens=105))
    assert prompts(workload) == [[3, 3], [7, 7]]
    assert workload.left_out == {
        "more than 105 tokens": 2,
        "after a turn of more than 105 tokens": 2 + 1,
    }


def test_too_long_turns_are_counted_in_the_episodes_sessions_only(path: Path) -> None:
    rows = session("a", 2) + session("b", 2, input_length=102) + session("c", 3)
    assert make(config(path, rows, max_tokens=105, num_requests=2)).left_out == {
        "more than 105 tokens": 1,
        "after a turn of more than 105 tokens": 1,
    }
    late = session("a", 2) + session("c", 3) + session("b", 2, input_length=102)
    assert make(config(path, late, max_tokens=105, num_requests=2)).left_out == {}


def test_a_file_without_a_usable_session_says_why(path: Path) -> None:
    rows = [*session("a", 2, input_length=102), turn("b", 1), turn("b", 2)]
    with pytest.raises(TraceError) as error:
        make(config(path, rows, max_tokens=105, on_error="skip"))
    assert str(error.value) == (
        f"{path}: got no request of 4 rows (1 malformed, 1 after a malformed turn, "
        "1 more than 105 tokens, 1 after a turn of more than 105 tokens); allowed: at least one"
    )


COUNT = "an integer from 1 to 2147483647"


def without(key: str) -> dict[str, Any]:
    row = turn("a", 1)
    del row[key]
    return row


MALFORMED: list[tuple[dict[str, Any] | str, str]] = [
    ('{"session_id": "a"', 'row: got \'{"session_id": "a"\'; allowed: a JSON object'),
    ("[1, 2]", "row: got '[1, 2]'; allowed: a JSON object"),
    *(
        (without(key), f"{key}: missing; allowed: a value in every row")
        for key in (
            "session_id",
            "turn",
            "t_session_s",
            "think_time_s",
            "input_length",
            "output_length",
            "hash_ids",
        )
    ),
    ({**turn("a", 1), "session_id": 7}, "session_id: got 7; allowed: a string"),
    (turn("a", 0), "turn: got 0; allowed: 1, as a session's turns count from 0"),
    (turn("a", 2), "turn: got 2; allowed: 1, as a session's turns count from 0"),
    ({**turn("a", 1), "turn": "1"}, "turn: got '1'; allowed: 1, as a session's turns count from 0"),
    (
        {**turn("a", 1), "turn": True},
        "turn: got True; allowed: 1, as a session's turns count from 0",
    ),
    (turn("b", 1), "turn: got 1; allowed: 0, as a session's turns count from 0"),
    (turn("a", 1, think_time_s=-0.5), "think_time_s: got -0.5; allowed: seconds, at least 0"),
    (turn("a", 1, think_time_s=math.nan), "think_time_s: got nan; allowed: seconds, at least 0"),
    (turn("a", 1, think_time_s=math.inf), "think_time_s: got inf; allowed: seconds, at least 0"),
    (turn("a", 1, think_time_s="2"), "think_time_s: got '2'; allowed: seconds, at least 0"),
    (turn("a", 1, think_time_s=False), "think_time_s: got False; allowed: seconds, at least 0"),
    (turn("a", 1, t_session_s=math.nan), "t_session_s: got nan; allowed: seconds, at least 0"),
    (
        turn("a", 1, t_session_s=1.0),
        "t_session_s: got 1.0; allowed: at least 2.5, as of the turn before",
    ),
    (turn("a", 1, input_length=0), f"input_length: got 0; allowed: {COUNT}"),
    (turn("a", 1, output_length=2.5), f"output_length: got 2.5; allowed: {COUNT}"),
    (turn("a", 1, output_length=math.nan), f"output_length: got nan; allowed: {COUNT}"),
    (turn("a", 1, hash_ids=[1.5]), "hash_ids: got [1.5]; allowed: a list of integers"),
    (
        turn("a", 1, input_length=1030, hash_ids=[4, 4]),
        "hash_ids: got [4, 4]; allowed: integers that differ, being chained",
    ),
    (
        turn("a", 1, input_length=1030, hash_ids=[1]),
        "number of hash_ids: got 1; allowed: 2 or 3, one for every 512 tokens "
        "(kvc.hash_block_tokens)",
    ),
    (
        turn("a", 1, input_length=1024, hash_ids=[1, 2, 3]),
        "number of hash_ids: got 3; allowed: 2, one for every 512 tokens (kvc.hash_block_tokens)",
    ),
]


@pytest.mark.parametrize(("row", "message"), MALFORMED)
def test_malformed_rows(path: Path, row: dict[str, Any] | str, message: str) -> None:
    """In line 3, after a blank one and the turn 0 of session a, which was recorded at 2.5 s."""
    line = row if isinstance(row, str) else json.dumps(row)
    content = text([turn("a", 0, t_session_s=2.5)]) + "\n" + line + "\n" + text(session("z", 2))
    with pytest.raises(TraceError) as error:
        make(config(path, content))
    assert str(error.value) == f"{path}:3: {message}"
    workload = make(config(path, content, on_error="skip"))
    assert prompts(workload) == [[3], [3, 3]]
    assert workload.left_out == {"malformed": 1}


def test_after_a_malformed_turn_the_rest_of_its_session_is_left_out_and_counted(
    path: Path,
) -> None:
    """a's third of five turns, and b's first of three (so that nothing is left of b); a row of
    nobody's breaks nobody's session, but for the gap that it leaves in c's."""
    rows = session("a", 5) + session("b", 3) + session("c", 4)
    rows[2]["think_time_s"] = -1.0
    rows[5]["output_length"] = 0
    lines = text(rows).splitlines()
    lines[9] = "garbage"  # c's second turn; its third is out of order then
    workload = make(config(path, "\n".join(lines), on_error="skip"))
    assert [len(turns) for turns in prompts(workload)] == [2, 1]
    assert workload.left_out == {"malformed": 2 + 2, "after a malformed turn": 2 + 2 + 1}


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "session_id": st.sampled_from(["a", "b", 3]),
                "turn": st.integers(0, 2),
                "t_session_s": st.floats() | st.just(1.0),
                "think_time_s": st.floats() | st.none() | st.just(1.0),
                "input_length": st.integers(-1, 600),
                "output_length": st.integers(0, 9),
                "hash_ids": st.lists(st.integers(0, 3), max_size=2),
            },
        ).map(json.dumps)
        | st.text(max_size=9),
        max_size=8,
    ),
    on_error=st.sampled_from(["error", "skip"]),
    num_requests=st.sampled_from([None, 1, 2, 3]),
)
def test_whatever_is_in_a_file_it_is_sessions_or_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[str],
    on_error: str,
    num_requests: int | None,
) -> None:
    path = tmp_path_factory.mktemp("any") / "sessions"
    content = text([turn("z", 0)]).encode() + "\n".join(rows).encode("utf-8", "surrogatepass")
    try:
        workload = make(config(path, content, on_error=on_error, num_requests=num_requests))
    except TraceError:
        return
    later = np.isinf(workload.arrival_time)
    assert sorted(workload.next_rows[workload.next_rows >= 0]) == np.flatnonzero(later).tolist()
    assert np.isfinite(workload.think_time).all()
    assert (workload.think_time >= 0).all()


# ------------------------------------------------------------------------------------- closed loop


def sessions_of(
    requests: list[tuple[float, int, int]],
    next_rows: list[int],
    think_time: list[float],
    **arguments: Any,
) -> Workload:
    return replace(
        tiny_workload(requests, **arguments),
        next_rows=np.array(next_rows, np.int64),
        think_time=np.array(think_time, np.float64),
    )


LATER = math.inf


@both_modes
def test_a_turn_arrives_when_the_one_before_has_ended_plus_its_think_time(stepwise: bool) -> None:
    """A: rows 0, 2, 3; B: row 1, 4. A prompt of 4 takes a step, every token after the first one.

    0 – 2      A0 (4, 2)
    1 – 4      B0 (4, 3)
    3.5 – 6    A1 (4, 2): ends at 2, thinks 1.5; arrives in B's last step, begins at 4
    4 – 5      B1 (8, 1): B0 ends at 4, it thinks 0; the rebuild at 4 sees it
    16 – 17    A2 (4, 1): thinks 10
    """
    workload = sessions_of(
        [(0, 4, 2), (1, 4, 3), (LATER, 4, 2), (LATER, 4, 1), (LATER, 8, 1)],
        next_rows=[2, 4, 3, -1, -1],
        think_time=[0, 0, 1.5, 10, 0],
    )
    simulation = Simulation(tiny_config({"simulation.step_by_step": stepwise}), workload)
    metrics = simulation.run()
    records = by_id(simulation)
    assert {i: record["arrival_time"] for i, record in records.items()} == {
        0: 0,
        1: 1,
        2: 3.5,
        4: 4,
        3: 16,
    }
    times = {i: record["token_times"] for i, record in records.items()}
    assert times == {0: [1, 2], 1: [2, 3, 4], 2: [5, 6], 4: [5], 3: [17]}
    assert simulation.done
    # 2 + 3 + 2.5 + 1 + 1 s for five requests, in the 17 s since the first arrival.
    assert metrics["e2e_s"]["mean"] == pytest.approx(9.5 / 5)
    assert metrics["requests"] == metrics["completed"] == 5
    assert metrics["duration_s"] == 17


def test_a_turn_has_ended_with_its_last_token_not_with_its_store() -> None:
    """The store of A0's block lasts from 2 to 22; A1 arrives at 3, and finds it when it has come:
    at 25 A2 (B's next turn, 8 tokens) hits 4."""
    workload = sessions_of(
        [(0, 4, 2), (LATER, 8, 1), (LATER, 8, 1)],
        next_rows=[1, 2, -1],
        think_time=[0, 1, 21],
        hash_ids=[(1,), (1, 2), (1, 3)],
    )
    simulation = Simulation(tiny_config(kv_cache(block_s=20)), workload)
    simulation.run()
    records = by_id(simulation)
    assert [records[i]["arrival_time"] for i in range(3)] == [0, 3, 25]
    assert [records[i]["prefix_hit_tokens"] for i in range(3)] == [0, 0, 4]


def test_a_rejected_turn_ends_at_once_and_the_session_goes_on() -> None:
    """A1 (300 + 200 of at most 400 tokens) arrives at 3 and is rejected; A2 arrives 2 s later."""
    workload = sessions_of(
        [(0, 4, 2), (LATER, 300, 200), (LATER, 4, 1)],
        next_rows=[1, 2, -1],
        think_time=[0, 1, 2],
    )
    simulation = Simulation(tiny_config(), workload)
    metrics = simulation.run()
    ((rejected, _),) = simulation.records.rejected
    assert (rejected.request_id, rejected.arrival_time) == (1, 3)
    assert by_id(simulation)[2]["arrival_time"] == 5
    assert by_id(simulation)[2]["token_times"] == [6]
    assert (metrics["completed"], metrics["rejected"]) == (2, 1)


def test_a_rejected_first_turn_too() -> None:
    workload = sessions_of([(1, 300, 200), (LATER, 4, 1)], next_rows=[1, -1], think_time=[0, 2])
    simulation = Simulation(tiny_config(), workload)
    simulation.run()
    assert by_id(simulation)[1]["arrival_time"] == 3


def test_turns_of_a_session_may_be_served_by_different_workers() -> None:
    """Round robin over two workers: A0, B0, A1, B1 in the order of their arrivals."""
    workload = sessions_of(
        [(0, 4, 2), (0.5, 4, 3), (LATER, 4, 1), (LATER, 4, 1)],
        next_rows=[2, 3, -1, -1],
        think_time=[0, 0, 1, 1],
    )
    simulation = Simulation(tiny_config({"simulation.num_workers": 2}), workload)
    simulation.run()
    assert {i: record["worker_id"] for i, record in by_id(simulation).items()} == {
        0: 0,
        1: 1,
        2: 0,
        3: 1,
    }


@pytest.mark.parametrize("kind", ["vllm", "single_stage"])
def test_a_slow_worker_slows_its_sessions_down(kind: str) -> None:
    """The difference to a trace with times: twice the step time, and the last turn of 5 arrives
    5 · 4 s later (4 tokens each), not at the same time; the think times are the same."""
    ends = []
    for base_s in (1.0, 2.0):
        workload = sessions_of(
            [(0, 4, 4), *[(LATER, 4, 4)] * 5], [1, 2, 3, 4, 5, -1], [0, *[0.5] * 5]
        )
        config = tiny_config(
            {
                "worker.kind": kind,
                "worker.inference_params": {"model": "synthetic", "base_s": base_s},
            }
        )
        simulation = Simulation(config, workload)
        simulation.run()
        ends.append(by_id(simulation)[5]["arrival_time"])
    assert ends == [5 * 4.5, 5 * 8.5]


def test_an_episode_of_sessions_earns_minus_the_mean_latency(path: Path) -> None:
    """Every turn counts once; think time is not latency. Predictions come with the workload."""
    rows = [
        turn(
            f"s{i}",
            t,
            input_length=20 + 8 * t,
            output_length=6,
            hash_ids=list(range(50 * i, 50 * i + 5 + 2 * t)),
        )
        for i in range(6)
        for t in range(4)
    ]
    scenario = {
        **TINY,
        "kvc": {
            "hash_block_tokens": 4,
            "tiers": [{"capacity_GB": 1.0, "bandwidth_GBps": 0.01}],
        },
        "workload": config(path, rows).model_dump(mode="json", exclude_none=True),
    }
    env = OpalVLLMEnv(scenario)
    _, info = env.reset(seed=0)
    total, terminated = 0.0, False
    while not terminated:
        _, reward, terminated, _, info = env.step(int(info["baseline_action"]))
        total += reward
    metrics = info["episode_metrics"]
    assert metrics["completed"] == 24
    assert total == pytest.approx(-metrics["e2e_s"]["mean"])
    assert metrics["prefix_hit_tokens"] > 0
    # All but the first turns come at least 6 tokens and the think time after the one before.
    records = by_id(env.simulation)
    workload = env.simulation.workload
    for row, following in enumerate(workload.next_rows.tolist()):
        if following >= 0:
            gap = records[following]["arrival_time"] - records[row]["decode_done_time"]
            assert gap == pytest.approx(2.0)


def test_a_horizon_cuts_sessions_short() -> None:
    """Rewards up to 5 s over all four turns: A0 2 s, A1 (from 3.5) 1.5 s; the others never come."""
    workload = sessions_of(
        [(0, 4, 2), (LATER, 4, 9), (LATER, 4, 1), (LATER, 4, 1)],
        next_rows=[1, 2, 3, -1],
        think_time=[0, 1.5, 0, 0],
    )
    env = OpalVLLMEnv(tiny_config(), horizon_s=5.0)
    _, info = env.reset(options={"workload": workload})
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, info = env.step(int(info["baseline_action"]))
        total += reward
        over = terminated or truncated
    assert truncated
    assert total == pytest.approx(-(2 + 1.5) / 4)
    assert info["episode_metrics"]["requests"] == 2


# -------------------------------------------------------------------------- the recorded sessions


def recorded_config(**values: Any) -> TraceWorkload:
    arrivals = {"rate_per_s": 0.1}
    given = {"format": "sessions", "path": str(RECORDED), "arrivals": arrivals, "on_error": "skip"}
    return TraceWorkload.model_validate({**given, **values})


def test_recorded_sessions() -> None:
    """Counted with the json module: 70 sessions, 1,926 turns, of which one, turn 6 of 10 of its
    session, has no output; 16 think times were not recorded."""
    if not RECORDED.exists():
        pytest.skip(f"the recorded sessions {RECORDED} are not here")
    recorded = read_sessions(RECORDED, skip_malformed=True)
    assert len(recorded.sessions) == 70
    assert (recorded.rows, recorded.malformed, recorded.cut_off) == (1926, 1, 3)
    with pytest.raises(TraceError, match=r":691: output_length: got 0; allowed: an integer"):
        read_sessions(RECORDED)
    first = recorded.sessions[0]
    assert [turn.prompt_tokens for turn in first[:3]] == [15818, 16003, 16162]
    assert [turn.think_time_s for turn in first[:4]] == [0, 3, 3, 10]
    assert first[0].hash_ids == tuple(range(31))
    whole = make(recorded_config())
    assert len(whole) == 1922
    assert int(np.isfinite(whole.arrival_time).sum()) == 70
    assert whole.left_out == {"malformed": 1, "after a malformed turn": 3}
    for seed in range(5):
        part = make(
            recorded_config(num_requests=256, window_start_s=None, max_tokens=100_000), seed
        )
        assert 256 - 78 < len(part) <= 256
        assert (part.prompt_tokens + part.output_tokens).max() <= 100_000
