"""Files of recorded requests: their lines, the values in these, and how a mistake is reported."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, NoReturn

MAX_TOKENS = 2**31 - 1
"""The largest token count that a trace may hold."""

MAX_TIME = 2**53
"""Times in a trace's own unit are below this: integers are exact in float64."""


class TraceError(ValueError):
    """An unusable trace; the message names file, line, column, value and what is allowed."""


class MalformedRowError(Exception):
    """What is wrong with a row, without the file and the line."""


def wrong(column: str, value: object, allowed: str) -> MalformedRowError:
    """A value that a column must not have."""
    return MalformedRowError(f"{column}: got {value!r:.60}; allowed: {allowed}")


def missing(column: str, allowed: str) -> MalformedRowError:
    """A column that is not there."""
    return MalformedRowError(f"{column}: missing; allowed: {allowed}")


# --- files ---------------------------------------------------------------------------------------


def file_version(path: Path) -> tuple[int, int]:
    """A file's time of change and size: another version has others.

    Raises:
        TraceError: There is no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        _unreadable(path, error)
    return status.st_mtime_ns, status.st_size


def read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not blank, numbered from 1; gzip is known by the name or first bytes.

    Raises:
        TraceError: The file cannot be read, or has no line.
    """
    data = _read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start : error.start + 1]
        raise TraceError(f"{path}:{line}: text: got {byte!r}; allowed: UTF-8") from None
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    if not lines:
        raise TraceError(f"{path}: got an empty file; allowed: at least one request")
    return lines


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        _unreadable(path, error)
    if path.suffix != ".gz" and not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(
            f"{path}: got a broken gzip file ({error}); allowed: a whole one"
        ) from None


def _unreadable(path: Path, error: OSError) -> NoReturn:
    raise TraceError(
        f"{path}: {error.strerror}; allowed: the path of a trace file (the configuration's "
        "`workload.path`)"
    ) from None


# --- values --------------------------------------------------------------------------------------


def json_object(line: str) -> dict[str, Any]:
    """The object that a line holds."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise wrong("row", line, "a JSON object")
    return record


def value(record: dict[str, Any], key: str) -> Any:
    """A value that every row has."""
    if key not in record:
        raise missing(key, "a value in every row")
    return record[key]


def count(column: str, value: object) -> int:
    """A token count."""
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise wrong(column, value, f"an integer from 1 to {MAX_TOKENS}")
    return value


def hash_list(value: object) -> tuple[int, ...]:
    """Chained hashes of a prompt's blocks; they stand for all that precedes, so none repeats."""
    if not isinstance(value, list) or any(type(hash_id) is not int for hash_id in value):
        raise wrong("hash_ids", value, "a list of integers")
    if len(set(value)) < len(value):
        raise wrong("hash_ids", value, "integers that differ, being chained")
    return tuple(value)
