"""The service rate of a worker that is never short of work."""

from __future__ import annotations

from typing import Any

from opal_gym.config import Config, TraceWorkload, load_config
from opal_gym.sim.policies import FifoLeastWorkPolicy
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import make_workload

OVERLOAD = 1e6
"""Arrivals per second, or the speed-up of a trace, at which all requests arrive at once."""

FIRST, LAST = 0.2, 0.8
"""The measured part of the completions: past the start's empty pool, with work still waiting."""


def overloaded(config: Config, num_requests: int) -> Config:
    """The same worker and the same lengths, with `num_requests` requests that arrive at once."""
    if isinstance(config.workload, TraceWorkload) and config.workload.arrivals is None:
        arrivals: dict[str, Any] = {"workload.rate_scale": OVERLOAD}
    else:
        arrivals = {"workload.arrivals": {"rate_per_s": OVERLOAD}}
    return load_config(config, {**arrivals, "workload.num_requests": num_requests})


def saturated_rate(config: Config, num_requests: int, seed: int) -> float:
    """Completions per second of the FIFO baseline while its queue is never empty.

    All requests arrive at once; counted are the completions between `FIRST` and `LAST` of them. In
    a pool that is too small for the batch, this is the rate of a FIFO that thrashes, with its
    recomputation: the highest load from which it recovers after a burst.

    Args:
        config: The scenario; its arrivals are replaced.
        num_requests: Requests of the workload, several times the size of a batch.
        seed: The workload's seed.

    Returns:
        Requests per second.
    """
    config = overloaded(config, num_requests)
    workload = make_workload(
        config.workload,
        seed,
        length_information=config.simulation.length_information,
        hash_block_tokens=config.kvc.hash_block_tokens,
    )
    simulation = Simulation(config, workload, FifoLeastWorkPolicy())
    simulation.run()
    done = simulation.records.table["decode_done_time"]
    first, last = int(FIRST * len(done)), int(LAST * len(done))
    return (last - first) / float(done[last] - done[first])
