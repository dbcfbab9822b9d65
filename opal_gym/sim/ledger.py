"""What a simulation owes its users so far: the integrals and counts that rewards are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from opal_gym.sim.clock import SimEnvironment
from opal_gym.sim.records import RequestRecords
from opal_gym.sim.request import LLMRequest


class Integral:
    """The integral over time of a piecewise constant function."""

    def __init__(self) -> None:
        self._value = 0.0
        self._rate = 0.0
        self._since = 0.0

    def add(self, rate: float, now: float) -> None:
        """Changes the function by `rate` from `now` on."""
        self._value, self._since = self.at(now), now
        self._rate += rate

    def at(self, now: float) -> float:
        """The integral up to `now`."""
        return self._value + self._rate * (now - self._since)


class Ledger:
    """Follows the requests of all workers (Little's law: ∫N dt = Σ of the times in the system).

    Args:
        env: The simulation.
        records: Where finished requests are noted.
        unloaded_latency: Seconds that a request takes alone on a worker.
        ended: Told of every request that completed or was rejected.

    Attributes:
        in_system: ∫ N dt, N = requests arrived, not rejected, not completed; s.
        slowdown: The same with each request weighted by weight / unloaded latency.
        awaiting_token: ∫ of the requests that have not made their first token; s.
        good_weight: Weight of the completed requests that met their objectives.
        completed_tokens: Output tokens of completed requests.
        preemptions: Evictions.
        arrived_requests: Requests that arrived and were accepted.
        arrived_weight: Their weight.
        completed_requests: Requests that made all their tokens.
        rejections: Rejected requests by reason.
        ended_requests: Requests that completed or were rejected.
        last_completion: When the last request completed, s.
    """

    def __init__(
        self,
        env: SimEnvironment,
        records: RequestRecords,
        unloaded_latency: Callable[[LLMRequest], float],
        ended: Callable[[LLMRequest], None],
    ) -> None:
        self._env = env
        self._records = records
        self._unloaded_latency = unloaded_latency
        self._ended = ended
        self._unloaded: dict[int, float] = {}
        self.in_system = Integral()
        self.slowdown = Integral()
        self.awaiting_token = Integral()
        self.good_weight = 0.0
        self.completed_tokens = 0
        self.preemptions = 0
        self.arrived_requests = 0
        self.arrived_weight = 0.0
        self.completed_requests = 0
        self.rejections: Counter[str] = Counter()
        self.ended_requests = 0
        self.last_completion = 0.0

    def arrived(self, request: LLMRequest) -> None:
        """A request reached a worker and was accepted."""
        unloaded, now = self._unloaded_latency(request), self._env.now
        self._unloaded[request.request_id] = unloaded
        self.arrived_requests += 1
        self.arrived_weight += request.tenant.weight
        self.in_system.add(1, now)
        self.awaiting_token.add(1, now)
        self.slowdown.add(request.tenant.weight / unloaded, now)

    def rejected(self, request: LLMRequest, reason: str) -> None:
        """A request reached a worker and can never run."""
        self.rejections[reason] += 1
        self.ended_requests += 1
        self._records.reject(request, reason)
        self._ended(request)

    def first_token(self, request: LLMRequest) -> None:
        """A request's first output token was made, now."""
        self.awaiting_token.add(-1, self._env.now)

    def preempted(self, request: LLMRequest) -> None:
        """A request was evicted, now."""
        self.preemptions += 1

    def completed(self, request: LLMRequest, worker_id: int) -> None:
        """A request made its last token, now."""
        unloaded, now = self._unloaded.pop(request.request_id), self._env.now
        self.in_system.add(-1, now)
        self.slowdown.add(-request.tenant.weight / unloaded, now)
        self.completed_requests += 1
        self.ended_requests += 1
        self.completed_tokens += request.output_tokens
        self.last_completion = now
        if self._records.complete(request, unloaded, worker_id):
            self.good_weight += request.tenant.weight
        self._ended(request)
