"""Workloads drawn from distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.request import Tenant
from opal_gym.sim.workloads.arrivals import arrival_times, draw_load
from opal_gym.sim.workloads.lengths import lengths_from
from opal_gym.sim.workloads.predictions import predict
from opal_gym.sim.workloads.prefixes import prompt_hash_ids
from opal_gym.sim.workloads.slo import objectives
from opal_gym.sim.workloads.streams import Stream, generator, pick
from opal_gym.sim.workloads.workload import Workload

if TYPE_CHECKING:
    from opal_gym.config import SyntheticWorkload, TenantConfig


def synthetic_workload(
    config: SyntheticWorkload,
    seed: int,
    *,
    hash_block_tokens: int,
    rate_scale: float,
) -> Workload:
    """Draws a workload; see `make_workload`."""
    n, tenants = config.num_requests, config.tenants
    load = draw_load(config.arrivals, seed) * rate_scale
    tenant = pick([tenant.share for tenant in tenants], generator(seed, Stream.TENANTS).random(n))
    prompt_tokens, output_tokens = _lengths(tenants, tenant, seed)
    return Workload(
        arrival_time=arrival_times(config.arrivals, n, seed, load),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        predicted_output_tokens=predict(output_tokens, config.prediction_sigma, seed),
        tenant=tenant,
        priority=np.array([tenant.priority for tenant in tenants], np.int64)[tenant],
        tenants=tuple(Tenant(t.name, t.weight, *objectives(t.slo)) for t in tenants),
        hash_ids=prompt_hash_ids(
            [tenant.prefix for tenant in tenants], tenant, prompt_tokens, hash_block_tokens, seed
        ),
        load=load,
    )


def _lengths(
    tenants: Sequence[TenantConfig], tenant: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompt and output lengths in tokens, shapes (n,), by each request's tenant."""
    n = len(tenant)
    uniform = generator(seed, Stream.LENGTHS, 0).random((n, 2))
    normal = generator(seed, Stream.LENGTHS, 1).standard_normal((n, 2))
    lengths = np.empty((2, n), np.int64)
    for index, config in enumerate(tenants):
        rows = np.flatnonzero(tenant == index)
        for column, distribution in enumerate((config.prompt, config.output)):
            lengths[column, rows] = lengths_from(
                distribution, uniform[rows, column], normal[rows, column]
            )
    return lengths[0], lengths[1]
