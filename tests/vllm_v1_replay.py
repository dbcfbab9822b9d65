"""Replays recordings of vLLM's own scheduler through the worker under `vllm_v1`."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from simpy.events import URGENT

from opal_gym.config import Config
from opal_gym.sim.clock import BOUNDARY
from opal_gym.sim.gpu_model import GPUModel
from opal_gym.sim.kvcache import OpalKVCacheEngine
from opal_gym.sim.questions import StepPlan
from opal_gym.sim.reporting import Reporter
from opal_gym.sim.request import DEFAULT_TENANT, LLMRequest, VLLMSchedulerRequest
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.span import Span
from opal_gym.sim.vllm_v1.request import V1Request
from opal_gym.sim.vllm_v1.worker import LLMWorkerVLLMV1
from opal_gym.sim.vllm_worker import Process
from opal_gym.sim.workloads import Workload
from tests.tiny import tiny_config

RECORDINGS = Path(__file__).with_name("vllm_v1_recordings")

DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
    "num_gpu_blocks": 10000,
    "max_model_len": 8192,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "kv_connector": False,
    "step_time": "linear",
}
"""What a recording's `config` leaves out."""

BEHAVIOUR_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "max_num_batched_tokens": 1024,
    "step_time": "unit",
}

STEP_TIMES: dict[str, dict[str, Any]] = {
    "unit": {"model": "synthetic", "base_s": 1.0},
    "linear": {
        "model": "synthetic",
        "base_s": 0.006,
        "per_prefill_token_s": 3.0e-5,
        "per_decode_s": 4.0e-5,
        "per_context_token_s": 2.5e-8,
    },
}

Trace = dict[str, Any]


def recordings(name: str) -> list[Trace]:
    """The recordings of one file, in order."""
    with gzip.open(RECORDINGS / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


@dataclass
class Step:
    """One engine step, as the recordings state it."""

    time: float
    scheduled: dict[str, int]
    preempted: list[str]
    running: int
    waiting: int
    free_blocks: int


@dataclass
class Ended:
    """A request's times and evictions."""

    arrival: float
    first_token_time: float
    finish_time: float
    num_preemptions: int


@dataclass
class Load:
    """What a remote KV store holds for a request."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass
class ByStep:
    """An arrival with the beginning of a step.

    It stands in the queue before those that arrive by the clock during the step before.

    Attributes:
        step: Number of the step, empty ones counted.
        early: When the step before begins, s; None: that step was empty.
    """

    step: int
    early: float | None


@dataclass
class Case:
    """A recording as a configuration and a workload; ids are places in order of arrival.

    `by_step` holds, by id, the requests that arrive with a step.
    """

    config: Config
    workload: Workload
    names: list[str]
    loads: list[Load] = field(default_factory=list)
    by_step: dict[int, ByStep] = field(default_factory=dict)


def case(trace: Trace, *, step_by_step: bool) -> Case:
    """A recording's case."""
    defaults = BEHAVIOUR_DEFAULTS if "name" in trace else DEFAULTS
    given = {**defaults, **trace["config"]}
    size = given["block_size"]
    config = tiny_config(
        {
            "simulation.step_by_step": step_by_step,
            "kvc.hash_block_tokens": size,
            "worker.inference_params": STEP_TIMES[given["step_time"]],
        },
        engine="vllm_v1",
        num_gpu_blocks_override=given["num_gpu_blocks"],
        chunked_prefill=given["enable_chunked_prefill"],
        **{
            name: given[name]
            for name in (
                "max_num_seqs",
                "max_num_batched_tokens",
                "block_size",
                "max_model_len",
                "enable_prefix_caching",
                "policy",
                "long_prefill_token_threshold",
                "scheduler_reserve_full_isl",
                "watermark",
            )
        },
    )
    arrivals = {name: ended["arrival"] for name, ended in trace["requests"].items()}
    requests = sorted(
        trace["workload"],
        key=lambda request: (arrivals[request["id"]], "arrival_step" not in request),
    )
    column = {
        name: np.array([request.get(name, 0) for request in requests], np.int64)
        for name in ("prompt_tokens", "output_tokens", "priority")
    }
    workload = Workload(
        arrival_time=np.array([arrivals[request["id"]] for request in requests], np.float64),
        predicted_output_tokens=column["output_tokens"],
        tenant=np.zeros(len(requests), np.int64),
        tenants=(DEFAULT_TENANT,),
        hash_ids=tuple(_hash_ids(requests, size)),
        **column,
    )
    loads = [Load(r.get("ext_tokens", 0), r.get("fetch_time", 0.0)) for r in requests]
    begins = {step["step"]: step["time"] for step in trace["steps"]}
    by_step = {
        row: ByStep(request["arrival_step"], begins.get(request["arrival_step"] - 1))
        for row, request in enumerate(requests)
        if "arrival_step" in request
    }
    return Case(
        config,
        workload,
        [request["id"] for request in requests],
        loads if given["kv_connector"] else [],
        by_step,
    )


def _hash_ids(requests: list[dict[str, Any]], block_size: int) -> Iterator[tuple[int, ...]]:
    """Hash ids of each prompt's full blocks, where a recording tells what prompts share."""
    ids: dict[Any, int] = {}
    for request in requests:
        shared = request.get("block_hashes")
        if shared is None:
            blocks = range(request.get("prefix_tokens", 0) // block_size)
            shared = [(request["prefix_group"], block) for block in blocks] if blocks else ()
        yield tuple(ids.setdefault(block, len(ids)) for block in shared)


class RemoteStore(OpalKVCacheEngine):
    """A KV store that keeps nothing; what it holds is written in the recording."""

    always = False

    @property
    def enabled(self) -> bool:
        return self.always


class ReplayWorker(LLMWorkerVLLMV1):
    """A worker that loads as recorded and notes its steps."""

    case: Case

    def begin_notes(self, case: Case) -> None:
        self.case = case
        self.noted: list[Step] = []
        self.steps_begun = 0
        self._preempted: list[str] = []

    @property
    def is_running(self) -> bool:
        return self._span is not None

    def _scheduler_step(self) -> Generator[simpy.Event, Any, bool]:
        worked = yield from super()._scheduler_step()
        if not worked:
            self.steps_begun += 1
            if self._preempted:
                self.noted.append(self._note())
        return worked

    def remote_tokens(self, request: V1Request) -> int:
        if not self.case.loads:
            return 0
        tokens = min(self.case.loads[request.request_id].tokens, request.known_tokens - 1)
        return tokens // self.block_size * self.block_size

    def remote_load(self, request: V1Request, tokens: range) -> Process:
        yield self.env.timeout(self.case.loads[request.request_id].seconds)

    def _preempt_request(self, request: VLLMSchedulerRequest) -> None:
        super()._preempt_request(request)
        self._preempted.append(self.case.names[request.request_id])

    def _start_span(self, plan: StepPlan) -> Span:
        self._noting = self._note()
        return super()._start_span(plan)

    def _note(self) -> Step:
        preempted, self._preempted = self._preempted, []
        return Step(
            self.env.now,
            {self.case.names[key]: n for key, n in self.batch.request_tokens.items()},
            preempted,
            len(self.batch),
            len(self.waiting_requests),
            self.pool.free,
        )

    def _update_request_states_and_stats(self, span: Span) -> None:
        first = self._noting
        self.steps_begun += span.steps
        self.noted.append(first)
        free = first.free_blocks
        later = self._blocks_by_step(span.plan, span.steps)[: span.steps - 1]
        for begin, blocks in zip(span.times[: span.steps - 1].tolist(), later, strict=True):
            free -= blocks
            step = Step(begin, first.scheduled, [], first.running, first.waiting, free)
            self.noted.append(step)
        super()._update_request_states_and_stats(span)


class Replay(Simulation):
    """Runs a recording's case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        super().__init__(case.config, case.workload)

    def _make_worker(self, worker_id: int, gpu_model: GPUModel) -> ReplayWorker:
        config = self.config
        reporter = Reporter(self.env, config, self.router, worker_id)
        store = RemoteStore(self.env, config.kvc, config.model.shape.kv_bytes_per_token)
        store.always = bool(self.case.loads)
        self.engines.append(store)
        worker = ReplayWorker(
            self.env, config, gpu_model, store, self, self.ledger, self.router, reporter
        )
        worker.begin_notes(self.case)
        return worker

    def _arrivals(self) -> Process:
        for request in self.workload:
            self.env.process(self._arrive(request, self.case.by_step.get(request.request_id)))
        return
        yield

    def _arrive(self, request: LLMRequest, by_step: ByStep | None) -> Process:
        worker = self.workers[0]
        if by_step is None:
            yield self.env.at(request.arrival_time)
        else:
            if by_step.early is not None:
                yield self.env.at(math.nextafter(by_step.early, math.inf))
            if not worker.is_running:
                yield self.env.at(request.arrival_time, URGENT)
                while worker.steps_begun < by_step.step:
                    yield self.env.at(self.env.now, BOUNDARY)
        self.router.route(request)

    @property
    def steps(self) -> list[Step]:
        worker = self.workers[0]
        assert isinstance(worker, ReplayWorker)
        return worker.noted

    @property
    def ended(self) -> dict[str, Ended]:
        return {
            self.case.names[row["request_id"]]: Ended(
                float(row["arrival_time"]),
                float(row["first_token_time"]),
                float(row["decode_done_time"]),
                int(row["preemptions"]),
            )
            for row in self.records.table
        }


def replay(trace: Trace, *, step_by_step: bool = False) -> Replay:
    """Runs a recording's case to its end."""
    run = Replay(case(trace, step_by_step=step_by_step))
    run.run()
    run.drain()
    return run


def first_difference(trace: Trace, run: Replay) -> str | None:
    """Where a replay first leaves its recording, as text; None: nowhere."""
    names = ("time", "scheduled", "preempted", "running", "waiting", "free_blocks")
    recorded = [Step(**{name: step[name] for name in names}) for step in trace["steps"]]
    for place, (theirs, ours) in enumerate(zip_longest(recorded, run.steps)):
        if theirs != ours:
            return _difference(f"step {place}", theirs, ours)
    for name, times in trace["requests"].items():
        ended = Ended(**{key: times[key] for key in Ended.__dataclass_fields__})
        if run.ended.get(name) != ended:
            return _difference(f"request {name}", ended, run.ended.get(name))
    return None


def _difference(where: str, theirs: Any, ours: Any) -> str:
    if theirs is None or ours is None:
        return f"{where}: vLLM {theirs}, ours {ours}"
    lines = [
        f"  {name}: vLLM {getattr(theirs, name)!r}, ours {getattr(ours, name)!r}"
        for name in theirs.__dataclass_fields__
        if getattr(theirs, name) != getattr(ours, name)
    ]
    return "\n".join([where, *lines])
