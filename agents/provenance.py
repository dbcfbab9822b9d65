"""How a file of results came to be."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("opal-gym", "gymnasium", "numpy", "pydantic", "simpy")
TRAINING_PACKAGES = ("cma", "sb3-contrib", "stable-baselines3", "torch")


def provenance(
    started: float, *, complete: bool, packages: Sequence[str] = PACKAGES
) -> dict[str, Any]:
    """The command, when and how long it ran, and the versions of what it ran on.

    Args:
        started: Unix time of the start, s.
        complete: Whether all of it has run.
        packages: Whose versions matter.
    """
    return {
        "complete": complete,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "created": datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="seconds"),
        "wall_s": round(time.time() - started, 3),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
    }
