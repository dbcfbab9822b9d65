"""The worker that serves one request at a time, and what continuous batching is worth.

On the hand-worked timelines every step takes 1 s, and a hash block of 4 tokens moves in 1 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from opal_gym.config import Config, load_config
from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.single_stage_worker import LLMWorkerSingleStage
from opal_gym.sim.workloads import make_workload
from tests.driving import exported, kv_cache, play, simulate
from tests.tiny import TINY, by_id

SINGLE: dict[str, Any] = {"worker.kind": "single_stage"}


def serve(
    requests: list[tuple[float, int, int]],
    *,
    overrides: dict[str, Any] | None = None,
    hash_ids: tuple[tuple[int, ...], ...] = (),
    **vllm_params: Any,
) -> Simulation:
    return simulate(
        requests, overrides={**SINGLE, **(overrides or {})}, hash_ids=hash_ids, **vllm_params
    )


# ----------------------------------------------------------------------------------- one at a time


def test_requests_are_served_one_after_the_other() -> None:
    """r0 (0, 4, 3) until 3; r1 (0.5, 4, 2) from then to 5; r2 (7, 4, 1) finds an idle worker."""
    simulation = serve([(0, 4, 3), (0.5, 4, 2), (7, 4, 1)])
    records = play(simulation)
    assert [records[i]["token_times"] for i in range(3)] == [[1, 2, 3], [4, 5], [8]]
    assert [records[i]["gpu_start_time"] for i in range(3)] == [0, 3, 7]
    assert [records[i]["worker_arrival_time"] for i in range(3)] == [0, 0.5, 7]
    assert [records[i]["decode_done_time"] for i in range(3)] == [3, 5, 8]
    (worker,) = simulation.workers
    assert isinstance(worker, LLMWorkerSingleStage)
    assert worker.gpu_busy_time == 6
    assert simulation.router.finished_requests == 3


def test_the_first_token_may_take_a_step_of_its_own() -> None:
    """The seed's `first_token_at_prefill_end: false`: prefill, then a step for each token."""
    simulation = serve([(0, 4, 3), (0, 4, 1)], first_token_at_prefill_end=False)
    records = play(simulation)
    assert [records[i]["token_times"] for i in range(2)] == [[2, 3, 4], [6]]
    assert exported(simulation)[0]["scheduler_timestamps"] == [1, 2, 3, 4]


def test_a_prompt_is_prefilled_at_once() -> None:
    """100 tokens, of which a batch with 16 tokens a step would take 7 steps."""
    assert play(serve([(0, 100, 2)]))[0]["token_times"] == [1, 2]
    assert play(simulate([(0, 100, 2)]))[0]["token_times"] == [7, 8]


def test_the_step_times_are_those_of_a_batch_of_one() -> None:
    """0.5 s a step, 1/8 s a prefill token, 1/16 s a decode, 1/64 s a token of its context.

    prefill of 8: 0.5 + 1 = 1.5; then contexts of 9 and 10: 0.5625 + 9/64 and 0.5625 + 10/64
    """
    timing = {
        "model": "synthetic",
        "base_s": 0.5,
        "per_prefill_token_s": 0.125,
        "per_decode_s": 0.0625,
        "per_context_token_s": 1 / 64,
    }
    expected = np.cumsum([1.5, 0.5625 + 9 / 64, 0.5625 + 10 / 64]).tolist()
    overrides = {"worker.inference_params": timing}
    assert play(serve([(0, 8, 3)], overrides=overrides))[0]["token_times"] == expected
    assert play(simulate([(0, 8, 3)], overrides=overrides))[0]["token_times"] == expected


def test_alone_a_request_is_served_as_by_the_vllm_worker() -> None:
    """Under the calibrated model, with a prompt that fits into one chunk."""
    overrides = {"worker.inference_params": {"model": "calibrated"}}
    requests = [(0.0, 300, 40), (100.0, 17, 100)]
    params = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 1000}
    one, other = (
        play(simulate(requests, overrides={**overrides, **kind}, **params)) for kind in (SINGLE, {})
    )
    for request_id in (0, 1):
        assert one[request_id]["token_times"] == other[request_id]["token_times"]


def test_a_request_that_can_never_run_is_rejected() -> None:
    """Pool of 100 blocks of 4: 401 tokens are too many, 400 are not."""
    simulation = serve([(0, 200, 201), (0, 399, 1)])
    records = play(simulation)
    assert list(records) == [1]
    ((request, reason),) = simulation.records.rejected
    assert (request.request_id, reason) == (0, "401 tokens exceed the pool of 100 blocks")


def test_littles_law_holds() -> None:
    """E2E 3, 4.5 and 1 s; TTFT 1, 3.5 and 1 s."""
    simulation = serve([(0, 4, 3), (0.5, 4, 2), (7, 4, 1)])
    simulation.run()
    ledger = simulation.ledger
    assert ledger.in_system.at(simulation.env.now) == 8.5
    assert ledger.awaiting_token.at(simulation.env.now) == 5.5
    metrics = simulation.metrics()
    assert metrics["gpu_busy_share"] == 6 / 8
    assert metrics["tokens_per_s"] == 6 / 8
    assert metrics["kv_utilisation"] == 0


def test_it_asks_nothing_so_it_is_no_environment() -> None:
    simulation = serve([(0, 4, 3)] * 4)
    simulation.run()
    assert simulation.decisions == 0
    with pytest.raises(ValueError, match=r"worker\.kind: got 'single_stage'; allowed: 'vllm'"):
        OpalVLLMEnv(TINY, overrides=SINGLE)


def test_waiting_takes_no_events() -> None:
    def events(pause: float, tokens: int) -> int:
        simulation = serve(
            [(0, 4, tokens), (pause, 4, tokens)],
            num_gpu_blocks_override=10_000,
            max_model_len=9_000,
        )
        count = 0
        while simulation.env.peek() < float("inf"):
            simulation.env.step()
            count += 1
        return count

    assert events(1e9, 8000) == events(10.0, 2)


# ---------------------------------------------------------------------------------------- KV cache


def test_a_prefix_is_fetched_before_the_prefill_and_stored_beside_the_next_request() -> None:
    """r0 (0, 12, 1; 1, 2, 3) is done at 1, its store lasts until 4. r1 (2, 4, 1) does not wait for
    it. r2 (10, 12, 1; 1, 2, 4) fetches 8 tokens until 12, while the GPU idles, and is done at 13;
    r3 (10, 12, 1; 1, 2, 3), until 16, has all but the last token."""
    simulation = serve(
        [(0, 12, 1), (2, 4, 1), (10, 12, 1), (10, 12, 1)],
        overrides=kv_cache(),
        hash_ids=((1, 2, 3), (), (1, 2, 4), (1, 2, 3)),
    )
    records = play(simulation)
    assert [records[i]["token_times"] for i in range(4)] == [[1], [3], [13], [18]]
    assert [records[i]["prefix_hit_tokens"] for i in range(4)] == [0, 0, 8, 11]
    assert records[2]["start_processing_time"] == 10
    assert records[2]["request_ready_time"] == records[2]["gpu_start_time"] == 12
    (worker,) = simulation.workers
    assert worker.gpu_busy_time == 4


# ------------------------------------------------------ the seed's table: what batching is worth

CHAT: dict[str, Any] = {
    "name": "chat",
    "worker": {
        "vllm_params": {"rebuild_on": "change", "first_token_at_prefill_end": True},
        "hw": {"gpu_memory_utilization": 0.9},
        "inference_params": {"model": "calibrated"},
    },
    "workload": {
        "kind": "synthetic",
        "num_requests": 200,
        "arrivals": {"rate_per_s": 15.0},
        "tenants": [
            {
                "prompt": {"kind": "lognormal", "median": 80, "sigma": 1.2},
                "output": {"kind": "lognormal", "median": 220, "sigma": 0.95, "max": 2000},
            }
        ],
    },
}
"""ShareGPT-like chat on one H100 with Llama-3.1-8B."""


def metrics_of(config: Config) -> tuple[Simulation, dict[str, Any]]:
    workload = make_workload(config.workload, 0, length_information="predicted")
    simulation = Simulation(config, workload)
    return simulation, simulation.run()


def overlap(simulation: Simulation) -> int:
    """The most requests that were on the GPU at once."""
    records = by_id(simulation).values()
    changes = [(record["gpu_start_time"], 1) for record in records]
    changes += [(record["decode_done_time"], -1) for record in records]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def test_continuous_batching_beats_one_request_at_a_time() -> None:
    """The same 200 requests. Measured: mean E2E 274 against 3.1 s (89 times), mean TTFT 271 s
    against 16 ms, tokens/s 126 against 2,511 (20 times); the price is a TPOT of 8.9 instead of
    7.9 ms, as a step of some 22 decodes takes longer than a step of one."""
    one, single = metrics_of(load_config(CHAT, SINGLE))
    many, batched = metrics_of(load_config(CHAT))
    assert single["completed"] == batched["completed"] == 200
    # Batching: no batching against continuous batching.
    assert overlap(one) == 1
    assert overlap(many) > 40
    # Scheduling: first come, first served.
    starts = [record["gpu_start_time"] for _, record in sorted(by_id(one).items())]
    assert starts == sorted(starts)
    assert single["preemptions"] == 0
    assert single["e2e_s"]["mean"] / batched["e2e_s"]["mean"] > 60
    assert single["ttft_s"]["mean"] / batched["ttft_s"]["mean"] > 5000
    assert batched["tokens_per_s"] / single["tokens_per_s"] > 15
    assert 1.05 < batched["tpot_s"]["mean"] / single["tpot_s"]["mean"] < 1.3


def test_without_a_crowd_both_are_alike() -> None:
    """One request every 20 s, which takes 2.76 s alone: 3.18 s one at a time."""
    quiet = {"workload.arrivals.rate_per_s": 0.05}
    _, single = metrics_of(load_config(CHAT, {**SINGLE, **quiet}))
    _, batched = metrics_of(load_config(CHAT, quiet))
    assert 1 <= single["e2e_s"]["mean"] / batched["e2e_s"]["mean"] < 1.5
    assert single["tokens_per_s"] == pytest.approx(batched["tokens_per_s"], rel=0.01)
