"""The router: its policies, and the messages that are all it knows.

Simulations have steps of 1 s and blocks of 4 tokens; a hash block moves in 1 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from opal_gym.config import ConfigError, load_config
from opal_gym.sim.kvcache import KVEvent
from opal_gym.sim.request import LLMRequest
from opal_gym.sim.router import InfraUpdate, Router
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import make_workload
from opal_gym.sim.workloads.streams import Stream, generator
from tests.driving import kv_cache, simulate
from tests.episodes import BUSY
from tests.tiny import by_id, tiny_config

both_modes = pytest.mark.parametrize("stepwise", [False, True])


# --------------------------------------------------------------------------- a router by itself


class Inbox:
    """A worker that only takes requests."""

    def __init__(self) -> None:
        self.requests: list[int] = []

    def queue_work(self, request: LLMRequest) -> None:
        self.requests.append(request.request_id)


class Routed:
    """A router with inboxes for workers."""

    def __init__(self, policy: str, workers: int = 3, seed: int = 0, **config: Any) -> None:
        overrides = {"router.policy": policy, "simulation.num_workers": workers, **kv_cache()}
        overrides.update({key.replace("__", "."): value for key, value in config.items()})
        self.router = Router(tiny_config(overrides), generator(seed, Stream.ROUTING))
        self.inboxes = [Inbox() for _ in range(workers)]
        self.router.connect(self.inboxes)
        self._sent = 0

    def send(self, *hash_ids: int) -> int:
        """Routes a request; returns where it went."""
        request = LLMRequest(self._sent, 0.0, max(1, 4 * len(hash_ids)), 1, 1, hash_ids=hash_ids)
        self._sent += 1
        self.router.route(request)
        (worker,) = [i for i, box in enumerate(self.inboxes) if request.request_id in box.requests]
        return worker

    def report(self, *loads: int) -> None:
        """Every worker reports a load."""
        for worker_id, load in enumerate(loads):
            self.router.receive_update(worker_id, InfraUpdate(load=load))

    def stored(self, worker_id: int, *chunks: int) -> None:
        self.router.receive_kv_events(worker_id, [KVEvent(True, chunk) for chunk in chunks])

    def dropped(self, worker_id: int, *chunks: int) -> None:
        self.router.receive_kv_events(worker_id, [KVEvent(False, chunk) for chunk in chunks])


def test_round_robin_takes_the_workers_in_turn() -> None:
    routed = Routed("RoundRobin")
    routed.report(9, 0, 0)
    assert [routed.send() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_takes_the_smallest_load_that_was_reported() -> None:
    routed = Routed("LeastLoaded")
    assert routed.send() == 0  # nothing is known: the first
    routed.report(3, 1, 2)
    # What it sends itself it does not count: it knows what it is told.
    assert [routed.send() for _ in range(4)] == [1, 1, 1, 1]
    routed.report(3, 5, 2)
    assert routed.send() == 2
    routed.report(2, 5, 2)
    assert routed.send() == 0


def test_random_is_uniform_and_reproducible() -> None:
    """3,000 draws of 3: 1,000 each, standard deviation √(3000 · 1/3 · 2/3) = 26."""
    routed, again, other = Routed("Random", seed=1), Routed("Random", seed=1), Routed("Random")
    sent = [routed.send() for _ in range(3000)]
    assert [again.send() for _ in range(3000)] == sent
    assert [other.send() for _ in range(3000)] != sent
    assert list(Counter(sent).values()) == pytest.approx([1000] * 3, abs=4 * 26)


def test_max_prefix_takes_the_longest_prefix_that_was_reported() -> None:
    """Worker 1 holds 1 and 2, worker 2 holds 1 and, without what leads to it, 3."""
    routed = Routed("MaxPrefix")
    routed.stored(1, 1, 2)
    routed.stored(2, 1, 3)
    assert routed.send(1, 2, 3) == 1
    assert routed.send(1) == 1  # of several the first
    routed.report(0, 2, 1)
    assert routed.send(1) == 2  # of several the least loaded
    assert routed.send(1, 2) == 1
    assert routed.send(7) == routed.send() == 0
    routed.dropped(1, 2)
    assert routed.send(1, 2) == 2
    routed.dropped(2, 1)
    assert routed.send(1, 2) == 1


def test_max_prefix_knows_a_workers_chunks_not_its_blocks() -> None:
    """Chunks of two blocks are named after their last."""
    routed = Routed("MaxPrefix", kvc__chunk_size=8)
    routed.stored(2, 2)
    assert routed.send(1, 2, 3) == 2
    assert routed.send(1) == 0


@pytest.mark.parametrize(("gap", "worker"), [(1, 0), (4, 0), (5, 1), (None, 1)])
def test_max_prefix_leaves_out_workers_far_above_the_smallest_load(
    gap: int | None, worker: int
) -> None:
    """Worker 1 holds the prompt, and has 4 requests more than worker 0."""
    routed = Routed("MaxPrefix", workers=2, router__max_load_gap=gap)
    routed.stored(1, 1)
    routed.report(2, 6)
    assert routed.send(1) == worker


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.policy: got 'Fastest'"):
        tiny_config({"router.policy": "Fastest"})


# ------------------------------------------------------------------------------------- messages


def listen(simulation: Simulation) -> list[tuple[float, int, Any]]:
    """Will hold (time, worker, message) of everything that the router is told."""
    heard: list[tuple[float, int, Any]] = []

    def wrap(name: str) -> None:
        receive = getattr(simulation.router, name)

        def listening(worker_id: int, message: Any) -> None:
            heard.append((simulation.env.now, worker_id, message))
            receive(worker_id, message)

        setattr(simulation.router, name, listening)

    wrap("receive_update")
    wrap("receive_kv_events")
    return heard


def several(
    requests: Sequence[tuple[float, int, int]],
    *,
    workers: int = 2,
    policy: str = "RoundRobin",
    period: float = 1.0,
    coalesce: float = 0.1,
    overrides: dict[str, Any] | None = None,
    **arguments: Any,
) -> Simulation:
    more = {
        "simulation.num_workers": workers,
        "router.policy": policy,
        "worker.worker_params.periodic_infra_update_time": period,
        "worker.worker_params.kvcevent_coalesce_time": coalesce,
        **(overrides or {}),
    }
    return simulate(requests, overrides=more, **arguments)


@both_modes
def test_updates_say_what_a_worker_does(stepwise: bool) -> None:
    """Period 2.5 s. Worker 0 gets r0 (0.5, 4, 4): it computes from 0.5 to 4.5.

    3.0  2.5 of 2.5 s so far, in mid-span; step 2.5 – 3.5 makes 7 tokens: 2 of 100 blocks
    5.5  1.5 of 2.5 s; nothing is left, and no more is said

    Worker 1 gets r1 (0.5, 4, 2) and r3 (1, 4, 7), one after the other: 0.5 – 2.5, 2.5 – 9.5. What
    worker 0 rejects (r2) is no load.
    """
    simulation = several(
        [(0.5, 4, 4), (0.5, 4, 2), (0.5, 200, 201), (1.0, 4, 7)],
        stepwise=stepwise,
        period=2.5,
        max_num_seqs=1,
    )
    heard = listen(simulation)
    simulation.run()
    simulation.drain()
    assert [(time, update) for time, worker, update in heard if worker == 0] == [
        (3.0, InfraUpdate(1, 0, pytest.approx(0.02), 1.0)),
        (5.5, InfraUpdate(0, 0, 0.0, pytest.approx(0.6))),
    ]
    assert [(time, update) for time, worker, update in heard if worker == 1] == [
        (3.0, InfraUpdate(1, 0, pytest.approx(0.02), 1.0)),
        (5.5, InfraUpdate(1, 0, pytest.approx(0.02), 1.0)),
        (8.0, InfraUpdate(1, 0, pytest.approx(0.03), 1.0)),
        (10.5, InfraUpdate(0, 0, 0.0, pytest.approx(0.6))),
    ]
    assert simulation.router.messages == 6


@both_modes
def test_updates_count_who_waits_and_what_runs_only_part_of_a_period(stepwise: bool) -> None:
    """One slot, period 4 s. Worker 0: r0 (0, 4, 2) from 0 to 2, r2 (3.5, 4, 3) from 3.5 to 6.5, r4
    (3.75, 4, 1) until 7.5; by 4 it has computed 2.5 s, from 4 to 8 3.5 s."""
    simulation = several(
        [(0, 4, 2), (0, 4, 1), (3.5, 4, 3), (3.5, 4, 1), (3.75, 4, 1)],
        stepwise=stepwise,
        period=4.0,
        max_num_seqs=1,
    )
    heard = listen(simulation)
    simulation.run()
    simulation.drain()
    updates = [(time, update) for time, worker, update in heard if worker == 0]
    assert [(t, u.load, u.queue_occupancy, u.gpu_utilisation) for t, u in updates] == [
        (4.0, 2, 1, 0.625),
        (8.0, 0, 0, 0.875),
    ]


def test_updates_of_a_later_burst_begin_with_it() -> None:
    """Worker 0 works from 0 to 2 and from 10.25 to 12.25."""
    simulation = several([(0, 4, 2), (0, 4, 1), (10.25, 4, 2)])
    heard = listen(simulation)
    simulation.run()
    simulation.drain()
    times = [time for time, worker, _ in heard if worker == 0]
    assert times == [1.0, 2.0, 3.0, 11.25, 12.25, 13.25]


def test_updates_are_the_same_with_spans_and_without() -> None:
    """Random requests on three workers: what is said, and when, to the last bit or nearly."""
    rng = np.random.default_rng(0)
    rows = zip(
        np.cumsum(rng.exponential(1.5, 40)).round(3).tolist(),
        rng.integers(1, 40, 40).tolist(),
        rng.integers(1, 60, 40).tolist(),
        strict=True,
    )
    requests, hash_ids = list(rows), []
    for number, (_, prompt, _) in enumerate(requests):
        hash_ids.append(tuple(1000 * (number % 3) + block for block in range(prompt // 4)))
    said = []
    for stepwise in (False, True):
        simulation = several(
            requests,
            workers=3,
            policy="MaxPrefix",
            stepwise=stepwise,
            period=0.7,
            overrides=kv_cache(block_s=0.1, blocks=20),
            hash_ids=hash_ids,
            num_gpu_blocks_override=40,
        )
        heard = listen(simulation)
        simulation.run()
        simulation.drain()
        said.append(heard)
    spans, steps = said
    assert len(spans) > 100
    assert [(time, worker) for time, worker, _ in spans] == [(t, worker) for t, worker, _ in steps]
    for (_, _, message), (_, _, other) in zip(spans, steps, strict=True):
        if isinstance(message, InfraUpdate):
            assert message == pytest.approx(other, abs=1e-9)
            assert 0 <= message.gpu_utilisation <= 1 + 1e-9
        else:
            assert message == other


# ------------------------------------------------------------------------- what updates do not do


@pytest.mark.parametrize("policy", ["RoundRobin", "LeastLoaded", "MaxPrefix"])
def test_an_idle_second_takes_no_events(policy: str) -> None:
    def events(pause: float) -> int:
        simulation = several(
            [(0.0, 8, 3), (pause, 8, 3), (2 * pause, 8, 3)],
            policy=policy,
            overrides=kv_cache(),
            hash_ids=[(1, 2), (1, 2), (1, 3)],
        )
        count = 0
        while simulation.env.peek() < float("inf"):
            simulation.env.step()
            count += 1
        assert simulation.done
        return count

    assert events(1e9) == events(100.0)


def test_updates_keep_no_finished_simulation_alive() -> None:
    """r0 ends at 2, its store of a block at 3; the last update is sent at 3, the last KV event's
    message at 3.1."""
    simulation = several([(0, 4, 2)], overrides=kv_cache(), hash_ids=[(1,)])
    simulation.run()
    assert simulation.env.now == 2
    simulation.drain()
    assert simulation.env.now == pytest.approx(3.1)


@both_modes
def test_updates_wake_no_idle_worker(stepwise: bool) -> None:
    """All requests go to worker 0, whose load is never reported before the next one comes."""
    simulation = several(
        [(0, 4, 30), (0.5, 4, 2)], stepwise=stepwise, policy="LeastLoaded", period=1.0
    )
    heard = listen(simulation)
    simulation.run()
    assert {worker for _, worker, _ in heard} == {0}
    assert [worker.rebuild_id for worker in simulation.workers if worker.worker_id == 1] == [0]


def test_a_worker_alone_says_nothing() -> None:
    simulation = several([(0, 4, 30)], workers=1, overrides=kv_cache(), hash_ids=[(1,)])
    simulation.run()
    simulation.drain()
    assert simulation.router.messages == 0


# --------------------------------------------------------------------------------------- KV events

TWO_STORES: dict[str, Any] = {
    "requests": [(0, 8, 1), (0, 4, 1), (0, 4, 1)],
    "hash_ids": [(1, 2), (9,), (3,)],
    "period": 100.0,
    "overrides": kv_cache(),
}
"""Worker 0 gets r0 and r2, which end at 1. Its stores end at 3 (blocks 1 and 2) and at 4 (3)."""


@pytest.mark.parametrize(
    ("coalesce", "messages"),
    [
        (0.5, [(3.5, [1, 2]), (4.5, [3])]),
        (1.5, [(4.5, [1, 2, 3])]),
        # Still one message for what happens at one time.
        (0.0, [(3.0, [1, 2]), (4.0, [3])]),
    ],
)
def test_kv_events_are_gathered_into_messages(
    coalesce: float, messages: list[tuple[float, list[int]]]
) -> None:
    simulation = several(coalesce=coalesce, **TWO_STORES)
    heard = listen(simulation)
    simulation.run()
    simulation.drain()
    said = [
        (time, [event.chunk_id for event in message])
        for time, worker, message in heard
        if worker == 0 and isinstance(message, list)
    ]
    assert said == messages


def test_the_router_knows_a_prefix_when_it_is_told() -> None:
    """Blocks 1 and 2 are there at 3, known at 3.5."""
    simulation = several(coalesce=0.5, **TWO_STORES)
    prompt = LLMRequest(9, 0.0, 12, 1, 1, hash_ids=(1, 2, 7))
    known = {}
    for time in (2.75, 3.25, 3.75):
        while simulation.env.peek() < time:
            simulation.env.step()
        resident = simulation.engines[0].lookup(prompt.hash_ids, 12)
        known[time] = (resident, [simulation.router.known_prefix(i, prompt) for i in (0, 1)])
    assert known == {2.75: (0, [0, 0]), 3.25: (8, [0, 0]), 3.75: (8, [8, 0])}


def test_an_eviction_is_a_kv_event() -> None:
    """A cache of one block: block 1 is stored at 2 (known at 2.1) and evicted at 11, when the
    store of block 2, until 12, begins."""
    simulation = several(
        [(0, 4, 1), (0, 4, 1), (10, 4, 1)],
        overrides=kv_cache(blocks=1),
        hash_ids=[(1,), (), (2,)],
        period=100.0,
    )
    heard = listen(simulation)
    simulation.run()
    simulation.drain()
    said = [(time, list(m)) for time, _, m in heard if isinstance(m, list)]
    assert said == [
        (pytest.approx(2.1), [KVEvent(True, 1)]),
        (pytest.approx(11.1), [KVEvent(False, 1)]),
        (pytest.approx(12.1), [KVEvent(True, 2)]),
    ]


# ------------------------------------------------------------------------- policies in simulations


DOCUMENTS: dict[str, Any] = {
    "simulation": {"num_workers": 4},
    "worker": BUSY["worker"] | {"vllm_params": {"rebuild_on": "change"}},
    "kvc": {"hash_block_tokens": 64, "tiers": [{"capacity_GB": 0.2, "bandwidth_GBps": 5.0}]},
    "workload": {
        "kind": "synthetic",
        "num_requests": 200,
        "arrivals": {"rate_per_s": 8.0},
        "tenants": [
            {
                "prompt": {"kind": "lognormal", "median": 260, "sigma": 0.3, "min": 200},
                "output": {"kind": "lognormal", "median": 40, "sigma": 0.5, "max": 200},
                "prefix": {"num_prefixes": 24, "tokens": 192, "zipf": 0.5},
            }
        ],
    },
}


def workers_of(simulation: Simulation) -> list[int]:
    """The worker of each request, by request id."""
    simulation.run()
    return [record["worker_id"] for _, record in sorted(by_id(simulation).items())]


def test_least_loaded_follows_the_reports() -> None:
    """Period 1 s, nobody finishes before 30.

    0, 0.5  nothing is known: worker 0
    1       worker 0 reports 2
    1.5     worker 1, which reports 1 at 2.5
    2.75    still the smaller: worker 1, which reports 2 at 3.5
    3.75    equal: worker 0
    """
    arrivals = [(0, 4, 40), (0.5, 4, 40), (1.5, 4, 40), (2.75, 4, 40), (3.75, 4, 40)]
    assert workers_of(several(arrivals, policy="LeastLoaded")) == [0, 0, 1, 1, 0]


def test_max_prefix_follows_the_kv_events() -> None:
    """Worker 0 is busy with r0 until 6, and has said so at 1; a fetch of blocks 1 and 2 takes 2 s.

    1.5         r1 (8, 1; 1, 2): worker 1, whose store of the blocks ends at 4.5 and is known at 5
    8           r2: both have reported 0: worker 0, until 48
    12, 14, 20  r3, r4 and r5 begin like r1: worker 1, though it has no less to do
    20          r6 begins like nobody: both have reported 1 (r2, r3): worker 0
    """
    simulation = several(
        [(0, 4, 6), (1.5, 8, 1), (8, 4, 40), (12, 12, 40), (14, 12, 1), (20, 12, 1), (20, 4, 1)],
        policy="MaxPrefix",
        coalesce=0.5,
        overrides=kv_cache(),
        hash_ids=[(), (1, 2), (), (1, 2, 3), (1, 2, 3), (1, 2, 4), ()],
    )
    assert workers_of(simulation) == [0, 1, 0, 1, 1, 1, 0]
    hits = {i: record["prefix_hit_tokens"] for i, record in by_id(simulation).items()}
    assert hits == {0: 0, 1: 0, 2: 0, 3: 8, 4: 8, 5: 8, 6: 0}


def test_max_prefix_sends_a_document_where_it_is_kept() -> None:
    """24 documents of 192 tokens, of 270-token prompts; each of four tiers holds 7 and the rest of
    their prompts. Hit rates: 17 % in turn, 42 % by prefix."""
    rates = {}
    for policy in ("RoundRobin", "MaxPrefix"):
        config = load_config(DOCUMENTS, {"router.policy": policy})
        workload = make_workload(
            config.workload, 0, length_information="predicted", hash_block_tokens=64
        )
        simulation = Simulation(config, workload)
        rates[policy] = simulation.run()["prefix_hit_rate"]
        served = np.bincount(simulation.records.table["worker_id"], minlength=4)
        assert served.min() > 10
    assert rates["RoundRobin"] == pytest.approx(0.17, abs=0.03)
    assert rates["MaxPrefix"] == pytest.approx(0.42, abs=0.03)


def test_workers_that_serve_one_request_at_a_time_report_too() -> None:
    """r0 (0, 4, 10) is at worker 0; r1, r2 and r3 know it from the updates since 1. At 2.5 and 3.5
    worker 1 reports r1 and r2: 2; r3 (3.75) goes to worker 0, which then has 2 as well."""
    simulation = several(
        [(0, 4, 10), (1.5, 4, 10), (1.75, 4, 10), (3.75, 4, 1)],
        policy="LeastLoaded",
        overrides={"worker.kind": "single_stage"},
    )
    heard = listen(simulation)
    assert workers_of(simulation) == [0, 1, 1, 0]
    assert heard[0] == (1.0, 0, InfraUpdate(1, 0, 0.0, 1.0))
    assert (2.5, 1, InfraUpdate(2, 1, 0.0, 1.0)) in heard
