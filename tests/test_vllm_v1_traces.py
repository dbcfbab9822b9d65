"""Every step of every recording of vLLM 0.33.0's scheduler, with its victims, blocks and times.

The recordings of `behaviours` are named by the behaviour that each of them shows.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

from tests.vllm_v1_replay import Trace, first_difference, recordings, replay

FILES = ("behaviours", "t1", "t2", "t3", "t4")


@cache
def traces(file: str) -> list[Trace]:
    return recordings(file)


def named(file: str) -> list[Any]:
    return [
        pytest.param(file, place, id=f"{file}-{trace.get('name') or place}")
        for place, trace in enumerate(traces(file))
    ]


def test_there_are_24_behaviours_and_56_traces() -> None:
    assert [len(traces(file)) for file in FILES] == [24, 14, 14, 14, 14]


@pytest.mark.parametrize("step_by_step", [True, False], ids=["steps", "spans"])
@pytest.mark.parametrize(("file", "place"), [case for file in FILES for case in named(file)])
def test_every_step_equals_vllm(file: str, place: int, step_by_step: bool) -> None:
    trace = traces(file)[place]
    difference = first_difference(trace, replay(trace, step_by_step=step_by_step))
    assert difference is None, difference


@pytest.mark.parametrize("file", FILES[1:])
def test_spans_skip_most_steps_of_a_recording(file: str) -> None:
    """Under pressure, with short outputs, a span is still some steps long."""
    steps = spans = 0
    for trace in traces(file):
        run = replay(trace)
        steps += len(run.steps)
        spans += run.worker.spans
    assert spans < 0.6 * steps


def test_a_difference_names_the_step_and_what_differs() -> None:
    trace = copy.deepcopy(traces("behaviours")[1])
    trace["steps"][1]["scheduled"]["b"] -= 1
    trace["steps"][1]["free_blocks"] += 1
    expected = """step 1
  scheduled: vLLM {'a': 1, 'b': 575, 'c': 10, 'd': 10}, ours {'a': 1, 'b': 576, 'c': 10, 'd': 10}
  free_blocks: vLLM 9897, ours 9896"""
    assert first_difference(trace, replay(trace)) == expected
    del trace["steps"][1:]
    assert first_difference(trace, replay(trace)).startswith(
        "step 1: vLLM None, ours Step(time=1.0"
    )
    trace = copy.deepcopy(traces("behaviours")[1])
    trace["requests"]["c"]["num_preemptions"] = 1
    assert first_difference(trace, replay(trace)) == "request c\n  num_preemptions: vLLM 1, ours 0"
