"""What the vLLM worker leaves behind: SimPy events, log messages, statistics, names of the seed."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from opal_gym.config import VLLMSchedulerConfig
from opal_gym.sim.batch import BatchMetadata
from opal_gym.sim.clock import BOUNDARY
from opal_gym.sim.decision import STOP
from opal_gym.sim.request import RequestPhase
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler
from tests.driving import Script, exported, kv_cache, play, simulate, watch
from tests.tiny import WorkerLog, tiny_config

# ------------------------------------------------------------------------------------- events


class EventCounter:
    """Counts a simulation's events, and the boundaries among them that nobody waits for."""

    def __init__(self, simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events = 0
        self.stale = 0
        self.most_pending = 0
        env = simulation.env
        step = env.step

        def counted_step() -> None:
            if env._queue:
                _, priority, _, event = env._queue[0]
                self.events += 1
                self.stale += priority == BOUNDARY and not event.callbacks
                self.most_pending = max(self.most_pending, len(env._queue))
            step()

        monkeypatch.setattr(env, "step", counted_step)


def events_of(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs to the very end; returns the number of events."""
    counter = EventCounter(simulation, monkeypatch)
    play(simulation)
    return counter.events


@pytest.mark.parametrize("rebuild_on", ["change", "completion"])
def test_idle_time_costs_no_events(rebuild_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests with 10 s or 10⁶ s between them."""
    few, many = (
        events_of(simulate([(0, 4, 2), (gap, 4, 2)], rebuild_on=rebuild_on), monkeypatch)
        for gap in (10, 1e6)
    )
    assert few == many


def test_tokens_cost_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of 100 and 4,000 tokens: the same rebuilds, the same spans."""
    short, long = (
        events_of(simulate([(0, 4, output)], num_gpu_blocks_override=2000), monkeypatch)
        for output in (100, 4000)
    )
    assert short == long


def test_waiting_for_a_fetch_costs_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = (
        events_of(
            simulate(
                [(10_000, 12, 2)],
                overrides=kv_cache(block_s=block_s),
                resident=(1, 2),
                hash_ids=[(1, 2, 3)],
            ),
            monkeypatch,
        )
        for block_s in (1, 1000)
    )
    assert fast == slow


def test_a_batch_of_one_that_waits_for_a_store_costs_no_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """r0 (6, 12) lacks a block at 10; r1's store ends at 12 or at 2 + 1000."""
    runs = []
    for block_s in (10, 1000):
        simulation = simulate(
            [(0, 6, 12), (0, 4, 2)],
            num_gpu_blocks_override=6,
            overrides=kv_cache(block_s=block_s),
            hash_ids=[(), (1,)],
        )
        runs.append(events_of(simulation, monkeypatch))
        assert simulation.worker.gpu_busy_time == 12
    assert runs[0] == runs[1]


def test_waiting_for_memory_or_a_stopped_policy_costs_no_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """r1 waits for r0's completion, at 100 or at 1,000: for its 598 blocks, of which 597 are free
    at 3, or for a policy that stopped."""
    for pool in (599, 2000):
        short, long = (
            events_of(
                simulate(
                    [(0, 4, output), (2.5, 2390, 2)],
                    policy=Script(admit=[STOP]),
                    num_gpu_blocks_override=pool,
                    max_num_batched_tokens=2400,
                ),
                monkeypatch,
            )
            for output in (100, 1000)
        )
        assert short == long


def test_wake_ups_leave_nothing_in_the_event_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 arrivals at an idle worker; pending at any time: the next arrival and a handful."""
    simulation = simulate([(10 * i, 4, 2) for i in range(300)])
    counter = EventCounter(simulation, monkeypatch)
    play(simulation)
    assert counter.most_pending < 10


def test_a_span_leaves_at_most_one_stale_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """r0 has the only slot from 0 to 1,000; three arrivals cut the span of 1 – 1,000 at 11 (the
    first of them), one cuts that of 11 – 1,000 at 21: two stale ends of spans."""
    arrivals = [(10.2, 4, 1), (10.5, 4, 1), (10.7, 4, 1), (20.5, 4, 1)]
    simulation = simulate([(0, 4, 1000), *arrivals], max_num_seqs=1, num_gpu_blocks_override=2000)
    seen = watch(simulation, [10.1, 11.1, 21.1])
    counter = EventCounter(simulation, monkeypatch)
    records: dict[int, Any] = play(simulation)
    assert [state.rebuilds for state in seen.values()] == [2, 3, 4]
    assert counter.stale == 2
    assert records[0]["token_times"] == list(range(1, 1001))


# ------------------------------------------------------------------------------- log messages


def test_the_seeds_log_messages_of_a_fetched_request() -> None:
    """The timeline of `test_a_prefix_match_is_fetched_and_the_rest_is_prefilled`."""
    simulation = simulate(
        [(10, 12, 2)], overrides=kv_cache(), resident=(1, 2), hash_ids=[(1, 2, 3)]
    )
    with WorkerLog() as log:
        play(simulation)
    for event in [
        (10, "New request 0 added to waiting queue (phase: WAITING)"),
        (10, "Request 0: initiating async KVC retrieve for 8 tokens, allocated 2 blocks"),
        (12, "Fetched KVC tokens 8 for Request 0"),
        (12, "Added READY request 0: tokens=4, blocks_needed=2, free_blocks=96/100"),
        (13, "Request 0: prefill complete, transitioning to DECODE"),
        (15, "Request 0: released 4 blocks after saving KVC store"),
        (15, "Request 0 retired on worker.0: prefill=12 tokens, decode=2 tokens"),
    ]:
        assert log.events.count(event) == 1, event
    assert "Request 0: no prefix match, now READY" not in [message for _, message in log.events]


def test_the_seeds_log_messages_of_an_evicted_request() -> None:
    """r0 (8, 6), r1 (4, 6), pool 5: r1 is evicted at 4 with 8 tokens in 2 blocks, is looked up
    again at 5 and back at 6, where it needs 2 of 5 blocks."""
    simulation = simulate([(0, 8, 6), (0, 4, 6)], num_gpu_blocks_override=5)
    with WorkerLog() as log:
        play(simulation)
    ready = "Request 1: no prefix match, now READY"
    assert [time for time, message in log.events if message == ready] == [0, 5]
    for event in [
        (4, "PREEMPTED request 1: freed 2 blocks (work_score=8, preemption_count=1)"),
        (6, "Added READY request 1: tokens=4, blocks_needed=2, free_blocks=3/5"),
        (6, "Request 0 retired on worker.0: prefill=8 tokens, decode=6 tokens"),
    ]:
        assert log.events.count(event) == 1, event


def test_the_seeds_log_message_of_the_rate_limit() -> None:
    """Two matches and a limit of one fetch: r1 is blocked at 10."""
    simulation = simulate(
        [(10, 12, 2), (10, 12, 2)],
        max_kvc_ready_requests=1,
        overrides=kv_cache(),
        resident=(1, 2),
        hash_ids=[(1, 2, 3), (1, 2, 4)],
    )
    with WorkerLog() as log:
        play(simulation)
    blocked = re.compile(r"KVC fetch blocked: 1 KVC-ready requests in waiting queue >= (1|max)")
    assert [time for time, message in log.events if blocked.fullmatch(message)][:1] == [10]


def test_an_unexpected_interrupt_is_logged_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Arrivals never interrupt a busy scheduler; somebody else does, at 1.5."""
    message = "Scheduler interrupted during work - unexpected while busy"
    requests = [(0, 4, 5), (2.5, 4, 2)]
    caplog.set_level(logging.DEBUG)
    undisturbed = play(simulate(requests))
    assert message not in caplog.messages

    simulation = simulate(requests)
    event = simulation.env.at(1.5)
    assert event.callbacks is not None
    event.callbacks.append(lambda _: simulation.worker._scheduler.interrupt())
    assert play(simulation) == undisturbed
    assert caplog.messages.count(message) == 1


# --------------------------------------------------------------------------------- statistics


def test_the_export_carries_the_seeds_statistics() -> None:
    """The timeline of `test_a_prefix_match_is_fetched_and_the_rest_is_prefilled`."""
    simulation = simulate(
        [(10, 12, 2)], overrides=kv_cache(), resident=(1, 2), hash_ids=[(1, 2, 3)]
    )
    play(simulation)
    row = exported(simulation)[0]
    seed = {
        "worker_arrival_time": 10,
        "_3_start_processing_time": 10,
        "_4_request_ready_time": 12,
        "_5_gpu_start_time": 12,
        "_7_decode_done_time": 14,
        "scheduler_timestamps": [13, 14],
        "prefix_hit_tokens": 8,
    }
    assert {name: row.get(name) for name in seed} == seed
    assert row["tenant"] == "default"


@pytest.mark.parametrize(
    "name",
    [
        "gpu_busy_time",
        "waiting_requests",
        "running_requests",
        "completed_requests",
        "total_gpu_blocks",
        "free_gpu_blocks",
        "kvc_fetch_blocks_in_flight",
    ],
)
def test_a_worker_has_the_seeds_metrics(name: str) -> None:
    assert hasattr(simulate([(0, 4, 2)]).worker, name)


@pytest.mark.parametrize(
    "name",
    [
        "queue_work",
        "_vllm_scheduling_loop",
        "_scheduler_step",
        "_check_new_requests",
        "_build_batch",
        "_calculate_batch_time",
        "_update_request_states_and_stats",
        "_move_completed_requests",
        "_handle_completed_requests",
        "_async_kvc_retrieve",
        "_preempt_request",
        "_can_issue_kvc_fetch",
    ],
)
def test_a_worker_has_the_seeds_methods(name: str) -> None:
    assert callable(getattr(LLMWorkerVLLMScheduler, name))


def test_phases_batch_and_parameters_carry_the_seeds_names_and_defaults() -> None:
    assert [phase.name for phase in RequestPhase] == [
        "WAITING",
        "FETCH_KVC",
        "READY",
        "PREFILL_CHUNKED",
        "DECODE",
        "COMPLETED",
    ]
    worker = simulate([(0, 4, 2)]).worker
    assert isinstance(worker.batch, BatchMetadata)
    for name in ("prefill_requests", "decode_requests", "request_tokens"):
        assert len(getattr(worker.batch, name)) == 0
    for name in ("total_tokens", "prefill_tokens", "decode_tokens"):
        assert getattr(worker.batch, name) == 0
    params = VLLMSchedulerConfig()
    assert params.max_num_seqs == 256
    assert params.max_num_batched_tokens == 2048
    assert params.chunked_prefill is True
    assert params.block_size == 16
    assert params.max_kvc_ready_requests == 4
    assert params.lookahead_reqs == 256
    assert params.rebuild_on == "completion"


# ------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("hardware", "blocks"),
    [
        # llama-3.1-8b: 2 · 8,030,261,248 = 16,060,522,496 bytes; a block of 16 tokens: 2 MiB.
        # 80 GiB = 40,960 blocks; the weights are 7,658.3 of them.
        ({}, 33_301),
        # The weights are loaded once: 2 · 40,960 - 7,658.3
        ({"tp": 2}, 74_261),
        # 0.9 · 80 - 2 = 70 GiB = 35,840 blocks
        ({"gpu_memory_utilization": 0.9, "activation_reserve_gb": 2.0}, 28_181),
        # Of each GPU: 71,680 - 7,658.3
        ({"gpu_memory_utilization": 0.9, "activation_reserve_gb": 2.0, "tp": 2}, 64_021),
    ],
)
def test_the_pool_is_what_the_weights_leave_of_all_gpus(
    hardware: dict[str, float], blocks: int
) -> None:
    config = tiny_config(
        {f"worker.hw.{name}": value for name, value in hardware.items()},
        block_size=16,
        num_gpu_blocks_override=None,
    )
    assert config.total_gpu_blocks == blocks


def test_the_pool_can_be_given_in_bytes_or_blocks_and_the_worker_takes_it() -> None:
    """A block of 4 tokens of 128 KiB is 524,288 bytes; 10 of them and a byte are 10 blocks."""
    by_bytes = simulate(
        [(0, 4, 2)], num_gpu_blocks_override=None, gpu_memory_kvcache_bytes=5_242_881
    )
    assert by_bytes.config.total_gpu_blocks == by_bytes.worker.pool.total == 10
    by_blocks = simulate([(0, 4, 2)], num_gpu_blocks_override=7)
    assert by_blocks.config.total_gpu_blocks == by_blocks.worker.pool.total == 7
    assert by_blocks.worker.pool.free == 7
