"""The shares bound on the sum of completion times (``reference/policies.md``, "Lower bound").

Give every request at every instant a share of the worker such that the shares of any batch sum to
at most 1, and such that its last stay takes at least the work W_i = ∫ share. Then
C_i ≥ M_i + lag_i, where M_i is the mean time at which it gets its last W_i, and lag_i the least
distance of that mean from its completion. Σ M_i is at least that of one machine, which gets the
same works after the same arrivals, and serves the smallest W_i first, preemptively: the known
optimum of the mean busy times (Goemans, 1997). Any valid share gives a bound; the best is taken.

Shares used, θ weighing slots against memory, occ = θ / slots + (1 - θ) · (memory held / pool):

- time: a resident request gets occ.
- step time: where a step with n decodes of summed context X, and T tokens in all, takes at least
  fixed + decode·n + context·X + token·(T - n) + pair·(pairs of the chunks), each request gets the
  terms of its own tokens and occ · fixed, spread evenly over the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from agents.residency import DecodeTimes, FloatArray, IntArray, Residencies
from opal_gym.sim.gpu_model import (
    CalibratedGPUModel,
    GPUModel,
    SimpleGPUModel,
    SyntheticGPUModel,
)

SLOT_WEIGHTS = (0.0, 0.5, 1.0)
"""The θ that are tried."""
TANGENTS = (0.0, 0.25, 0.5, 0.9)
"""Parts of the token budget at which step times are touched from below by a line."""


@dataclass(frozen=True)
class StepTime:
    """A lower estimate of any step's time, a sum over the requests in it.

    Attributes:
        fixed_s: Seconds of the step.
        decode_s: Seconds per decode.
        context_s: Seconds per token of the decodes' context.
        token_s: Seconds per prefill token; None: a step of prefills alone may take less than
            `fixed_s`, so that prefills get no share.
        half_pair_s: Seconds per prefilled token and half token before it.
    """

    fixed_s: float
    decode_s: float
    context_s: float
    token_s: float | None = None
    half_pair_s: float = 0.0


def step_times(gpu: GPUModel, stays: Residencies, max_tokens: int) -> list[StepTime]:
    """Lower estimates that are proven for a GPU model.

    Decodes beside prefills take at least what they take alone, under every model. A prefill beside
    others can be free (roofline): there it gets nothing. The fused models add attention to a time
    that depends on the tokens alone but for the number of sequences; lines below it are checked at
    every number of tokens that a step can have.

    Args:
        gpu: The step times.
        stays: The requests.
        max_tokens: Most tokens of a step.
    """
    decode = DecodeTimes(gpu)
    estimates = [StepTime(decode.base_s, 0.0, decode.context_s)]
    if isinstance(gpu, SyntheticGPUModel):
        per_decode = gpu.batch_latency((), 2, 0) - decode.base_s
        token = gpu.batch_latency(((0, 1),), 0, 0) - (decode.base_s - per_decode)
        fixed = max(0.0, decode.base_s - per_decode)
        estimates.append(StepTime(fixed, per_decode, decode.context_s, max(0.0, token)))
    elif isinstance(gpu, CalibratedGPUModel | SimpleGPUModel):
        estimates += _fused_step_times(gpu, decode.context_s, max_tokens)
    return estimates


def _fused_step_times(gpu: GPUModel, context_s: float, max_tokens: int) -> list[StepTime]:
    tokens = np.arange(1, max_tokens + 1)
    alone = np.array([gpu.batch_latency(((0, c),), 0, 0) for c in tokens.tolist()])
    one, two = (
        gpu.batch_latency(((c, c),), 0, 0) - gpu.batch_latency(((0, c),), 0, 0) for c in (1, 2)
    )
    # A chunk of c tokens after p takes p (2 c half_pair + read) more than at the beginning.
    half_pair = (two / 2 - one) / 2
    read = max(0.0, 2 * one - two / 2)
    by_tokens = alone - half_pair * tokens**2 - read * tokens
    estimates = []
    for part in TANGENTS:
        at = int(part * (max_tokens - 1))
        slope = max(0.0, float(np.diff(by_tokens[at : at + 2]).sum()))
        fixed = float((by_tokens - slope * tokens).min())
        if fixed >= 0:
            estimates.append(StepTime(fixed, slope, context_s, slope, half_pair))
    return estimates


@dataclass(frozen=True)
class Shares:
    """What the last stays take of one kind of share.

    Attributes:
        work: ∫ share, s, shape (n,).
        lag: Least distance of the work's mean time from the completion, s, shape (n,); any number
            where the work is 0.
    """

    work: FloatArray
    lag: FloatArray


def shares_bound(
    stays: Residencies, gpu: GPUModel, slots: int, max_tokens: int, workers: int
) -> float:
    """The best shares bound on Σ C_i, s.

    Args:
        stays: The requests.
        gpu: The step times.
        slots: Most sequences of a batch.
        max_tokens: Most tokens of a step.
        workers: Number of workers; the shares of each sum to at most 1.
    """
    estimates = step_times(gpu, stays, max_tokens)
    shares = [
        kind
        for theta in SLOT_WEIGHTS
        for kind in (
            time_shares(stays, theta, slots),
            *(step_shares(stays, theta, slots, max_tokens, estimate) for estimate in estimates),
        )
    ]
    return max(completion_sum(stays, kind, workers) for kind in shares)


def completion_sum(stays: Residencies, shares: Shares, workers: int) -> float:
    """The bound on Σ C_i of one kind of share, s; who needs no work completes when alone."""
    works = shares.work > 0
    busy = smallest_work_first(stays.arrival[works], shares.work[works] / workers)
    alone = (stays.arrival + stays.seconds)[~works]
    return busy + float(shares.lag[works].sum() + alone.sum())


def smallest_work_first(release: FloatArray, work: FloatArray) -> float:
    """Least Σ of mean busy times on one preemptive machine, s.

    Args:
        release: When each job may begin, s, shape (n,).
        work: Its seconds on the machine, above 0, shape (n,).
    """
    total, now = 0.0, 0.0
    waiting: list[tuple[float, int]] = []
    left = work.tolist()
    order = np.argsort(release, kind="stable").tolist()
    releases = [*release[order].tolist(), np.inf]
    for place, job in enumerate(order):
        now = max(now, releases[place])
        heappush(waiting, (work.item(job), job))
        while waiting and now < releases[place + 1]:
            size, first = waiting[0]
            end = min(now + left[first], releases[place + 1])
            total += (end - now) * (end + now) / 2 / size
            left[first] -= end - now
            if end < releases[place + 1] or left[first] <= 0:
                heappop(waiting)
            now = end
    return total


def time_shares(stays: Residencies, theta: float, slots: int) -> Shares:
    """A resident request gets occ all the time."""
    share = theta / slots + (1 - theta) * stays.memory
    begins = np.concatenate([np.zeros((len(share), 1)), stays.ends[:, :-1]], axis=1)
    work = share * (stays.ends - begins)
    distance = (work * (begins + stays.ends) / 2).sum(axis=1)
    return _shares(work.sum(axis=1), distance)


def step_shares(
    stays: Residencies, theta: float, slots: int, max_tokens: int, time: StepTime
) -> Shares:
    """A request gets the step time's terms of its own, and occ of the fixed one.

    The share of its prefill tokens is at most 1 while it gets it, so that they take at least their
    own work in time; the prefill's steps are counted, and said to hold no memory.
    """
    steps, n = stays.steps, len(stays.arrival)
    occupancy = theta / slots + (1 - theta) * steps.memory
    share = time.fixed_s * occupancy + time.decode_s + time.context_s * steps.context
    work = _by_request(steps.row, share, n)
    distance = _by_request(steps.row, share * steps.before_end, n)
    if time.token_s is not None:
        tokens = time.token_s * stays.computed + time.half_pair_s * _pairs(stays)
        held = time.fixed_s * theta / slots * -(-stays.computed // max_tokens)
        work = work + tokens + held
        distance = distance + tokens * (stays.decode_s + tokens / 2) + held * stays.decode_s
    return _shares(work, distance)


def _pairs(stays: Residencies) -> IntArray:
    """Twice the pairs of computed prompt tokens with tokens before them."""
    return stays.prompt**2 - (stays.prompt - stays.computed) ** 2


def _shares(work: FloatArray, distance: FloatArray) -> Shares:
    return Shares(work, distance / np.where(work > 0, work, 1.0))


def _by_request(row: IntArray, values: FloatArray, requests: int) -> FloatArray:
    """Sums of the values of each request's steps, shape (requests,)."""
    # Without any step, NumPy counts in whole numbers.
    return np.bincount(row, values, requests).astype(np.float64)
