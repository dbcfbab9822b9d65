"""Workloads from a window of a trace."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.request import Tenant
from opal_gym.sim.workloads.arrivals import arrival_times, draw_load
from opal_gym.sim.workloads.predictions import predict
from opal_gym.sim.workloads.slo import objectives
from opal_gym.sim.workloads.streams import Stream, generator
from opal_gym.sim.workloads.trace_files import TraceError
from opal_gym.sim.workloads.traces import Trace, read_trace
from opal_gym.sim.workloads.workload import Workload

if TYPE_CHECKING:
    from opal_gym.config import TraceWorkload


def trace_workload(
    config: TraceWorkload,
    seed: int,
    *,
    hash_block_tokens: int,
    rate_scale: float,
) -> Workload:
    """Replays a trace; see `make_workload`."""
    assert config.format != "sessions"
    trace = read_trace(
        config.path,
        config.format,
        hash_block_tokens=hash_block_tokens,
        spread_bins=config.spread_bins,
        skip_malformed=config.on_error == "skip",
    )
    rows, start_s, left_out = _window(config, trace, seed)
    load = rate_scale * config.rate_scale
    if config.arrivals is None:
        arrival_time = (trace.time_s[rows] - start_s) / load
    else:
        load *= draw_load(config.arrivals, seed)
        arrival_time = arrival_times(config.arrivals, len(rows), seed, load)
    output_tokens = trace.output_tokens[rows]
    return Workload(
        arrival_time=arrival_time,
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=output_tokens,
        predicted_output_tokens=predict(output_tokens, config.prediction_sigma, seed),
        tenant=np.zeros(len(rows), np.int64),
        priority=np.full(len(rows), config.priority, np.int64),
        tenants=(Tenant(config.tenant, config.weight, *objectives(config.slo)),),
        hash_ids=tuple(trace.hash_ids[row] for row in rows) if trace.hash_ids else (),
        load=load,
        left_out=left_out,
    )


def _window(
    config: TraceWorkload, trace: Trace, seed: int
) -> tuple[NDArray[np.int64], float, dict[str, int]]:
    """Rows of an episode, the window's start in trace seconds, and what is left out, by reason."""
    limit = math.inf if config.max_tokens is None else config.max_tokens
    fits = trace.prompt_tokens + trace.output_tokens <= limit
    fitting = np.flatnonzero(fits)
    if config.arrivals is None:
        first, last, start_s = _time_window(config, trace.time_s, fitting, seed)
    else:
        first, last, start_s = _first_row(config, fitting, seed), len(trace), 0.0
    rows = fitting[np.searchsorted(fitting, first) : np.searchsorted(fitting, last)]
    if config.num_requests is not None and config.num_requests < len(rows):
        rows = rows[: config.num_requests]
        last = int(rows[-1]) + 1
    left_out = {
        "malformed": trace.malformed,
        f"more than {limit} tokens": int(np.count_nonzero(~fits[first:last])),
    }
    left_out = {reason: count for reason, count in left_out.items() if count}
    if not len(rows):
        reasons = {**left_out, "outside the window": len(trace) - (last - first)}
        raise TraceError(
            f"{config.path}: got no request of {len(trace) + trace.malformed} rows ("
            + ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            + "); allowed: at least one"
        )
    return rows, start_s, left_out


def _time_window(
    config: TraceWorkload, time_s: NDArray[np.float64], fitting: NDArray[np.int64], seed: int
) -> tuple[int, int, float]:
    """The window's first row, the row after its last, and its start in trace seconds."""
    start_s = config.window_start_s
    if start_s is None:
        latest = _latest_start(config, time_s, fitting)
        start_s = generator(seed, Stream.WINDOW).uniform(0.0, latest)
    end_s = math.inf if config.window_s is None else start_s + config.window_s
    first, last = np.searchsorted(time_s, (start_s, end_s))
    return int(first), int(last), start_s


def _latest_start(
    config: TraceWorkload, time_s: NDArray[np.float64], fitting: NDArray[np.int64]
) -> float:
    """The latest start in trace seconds that leaves a whole window; 0 if none does."""
    if config.window_s is not None and len(time_s):
        return max(0.0, float(time_s[-1]) - config.window_s)
    if config.window_s is None and config.num_requests and config.num_requests < len(fitting):
        return float(time_s[fitting[-config.num_requests]])
    return 0.0


def _first_row(config: TraceWorkload, fitting: NDArray[np.int64], seed: int) -> int:
    """The first row of an episode from a file without times, in which windows are of rows."""
    if config.window_start_s == 0 or config.num_requests is None:
        return 0
    last_start = len(fitting) - config.num_requests
    if last_start <= 0:
        return 0
    return int(fitting[generator(seed, Stream.WINDOW).integers(last_start + 1)])
