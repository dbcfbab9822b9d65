"""What a request costs: SimPy events, bytes while it lives and after, objects after a reset."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import gymnasium
import pytest

from opal_gym.sim.simulation import Simulation
from tests.driving import simulate
from tests.episodes import random_legal


def count_events(simulation: Simulation) -> int:
    """SimPy events of a whole run."""
    events, step = 0, simulation.env.step

    def counted() -> None:
        nonlocal events
        events += 1
        step()

    simulation.env.step = counted  # type: ignore[method-assign]
    simulation.advance()
    return events


def test_a_request_alone_costs_six_events() -> None:
    """Its arrival; the interrupts of the intake and of the idle scheduler; the boundary at which
    that instant has been seen; the ends of its prefill and of its decode, of any length.
    """
    few, many = (count_events(simulate([(1000.0 * i, 4, 100) for i in range(n)])) for n in (10, 30))
    assert (many - few) / 20 == 6


def test_a_request_among_others_costs_six_events_too() -> None:
    """No interrupt of the busy scheduler, but the span that its arrival cuts leaves its end."""
    few, many = (
        count_events(
            simulate(
                [(7.5 * i, 4, 20) for i in range(n)], max_num_seqs=8, num_gpu_blocks_override=1000
            )
        )
        for n in (50, 150)
    )
    assert (many - few) / 100 == 6


def retained_bytes(make: Callable[[], Any]) -> int:
    """Bytes of what `make` returns and all that it holds."""
    gc.collect()
    tracemalloc.start()
    kept = make()
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept is not None
    return size


def test_a_completed_request_keeps_at_most_250_bytes() -> None:
    """Beside the end times of the steps: 8 bytes a step, shared by all requests."""

    def records(n: int) -> Any:
        simulation = simulate([(10.0 * i, 4, 2) for i in range(n)])
        simulation.advance()
        assert simulation.worker.steps.count == 2 * n
        return simulation.records

    few, many = retained_bytes(lambda: records(200)), retained_bytes(lambda: records(2200))
    assert (many - few) / 2000 <= 250 + 2 * 8


def crowd(requests: int) -> Simulation:
    """All arrive at once; eight run."""
    return simulate([(0.0, 4, 50)] * requests, max_num_seqs=8, overrides=QUIET)


QUIET = {"simulation.check_invariants": False}


def test_a_waiting_request_takes_at_most_2_kilobytes() -> None:
    def waiting(n: int) -> Any:
        simulation = crowd(n)
        while simulation.env.now < 1:
            simulation.env.step()
        assert len(simulation.worker.waiting_requests) >= n - 8
        return simulation

    few, many = retained_bytes(lambda: waiting(100)), retained_bytes(lambda: waiting(4100))
    assert (many - few) / 4000 <= 2000


def calls(run: Callable[[], None]) -> int:
    """Python and C functions called in a run."""
    count = 0

    def profile(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    run()
    sys.setprofile(None)
    return count


@pytest.mark.slow
def test_a_decision_costs_the_same_with_100_000_waiting_as_with_1_000() -> None:
    def serve_some(requests: int) -> int:
        simulation = crowd(requests)
        while simulation.ledger.completed_requests < 16:
            simulation.env.step()

        def more() -> None:
            while simulation.ledger.completed_requests < 80:
                simulation.env.step()

        return calls(more)

    assert serve_some(100_000) == serve_some(1_000)


def begin_episode(env: gymnasium.Env[Any, Any], decisions: int) -> None:
    """A reset and some decisions, among them the first evictions."""
    act = random_legal(0)
    _, info = env.reset(seed=0)
    for _ in range(decisions):
        *_, info = env.step(act(info))


@pytest.mark.parametrize("scenario", ["mem-chat-burst", "prod-mix"])
def test_a_reset_leaks_no_object(scenario: str) -> None:
    env = gymnasium.make("OpalVLLM-v0", scenario=scenario, num_requests=64)
    counts = []
    for _ in range(8):
        begin_episode(env, decisions=100)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert len(set(counts[3:])) == 1, counts


RESETS = """
import gc, tracemalloc
import gymnasium, opal_gym

env = gymnasium.make("OpalVLLM-v0", num_requests=16)

def resets(n):
    for _ in range(n):
        env.reset(seed=0)
    gc.collect()
    print(len(gc.get_objects()), tracemalloc.get_traced_memory()[0])

tracemalloc.start()
for _ in range(5):
    resets(500)
"""


@pytest.mark.slow
def test_memory_is_flat_over_2_000_resets() -> None:
    """In a process of its own: no object more, and less than half a byte a reset.

    Of the four stretches of 500 resets after the first the one that grows least counts: what a
    reset leaks shows in all of them, a cache of NumPy's that fills up in one.
    """
    run = subprocess.run([sys.executable, "-c", RESETS], capture_output=True, text=True, check=True)
    seen = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    assert len({objects for objects, _ in seen}) == 1
    assert min(size - before for (_, before), (_, size) in pairwise(seen)) < 250
