"""A lower bound on the mean latency of a workload, whatever the scheduler.

Source: ``reference/policies.md``, "Lower bound on the mean latency". Three bounds on the sum of the
completion times C_i, of which the best is taken:

- alone: Σ (r_i + e_i), each request's arrival and the least time that its steps take alone;
- prices: `agents.price_bound`;
- shares: `agents.shares_bound`.

Of the worker they use only this: a request completes after a contiguous stay in the batch; a batch
has at most `max_num_seqs` requests and the pool's blocks; a step takes at least what the requests
in it would take alone. Several workers are bounded like one of their summed slots, memory and
shares, which any routing respects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agents.price_bound import price_bound
from agents.residency import Residencies
from agents.shares_bound import shares_bound
from opal_gym.config import Config
from opal_gym.sim.gpu_model import GPUModel
from opal_gym.sim.simulation import accepted_requests, make_gpu_model
from opal_gym.sim.workloads import Workload

ROUNDING = 1e-9
"""Relative reserve for rounding, in the bounds and in the simulation they are held against."""


@dataclass(frozen=True)
class LowerBound:
    """What no scheduler's mean E2E latency over the accepted requests is below, s.

    Attributes:
        alone: Mean of the times that the requests take alone.
        prices: The price bound; None where it does not hold.
        shares: The shares bound; None where it does not hold.
    """

    alone: float
    prices: float | None = None
    shares: float | None = None

    @property
    def mean(self) -> float:
        """The best of the bounds, s."""
        return max(bound for bound in (self.alone, self.prices, self.shares) if bound is not None)


def no_bound_reason(config: Config) -> str | None:
    """Why no bound is given for a configuration; None where there is one."""
    if config.worker.kind == "single_stage":
        return "the single-stage worker has no batch"
    if config.env.horizon_s is not None:
        return "a horizon may leave out any of the requests"
    return None


def lower_bound(config: Config, workload: Workload) -> LowerBound:
    """The lower bound on the mean E2E latency.

    Prices and shares need arrival times that no scheduler changes, and preempted requests that
    restart: in closed-loop sessions and with the engine `vllm_v1` only the times alone are used.

    Args:
        config: What is simulated.
        workload: The requests; those that the worker rejects are left out, as in the mean.

    Raises:
        ValueError: There is no bound (`no_bound_reason`), or no request is accepted.
    """
    reason = no_bound_reason(config)
    accepted = accepted_requests(config, workload)
    if reason or not accepted.any():
        raise ValueError(f"lower bound: got none; {reason or 'no request is accepted'}")
    gpu, requests = make_gpu_model(config), _rows(workload, accepted)
    stays = Residencies.of(config, requests, gpu)
    keeps_tokens = config.worker.vllm_params.engine == "vllm_v1"
    alone = keeping_seconds(stays, gpu) if keeps_tokens else stays.seconds
    bound = LowerBound(_reserved(float(alone.mean())))
    if keeps_tokens or len(workload.next_rows):
        return bound
    params, workers = config.worker.vllm_params, config.simulation.num_workers
    slots, budget = params.max_num_seqs, params.max_num_batched_tokens
    completions = {
        "prices": price_bound(stays, slots * workers, workers),
        "shares": shares_bound(stays, gpu, slots, budget, workers),
    }
    arrivals = requests.arrival_time.sum()
    return replace(
        bound,
        **{
            name: max(0.0, _reserved((total - arrivals) / len(requests), arrivals / len(requests)))
            for name, total in completions.items()
        },
    )


def keeping_seconds(stays: Residencies, gpu: GPUModel) -> NDArray[np.float64]:
    """Least seconds of each request where a preempted one keeps its output tokens, shape (n,).

    The prompt is prefilled before the first token. Each later token ends another step of the
    request: a decode of at least the first context, or the last chunk of a recomputation.
    """
    first_decode = np.array([gpu.batch_latency((), 1, int(p)) for p in stays.prompt])
    token = np.minimum(first_decode, stays.prefill.alone.min())
    seconds: NDArray[np.float64] = stays.prefill_s + (stays.output - 1) * token
    return seconds


def _reserved(bound: float, scale: float = 0.0) -> float:
    """A bound less a reserve for rounding of numbers of its size, or of `scale`."""
    return float(bound - ROUNDING * max(bound, scale))


def _rows(workload: Workload, chosen: NDArray[np.bool_]) -> Workload:
    """The chosen requests of a workload."""
    hash_ids = workload.hash_ids
    return replace(
        workload,
        arrival_time=workload.arrival_time[chosen],
        prompt_tokens=workload.prompt_tokens[chosen],
        output_tokens=workload.output_tokens[chosen],
        hash_ids=tuple(h for h, take in zip(hash_ids, chosen, strict=True) if take)
        if hash_ids
        else (),
    )
