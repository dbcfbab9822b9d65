"""Files of recorded requests, read into columns.

Formats: the Azure LLM inference traces (CSV), Mooncake's traces (JSON lines) and plain CSV files of
lengths; each may be gzipped. A mistake in a file is reported with its line, column and value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.workloads.trace_files import (
    MAX_TIME,
    MalformedRowError,
    TraceError,
    count,
    file_version,
    hash_list,
    json_object,
    missing,
    read_lines,
    value,
    wrong,
)

TraceFormat = Literal["azure", "mooncake", "lengths"]

CSV_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "lengths": ("input_length", "output_length"),
}
MOONCAKE_BIN_S = 3.0
"""The Mooncake traces record arrivals on a grid of this many seconds."""

_EPOCH = datetime(1970, 1, 1)
_UTC_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(?:Z|\+00:00)?", re.ASCII)


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
    return _read_version(
        path, trace_format, hash_block_tokens, spread_bins, skip_malformed, file_version(path)
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
    lines = read_lines(path)
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


# --- rows ----------------------------------------------------------------------------------------


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
                raise MalformedRowError(
                    f"timestamp: got {back:g} s before the row above; allowed: times in order"
                )
            rows.append(row)
        except MalformedRowError as error:
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
            error = missing(column, f"a first line that names {', '.join(columns)}")
            raise TraceError(f"{path}:{number}: {error}")
    indices = [names.index(column) for column in columns]
    return partial(
        _azure_row if trace_format == "azure" else _lengths_row, names=names, indices=indices
    )


def _fields(line: str, names: Sequence[str], indices: Sequence[int]) -> list[str]:
    fields = line.split(",")
    if len(fields) < len(names):
        raise missing(names[len(fields)], f"{len(names)} fields")
    if len(fields) > len(names):
        raise wrong("row", line, f"{len(names)} fields")
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
        raise wrong("TIMESTAMP", text, "a UTC time like 2023-11-16 18:15:46.6805900") from None
    seconds = since_epoch.days * 86_400 + since_epoch.seconds
    return seconds * 10**9 + int(f"{match[3] or 0:0<9}"[:9])


def _mooncake_row(line: str, hash_block_tokens: int) -> Row:
    record = json_object(line)
    time_ms, prompt, output, hash_ids = (
        value(record, key) for key in ("timestamp", "input_length", "output_length", "hash_ids")
    )
    if type(time_ms) not in (int, float) or not 0 <= time_ms < MAX_TIME:
        raise wrong("timestamp", time_ms, "milliseconds, at least 0")
    prompt, output = count("input_length", prompt), count("output_length", output)
    hash_ids = hash_list(hash_ids)
    blocks = -(-prompt // hash_block_tokens)
    if len(hash_ids) != blocks:
        allowed = f"{blocks}, one for every {hash_block_tokens} tokens (kvc.hash_block_tokens)"
        raise wrong("number of hash_ids", len(hash_ids), allowed)
    return Row(round(time_ms * 10**6), prompt, output, hash_ids)


def _counts(columns: Sequence[str], fields: Sequence[str]) -> tuple[int, int]:
    """Prompt and output tokens from two fields of a CSV row."""
    prompt, output = map(count, columns, map(_number, fields))
    return prompt, output


def _number(text: str) -> int | str:
    """The integer that a field holds, or else the field; `int` alone takes `1_0` and ` 1` too."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else text
