"""Rendering of a simulation."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from opal_gym.sim.candidates import CandidateTable
from opal_gym.sim.decision import Decision, DecisionKind
from opal_gym.sim.simulation import Simulation

SHOWN_CANDIDATES = 8
COLUMNS = {
    DecisionKind.CHUNK: ("budget_tokens", "step_time"),
    DecisionKind.PREEMPT: ("work_lost", "blocks_freed", "predicted_remaining", "preemptions"),
    DecisionKind.ADMIT: (
        "prompt_tokens",
        "predicted_output_tokens",
        "waiting_time",
        "blocks_needed",
        "predicted_peak_kv",
    ),
}
BAR_WIDTH = 40


def render_ansi(simulation: Simulation, decision: Decision | None) -> str:
    """The worker, its queue and the pending decision as text."""
    worker, ledger = simulation.worker, simulation.ledger
    used = worker.pool.total - worker.pool.free
    lines = [
        f"t = {simulation.env.now:.3f} s   rebuild {worker.rebuild_id}   "
        f"completed {ledger.completed_requests}/{len(simulation.workload)}   "
        f"preemptions {ledger.preemptions}",
        f"blocks  {_bar(used, worker.pool.total)} {used}/{worker.pool.total}",
        f"batch   {_bar(len(worker.batch), worker.params.max_num_seqs)} "
        f"{len(worker.batch)}/{worker.params.max_num_seqs} sequences, "
        f"{len(worker.batch.prefill_requests)} in prefill",
        f"queue   {len(worker.waiting_requests)} waiting"
        + _ids(request.request_id for request in islice(worker.waiting_requests, 8)),
    ]
    return "\n".join(lines + _decision(decision))


def _bar(part: int, whole: int) -> str:
    filled = round(BAR_WIDTH * part / whole)
    return "█" * filled + "·" * (BAR_WIDTH - filled)


def _ids(ids: Iterable[int]) -> str:
    listed = ", ".join(map(str, ids))
    return f": {listed}" if listed else ""


def _decision(decision: Decision | None) -> list[str]:
    if decision is None:
        return ["no decision is pending"]
    table, columns = decision.candidates, COLUMNS[decision.kind]
    stop = ", or STOP" if decision.stop_allowed else ""
    head = f"{decision.kind.name}: {len(table)} candidates{stop}; baseline: {decision.baseline}"
    header = f"{'':>4} {'request':>8} " + " ".join(f"{name:>24}" for name in columns)
    rows = [_row(table, row, columns) for row in range(min(len(table), SHOWN_CANDIDATES))]
    return [head, header, *rows]


def _row(table: CandidateTable, row: int, columns: tuple[str, ...]) -> str:
    request = "" if table.request_ids[row] < 0 else str(table.request_ids[row])
    cells = " ".join(f"{table[name][row]:>24.4g}" for name in columns)
    return f"{row:>4} {request:>8} {cells}"
