"""What an evaluation runs: a scenario, or a trace on a scenario's worker, with a user's changes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opal_gym.config import Config, ConfigError, SyntheticWorkload, TraceWorkload, load_config
from opal_gym.sim.workloads import TraceError
from opal_gym.sim.workloads.traces import CSV_COLUMNS, TraceFormat

DEFAULT_SCENARIO = "mem-chat-burst"
SCENARIO_REQUESTS = 1000
"""Requests of an evaluation's workload where a scenario draws it."""


@dataclass(frozen=True)
class Source:
    """What a user asked to evaluate; None: not said.

    Attributes:
        scenario: Name or JSON file.
        trace: A trace file, which replaces the scenario's workload.
        trace_format: Its format; None: found out from its first line.
        window_s: Seconds of the trace.
        window_start_s: Start of the window in trace seconds.
        rate_scale: Arrivals are this much faster than recorded.
        max_tokens: Requests of the trace with more prompt + output tokens are left out.
        skip_malformed: Malformed rows of the trace are left out and counted.
        requests: Requests of a workload.
        load: Share of the saturated service rate.
        overrides: Values by dotted key, applied last.
    """

    scenario: str | None = None
    trace: Path | None = None
    trace_format: TraceFormat | None = None
    window_s: float | None = None
    window_start_s: float | None = None
    rate_scale: float | None = None
    max_tokens: int | None = None
    skip_malformed: bool = False
    requests: int | None = None
    load: float | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)


def load_source(source: Source) -> Config:
    """The configuration of an evaluation, in which nothing is left to draw but the workload.

    Of a range of loads the highest is taken. A trace has the worker of `scenario`; without one, of
    the scenario made for its format.

    Raises:
        ConfigError: A value is impossible, or does not apply to this kind of workload.
        TraceError: The trace's format is not known.
    """
    if source.trace is None:
        config = load_config(source.scenario or DEFAULT_SCENARIO)
    else:
        config = _with_trace(source, source.trace)
    if isinstance(config.workload, TraceWorkload):
        changes = _trace_changes(source)
    else:
        changes = _synthetic_changes(source)
    arrivals = config.workload.arrivals
    if arrivals is None:
        _refuse("load", source.load, "none: a trace has its own times (--rate-scale)")
    else:
        highest = arrivals.load[1] if isinstance(arrivals.load, tuple) else arrivals.load
        changes["workload.arrivals.load"] = highest if source.load is None else source.load
    return load_config(config, {**changes, **source.overrides})


def parse_override(text: str) -> tuple[str, Any]:
    """The key and the value of `key=value`; a value that is not JSON is a string.

    Raises:
        ConfigError: The text has another form.
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ConfigError(f"--set: got {text!r}; allowed: key=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def detect_format(path: Path) -> TraceFormat:
    """The format of a trace, from its first line.

    Raises:
        TraceError: The file cannot be read, or begins like none of the formats.
    """
    line = _first_line(path)
    if line.startswith("{"):
        return "mooncake"
    names = set(line.split(","))
    if names.issuperset(CSV_COLUMNS["azure"]):
        return "azure"
    if names.issuperset(CSV_COLUMNS["lengths"]):
        return "lengths"
    allowed = "; ".join(",".join(columns) for columns in CSV_COLUMNS.values())
    raise TraceError(
        f"{path}:1: format: got {line[:60]!r}; allowed: a JSON object (mooncake), or a header "
        f"that names {allowed}"
    )


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else path.open("rb") as file:
            return file.readline(4096).decode("utf-8-sig", errors="replace").strip()
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: {reason}; allowed: the path of a trace file") from None


def _with_trace(source: Source, trace: Path) -> Config:
    """The scenario whose worker a trace runs on, with the trace as its workload."""
    trace_format = source.trace_format or detect_format(trace)
    if trace_format == "lengths":
        return _with_lengths(load_config(source.scenario or DEFAULT_SCENARIO), trace)
    made_for = _scenario_for(trace_format, trace)
    workload = load_config(made_for).workload
    whole = source.window_s is None and source.requests is None
    return load_config(
        source.scenario or made_for,
        {
            "workload": {
                **workload.model_dump(),
                "path": str(trace),
                "rate_scale": 1.0,
                "num_requests": None,
                "window_start_s": 0.0 if whole else None,
            }
        },
    )


def _scenario_for(trace_format: TraceFormat, trace: Path) -> str:
    if trace_format == "mooncake":
        return "trace-mooncake"
    return "trace-azure-code" if "code" in trace.name.lower() else "trace-azure-conv"


def _with_lengths(config: Config, trace: Path) -> Config:
    """A scenario whose lengths come from a file; its arrivals stay."""
    if not isinstance(config.workload, SyntheticWorkload):
        raise ConfigError(
            f"scenario: got {config.name!r}; allowed: one with an arrival process, since the "
            "format `lengths` has no times"
        )
    workload = {
        "kind": "trace",
        "format": "lengths",
        "path": str(trace),
        "arrivals": config.workload.arrivals.model_dump(),
        "slo": config.workload.tenants[0].slo,
    }
    return load_config(config, {"workload": workload})


def _trace_changes(source: Source) -> dict[str, Any]:
    settings = {
        "workload.window_s": source.window_s,
        "workload.window_start_s": source.window_start_s,
        "workload.rate_scale": source.rate_scale,
        "workload.max_tokens": source.max_tokens,
        "workload.on_error": "skip" if source.skip_malformed else None,
    }
    drawn = source.trace is None and source.window_s is None
    requests = source.requests or (SCENARIO_REQUESTS if drawn else None)
    changes = {key: value for key, value in settings.items() if value is not None}
    return {**changes, "workload.num_requests": requests}


def _synthetic_changes(source: Source) -> dict[str, Any]:
    traces_only = {
        "window": source.window_s,
        "window-start": source.window_start_s,
        "rate-scale": source.rate_scale,
        "max-tokens": source.max_tokens,
        "on-error": "skip" if source.skip_malformed else None,
    }
    for name, value in traces_only.items():
        _refuse(name, value, "only for a trace")
    return {"workload.num_requests": source.requests or SCENARIO_REQUESTS}


def _refuse(name: str, value: object, allowed: str) -> None:
    if value is not None:
        raise ConfigError(f"--{name}: got {value!r}; allowed: {allowed}")
