"""When requests arrive: a renewal process whose rate is modulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.workloads.modulation import simulated_time
from opal_gym.sim.workloads.streams import Stream, generator

if TYPE_CHECKING:
    from opal_gym.config import ArrivalConfig, GammaProcess, PoissonProcess


def draw_load(config: ArrivalConfig, seed: int) -> float:
    """The configured load, or one drawn uniformly from the configured range."""
    if not isinstance(config.load, tuple):
        return config.load
    return generator(seed, Stream.LOAD).uniform(*config.load)


def arrival_times(
    config: ArrivalConfig, num_requests: int, seed: int, load: float
) -> NDArray[np.float64]:
    """Arrival times of a renewal process that begins at time 0.

    Args:
        config: The process, its rate and the rate's modulation.
        num_requests: Number n of arrivals.
        seed: The workload's seed.
        load: Share of the configured rate.

    Returns:
        Seconds, not decreasing, shape (n,).
    """
    gaps = _gaps(config.process, num_requests, generator(seed, Stream.ARRIVALS))
    operational = np.cumsum(gaps) / (config.rate_per_s * load)
    return simulated_time(operational, config.modulation, seed)


def _gaps(
    process: PoissonProcess | GammaProcess, num_requests: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Gaps with mean 1; a gamma distribution of shape k has the cv 1/√k."""
    if process.kind == "poisson":
        return rng.standard_exponential(num_requests)
    return rng.standard_gamma(process.cv**-2, num_requests) * process.cv**2
