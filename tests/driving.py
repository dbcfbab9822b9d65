"""Drives tiny simulations: scripted answers, notes of every question, snapshots of the worker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opal_gym.sim.decision import STOP, Decision, DecisionKind, Policy
from opal_gym.sim.simulation import Simulation
from tests.tiny import by_id, tiny_config, tiny_workload

BLOCK_BYTES = 4 * 131_072
"""KV bytes of a hash block of 4 tokens of the default model (llama-3.1-8b: 128 KiB a token)."""

BASELINE: Literal["baseline"] = "baseline"
"""A scripted answer: what `decision.baseline` says."""


@dataclass(frozen=True)
class Asked:
    """A question as it was asked; `ids` are request ids, or for CHUNK the budgets."""

    kind: str
    time: float
    rebuild_id: int
    ids: tuple[int, ...]
    stop_allowed: bool
    baseline: int


class Script(Policy):
    """The baseline with some answers replaced; notes every question.

    An answer is a candidate's request id (CHUNK: its budget), `STOP` or `BASELINE`. A kind's
    answers are used up in order; after that the baseline answers.
    """

    def __init__(
        self,
        *,
        chunk: Iterable[int | str] = (),
        preempt: Iterable[int | str] = (),
        admit: Iterable[int | str] = (),
    ) -> None:
        self.asked: list[Asked] = []
        self._answers = {"CHUNK": list(chunk), "PREEMPT": list(preempt), "ADMIT": list(admit)}

    def choose(self, decision: Decision) -> int:
        question = note(decision)
        self.asked.append(question)
        answers = self._answers[question.kind]
        answer = answers.pop(0) if answers else BASELINE
        if answer == BASELINE:
            return decision.baseline
        if answer == STOP:
            return STOP
        return question.ids.index(int(answer))

    def of(self, kind: str) -> list[Asked]:
        """The questions of one kind."""
        return [question for question in self.asked if question.kind == kind]

    def ids(self, kind: str) -> list[tuple[float, tuple[int, ...]]]:
        """(time, candidates) of each question of one kind."""
        return [(question.time, question.ids) for question in self.of(kind)]


def note(decision: Decision) -> Asked:
    """A decision's question; reads the candidate table."""
    table = decision.candidates
    if decision.kind is DecisionKind.CHUNK:
        ids = tuple(int(budget) for budget in table["budget_tokens"])
    else:
        ids = tuple(int(request_id) for request_id in table.request_ids)
    assert len(ids) == decision.num_candidates
    return Asked(
        decision.kind.name,
        decision.time,
        decision.rebuild_id,
        ids,
        decision.stop_allowed,
        decision.baseline,
    )


def simulate(
    requests: Sequence[tuple[float, int, int]],
    *,
    stepwise: bool = False,
    overrides: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    resident: tuple[int, ...] = (),
    outside: Iterable[DecisionKind] = (),
    predicted: Sequence[int] | None = None,
    hash_ids: Sequence[tuple[int, ...]] = (),
    **vllm_params: Any,
) -> Simulation:
    """A tiny simulation that has not begun.

    Args:
        requests: (arrival time, prompt tokens, output tokens) of each.
        stepwise: One event a step: the pool's blocks can be watched inside a span.
        overrides: Of the configuration, by dotted key.
        policy: Default: the reference baseline.
        resident: A chain of hash blocks that is written to the KV cache from t = 0 on.
        outside: Kinds of decision that the test answers.
        predicted: Predicted output lengths; default: the truth.
        hash_ids: Of each request.
        **vllm_params: Scheduler parameters.
    """
    simulation = Simulation(
        tiny_config({"simulation.step_by_step": stepwise, **(overrides or {})}, **vllm_params),
        tiny_workload(requests, predicted=predicted, hash_ids=hash_ids),
        policy,
        outside=tuple(outside),
    )
    if resident:
        transfer = simulation.engine.store(resident, 4 * len(resident))
        assert transfer is not None
        simulation.env.process(transfer)
    return simulation


def kv_cache(*, block_s: float = 1.0, blocks: int = 100) -> dict[str, Any]:
    """Overrides for a KV cache of `blocks` blocks of 4 tokens that moves one in `block_s`."""
    return {
        "kvc.hash_block_tokens": 4,
        "kvc.tiers": [
            {
                "capacity_GB": (blocks + 0.5) * BLOCK_BYTES / 1e9,
                "bandwidth_GBps": BLOCK_BYTES / 1e9 / block_s,
            }
        ],
    }


def play(simulation: Simulation) -> dict[int, dict[str, Any]]:
    """Runs to the very end; returns the completed requests by id."""
    simulation.run()
    simulation.drain()
    return by_id(simulation)


def exported(simulation: Simulation) -> dict[int, dict[str, Any]]:
    """The exported rows by request id."""
    rows = [json.loads(line) for line in simulation.records.export()]
    return {row["request_id"]: row for row in rows}


@dataclass(frozen=True)
class Snapshot:
    """A worker between two events; dictionaries are by request id.

    Attributes:
        free: Free blocks.
        tokens: Tokens of the step under way, of those that take part in it.
        queue: Ids of the waiting requests, in queue order.
        phases: Phase of each waiting or running request.
        blocks: Blocks of each waiting, running or storing request.
        storing: Ids of completed requests whose KV store is under way.
        fetching: Blocks of fetches in flight.
        rebuilds: Rebuilds so far.
        handed_back: Requests that the router got back.
        stores_skipped: Stores that found no room.
    """

    free: int
    tokens: dict[int, int]
    queue: list[int]
    phases: dict[int, str]
    blocks: dict[int, int]
    storing: list[int]
    fetching: int
    rebuilds: int
    handed_back: int
    stores_skipped: int


def snapshot(simulation: Simulation) -> Snapshot:
    """The worker now."""
    worker = simulation.worker
    waiting, storing = list(worker.waiting_requests), list(worker.completed_requests.values())
    live = [*waiting, *worker.batch]
    return Snapshot(
        free=worker.pool.free,
        tokens=dict(sorted(worker.batch.request_tokens.items())),
        queue=[request.request_id for request in waiting],
        phases={request.request_id: request.phase.name for request in live},
        blocks={request.request_id: request.allocated_blocks for request in (*live, *storing)},
        storing=[request.request_id for request in storing],
        fetching=worker.kvc_fetch_blocks_in_flight,
        rebuilds=worker.rebuild_id,
        handed_back=simulation.router.finished_requests,
        stores_skipped=simulation.engine.stores_skipped,
    )


def watch(simulation: Simulation, times: Iterable[float]) -> dict[float, Snapshot]:
    """Will hold a snapshot of each of `times`; choose times inside steps."""
    seen: dict[float, Snapshot] = {}

    def look_at(time: float) -> None:
        event = simulation.env.at(time)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: seen.update({time: snapshot(simulation)}))

    for time in times:
        look_at(time)
    return seen
