"""A small Ray cluster on this machine, for tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two CPUs, whose processes were not started in the current directory."""
    ray = pytest.importorskip("ray", reason="needs the extra `rllib`")
    directory = os.getcwd()
    os.chdir("/")
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"worker_niceness": 0},  # else whatever else runs here starves them
    )
    os.chdir(directory)
    yield
    ray.shutdown()
