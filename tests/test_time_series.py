"""Time series of the workers, sampled by event, worked out by hand.

Every step takes 1 s; blocks hold 4 tokens; a hash block moves in 1 s.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from opal_gym.sim.simulation import Simulation
from opal_gym.sim.timeseries import SAMPLE, TimeSeries
from tests.driving import kv_cache, simulate

RECORDED = {"simulation.record_time_series": True}
both_modes = pytest.mark.parametrize("stepwise", [False, True])


def series(
    requests: list[tuple[float, int, int]], *, overrides: dict[str, Any] | None = None, **more: Any
) -> TimeSeries:
    """The time series of a simulation that ran to its very end."""
    simulation = simulate(requests, overrides={**RECORDED, **(overrides or {})}, **more)
    simulation.run()
    simulation.drain()
    assert simulation.time_series is not None
    return simulation.time_series


def rows(time_series: TimeSeries, *fields: str) -> list[tuple[float, ...]]:
    """The time and some fields of every sample; repetitions left out."""
    columns = [time_series.table[field].tolist() for field in ("time", *fields)]
    seen = list(zip(*columns, strict=True))
    return [row for i, row in enumerate(seen) if i == 0 or row != seen[i - 1]]


def test_none_is_kept_unless_asked_for() -> None:
    simulation = simulate([(0, 4, 2)])
    simulation.run()
    assert simulation.time_series is None


@both_modes
def test_every_change_is_sampled(stepwise: bool) -> None:
    """r0 (0, 4, 3), r1 (0.5, 4, 2), which begins at 1. Both are done at 3.

    step   r0     r1     free
    0 – 1  5, 2   –      98
    1 – 2  6, 2   5, 2   96
    2 – 3  7, 2   6, 2   96
    """
    fields = ("waiting_requests", "running_requests", "completed_requests", "free_gpu_blocks")
    seen = rows(series([(0, 4, 3), (0.5, 4, 2)], stepwise=stepwise), *fields, "gpu_busy_time")
    assert seen == [
        (0.0, 0, 0, 0, 100, 0.0),  # every worker begins idle
        (0.0, 1, 0, 0, 100, 0.0),  # r0 arrives
        (0.0, 0, 1, 0, 98, 0.0),  # and is admitted
        (0.5, 1, 1, 0, 98, 0.5),  # r1 arrives in mid-step
        (1.0, 0, 2, 0, 96, 1.0),
        (2.0, 0, 2, 0, 96, 2.0),  # r1's prefill has ended
        (3.0, 0, 0, 1, 98, 3.0),  # r0 gives its blocks back, then r1
        (3.0, 0, 0, 0, 100, 3.0),
    ]


@both_modes
def test_fetches_and_stores_are_sampled(stepwise: bool) -> None:
    """Prompt 12 of blocks 1, 2, 3, of which 1 and 2 are resident; output 2.

    10 – 12  fetch to 2 blocks
    12 – 14  13 and 14 tokens: 4 blocks
    14 – 15  block 3 is stored
    """
    fields = ("completed_requests", "free_gpu_blocks", "kvc_fetch_blocks_in_flight")
    seen = rows(
        series(
            [(10, 12, 2)],
            stepwise=stepwise,
            overrides=kv_cache(),
            resident=(1, 2),
            hash_ids=[(1, 2, 3)],
        ),
        *fields,
    )
    assert seen == [
        (0.0, 0, 100, 0),
        (10.0, 0, 100, 0),
        (10.0, 0, 98, 2),
        (12.0, 0, 98, 0),
        (12.0, 0, 96, 0),
        (13.0, 0, 96, 0),
        (14.0, 1, 96, 0),
        (15.0, 0, 100, 0),
    ]


def test_what_is_seen_in_the_middle_of_a_span_is_what_a_step_shows() -> None:
    """r0 (0, 4, 40) runs alone; r1 arrives at 20.5: the step makes 25 tokens in 7 blocks."""
    seen = []
    for stepwise in (False, True):
        table = series([(0, 4, 40), (20.5, 4, 1)], stepwise=stepwise).table
        seen.append(table[table["time"] == 20.5].tolist())
    assert seen[0] == seen[1]
    ((_, _, waiting, running, _, free, _, busy),) = seen[0]
    assert (waiting, running, free, busy) == (1, 1, 93, 20.5)


def test_samples_follow_events_not_tokens() -> None:
    def samples(tokens: int) -> int:
        pool = {"num_gpu_blocks_override": 10_000, "max_model_len": 10_000}
        return len(series([(0, 40, tokens), (1e5, 40, tokens)], **pool).table)

    assert samples(4000) == samples(40)


def test_the_last_sample_is_an_empty_system() -> None:
    rng = np.random.default_rng(0)
    requests = [
        (float(t), int(p), int(o))
        for t, p, o in zip(
            np.cumsum(rng.exponential(2, 50)),
            rng.integers(1, 40, 50),
            rng.integers(1, 60, 50),
            strict=True,
        )
    ]
    table = series(requests, num_gpu_blocks_override=40).table
    assert np.all(np.diff(table["time"]) >= 0)
    assert np.all(np.diff(table["gpu_busy_time"]) >= 0)
    last = table[-1]
    assert (last["waiting_requests"], last["running_requests"], last["free_gpu_blocks"]) == (
        0,
        0,
        40,
    )
    assert table["free_gpu_blocks"].min() >= 0


def test_several_workers_are_sampled_side_by_side() -> None:
    """r0 (0, 4, 2) is at worker 0, r1 (0.5, 4, 1) at worker 1."""
    overrides = {"simulation.num_workers": 2}
    seen = rows(
        series([(0, 4, 2), (0.5, 4, 1)], overrides=overrides), "worker_id", "running_requests"
    )
    assert seen == [
        (0.0, 0, 0),
        (0.0, 1, 0),
        (0.0, 0, 0),
        (0.0, 0, 1),
        (0.5, 1, 0),
        (0.5, 1, 1),
        (1.0, 0, 1),
        (1.5, 1, 0),
        (2.0, 0, 0),
    ]


def test_export_is_one_json_object_a_sample() -> None:
    time_series = series([(0, 4, 3), (0.5, 4, 2)])
    exported = [json.loads(line) for line in time_series.export()]
    assert len(exported) == len(time_series.table)
    assert list(exported[0]) == list(SAMPLE.names or ())
    for line, row in zip(exported, time_series.table, strict=True):
        assert tuple(line.values()) == row.item()


def test_the_table_grows() -> None:
    time_series = TimeSeries()
    for number in range(3000):
        time_series.add(number / 2, 0, number, 0, 0, 0, 0, 0.0)
    assert time_series.table["time"].tolist() == [number / 2 for number in range(3000)]
    assert time_series.table["waiting_requests"].tolist() == list(range(3000))


def test_a_simulation_is_the_same_with_it_and_without() -> None:
    tables = []
    for record in (False, True):
        simulation: Simulation = simulate(
            [(0, 4, 30), (0.5, 20, 20), (1, 12, 9)],
            overrides={"simulation.record_time_series": record},
            num_gpu_blocks_override=12,
        )
        simulation.run()
        tables.append(simulation.records.table.tobytes())
    assert tables[0] == tables[1]
