"""Files of recorded requests, read into columns.

Formats: the Azure LLM inference traces (CSV), Mooncake's traces (JSON lines) and plain CSV files of
lengths; each may be gzipped. A mistake in a file is reported with its line, column and value.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

TraceFormat = Literal["azure", "mooncake", "lengths"]

CSV_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "lengths": ("input_length", "output_length"),
}
MOONCAKE_BIN_S = 3.0
"""The Mooncake traces record arrivals on a grid of this many seconds."""

_MAX_TOKENS = 2**31 - 1
_MAX_TIMESTAMP_MS = 2**53
_EPOCH = datetime(1970, 1, 1)
_UTC_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(?:Z|\+00:00)?", re.ASCII)


class TraceError(ValueError):
    """An unusable trace; the message names file, line, column, value and what is allowed."""


class Row(NamedTuple):
    """One recorded request; its time counts from any origin, in ns."""

    time_ns: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Recorded requests, n rows in the order of the file. The arrays are read-only.

    Attributes:
        time_s: Seconds since the first row, not decreasing, shape (n,); zeros without times.
        prompt_tokens: Shape (n,), int64, at least 1.
        output_tokens: Shape (n,), int64, at least 1.
        hash_ids: Chained hashes of each prompt's blocks; empty: the format has none.
        malformed: Rows that were skipped.
    """

    time_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    hash_ids: tuple[tuple[int, ...], ...]
    malformed: int

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.time_s)


def read_trace(
    path: str | Path,
    trace_format: TraceFormat,
    *,
    hash_block_tokens: int = 512,
    spread_bins: bool = True,
    skip_malformed: bool = False,
) -> Trace:
    """Reads a trace; the last few read are kept, and read again when their file has changed.

    Args:
        path: The file; gzipped if its name or its first bytes say so.
        trace_format: Its format.
        hash_block_tokens: Tokens that one id of a Mooncake trace stands for.
        spread_bins: Spread the requests that a Mooncake trace records at one time evenly over
            the 3 s that begin then, in the order of the file.
        skip_malformed: Count malformed rows instead of raising.

    Raises:
        TraceError: The file cannot be read, or a row is malformed.
    """
    path = Path(path).absolute()
    try:
        status = path.stat()
    except OSError as error:
        _unreadable(path, error)
    return _read_version(
        path,
        trace_format,
        hash_block_tokens,
        spread_bins,
        skip_malformed,
        (status.st_mtime_ns, status.st_size),
    )


@lru_cache(maxsize=8)
def _read_version(
    path: Path,
    trace_format: TraceFormat,
    hash_block_tokens: int,
    spread_bins: bool,
    skip_malformed: bool,
    version: tuple[int, int],  # a part of the cache's key alone
) -> Trace:
    lines = _read_lines(path)
    if trace_format == "mooncake":
        parse: Callable[[str], Row] = partial(_mooncake_row, hash_block_tokens=hash_block_tokens)
    else:
        parse = _csv_parser(path, trace_format, lines.pop(0))
    rows, malformed = _parse_rows(path, lines, parse, skip_malformed)
    return _columns(rows, malformed, spread_bins and trace_format == "mooncake")


def _columns(rows: Sequence[Row], malformed: int, spread_bins: bool) -> Trace:
    time_s = np.array([(row.time_ns - rows[0].time_ns) / 1e9 for row in rows])
    trace = Trace(
        time_s=_spread(time_s) if spread_bins else time_s,
        prompt_tokens=np.array([row.prompt_tokens for row in rows], np.int64),
        output_tokens=np.array([row.output_tokens for row in rows], np.int64),
        hash_ids=tuple(row.hash_ids for row in rows) if any(r.hash_ids for r in rows) else (),
        malformed=malformed,
    )
    for column in (trace.time_s, trace.prompt_tokens, trace.output_tokens):
        column.setflags(write=False)
    return trace


def _spread(time_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spreads equal times over a bin, which ends early where the next one begins."""
    first = np.flatnonzero(np.diff(time_s, prepend=-np.inf))
    size = np.diff(first, append=len(time_s))
    width = np.minimum(MOONCAKE_BIN_S, np.diff(time_s[first], append=np.inf))
    rank = np.arange(len(time_s)) - np.repeat(first, size)
    return time_s + rank * np.repeat(width / size, size)


# --- files ---------------------------------------------------------------------------------------


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not blank, numbered from 1."""
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


# --- rows ----------------------------------------------------------------------------------------


class _MalformedError(Exception):
    """What is wrong with a row, without the file and the line."""


def _wrong(column: str, value: object, allowed: str) -> _MalformedError:
    return _MalformedError(f"{column}: got {value!r:.60}; allowed: {allowed}")


def _missing(column: str, allowed: str) -> _MalformedError:
    return _MalformedError(f"{column}: missing; allowed: {allowed}")


def _parse_rows(
    path: Path,
    lines: Iterable[tuple[int, str]],
    parse: Callable[[str], Row],
    skip_malformed: bool,
) -> tuple[list[Row], int]:
    """The well-formed rows, and the number of the others."""
    rows: list[Row] = []
    malformed = 0
    for number, line in lines:
        try:
            row = parse(line)
            if rows and row.time_ns < rows[-1].time_ns:
                back = (rows[-1].time_ns - row.time_ns) / 1e9
                raise _MalformedError(
                    f"timestamp: got {back:g} s before the row above; allowed: times in order"
                )
            rows.append(row)
        except _MalformedError as error:
            if not skip_malformed:
                raise TraceError(f"{path}:{number}: {error}") from None
            malformed += 1
    return rows, malformed


def _csv_parser(
    path: Path, trace_format: Literal["azure", "lengths"], header: tuple[int, str]
) -> Callable[[str], Row]:
    """A parser of the rows under a header. No field needs quotes in these formats."""
    number, line = header
    names, columns = line.split(","), CSV_COLUMNS[trace_format]
    for column in columns:
        if column not in names:
            error = _missing(column, f"a first line that names {', '.join(columns)}")
            raise TraceError(f"{path}:{number}: {error}")
    indices = [names.index(column) for column in columns]
    return partial(
        _azure_row if trace_format == "azure" else _lengths_row, names=names, indices=indices
    )


def _fields(line: str, names: Sequence[str], indices: Sequence[int]) -> list[str]:
    fields = line.split(",")
    if len(fields) < len(names):
        raise _missing(names[len(fields)], f"{len(names)} fields")
    if len(fields) > len(names):
        raise _wrong("row", line, f"{len(names)} fields")
    return [fields[index] for index in indices]


def _azure_row(line: str, names: Sequence[str], indices: Sequence[int]) -> Row:
    time, *tokens = _fields(line, names, indices)
    return Row(_utc_ns(time), *_counts(CSV_COLUMNS["azure"][1:], tokens))


def _lengths_row(line: str, names: Sequence[str], indices: Sequence[int]) -> Row:
    return Row(0, *_counts(CSV_COLUMNS["lengths"], _fields(line, names, indices)))


def _utc_ns(text: str) -> int:
    """Nanoseconds since 1970; Python's own parser takes seven decimals only from 3.11 on."""
    match = _UTC_TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        since_epoch = datetime.fromisoformat(f"{match[1]} {match[2]}") - _EPOCH
    except ValueError:
        raise _wrong("TIMESTAMP", text, "a UTC time like 2023-11-16 18:15:46.6805900") from None
    seconds = since_epoch.days * 86_400 + since_epoch.seconds
    return seconds * 10**9 + int(f"{match[3] or 0:0<9}"[:9])


def _mooncake_row(line: str, hash_block_tokens: int) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise _wrong("row", line, "a JSON object")
    time_ms, prompt, output, hash_ids = (
        _value(record, key) for key in ("timestamp", "input_length", "output_length", "hash_ids")
    )
    if type(time_ms) not in (int, float) or not 0 <= time_ms < _MAX_TIMESTAMP_MS:
        raise _wrong("timestamp", time_ms, "milliseconds, at least 0")
    prompt, output = _count("input_length", prompt), _count("output_length", output)
    if not isinstance(hash_ids, list) or any(type(hash_id) is not int for hash_id in hash_ids):
        raise _wrong("hash_ids", hash_ids, "a list of integers")
    blocks = -(-prompt // hash_block_tokens)
    if len(hash_ids) != blocks:
        allowed = f"{blocks}, one for every {hash_block_tokens} tokens (kvc.hash_block_tokens)"
        raise _wrong("number of hash_ids", len(hash_ids), allowed)
    return Row(round(time_ms * 10**6), prompt, output, tuple(hash_ids))


def _value(record: dict[str, Any], key: str) -> Any:
    if key not in record:
        raise _missing(key, "a value in every row")
    return record[key]


def _count(column: str, value: object) -> int:
    """A token count."""
    if type(value) is not int or not 1 <= value <= _MAX_TOKENS:
        raise _wrong(column, value, f"an integer from 1 to {_MAX_TOKENS}")
    return value


def _counts(columns: Sequence[str], fields: Sequence[str]) -> tuple[int, int]:
    """Prompt and output tokens from two fields of a CSV row."""
    prompt, output = map(_count, columns, map(_number, fields))
    return prompt, output


def _number(text: str) -> int | str:
    """The integer that a field holds, or else the field; `int` alone takes `1_0` and ` 1` too."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else text
