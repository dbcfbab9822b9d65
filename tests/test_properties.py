"""What holds for every workload, worker and policy (DESIGN §2, §3, §6)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from opal_gym.config import Config, ConfigError, load_config, scenario_names
from opal_gym.sim.clock import BOUNDARY
from opal_gym.sim.decision import STOP, Decision, DecisionKind, Policy
from opal_gym.sim.gauges import GAUGES
from opal_gym.sim.policies import FifoLeastWorkPolicy
from opal_gym.sim.request import LLMRequest, RequestPhase, VLLMSchedulerRequest
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.vllm_worker import LLMWorkerVLLMScheduler
from opal_gym.sim.workloads import Workload, make_workload
from tests.policies import RandomPolicy, StopPolicy
from tests.random_cases import Case, cases, seeded_case
from tests.tiny import WorkerLog, by_id, tiny_config, tiny_workload

# ------------------------------------------------------------------ policies


class MostWorkPolicy(Policy):
    """Evicts whoever loses most."""

    def choose(self, decision: Decision) -> int:
        if decision.kind is DecisionKind.PREEMPT:
            return int(np.argmax(decision.candidates["work_lost"]))
        return decision.baseline


class HoardingPolicy(Policy):
    """Fetches before it runs anybody, the youngest first, in the smallest chunks."""

    def choose(self, decision: Decision) -> int:
        if decision.kind is DecisionKind.ADMIT:
            fetches = np.flatnonzero(decision.candidates["is_fetch"])
            return int(fetches[-1]) if len(fetches) else decision.num_candidates - 1
        return decision.num_candidates - 1


class YoungestFirstPolicy(Policy):
    """Admits the youngest and evicts the oldest: nobody old would ever finish by itself."""

    def choose(self, decision: Decision) -> int:
        if decision.kind is DecisionKind.CHUNK:
            return 0
        waiting = decision.candidates["waiting_time"]
        oldest = decision.kind is DecisionKind.PREEMPT
        return int(np.argmax(waiting) if oldest else len(waiting) - 1 - np.argmin(waiting[::-1]))


POLICIES: dict[str, Callable[[], Policy]] = {
    "baseline": FifoLeastWorkPolicy,
    "random": RandomPolicy,
    "stop": StopPolicy,
    "most-work": MostWorkPolicy,
    "hoarding": HoardingPolicy,
    "youngest-first": YoungestFirstPolicy,
}

# ------------------------------------------------------------------ watching a simulation

MAX_PREEMPTIONS = 3
"""Whoever was evicted so often is evicted again only if all of the batch were (DESIGN §2)."""
EVENT_LIMIT = 20_000
"""SimPy events of one tiny simulation, which needs some hundreds: more is a livelock."""


@dataclass
class Asked:
    """One question and its answer."""

    kind: DecisionKind
    rebuild_id: int
    time: float
    num_candidates: int
    stop_allowed: bool
    baseline: int
    answer: int
    request_ids: tuple[int, ...] = ()
    values: bytes = field(default=b"", repr=False)


class Watch(Policy):
    """Watches a simulation from within: its questions, evictions, completions and every step.

    Args:
        policy: Whoever really answers.
        tables: Whether all candidate tables and gauges are built, checked and kept; otherwise only
            PREEMPT's tables.
        event_limit: SimPy events, and questions, after which it is a livelock.

    Attributes:
        asked: Questions and answers.
        gauges: The gauges at each question, as bytes.
        rebuild_times: When each rebuild took place, s.
        completed: How often each request completed.
        evicted: How often each request was evicted.
        forced: Evictions that nobody was asked about, all being at the cap.
        events: SimPy events so far.
        stale_events: Boundary events that found nothing to do.
        spans: Spans so far, and `cut_spans` of these were cut.
        made: How often each KV token, (request id, position), was made; step by step alone.
    """

    def __init__(
        self, policy: Policy, *, tables: bool = True, event_limit: int = EVENT_LIMIT
    ) -> None:
        self._policy = policy
        self._tables = tables
        self._event_limit = event_limit
        self.asked: list[Asked] = []
        self.gauges: list[bytes] = []
        self.rebuild_times: dict[int, float] = {}
        self.completed: Counter[int] = Counter()
        self.evicted: Counter[int] = Counter()
        self.forced = 0
        self.events = self.stale_events = 0
        self.spans = self.cut_spans = 0
        self.made: Counter[tuple[int, int]] = Counter()
        self._chosen: int | None = None
        self._boundaries = self._steps = 0
        self._evicted_in = self._rebuilt_after = 0
        self._survivors: set[int] = set()
        self._fetchers: set[int] = set()

    def attach(self, simulation: Simulation) -> None:
        """Hooks into a simulation that has not begun."""
        self._simulation = simulation
        self._worker = worker = simulation.worker
        ledger, env = simulation.ledger, simulation.env
        self._wrap(ledger, "preempted", before=self._on_eviction)
        self._wrap(ledger, "completed", before=self._on_completion)
        self._wrap(worker, "check_invariants", before=self._on_check)
        self._wrap(env, "step", before=self._on_event)
        self._wrap(env, "at", before=self._on_schedule)

    @staticmethod
    def _wrap(owner: Any, name: str, before: Callable[..., None]) -> None:
        wrapped = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            return wrapped(*args, **kwargs)

        setattr(owner, name, wrapper)

    # -- questions

    def reset(self, seed: int) -> None:
        self._policy.reset(seed)

    def choose(self, decision: Decision) -> int:
        worker = self._worker
        assert len(self.asked) < self._event_limit, "a rebuild asks without end"
        assert decision.time == worker.env.now
        assert decision.rebuild_id == worker.rebuild_id
        if decision.kind is not DecisionKind.CHUNK:
            assert decision.num_candidates <= worker.max_candidates
        assert len(decision.legal_answers()) > 1, "a question with only one possible answer"
        assert decision.is_legal(decision.baseline)
        self._check_order(decision)
        tables = self._tables or decision.kind is DecisionKind.PREEMPT
        if tables:
            self._check_table(decision)
        may_stop = bool(worker.batch) or worker.in_flight > 0
        assert decision.stop_allowed == (decision.kind is DecisionKind.ADMIT and may_stop)
        if decision.kind is DecisionKind.PREEMPT:
            assert len(worker.batch) > 1, "the batch's only request could be evicted"
            assert sum(r.preemption_count < MAX_PREEMPTIONS for r in worker.batch) > 1
        answer = self._policy.choose(decision)
        if self._tables:
            self.gauges.append(decision.gauges.values.tobytes())
        table = decision.candidates if tables else None
        ids = () if table is None else tuple(table.request_ids.tolist())
        self.asked.append(
            Asked(
                decision.kind,
                decision.rebuild_id,
                decision.time,
                decision.num_candidates,
                decision.stop_allowed,
                decision.baseline,
                answer,
                ids,
                b"" if table is None else table.values.tobytes(),
            )
        )
        if decision.kind is DecisionKind.PREEMPT:
            self._chosen = ids[answer]
        return answer

    def _check_order(self, decision: Decision) -> None:
        """CHUNK once, then PREEMPT, then ADMIT; not both of the last two in one rebuild."""
        if not self.asked or self.asked[-1].rebuild_id != decision.rebuild_id:
            return
        last = self.asked[-1].kind
        assert decision.kind is not DecisionKind.CHUNK
        assert last in (decision.kind, DecisionKind.CHUNK)

    def _check_table(self, decision: Decision) -> None:
        table, worker = decision.candidates, self._worker
        assert len(table) == len(table.request_ids) == decision.num_candidates
        assert np.all(table["present"] == 1)
        if decision.kind is DecisionKind.CHUNK:
            assert table["budget_tokens"].tolist() == list(worker.chunk_budgets)
            return
        assert len(set(table.request_ids.tolist())) == len(table)
        if decision.kind is DecisionKind.PREEMPT:
            check_victims(worker, table.request_ids.tolist())
            return
        waiting = {request.request_id: request for request in worker.waiting_requests}
        places = {request_id: place for place, request_id in enumerate(waiting)}
        order = [places[request_id] for request_id in table.request_ids.tolist()]
        assert order == sorted(order), "candidates are not in queue order"
        for request_id in table.request_ids.tolist():
            request = waiting[request_id]
            assert request.phase in (RequestPhase.WAITING, RequestPhase.READY)
            if request.phase is RequestPhase.READY:
                assert len(worker.batch) < worker.params.max_num_seqs
            else:
                assert worker.kvc_ready_count < worker.params.max_kvc_ready_requests

    # -- what happens

    def _on_event(self) -> None:
        self.events += 1
        assert self.events <= self._event_limit, f"livelock at {self._worker.env.now} s"
        for _, priority, _, event in self._simulation.env._queue[:1]:
            self.stale_events += int(priority == BOUNDARY and event.callbacks == [])

    def _on_schedule(self, time: float, priority: int = 1) -> None:
        self._boundaries += int(priority == BOUNDARY)

    def _on_completion(self, request: LLMRequest, worker_id: int) -> None:
        self.completed[request.request_id] += 1
        self._rebuilt_after = self._worker.rebuild_id

    def _on_eviction(self, request: LLMRequest) -> None:
        """Below the cap whoever the policy chose; above it the latest arrival, if all are there."""
        rest = list(self._worker.batch)
        assert rest, "the batch's only request was evicted"
        self._evicted_in = self._worker.rebuild_id
        self._survivors = {other.request_id for other in rest}
        self.evicted[request.request_id] += 1
        before = self.evicted[request.request_id] - 1
        if before < MAX_PREEMPTIONS:
            if self._chosen is not None:
                assert request.request_id == self._chosen
            self._chosen = None
            return
        assert self._chosen is None, "a forced eviction after the policy was asked"
        self.forced += 1
        victim = (request.arrival_time, request.request_id)
        assert all(other.preemption_count >= MAX_PREEMPTIONS for other in rest)
        assert all(other.order < victim for other in rest), "not the latest of the batch was forced"

    def _on_check(self) -> None:
        """After every build and every step: the seed's invariants and more, worked out anew."""
        worker = self._worker
        scheduled = worker.steps.scheduled > worker.steps.count
        if scheduled:
            if worker.rebuild_id:
                self.rebuild_times.setdefault(worker.rebuild_id, worker.env.now)
            assert worker.rebuild_id > self._rebuilt_after or not worker.steps.count
            if self._evicted_in == worker.rebuild_id:
                members = {request.request_id for request in worker.batch}
                assert members == self._survivors, "somebody was admitted in a rebuild that evicted"
                self._rebuilt_after = worker.rebuild_id
            check_coming_step(worker)
            for request in worker.batch:
                begin, tokens = request.tokens_held, tokens_made(worker, request)
                self.made.update((request.request_id, begin + i) for i in range(tokens))
            self._boundaries = 0
        elif worker.steps.count > self._steps:
            # A span has one boundary event; being cut gives it one more, once.
            self.spans += 1
            assert 1 <= self._boundaries <= 2, "a span was cut more than once"
            self.cut_spans += self._boundaries - 1
            self._steps = worker.steps.count
        self._check_holders()
        block_size, pool = worker.block_size, worker.pool
        held = 0
        for request in worker.batch:
            tokens = request.tokens_held
            if scheduled:
                tokens += tokens_made(worker, request)
            held += ceil_div(tokens, block_size)
        for request in worker.waiting_requests:
            assert request.tokens_held == request.prefix_tokens < request.prompt_tokens
            held += ceil_div(request.prefix_tokens, block_size)
        for request in worker.completed_requests.values():
            held += ceil_div(request.prompt_tokens + request.llm_request.output_tokens, block_size)
        assert pool.free + held - pool.shared == pool.total
        assert pool.free >= 0

    def _check_holders(self) -> None:
        """Whoever gave fetched blocks back is younger than whoever still holds some."""
        waiting = list(self._worker.waiting_requests)
        holders = [
            request.order
            for request in waiting
            if request.phase is RequestPhase.READY and request.prefix_tokens
        ]
        for request in waiting:
            if request.request_id in self._fetchers and request.kvc_lookup is None:
                assert all(request.order > holder for holder in holders), (
                    "not the youngest gave back"
                )
        self._fetchers = {request.request_id for request in waiting if request.prefix_tokens}


def check_victims(worker: LLMWorkerVLLMScheduler, request_ids: list[int]) -> None:
    """Below the cap; least work first, nearly finished last; later arrivals, then larger ids.

    Of more than the table holds: the first half so, then the longest predicted remaining.
    """

    def remaining(request: VLLMSchedulerRequest) -> int:
        predicted = request.llm_request.predicted_output_tokens
        return max(1, predicted - request.decode_tokens_generated)

    def place(request: VLLMSchedulerRequest) -> tuple[bool, int, float, int]:
        predicted = request.llm_request.predicted_output_tokens
        nearly_finished = 0 < 0.95 * predicted <= request.decode_tokens_generated
        arrival, request_id = request.order
        return nearly_finished, request.tokens_held, -arrival, -request_id

    below = [request for request in worker.batch if request.preemption_count < MAX_PREEMPTIONS]
    expected = sorted(below, key=place)
    size = worker.max_candidates
    assert len(request_ids) == min(len(expected), size)
    if len(expected) > size:
        half = max(1, size // 2)
        chosen = [request for request in expected if request.request_id in request_ids]
        longest = sorted(
            (remaining(request) for request in expected[-(-size // 2) :]), reverse=True
        )
        others = sorted((remaining(request) for request in chosen[-(-size // 2) :]), reverse=True)
        assert others == longest[: size - -(-size // 2)]
        expected = expected[:half]
    ids = [request.request_id for request in expected]
    assert request_ids[: len(ids)] == ids, "not the least work first"


def ceil_div(numerator: int, denominator: int) -> int:
    return (numerator + denominator - 1) // denominator


def tokens_made(worker: LLMWorkerVLLMScheduler, request: VLLMSchedulerRequest) -> int:
    """KV tokens that the coming step adds to a request of the batch."""
    tokens = worker.batch.request_tokens.get(request.request_id, 0)
    if request.phase is RequestPhase.DECODE:
        return 1
    ends = request.prompt_processed + tokens == request.prompt_tokens
    return tokens + int(ends and worker.params.first_token_at_prefill_end)


def check_coming_step(worker: LLMWorkerVLLMScheduler) -> None:
    """Budget and sequence limits; the prefills share what the decodes leave, in their order."""
    batch, params = worker.batch, worker.params
    decodes = len(batch.decode_requests)
    assert len(batch) <= params.max_num_seqs
    limit = min(worker.chunk_budget, params.max_num_batched_tokens - decodes)
    assert limit >= 0
    left = limit
    for request in batch.prefill_requests.values():
        rest = request.prompt_tokens - request.prompt_processed
        tokens = batch.request_tokens.get(request.request_id, 0)
        assert rest > 0
        assert tokens == min(rest, left)
        left -= tokens
        if not params.chunked_prefill:
            assert tokens == request.prompt_tokens - request.prefix_tokens
    assert batch.total_tokens == decodes + limit - left
    assert all(batch.request_tokens[request_id] == 1 for request_id in batch.decode_requests)
    if not batch and worker.waiting_requests:
        assert worker.in_flight, "an empty batch sleeps though somebody waits"


def run(
    case: Case, policy: Policy, *, seed: int = 0, tables: bool = True, **overrides: Any
) -> tuple[Simulation, Watch]:
    """Runs a case to its end and checks what must hold of every one."""
    watch = Watch(policy, tables=tables)
    simulation = Simulation(case.config(**overrides), case.workload(), watch, policy_seed=seed)
    watch.attach(simulation)
    while not simulation.done:
        simulation.env.step()
    check_finished(simulation, watch)
    return simulation, watch


def check_finished(simulation: Simulation, watch: Watch) -> None:
    simulation.drain()
    check_all_free(simulation)
    check_everybody_is_done(simulation, watch)
    check_times(simulation)
    check_identities(simulation, watch)


def check_all_free(simulation: Simulation) -> None:
    worker = simulation.worker
    assert worker.pool.free == worker.pool.total
    assert worker.in_flight == worker.kvc_fetch_blocks_in_flight == worker.kvc_ready_count == 0
    assert not worker.waiting_requests
    assert not worker.batch
    assert not worker.batch.request_tokens
    assert not worker.completed_requests
    assert simulation.env.peek() == float("inf"), "an event is left in SimPy's heap"


def check_everybody_is_done(simulation: Simulation, watch: Watch) -> None:
    """Accepted requests complete exactly once; the others are rejected, with the reason."""
    config, workload, records = simulation.config, simulation.workload, simulation.records
    pool = config.total_gpu_blocks * config.worker.vllm_params.block_size
    tokens = workload.prompt_tokens + workload.output_tokens
    fits = (tokens <= config.max_model_len) & (tokens <= pool)
    accepted = np.flatnonzero(fits).tolist()
    assert sorted(records.table["request_id"].tolist()) == accepted
    assert watch.completed == Counter(accepted)
    assert simulation.router.finished_requests == len(accepted)
    rejected = {request.request_id: reason for request, reason in records.rejected}
    assert sorted(rejected) == np.flatnonzero(~fits).tolist()
    assert len(records.rejected) == len(rejected) == simulation.ledger.rejections.total()
    for request_id, reason in rejected.items():
        assert str(int(tokens[request_id])) in reason


def check_times(simulation: Simulation) -> None:
    steps, workload = simulation.worker.steps, simulation.workload
    assert np.all(np.diff(steps.times(0, steps.count)) > 0), "time went back"
    ends = set(steps.times(0, steps.count).tolist())
    for request_id, record in by_id(simulation).items():
        assert record["arrival_time"] == workload.arrival_time[request_id]
        assert (
            record["arrival_time"]
            <= record["worker_arrival_time"]
            <= record["start_processing_time"]
            <= record["request_ready_time"]
            <= record["gpu_start_time"]
            < record["first_token_time"]
            <= record["decode_done_time"]
        ), f"times of request {request_id} are out of order: {record}"
        times = record["token_times"]
        assert len(times) == workload.output_tokens[request_id], "a token was lost or made twice"
        assert np.all(np.diff(times) > 0)
        assert ends.issuperset(times)
        assert times[0] == record["first_token_time"]
        assert times[-1] == record["decode_done_time"]
        assert record["max_gap"] == max(np.diff(times), default=0.0)
    records = simulation.records
    both = zip(records.scheduler_timestamps(), records.token_times(), strict=True)
    for timestamps, token_times in both:
        assert np.all(np.diff(timestamps) > 0)
        assert ends.issuperset(timestamps.tolist())
        assert set(timestamps.tolist()).issuperset(token_times.tolist())


def check_identities(simulation: Simulation, watch: Watch) -> None:
    """Little's law, and every computed token is a prompt's, an output's or a recomputed one."""
    table, ledger, now = simulation.records.table, simulation.ledger, simulation.env.now
    e2e = table["decode_done_time"] - table["arrival_time"]
    ttft = table["first_token_time"] - table["arrival_time"]
    assert ledger.in_system.at(now) == pytest.approx(e2e.sum(), abs=1e-9)
    assert ledger.awaiting_token.at(now) == pytest.approx(ttft.sum(), abs=1e-9)
    assert sum(watch.evicted.values()) == ledger.preemptions == table["preemptions"].sum()
    for record in table:
        assert record["preemptions"] == watch.evicted[int(record["request_id"])]
        assert bool(record["recomputed_tokens"]) <= bool(record["preemptions"])


def union_length(intervals: list[tuple[float, float]]) -> float:
    """Total length that the intervals cover."""
    total, reach = 0.0, -np.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return float(total)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the worker's log from pytest's own handlers, which would be slow."""
    monkeypatch.setattr(logging.getLogger("opal_gym.sim.vllm_worker"), "propagate", False)


# ------------------------------------------------------------------ everything drains

QUICK = 15
CHUNKS = 20
SLOW = [pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(CHUNKS)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_workload_drains(policy: str) -> None:
    for seed in range(QUICK):
        run(seeded_case(seed, sharing=seed % 4 == 3), POLICIES[policy](), seed=seed)


@pytest.mark.parametrize("chunk", SLOW)
def test_two_thousand_workloads_drain_under_every_policy(chunk: int) -> None:
    for seed in range(100 * chunk, 100 * (chunk + 1)):
        for name, policy in POLICIES.items():
            try:
                case = seeded_case(seed, sharing=seed % 4 == 3, max_requests=8)
                run(case, policy(), seed=seed, tables=seed % 5 == 0)
            except Exception as error:
                raise AssertionError(f"{case} under {name}: {error!r}") from error


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=cases(), policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 9))
def test_every_drawn_workload_drains(case: Case, policy: str, seed: int) -> None:
    run(case, POLICIES[policy](), seed=seed)


def test_the_random_cases_reach_every_corner() -> None:
    """The properties above are not empty: all of this happens in the first seeds."""
    seen: Counter[str] = Counter()
    policies = (HoardingPolicy, RandomPolicy, YoungestFirstPolicy)
    for seed in range(90):
        case = seeded_case(seed)
        with WorkerLog() as log:
            simulation, watch = run(case, policies[seed % len(policies)]())
        messages = [message for _, message in log.events]
        seen["fetch"] += sum("initiating async KVC retrieve" in text for text in messages)
        seen["give back"] += sum("gave back" in text for text in messages)
        seen["skipped store"] += simulation.engine.stores_skipped
        seen["rejection"] += len(simulation.records.rejected)
        seen["eviction"] += simulation.ledger.preemptions
        seen["forced eviction"] += watch.forced
        seen["stop"] += sum(asked.answer == STOP for asked in watch.asked)
        seen["cut"] += watch.cut_spans
        seen["whole pool"] += int(simulation.worker.pool.block_seconds() > 0) and sum(
            ceil_div(prompt + output, simulation.worker.block_size) == simulation.worker.pool.total
            for _, prompt, output in case.requests
        )
        seen["nothing stored"] += simulation.engine.enabled and sum(
            not hash_ids for hash_ids in case.hash_ids
        )
        for kind in DecisionKind:
            seen[kind.name] += sum(asked.kind is kind for asked in watch.asked)
    assert min(seen.values()) >= 3, seen


# ------------------------------------------------------------------ every token is accounted for


@pytest.mark.parametrize("tier", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed_tokens_are_those_made_again(policy: str, tier: bool) -> None:
    """Step by step: every token that no cache brought is made, and each time but the first counts.

    What a cache brought of a prompt that was never evicted is its hit.
    """
    for seed in range(54):
        case = seeded_case(seed, tier=tier)
        simulation, watch = run(case, POLICIES[policy](), simulation__step_by_step=True)
        for record in simulation.records.table:
            request_id, label = int(record["request_id"]), f"seeded_case({seed}, tier={tier})"
            length = int(record["prompt_tokens"] + record["output_tokens"])
            times = [watch.made[request_id, position] for position in range(length)]
            again = sum(max(0, made - 1) for made in times)
            assert record["recomputed_tokens"] == again, label
            assert all(times[record["prefix_hit_tokens"] :]), label
            assert record["prefix_hit_tokens"] >= times.count(0), label
            if not record["preemptions"]:
                assert record["prefix_hit_tokens"] == times.count(0), label


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gpu_works_whenever_somebody_is_in_the_system(policy: str) -> None:
    """Without a KV cache nothing is worth waiting for, whatever the policy."""
    for seed in range(30):
        simulation, _ = run(seeded_case(seed, tier=False), POLICIES[policy]())
        stays = [
            (float(record["arrival_time"]), float(record["decode_done_time"]))
            for record in simulation.records.table
        ]
        assert simulation.worker.gpu_busy_time == pytest.approx(union_length(stays), abs=1e-9)


class FifoWatch(Watch):
    """Under the baseline and `change`, at every step: FIFO's walk cannot go on."""

    def __init__(self) -> None:
        super().__init__(FifoLeastWorkPolicy(), tables=False)

    def _on_check(self) -> None:
        super()._on_check()
        worker = self._worker
        exempt = self._evicted_in == worker.rebuild_id
        window = list(worker.waiting_requests.window(worker.window_size))
        # A holder that has just given back will be looked up again at the next boundary.
        exempt |= any(request.kvc_lookup is None for request in window)
        if worker.steps.scheduled > worker.steps.count and worker.batch and not exempt:
            for request in window:
                if not self._passed_over(request):
                    assert not self._fits(request), f"request {request.request_id} could run"
                    return

    def _passed_over(self, request: VLLMSchedulerRequest) -> bool:
        limited = self._worker.kvc_ready_count >= self._worker.params.max_kvc_ready_requests
        return request.phase is RequestPhase.FETCH_KVC or (
            request.phase is RequestPhase.WAITING and limited
        )

    def _fits(self, request: VLLMSchedulerRequest) -> bool:
        worker, block_size = self._worker, self._worker.block_size
        if request.phase is RequestPhase.WAITING:
            return ceil_div(request.kvc_lookup or 0, block_size) <= worker.pool.free
        batch, params = worker.batch, worker.params
        limit = min(worker.chunk_budget, params.max_num_batched_tokens - len(batch.decode_requests))
        tokens = min(limit - batch.prefill_tokens, request.prompt_tokens - request.prompt_processed)
        held = request.prompt_processed + tokens
        if held == request.prompt_tokens:
            held += params.first_token_at_prefill_end
        elif not params.chunked_prefill:
            return False
        blocks = ceil_div(held, block_size) - request.allocated_blocks
        slot = len(batch) < params.max_num_seqs
        return slot and tokens > 0 and blocks <= worker.pool.free


def test_under_change_the_baseline_leaves_nobody_waiting_who_could_run() -> None:
    """ "whenever asking could change anything": FIFO's next one fits at no step's beginning."""
    for seed in range(150):
        watch = FifoWatch()
        case = seeded_case(seed)
        config = case.config(
            worker__vllm_params__rebuild_on="change",
            worker__vllm_params__lookahead_reqs=256,
            simulation__step_by_step=True,
        )
        simulation = Simulation(config, case.workload(), watch)
        watch.attach(simulation)
        simulation.run()
        check_finished(simulation, watch)


# ------------------------------------------------------------------ boundaries


def test_a_boundary_sees_the_blocks_that_come_back_at_it() -> None:
    """A store with nothing to write ends at once, so its blocks are there for the rebuild.

    Blocks of 4 tokens, 6 of them; three prompts of 4 end in step 1 with a first token each, so
    that after step k everybody holds 4 + k tokens: 2 blocks from step 1 on, 3 from step 5 on.
    Request 0 (4 tokens of output) completes at 4 s and stores nothing, having no hashes. Its 2
    blocks are the 2 that the others need for step 5: nobody has to go, and both end at 8 s.
    """
    config = tiny_config(
        {"kvc.tiers": [{"capacity_GB": 1.0, "bandwidth_GBps": 1.0}]}, num_gpu_blocks_override=6
    )
    simulation = Simulation(config, tiny_workload([(0.0, 4, 4), (0.0, 4, 8), (0.0, 4, 8)]))
    simulation.run()
    assert simulation.ledger.preemptions == 0
    done = [record["decode_done_time"] for record in by_id(simulation).values()]
    assert done == [4.0, 8.0, 8.0]


@pytest.mark.parametrize("tier", [False, True])
def test_there_is_at_most_one_rebuild_per_boundary(tier: bool) -> None:
    for seed in range(40):
        for step_by_step in (False, True):
            _, watch = run(
                seeded_case(seed, tier=tier),
                FifoLeastWorkPolicy(),
                simulation__step_by_step=step_by_step,
            )
            twice = [time for time, n in Counter(watch.rebuild_times.values()).items() if n > 1]
            assert not twice, f"seeded_case({seed}, tier={tier}): two rebuilds at {twice} s"


def drive(case: Case, policy: Policy, outside: list[DecisionKind]) -> tuple[Simulation, Watch, Any]:
    """Runs a case with decisions of some kinds answered from outside, and the others in process."""
    watch = Watch(policy)
    simulation = Simulation(case.config(), case.workload(), watch, outside=outside)
    watch.attach(simulation)
    with WorkerLog() as log:
        while (decision := simulation.advance()) is not None:
            simulation.answer(watch.choose(decision))
    return simulation, watch, log.events


@pytest.mark.parametrize("outside", [list(DecisionKind), *([kind] for kind in DecisionKind)])
def test_a_driver_outside_has_the_same_run_as_a_policy_in_process(
    outside: list[DecisionKind],
) -> None:
    """DESIGN §3: event for event."""
    for seed in range(40):
        policy = RandomPolicy if seed % 2 else FifoLeastWorkPolicy
        inside = drive(seeded_case(seed), policy(), [])
        driven = drive(seeded_case(seed), policy(), outside)
        assert_same(driven[1].asked, inside[1].asked, f"seeded_case({seed})")
        assert_same(driven[2], inside[2], f"seeded_case({seed})")
        assert_equal_records(driven[0], inside[0])


def assert_same(mine: list[Any], other: list[Any], label: str = "") -> None:
    """Equal lists; otherwise says only where they part."""
    for place, (one, another) in enumerate(zip(mine, other, strict=False)):
        assert one == another, f"{label}, from place {place} on"
    assert len(mine) == len(other), label


def assert_equal_records(simulation: Simulation, other: Simulation) -> None:
    """Equal to the last bit."""
    records, others = simulation.records, other.records
    assert records.table.tobytes() == others.table.tobytes()
    assert [times.tobytes() for times in records.token_times()] == [
        times.tobytes() for times in others.token_times()
    ]
    assert [(request.request_id, why) for request, why in records.rejected] == [
        (request.request_id, why) for request, why in others.rejected
    ]


# ------------------------------------------------------------------ decisions


def test_the_table_of_a_decision_holds_at_most_max_candidates() -> None:
    """Or the configuration is refused: 16 tokens a step give five chunk budgets, and 2 rows."""
    try:
        config = tiny_config({"env.max_candidates": 2})
    except ConfigError:
        return
    watch = CountingPolicy()
    Simulation(config, tiny_workload([(0.0, 40, 2)] * 4), watch).run()
    assert watch.most <= 2


class CountingPolicy(FifoLeastWorkPolicy):
    """The baseline, which counts candidates."""

    most = 0

    def choose(self, decision: Decision) -> int:
        self.most = max(self.most, decision.num_candidates)
        return super().choose(decision)


# ------------------------------------------------------------------ spans


def assert_spans_change_nothing(
    make: Callable[[bool], tuple[Simulation, Watch]],
) -> tuple[Simulation, Watch]:
    """Runs with spans and step by step, and compares all that can be seen of both."""
    with WorkerLog() as log:
        simulation, watch = make(False)
    with WorkerLog() as reference_log:
        reference, reference_watch = make(True)
    assert_same(log.events, reference_log.events)
    assert_same(watch.asked, reference_watch.asked)
    assert_equal_records(simulation, reference)
    steps, reference_steps = simulation.worker.steps, reference.worker.steps
    assert steps.count == reference_steps.count == reference_watch.spans
    assert steps.times(0, steps.count).tobytes() == (
        reference_steps.times(0, steps.count).tobytes()
    )
    assert simulation.worker.rebuild_id == reference.worker.rebuild_id
    assert simulation.worker.gpu_busy_time == pytest.approx(reference.worker.gpu_busy_time)
    block_seconds = reference.worker.pool.block_seconds()
    assert simulation.worker.pool.block_seconds() == pytest.approx(block_seconds)
    assert watch.stale_events == watch.cut_spans <= watch.spans
    assert reference_watch.stale_events == reference_watch.cut_spans == 0
    return simulation, watch


def assert_spans_change_nothing_in(seeds: range, **overrides: Any) -> None:
    policies = list(POLICIES)
    for seed in seeds:
        policy = POLICIES[policies[seed % len(policies)]]

        def make(
            step_by_step: bool,
            seed: int = seed,
            policy: Callable[[], Policy] = policy,
        ) -> tuple[Simulation, Watch]:
            more = {**overrides, "simulation__step_by_step": step_by_step}
            case = seeded_case(seed, sharing=seed % 4 == 3)
            return run(case, policy(), seed=seed, **more)

        try:
            assert_spans_change_nothing(make)
        except Exception as error:
            name = policies[seed % len(policies)]
            raise AssertionError(f"seeded_case({seed}) under {name}: {error}") from error


def test_spans_change_nothing() -> None:
    assert_spans_change_nothing_in(range(30))


@pytest.mark.parametrize("chunk", SLOW[:10])
def test_spans_change_nothing_in_a_thousand_workloads(chunk: int) -> None:
    assert_spans_change_nothing_in(range(100 * chunk, 100 * (chunk + 1)))


GPU_MODELS: dict[str, dict[str, Any]] = {
    "context": {
        "model": "synthetic",
        "base_s": 0.013,
        "per_prefill_token_s": 0.00031,
        "per_decode_s": 0.0017,
        "per_context_token_s": 0.000023,
    },
    "roofline": {"model": "roofline"},
    "calibrated": {"model": "calibrated"},
    "simple": {"model": "simple", "mfu": 0.6, "mbu": 0.8, "overhead_s": 0.001},
}


@pytest.mark.parametrize("model", GPU_MODELS)
def test_spans_change_nothing_under_any_gpu_model(model: str) -> None:
    assert_spans_change_nothing_in(range(24), worker__inference_params=GPU_MODELS[model])


@pytest.mark.parametrize("model", GPU_MODELS)
@pytest.mark.parametrize("rebuild_on", ["change", "completion"])
@pytest.mark.parametrize("policy", ["baseline", "youngest-first"])
def test_spans_change_nothing_in_a_tight_crowd(model: str, rebuild_on: str, policy: str) -> None:
    """40 requests of up to 60 tokens each way, in a pool that holds some four of them."""
    rng = np.random.default_rng(3)
    n = 40
    # Arrivals keep the worker busy at the step times of each model.
    pace = {"context": 0.3}.get(model, 0.1)
    rows = zip(
        np.cumsum(rng.exponential(pace, n)).tolist(),
        rng.integers(1, 60, n).tolist(),
        rng.integers(1, 60, n).tolist(),
        strict=True,
    )
    workload = tiny_workload(list(rows), predicted=rng.integers(1, 60, n).tolist())

    def make(step_by_step: bool) -> tuple[Simulation, Watch]:
        config = tiny_config(
            {
                "worker.inference_params": GPU_MODELS[model],
                "simulation.step_by_step": step_by_step,
            },
            num_gpu_blocks_override=40,
            max_num_seqs=16,
            rebuild_on=rebuild_on,
        )
        return watched(config, workload, POLICIES[policy]())

    simulation, watch = assert_spans_change_nothing(make)
    assert simulation.ledger.preemptions > 0
    assert watch.spans < 0.8 * simulation.worker.steps.count


def watched(config: Config, workload: Workload, policy: Policy) -> tuple[Simulation, Watch]:
    """Runs a workload to its end and checks what must hold of every one."""
    watch = Watch(policy, event_limit=500_000)
    simulation = Simulation(config, workload, watch, policy_seed=1)
    watch.attach(simulation)
    simulation.run()
    check_finished(simulation, watch)
    return simulation, watch


SCENARIOS = [name for name in scenario_names() if not name.startswith("trace-")]


def scenario(name: str, requests: int, **overrides: Any) -> tuple[Config, Workload]:
    """A packaged scenario, overloaded so that its limits bind, with its first workload."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    overload = {"workload.num_requests": requests, "workload.arrivals.load": 1.5}
    config = load_config(name, {**overload, **keys})
    workload = make_workload(
        config.workload,
        0,
        length_information=config.simulation.length_information,
        hash_block_tokens=config.kvc.hash_block_tokens,
    )
    return config, workload


def assert_spans_change_nothing_in_scenario(name: str, requests: int, policy: str) -> None:
    def make(step_by_step: bool) -> tuple[Simulation, Watch]:
        config, workload = scenario(name, requests, simulation__step_by_step=step_by_step)
        return watched(config, workload, POLICIES[policy]())

    assert_spans_change_nothing(make)


@pytest.mark.parametrize("name", SCENARIOS)
def test_spans_change_nothing_in_a_packaged_scenario(name: str) -> None:
    assert_spans_change_nothing_in_scenario(name, 64, "baseline")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["baseline", "random"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_spans_change_nothing_in_a_long_packaged_scenario(name: str, policy: str) -> None:
    assert_spans_change_nothing_in_scenario(name, 200, policy)


@cache
def gauges_with_and_without_spans(seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The gauges of all questions, shape (questions, gauges), of both ways to run a case."""
    policy, case = POLICIES[("baseline", "random")[seed % 2]], seeded_case(seed)
    with_spans, step_by_step = (
        run(case, policy(), simulation__step_by_step=alone)[1].gauges for alone in (False, True)
    )
    rows = (len(with_spans), len(GAUGES))
    return (
        np.frombuffer(b"".join(with_spans)).reshape(rows),
        np.frombuffer(b"".join(step_by_step)).reshape(rows),
    )


@pytest.mark.parametrize("gauge", [gauge.name for gauge in GAUGES])
def test_a_gauge_is_the_same_with_spans_and_without(gauge: str) -> None:
    """Whoever learns on spans must see what a worker that goes step by step would show."""
    column = [gauge.name for gauge in GAUGES].index(gauge)
    for seed in range(24):
        with_spans, step_by_step = gauges_with_and_without_spans(seed)
        assert with_spans[:, column].tolist() == step_by_step[:, column].tolist(), (
            f"seeded_case({seed})"
        )


# ------------------------------------------------------------------ SimPy events

EVENTS_PER_REQUEST = 13
"""Without a KV cache, per request or eviction.

A request: its arrival, an interrupt each of intake and scheduler, the scheduler's wake-up: 4. Its
spans end at its completion, before and after the last step of its prefill, after its first token,
and where its arrival cut one, whose old event is stale: 6. An eviction: the span before it, the
step after it, and the prefill's ends and the first token once more: 5; and where a span ends for
want of memory but a batch of one just waits, one more.
"""
EVENTS_PER_TRANSFER = 9
"""A fetch or a store: the process's begin and end; the channel's request, hold and release; an
interrupt and a wake-up of the scheduler, or a cut and its stale event: 9."""


def fetches_and_stores(log: WorkerLog, simulation: Simulation) -> int:
    fetches = sum("initiating async KVC retrieve" in message for _, message in log.events)
    return fetches + len(simulation.records) * simulation.engine.enabled


def event_bound(simulation: Simulation, transfers: int) -> int:
    requests = len(simulation.workload) + simulation.ledger.preemptions
    # Three processes begin, and that of the arrivals ends.
    return 4 + EVENTS_PER_REQUEST * requests + EVENTS_PER_TRANSFER * transfers


@pytest.mark.parametrize("policy", POLICIES)
def test_events_follow_requests_and_evictions_not_tokens(policy: str) -> None:
    for seed in range(40):
        with WorkerLog() as log:
            simulation, watch = run(seeded_case(seed), POLICIES[policy]())
        bound = event_bound(simulation, fetches_and_stores(log, simulation))
        assert watch.events <= bound, f"seeded_case({seed})"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_takes_few_events_per_request_and_decision(name: str) -> None:
    """Some hundreds of steps a request, but its spans, interrupts and transfers are these."""
    config, workload = scenario(name, 100)
    with WorkerLog() as log:
        simulation, watch = watched(config, workload, FifoLeastWorkPolicy())
    assert watch.events <= event_bound(simulation, fetches_and_stores(log, simulation))
    assert watch.events <= 6 * (len(workload) + len(watch.asked))


@pytest.mark.parametrize("rebuild_on", ["change", "completion"])
@pytest.mark.parametrize("first_token_at_prefill_end", [True, False])
def test_a_long_output_takes_as_many_events_as_a_short_one(
    rebuild_on: str, first_token_at_prefill_end: bool
) -> None:
    def events(tokens: int) -> int:
        config = tiny_config(
            rebuild_on=rebuild_on,
            first_token_at_prefill_end=first_token_at_prefill_end,
            num_gpu_blocks_override=2000,
        )
        # Prompts of several chunks, one behind the other; nobody arrives while somebody runs.
        workload = tiny_workload([(0.0, 10 * tokens, tokens), (1e6, 10 * tokens, tokens)])
        _, watch = watched(config, workload, FifoLeastWorkPolicy())
        return watch.events

    assert events(700) == events(70)


def test_an_idle_second_takes_no_events() -> None:
    """Twice as many requests after a longer or a shorter pause: not one event more."""

    def events(pause: float, tier: bool) -> tuple[int, int]:
        tiers = [{"capacity_GB": 1.0, "bandwidth_GBps": 1.0}] if tier else []
        config = tiny_config({"kvc.tiers": tiers, "kvc.hash_block_tokens": 4})
        workload = tiny_workload(
            [(0.0, 8, 3), (pause, 8, 3), (2 * pause, 8, 3)], hash_ids=[(1, 2), (1, 2), (1, 3)]
        )
        simulation, watch = watched(config, workload, FifoLeastWorkPolicy())
        return watch.events, simulation.worker.rebuild_id

    for tier in (False, True):
        assert events(1e9, tier) == events(100.0, tier)


@pytest.mark.parametrize("rebuild_on", ["change", "completion"])
def test_each_arrival_at_an_idle_worker_causes_one_rebuild(rebuild_on: str) -> None:
    """Outputs of one token end in the prefill's step: a rebuild to begin, and one to end."""
    config = tiny_config(rebuild_on=rebuild_on)
    arrivals = [(10.0 * i, 4, 1) for i in range(1, 8)]
    simulation, watch = watched(config, tiny_workload(arrivals), FifoLeastWorkPolicy())
    begins = {time for time, _, _ in arrivals}
    assert sorted(watch.rebuild_times.values()) == sorted(begins | {t + 1.0 for t in begins})
    assert simulation.worker.rebuild_id == 14


def test_wake_ups_leave_nothing_in_the_heap() -> None:
    """An interrupted wait must not stay in SimPy's heap until the end of time."""
    watch = Watch(FifoLeastWorkPolicy())
    workload = tiny_workload([(10.0 * i, 4, 2) for i in range(50)])
    simulation = Simulation(tiny_config(), workload, watch)
    watch.attach(simulation)
    longest = 0
    while not simulation.done:
        simulation.env.step()
        longest = max(longest, len(simulation.env._queue))
    # The next arrival, the span's end, an interrupt, a process's begin.
    assert longest <= 4
