"""The shared transfer channel, on timelines worked out by hand and against a fluid model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opal_gym.sim.channel import SharedChannel
from opal_gym.sim.clock import SimEnvironment


def run(
    transfers: Sequence[tuple[float, float]],
    *,
    bandwidth: float = 4.0,
    latency: float = 0.0,
    concurrency: int = 1,
) -> tuple[list[float], int]:
    """Ends of transfers of (start in s, bytes), and the SimPy events that they took."""
    env = SimEnvironment()
    channel = SharedChannel(env, bandwidth, latency, concurrency)
    ends = [0.0] * len(transfers)

    def one(number: int, start: float, num_bytes: float) -> Generator[Any, Any, None]:
        yield env.at(start)
        yield from channel.transfer(num_bytes)
        ends[number] = env.now

    for number, (start, num_bytes) in enumerate(transfers):
        env.process(one(number, start, num_bytes))
    events = 0
    while env.peek() < float("inf"):
        env.step()
        events += 1
    return ends, events


def ends_of(transfers: Sequence[tuple[float, float]], **channel: Any) -> list[float]:
    return run(transfers, **channel)[0]


def test_a_transfer_alone_takes_the_latency_and_its_bytes_over_the_bandwidth() -> None:
    """0.5 s + 10 B / 4 B/s."""
    assert ends_of([(1.0, 10.0)], latency=0.5) == [4.0]


def test_transfers_queue_in_the_order_of_their_requests() -> None:
    """One at a time, each with its latency: 0.5 + 1 s from 0, 1.5 and 3."""
    assert ends_of([(0, 4), (0, 4), (0.25, 4)], latency=0.5) == [1.5, 3.0, 4.5]


def test_two_transfers_share_the_bandwidth_equally() -> None:
    """A (8 B) alone from 0 to 1: 4 B left; both at 2 B/s until 3; B's last 4 B at 4 B/s."""
    assert ends_of([(0, 8), (1, 8)], concurrency=2) == [3.0, 4.0]


def test_equal_shares_of_equal_transfers_end_together() -> None:
    """3 · 4 B at 4 B/s."""
    assert ends_of([(0, 4)] * 3, concurrency=3) == [3.0] * 3


def test_a_third_transfer_queues_behind_two_with_a_latency() -> None:
    """A (0, 8 B), B (0.5, 12 B), C (0.5, 4 B); 4 B/s, latency 1 s, two at once.

    1 – 1.5    A alone: 6 B left (B waits for its first byte, which takes no bandwidth)
    1.5 – 4.5  2 B/s each: A ends, B has 6 B left; C gets the slot
    4.5 – 5.5  B alone, C waits for its first byte: B has 2 B left
    5.5 – 6.5  2 B/s each: B ends, C has 2 B left
    6.5 – 7    C alone
    """
    transfers = [(0.0, 8.0), (0.5, 12.0), (0.5, 4.0)]
    assert ends_of(transfers, latency=1.0, concurrency=2) == [4.5, 6.5, 7.0]


def test_nothing_moves_in_no_time_beside_a_long_transfer() -> None:
    """And does not slow it down: 40 B at 4 B/s."""
    assert ends_of([(0, 40), (1, 0)], concurrency=2) == [10.0, 1.0]


def test_a_pause_counts_for_nothing() -> None:
    """The pace of the channel stands still while nobody moves."""
    assert ends_of([(0, 4), (100, 8), (101, 4)], concurrency=2) == [1.0, 103.0, 103.0]


def test_events_follow_transfers_not_bytes() -> None:
    """At most 9 a transfer: two for its process, its start, slot, latency, end and release, and
    the two ends that its own start and end plan for others."""
    for concurrency in (1, 4):
        few = run([(i / 8, 4) for i in range(40)], concurrency=concurrency)[1]
        many = run([(i / 8, 4e9) for i in range(40)], concurrency=concurrency)[1]
        assert max(few, many) <= 9 * 40


def fluid(
    transfers: Sequence[tuple[Fraction, Fraction]],
    bandwidth: Fraction,
    latency: Fraction,
    concurrency: int,
) -> list[Fraction]:
    """The same channel in exact arithmetic: from event to event, everybody's rest is counted down.

    Transfers must start in order.
    """
    now, coming = Fraction(0), list(range(len(transfers)))
    queue: list[int] = []
    first_byte: dict[int, Fraction] = {}
    rest: dict[int, Fraction] = {}
    ends = [Fraction(0)] * len(transfers)
    while coming or queue or first_byte or rest:
        while coming and transfers[coming[0]][0] <= now:
            queue.append(coming.pop(0))
        while queue and len(first_byte) + len(rest) < concurrency:
            first_byte[queue.pop(0)] = now + latency
        for number in [n for n, time in first_byte.items() if time <= now]:
            del first_byte[number]
            rest[number] = transfers[number][1]
        done = [number for number, left in rest.items() if left <= 0]
        for number in done:
            del rest[number]
            ends[number] = now
        if done:
            continue
        events = [*first_byte.values(), *(transfers[n][0] for n in coming[:1])]
        events += [now + left * len(rest) / bandwidth for left in rest.values()]
        if not events:
            break
        moved = (min(events) - now) * bandwidth / max(1, len(rest))
        rest = {number: left - moved for number, left in rest.items()}
        now = min(events)
    return ends


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    gaps=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    latency=st.integers(0, 6),
    concurrency=st.integers(1, 4),
)
def test_the_channel_is_a_fluid_shared_equally(
    gaps: list[int], sizes: list[int], latency: int, concurrency: int
) -> None:
    starts = [Fraction(sum(gaps[: number + 1]), 4) for number in range(len(gaps))]
    transfers = [(start, Fraction(size)) for start, size in zip(starts, sizes, strict=False)]
    expected = fluid(transfers, Fraction(4), Fraction(latency, 4), concurrency)
    ends = ends_of(
        [(float(start), float(size)) for start, size in transfers],
        latency=latency / 4,
        concurrency=concurrency,
    )
    assert ends == pytest.approx([float(end) for end in expected], abs=1e-9)
