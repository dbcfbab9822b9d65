"""Runs spread over the machines of a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from agents.evaluation import Files, Job, Run, simulate, write_files
from agents.missing import require


def _address_of(words: list[str]) -> str:
    if len(words) > 1:
        raise ValueError(f"got {' '.join(words)}; allowed: at most one address")
    return "".join(words)


RayAddress = Annotated[
    str | None,
    arg(help_behavior_hint="(default: without Ray)"),
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="[ADDRESS]",
        instance_from_str=_address_of,
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: [value] if value else [],
    ),
]
"""A command line's cluster: None where the flag is missing, "" where it has no address."""


def connect(address: str) -> None:
    """Connects this process to a cluster, until the process ends; once is enough.

    Args:
        address: `host:port` of a cluster's head; `auto`: the cluster that `ray start` began on this
            machine; `local`: a new one on this machine; empty: the environment's RAY_ADDRESS, or
            else `local`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: There is no such cluster.
    """
    require("rllib", "ray")
    import ray

    address = address or os.environ.get("RAY_ADDRESS", "local")
    try:
        _check_reachable(address)
        ray.init(
            address,
            ignore_reinit_error=True,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises plain ones, too
        raise ValueError(
            f"Ray's address: got {address!r}; allowed: host:port of a running cluster, auto, or "
            f"local ({error})"
        ) from None


def _check_reachable(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=5).close()


def run_on_cluster(jobs: Sequence[Job]) -> Generator[Run, None, None]:
    """Runs jobs as tasks of the connected cluster; see `agents.evaluation.run_jobs`.

    A task takes a CPU. The files are written here; files that a job reads (a trace, a trained
    policy) must lie at the same path on every machine.
    """
    import ray

    task, here = ray.remote(_simulate_from), Path.cwd()
    pending = [task.remote(here, job) for job in jobs]
    try:
        while pending:
            (finished,), pending = ray.wait(pending)
            run, files = ray.get(finished)
            write_files(files)
            yield run
    finally:
        # Nobody waits for the runs under way.
        for each in pending:
            ray.cancel(each, force=True)


def _simulate_from(directory: Path, job: Job) -> tuple[Run, Files]:
    """Runs a job whose relative paths begin at a directory, as they do where it was made."""
    if directory.is_dir():
        os.chdir(directory)
    return simulate(job)
