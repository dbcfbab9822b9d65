"""The one way to make a workload from a configuration."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from opal_gym.sim.workloads.replay import trace_workload
from opal_gym.sim.workloads.sessions import session_workload
from opal_gym.sim.workloads.synthetic import synthetic_workload
from opal_gym.sim.workloads.workload import Workload

if TYPE_CHECKING:
    from opal_gym.config import LengthInformation, SyntheticWorkload, TraceWorkload


def make_workload(
    config: SyntheticWorkload | TraceWorkload,
    seed: int,
    *,
    length_information: LengthInformation,
    hash_block_tokens: int = 512,
    rate_scale: float = 1.0,
) -> Workload:
    """Draws the requests of one episode.

    Equal arguments give equal workloads, in any process. Arrivals, their modulation, lengths,
    tenants, prefixes, predictions, load and window each have a random stream of their own: a
    change of the load or of `rate_scale` moves arrivals only, a change of a length distribution
    leaves arrivals alone.

    Args:
        config: The distributions, or the trace.
        seed: At least 0.
        length_information: What schedulers see of output lengths (DESIGN §3).
        hash_block_tokens: Tokens that one hash id stands for (`kvc.hash_block_tokens`).
        rate_scale: Arrivals are this much faster than configured; `Workload.load` includes it.

    Raises:
        TraceError: A trace cannot be read, has a malformed row, or no request is left of it.
    """
    if not 0 < rate_scale < math.inf:
        raise ValueError(f"rate_scale: got {rate_scale!r}; allowed: a finite number above 0")
    if config.kind == "synthetic":
        make = partial(synthetic_workload, config)
    elif config.format == "sessions":
        make = partial(session_workload, config)
    else:
        make = partial(trace_workload, config)
    workload = make(seed, hash_block_tokens=hash_block_tokens, rate_scale=rate_scale)
    return workload.with_length_information(length_information)
