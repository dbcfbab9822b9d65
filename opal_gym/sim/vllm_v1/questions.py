"""The three questions of a rebuild under `vllm_v1`: the baseline answers what vLLM does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.candidates import INDEX, CandidateTable
from opal_gym.sim.decision import STOP, DecisionKind
from opal_gym.sim.questions import (
    Question,
    Running,
    chunk_question_of,
    first_half_then,
    preempt_table,
    request_features,
)
from opal_gym.sim.table import (
    DELIVERED,
    IS_FETCH,
    PREDICTED_REMAINING,
    PREFIX_HIT,
    PROMPT,
    PROMPT_REMAINING,
    REQUEST_ID,
)
from opal_gym.sim.vllm_v1.admission import Admission, TokenBudget, admissible
from opal_gym.sim.vllm_v1.request import V1Request

if TYPE_CHECKING:
    from opal_gym.sim.vllm_v1.worker import LLMWorkerVLLMV1


def chunk_question(worker: LLMWorkerVLLMV1) -> Question[int] | None:
    """CHUNK: how many prefill tokens a step may take until the next rebuild.

    Asked where a prefill is running, or a slot is free and somebody waits who is not being
    fetched; unless every budget gives the same coming step and nobody waits.
    """
    budgets = worker.chunk_budgets
    rest = sum(request.rest for request in worker.prefills)
    waits = worker.somebody_waits
    if not worker.params.chunked_prefill or not (rest or (worker.slots_free and waits)):
        return None
    if not waits and rest <= budgets[-1]:
        return None
    return chunk_question_of(worker)


def preempt_question(worker: LLMWorkerVLLMV1) -> Question[V1Request]:
    """PREEMPT: who is evicted, in vLLM's order of victims.

    A policy may evict a request as often as the seed allows; beyond that only vLLM's own choice is
    left, which never takes the first of `running`, or the most urgent, from the others.
    """
    first, *others = worker.victims()

    def candidates() -> Sequence[V1Request]:
        return first_half_then(
            [first, *(request for request in others if request.may_be_preempted)],
            worker.max_candidates,
            lambda request: -request.predicted_remaining,
        )

    return Question(
        worker,
        DecisionKind.PREEMPT,
        first,
        candidates,
        lambda victims: preempt_table(worker, _running(worker, victims)),
    )


def _running(worker: LLMWorkerVLLMV1, options: Sequence[V1Request]) -> Running:
    data = worker.table.data.take([request.row for request in options], axis=0)
    held = _column([request.tokens_held for request in options])
    return Running.of(data, worker.tokens_generated(data), held)


def admit_question(worker: LLMWorkerVLLMV1, budget: TokenBudget) -> Question[Admission] | None:
    """ADMIT: which waiting request is the head of the line; None where nobody fits.

    The baseline is vLLM's head, or STOP where that one does not fit.
    """
    found = admissible(worker, budget)
    place, first = next(found, (0, None))
    if first is None:
        return None

    def candidates() -> list[Admission]:
        chosen = first_half_then(
            [(place, first), *found], worker.max_candidates, lambda fit: fit[1].request.kv_area
        )
        return [fit for _, fit in sorted(chosen, key=itemgetter(0))]

    stop_allowed = worker.in_flight > 0 or len(worker.batch) > 0
    return Question(
        worker,
        DecisionKind.ADMIT,
        first,
        candidates,
        partial(_admit_table, worker),
        baseline=0 if place == 0 or not stop_allowed else STOP,
        stop_allowed=stop_allowed,
    )


def _admit_table(worker: LLMWorkerVLLMV1, options: Sequence[Admission]) -> CandidateTable:
    requests = [option.request for option in options]
    data = worker.table.data.take([request.row for request in requests], axis=0)
    values, pool = request_features(worker, data), worker.pool.total
    computed = _column([option.computed for option in options])
    known = _column([request.known_tokens for request in requests])
    values[:, PROMPT_REMAINING] = known - computed
    values[:, PREFIX_HIT] = computed
    values[:, IS_FETCH] = [option.tokens == 0 for option in options]
    values[:, INDEX["blocks_needed"]] = [option.blocks / pool for option in options]
    current, remaining = data[:, PROMPT] + data[:, DELIVERED], data[:, PREDICTED_REMAINING]
    peaks = worker.peak_kv().with_candidates(current, remaining)
    values[:, INDEX["predicted_peak_kv"]] = peaks / (pool * worker.block_size)
    return CandidateTable(values, data[:, REQUEST_ID].astype(np.int64))


def _column(values: list[int]) -> NDArray[np.float64]:
    return np.array(values, np.float64)
