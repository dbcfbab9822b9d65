"""Files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def temporary(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}.tmp")


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file and then renames it into its place, replacing an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary(path).write_bytes(data)
        os.replace(temporary(path), path)
    finally:
        temporary(path).unlink(missing_ok=True)


def check_writable(directory: Path) -> None:
    """Makes a directory, and a file in it that is gone again.

    Raises:
        OSError: Nothing can be written there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass
