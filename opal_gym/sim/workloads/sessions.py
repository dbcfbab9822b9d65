"""Recorded sessions, replayed in closed loop.

A file holds JSON lines, one a turn: `session_id`; `turn`, counted from 0; `t_session_s`, when the
turn was recorded to begin, in seconds of its session; `think_time_s` before it; `input_length`;
`output_length`; `hash_ids` of the prompt's blocks. Turns of several sessions may be interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from opal_gym.sim.request import Tenant
from opal_gym.sim.workloads.arrivals import arrival_times, draw_load
from opal_gym.sim.workloads.predictions import predict
from opal_gym.sim.workloads.slo import objectives
from opal_gym.sim.workloads.streams import Stream, generator
from opal_gym.sim.workloads.trace_files import (
    MAX_TIME,
    MalformedRowError,
    TraceError,
    count,
    file_version,
    hash_list,
    json_object,
    read_lines,
    value,
    wrong,
)
from opal_gym.sim.workloads.workload import Workload

if TYPE_CHECKING:
    from opal_gym.config import TraceWorkload


class Turn(NamedTuple):
    """One recorded turn of a session; `start_s` counts from the session's beginning."""

    start_s: float
    think_time_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Prompt + output tokens."""
        return self.prompt_tokens + self.output_tokens


Session = tuple[Turn, ...]


@dataclass(frozen=True)
class RecordedSessions:
    """The sessions of a file.

    Attributes:
        sessions: In the order in which they begin in the file, each with at least one turn.
        malformed: Rows that were skipped.
        cut_off: Rows of a session after its malformed one, well-formed or not.
    """

    sessions: tuple[Session, ...]
    malformed: int
    cut_off: int

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return sum(map(len, self.sessions)) + self.malformed + self.cut_off


def session_workload(
    config: TraceWorkload,
    seed: int,
    *,
    hash_block_tokens: int,
    rate_scale: float,
) -> Workload:
    """Replays sessions in closed loop; see `make_workload`.

    The arrival process starts sessions. A later turn arrives when the turn before it has ended,
    plus its recorded think time; neither the load nor `rate_scale` changes that.
    """
    recorded = read_sessions(
        config.path, hash_block_tokens=hash_block_tokens, skip_malformed=config.on_error == "skip"
    )
    sessions, left_out = _choose(config, recorded, seed)
    assert config.arrivals is not None
    load = rate_scale * config.rate_scale * draw_load(config.arrivals, seed)
    starts = arrival_times(config.arrivals, len(sessions), seed, load)
    # First turns stand first; the later ones follow, session after session.
    turns = [session[0] for session in sessions]
    turns += [turn for session in sessions for turn in session[1:]]
    output_tokens = np.array([turn.output_tokens for turn in turns], np.int64)
    hash_ids = tuple(turn.hash_ids for turn in turns)
    return Workload(
        arrival_time=np.concatenate([starts, np.full(len(turns) - len(starts), math.inf)]),
        prompt_tokens=np.array([turn.prompt_tokens for turn in turns], np.int64),
        output_tokens=output_tokens,
        predicted_output_tokens=predict(output_tokens, config.prediction_sigma, seed),
        tenant=np.zeros(len(turns), np.int64),
        priority=np.full(len(turns), config.priority, np.int64),
        tenants=(Tenant(config.tenant, config.weight, *objectives(config.slo)),),
        hash_ids=hash_ids if any(hash_ids) else (),
        next_rows=_next_rows([len(session) for session in sessions]),
        think_time=np.array([turn.think_time_s for turn in turns]),
        load=load,
        left_out=left_out,
    )


def _next_rows(turns: Sequence[int]) -> NDArray[np.int64]:
    """The row of every turn's next one, -1 for the last, of sessions with `turns` turns each."""
    next_rows = np.full(sum(turns), -1)
    row = len(turns)
    for first, length in enumerate(turns):
        chain = [first, *range(row, row + length - 1)]
        next_rows[chain[:-1]] = chain[1:]
        row += length - 1
    return next_rows


# --- which sessions ------------------------------------------------------------------------------


def _choose(
    config: TraceWorkload, recorded: RecordedSessions, seed: int
) -> tuple[list[Session], dict[str, int]]:
    """An episode's sessions, and what is left out of them, by reason."""
    limit = math.inf if config.max_tokens is None else config.max_tokens
    fitting = [_fitting(session, limit) for session in recorded.sessions]
    usable = [index for index, session in enumerate(fitting) if session]
    turns = [len(fitting[index]) for index in usable]
    first = _first(config, turns, seed)
    after = first + _whole(config, turns[first:])
    window = slice(usable[first] if first else 0, usable[after] if after < len(usable) else None)
    sessions = [session[: config.num_requests] for session in fitting[window] if session]
    left_out = _left_out(recorded, recorded.sessions[window], fitting[window], limit)
    if not sessions:
        raise TraceError(
            f"{config.path}: got no request of {recorded.rows} rows ("
            + ", ".join(f"{rows} {reason}" for reason, rows in left_out.items())
            + "); allowed: at least one"
        )
    return sessions, left_out


def _left_out(
    recorded: RecordedSessions, whole: Sequence[Session], fitting: Sequence[Session], limit: float
) -> dict[str, int]:
    """Rows that are malformed, or not among the fitting turns of a window's sessions, by reason."""
    rest = [len(turns) - len(kept) for turns, kept in zip(whole, fitting, strict=True)]
    too_long = sum(rows > 0 for rows in rest)
    reasons = {
        "malformed": recorded.malformed,
        "after a malformed turn": recorded.cut_off,
        f"more than {limit} tokens": too_long,
        f"after a turn of more than {limit} tokens": sum(rest) - too_long,
    }
    return {reason: rows for reason, rows in reasons.items() if rows}


def _fitting(session: Session, limit: float) -> Session:
    """A session up to its first turn of more than `limit` tokens."""
    ends = (number for number, turn in enumerate(session) if turn.tokens > limit)
    return session[: next(ends, len(session))]


def _first(config: TraceWorkload, turns: Sequence[int], seed: int) -> int:
    """The first session, of sessions with `turns` turns each: drawn, if asked for.

    Every session is as likely as another from which on there are enough turns.
    """
    if config.window_start_s is not None or config.num_requests is None:
        return 0
    turns_from = np.cumsum(turns[::-1])[::-1]
    starts = int(np.count_nonzero(turns_from >= config.num_requests))
    return int(generator(seed, Stream.WINDOW).integers(max(1, starts)))


def _whole(config: TraceWorkload, turns: Sequence[int]) -> int:
    """How many sessions, of `turns` turns each, are whole within the cap; the first one always."""
    if config.num_requests is None:
        return len(turns)
    return max(1, int(np.searchsorted(np.cumsum(turns), config.num_requests, side="right")))


# --- the file ------------------------------------------------------------------------------------


def read_sessions(
    path: str | Path, *, hash_block_tokens: int = 512, skip_malformed: bool = False
) -> RecordedSessions:
    """Reads sessions; the last few files are kept, and read again when they have changed.

    Args:
        path: The file; gzipped if its name or its first bytes say so.
        hash_block_tokens: Tokens that one hash id stands for.
        skip_malformed: Count malformed rows, and those that follow in their session, instead of
            raising.

    Raises:
        TraceError: The file cannot be read, or a row is malformed.
    """
    path = Path(path).absolute()
    return _read_version(path, hash_block_tokens, skip_malformed, file_version(path))


@lru_cache(maxsize=8)
def _read_version(
    path: Path,
    hash_block_tokens: int,
    skip_malformed: bool,
    version: tuple[int, int],  # a part of the cache's key alone
) -> RecordedSessions:
    reader = _Reader(hash_block_tokens)
    malformed = 0
    for number, line in read_lines(path):
        try:
            reader.read(line)
        except MalformedRowError as error:
            if not skip_malformed:
                raise TraceError(f"{path}:{number}: {error}") from None
            malformed += 1
    return RecordedSessions(tuple(reader.sessions()), malformed, reader.cut_off)


class _Reader:
    """Reads turns in the order of the file; a malformed one ends its session.

    Attributes:
        cut_off: Rows of sessions that have ended so.
    """

    def __init__(self, hash_block_tokens: int) -> None:
        self._hash_block_tokens = hash_block_tokens
        self._turns: dict[str, list[Turn]] = {}
        self._ended: set[str] = set()
        self.cut_off = 0

    def sessions(self) -> Iterable[Session]:
        """The sessions so far."""
        return (tuple(turns) for turns in self._turns.values() if turns)

    def read(self, line: str) -> None:
        """Adds a row to its session."""
        record = json_object(line)
        session_id = value(record, "session_id")
        if not isinstance(session_id, str):
            raise wrong("session_id", session_id, "a string")
        if session_id in self._ended:
            self.cut_off += 1
            return
        self._ended.add(session_id)
        turns = self._turns.setdefault(session_id, [])
        turns.append(self._turn(record, turns))
        self._ended.remove(session_id)

    def _turn(self, record: dict[str, Any], before: Sequence[Turn]) -> Turn:
        number = value(record, "turn")
        if type(number) is not int or number != len(before):
            raise wrong("turn", number, f"{len(before)}, as a session's turns count from 0")
        start_s = _seconds("t_session_s", value(record, "t_session_s"))
        begun_s = before[-1].start_s if before else 0.0
        if start_s < begun_s:
            raise wrong("t_session_s", start_s, f"at least {begun_s}, as of the turn before")
        think_time_s = value(record, "think_time_s")
        # What was not recorded is at most the time from turn to turn.
        thought_s = start_s - begun_s if think_time_s is None else think_time_s
        prompt_tokens = count("input_length", value(record, "input_length"))
        return Turn(
            start_s,
            _seconds("think_time_s", thought_s),
            prompt_tokens,
            count("output_length", value(record, "output_length")),
            self._hash_ids(hash_list(value(record, "hash_ids")), prompt_tokens),
        )

    def _hash_ids(self, hash_ids: tuple[int, ...], prompt_tokens: int) -> tuple[int, ...]:
        """Ids of the prompt's blocks, of which the last, partial one may have none."""
        tokens = self._hash_block_tokens
        full, blocks = prompt_tokens // tokens, -(-prompt_tokens // tokens)
        if not full <= len(hash_ids) <= blocks:
            numbers = f"{full} or {blocks}" if full < blocks else f"{full}"
            allowed = f"{numbers}, one for every {tokens} tokens (kvc.hash_block_tokens)"
            raise wrong("number of hash_ids", len(hash_ids), allowed)
        return hash_ids


def _seconds(column: str, seconds: Any) -> float:
    if type(seconds) not in (int, float) or not 0 <= seconds < MAX_TIME:
        raise wrong(column, seconds, "seconds, at least 0")
    return float(seconds)
