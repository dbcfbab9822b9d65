"""A simulation: workload, router, worker, policy and metrics, put together."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator

import numpy as np
import simpy

from opal_gym.config import CalibratedParams, Config, RooflineParams, SyntheticParams
from opal_gym.sim.clock import Signal, SimEnvironment
from opal_gym.sim.decision import Decision, DecisionKind, Policy
from opal_gym.sim.gpu_model import (
    CalibratedGPUModel,
    GPUModel,
    RooflineGPUModel,
    SimpleConstants,
    SimpleGPUModel,
    SyntheticGPUModel,
)
from opal_gym.sim.kvcache import OpalKVCacheEngine
from opal_gym.sim.ledger import Ledger
from opal_gym.sim.metrics import Metrics, episode_metrics
from opal_gym.sim.policies import FifoLeastWorkPolicy
from opal_gym.sim.records import RequestRecords
from opal_gym.sim.reporting import Reporter
from opal_gym.sim.request import LLMRequest
from opal_gym.sim.router import Router
from opal_gym.sim.single_stage_worker import LLMWorkerSingleStage
from opal_gym.sim.timeseries import TimeSeries
from opal_gym.sim.vllm_v1.worker import LLMWorkerVLLMV1
from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler
from opal_gym.sim.workloads.streams import Stream, generator
from opal_gym.sim.workloads.workload import Workload

VLLM_WORKERS: dict[str, type[LLMWorkerVLLMScheduler]] = {
    "opal": LLMWorkerVLLMScheduler,
    "vllm_v1": LLMWorkerVLLMV1,
}
"""The worker of each engine."""


class Simulation:
    """One episode.

    Decisions of the kinds in `outside` are left pending for whoever drives the simulation with
    `advance` and `answer`; the policy answers the others in process.

    Args:
        config: What is simulated.
        workload: The requests.
        policy: Answers decisions in process; default: the reference baseline.
        outside: Kinds of decision that the driver answers.
        policy_seed: Seed of the policy's own randomness.
        routing_seed: Seed of random routing.
        horizon_s: Simulated seconds after which `advance` stops; None: when all is done.

    Attributes:
        ledger: Integrals and counts so far.
        records: Finished requests.
        pending: The decision that waits for the driver's answer.
        decisions: Decisions asked so far.
    """

    def __init__(
        self,
        config: Config,
        workload: Workload,
        policy: Policy | None = None,
        *,
        outside: Collection[DecisionKind] = (),
        policy_seed: int = 0,
        routing_seed: int = 0,
        horizon_s: float | None = None,
    ) -> None:
        self.config = config
        self.workload = workload
        self._num_requests = len(workload)
        self.env = SimEnvironment()
        self.pending: Decision | None = None
        self.decisions = 0
        self.horizon_reached = False
        self._policy = policy or FifoLeastWorkPolicy()
        self._policy.reset(policy_seed)
        self._outside = frozenset(outside)
        self._answer: Signal | None = None
        gpu_model = make_gpu_model(config)
        params = config.worker.vllm_params

        def unloaded_latency(request: LLMRequest) -> float:
            return gpu_model.unloaded_latency(
                request.prompt_tokens,
                request.output_tokens,
                params.max_num_batched_tokens,
                params.first_token_at_prefill_end,
            )

        self.records = RequestRecords(workload.tenants)
        self.ledger = Ledger(self.env, self.records, unloaded_latency, self._follow_up)
        self.time_series = TimeSeries() if config.simulation.record_time_series else None
        self.router = Router(config, generator(routing_seed, Stream.ROUTING))
        self.engines: list[OpalKVCacheEngine] = []
        self.workers = [
            self._make_worker(i, gpu_model) for i in range(config.simulation.num_workers)
        ]
        self.router.connect(self.workers)
        self.env.process(self._arrivals())
        if horizon_s is not None:
            horizon = self.env.at(horizon_s)
            assert horizon.callbacks is not None
            horizon.callbacks.append(self._reach_horizon)

    def _make_worker(
        self, worker_id: int, gpu_model: GPUModel
    ) -> LLMWorkerVLLMScheduler | LLMWorkerSingleStage:
        config = self.config
        reporter = Reporter(self.env, config, self.router, worker_id)
        engine = OpalKVCacheEngine(
            self.env, config.kvc, config.model.shape.kv_bytes_per_token, reporter.kv_event
        )
        self.engines.append(engine)
        if config.worker.kind == "single_stage":
            return LLMWorkerSingleStage(
                self.env, config, gpu_model, engine, self.ledger, self.router, reporter, worker_id
            )
        return VLLM_WORKERS[config.worker.vllm_params.engine](
            self.env,
            config,
            gpu_model,
            engine,
            self,
            self.ledger,
            self.router,
            reporter,
            self.time_series,
            worker_id,
            closed_loop=len(self.workload.next_rows) > 0,
        )

    @property
    def worker(self) -> LLMWorkerVLLMScheduler:
        """The vLLM worker that asks the pending decision, or else the first."""
        worker = self.workers[0 if self.pending is None else self.pending.worker_id]
        assert isinstance(worker, LLMWorkerVLLMScheduler)
        return worker

    @property
    def engine(self) -> OpalKVCacheEngine:
        """The KV-cache engine of the first worker."""
        return self.engines[0]

    def other_workers(self, worker: LLMWorkerVLLMScheduler) -> list[LLMWorkerVLLMScheduler]:
        """The vLLM workers beside `worker`."""
        vllm_workers = (w for w in self.workers if isinstance(w, LLMWorkerVLLMScheduler))
        return [other for other in vllm_workers if other is not worker]

    @property
    def done(self) -> bool:
        """Whether every request has completed or been rejected."""
        return self.ledger.ended_requests == self._num_requests

    def advance(self) -> Decision | None:
        """Runs to the next decision for the driver; None when all is done or at the horizon."""
        step = self.env.step
        while self.pending is None and not self.done and not self.horizon_reached:
            step()
        return self.pending

    def answer(self, answer: int) -> None:
        """Answers the pending decision."""
        assert self._answer is not None
        signal, self._answer, self.pending = self._answer, None, None
        signal.fire(answer)

    def run(self) -> Metrics:
        """Runs to the end and summarises."""
        while self.advance() is not None:
            raise RuntimeError("a decision is pending for a driver; use advance and answer")
        return self.metrics()

    def drain(self) -> None:
        """Runs on until nothing is left: the KV stores of the last requests end, too."""
        self.env.run()

    def ask(self, decision: Decision) -> Generator[simpy.Event, int, int]:
        """Answers a worker's decision, in process or by the driver."""
        self.decisions += 1
        if decision.kind not in self._outside:
            return self._policy.choose(decision)
        self.pending = decision
        self._answer = signal = Signal(self.env)
        answer: int = yield signal
        return answer

    def metrics(self) -> Metrics:
        """Summarises the episode so far."""
        first = float(self.workload.arrival_time[0])
        end = self.ledger.last_completion if self.done else self.env.now
        summary = episode_metrics(
            self.records,
            arrived=self.ledger.arrived_requests,
            duration_s=max(0.0, end - first),
            gpu_busy_s=sum(worker.gpu_busy_time_now for worker in self.workers),
            kv_block_s=sum(worker.kv_block_seconds() for worker in self.workers),
            total_blocks=self.config.total_gpu_blocks * len(self.workers),
            num_workers=len(self.workers),
            arrived_weight=self.ledger.arrived_weight,
        )
        summary["stores_skipped"] = float(sum(engine.stores_skipped for engine in self.engines))
        summary["decisions"] = float(self.decisions)
        summary["load"] = float(self.workload.load)
        return summary

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        """Requests that arrive by themselves: all but the later turns of sessions."""
        for request in self.workload:
            if math.isinf(request.arrival_time):
                return
            if request.arrival_time > self.env.now:  # those of one instant share its event
                yield self.env.at(request.arrival_time)
            self.router.route(request)

    def _follow_up(self, request: LLMRequest) -> None:
        """A request has ended: its session's next turn, if any, begins to be thought of."""
        turn = self.workload.next_turn(request.request_id)
        if turn is not None:
            self.env.process(self._arrive_after_thinking(*turn))

    def _arrive_after_thinking(
        self, request: LLMRequest, think_time_s: float
    ) -> Generator[simpy.Event, None, None]:
        yield self.env.timeout(think_time_s)
        request.arrival_time = self.env.now
        self.router.route(request)

    def _reach_horizon(self, _: simpy.Event) -> None:
        self.horizon_reached = True


def make_gpu_model(config: Config) -> GPUModel:
    """The step-time model of `worker.inference_params` for the worker's hardware."""
    params, hw, shape = config.worker.inference_params, config.worker.hw, config.model.shape
    if isinstance(params, RooflineParams):
        return RooflineGPUModel(shape, hw.tflops, hw.mem_bw_TBps, hw.tp)
    if isinstance(params, SyntheticParams):
        return SyntheticGPUModel(
            params.base_s,
            params.per_prefill_token_s,
            params.per_decode_s,
            params.per_context_token_s,
        )
    constants = config.worker.gpu_constants
    if isinstance(constants, SimpleConstants):
        return SimpleGPUModel(shape, constants, hw.tflops, hw.mem_bw_TBps, hw.tp)
    assert isinstance(params, CalibratedParams)
    assert constants is not None
    return CalibratedGPUModel(
        shape, constants, hw.tflops, hw.mem_bw_TBps, hw.tp, params.step_overhead_s
    )


def accepted_requests(config: Config, workload: Workload) -> np.ndarray:
    """Which requests of a workload a worker accepts, shape (n,), bool."""
    tokens = workload.prompt_tokens + workload.output_tokens
    params = config.worker.vllm_params
    in_pool = config.total_gpu_blocks * params.block_size + params.unwritten_tokens
    longest = min(config.max_model_len, in_pool)
    return np.asarray(tokens <= longest)
