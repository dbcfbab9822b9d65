"""The grid of heuristics: an admission order × a gate × a victim rule × a chunk rule, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from types import MappingProxyType

from agents.heuristics import (
    Rule,
    RulePolicy,
    aged_sjf,
    baseline,
    budget_share,
    least,
    leaves_watermark,
    most,
    peak_kv_within,
    step_within,
    stop_unless,
    weighted_sjf,
)

ADMISSION: Mapping[str, Rule] = MappingProxyType(
    {
        "fifo": baseline,
        "spf": least("prompt_tokens"),
        "sjf": least("predicted_output_tokens"),
        "mem-sjf": least("predicted_kv_area"),
        "aged": aged_sjf,
        "weighted-sjf": weighted_sjf,
    }
)
"""Who is admitted next."""

VICTIMS: Mapping[str, Rule] = MappingProxyType(
    {
        "lwd": baseline,
        "latest": most("admission_rank"),
        "longest": most("predicted_remaining"),
    }
)
"""Who is evicted: least work done, latest admitted (vLLM), longest predicted remaining output."""

GATES = ("none", "0.8", "0.95", "1.0", "1.1")
"""Gates of the grid: none, or a bound on the predicted peak KV as a share of the pool."""

CHUNKS = ("full", "1/2", "1/4", "1/8", "1/16", "slack-10ms", "slack-15ms", "slack-29ms")
"""Chunk rules of the grid: a share of the token budget, or the largest within a step time."""

ORDERS = ("fifo", "spf", "sjf", "mem-sjf", "aged")
"""Admission orders of the grid. Where tenants' weights differ, `weighted-sjf` is one more."""


@dataclass(frozen=True)
class Heuristic:
    """A member of the grid, or one like it.

    Attributes:
        admit: Admission order, one of `ADMISSION`.
        gate: When to STOP: `none`; `watermark` (5 % of the blocks stay free); or a number, the
            largest predicted peak KV of the batch as a share of the pool.
        victim: Who is evicted, one of `VICTIMS`.
        chunk: Prefill tokens per step: `full`; `1/N` of the largest budget; or `slack-Nms`, the
            largest whose step takes at most N ms.

    Raises:
        ValueError: A rule is not known.
    """

    admit: str = "fifo"
    gate: str = "none"
    victim: str = "lwd"
    chunk: str = "full"

    def __post_init__(self) -> None:
        self.policy()

    @classmethod
    def parse(cls, text: str) -> Heuristic:
        """Reads `admit=mem-sjf,gate=0.95,victim=longest,chunk=1/8`; what is left out is default.

        Raises:
            ValueError: A key or a rule is not known, or a key is given twice.
        """
        keys = [field.name for field in fields(cls)]
        rules: dict[str, str] = {}
        for part in text.split(","):
            key, _, rule = part.partition("=")
            if key not in keys or key in rules:
                raise ValueError(f"got {part!r}; allowed: {GRAMMAR}, each key at most once")
            rules[key] = rule
        return cls(**rules)

    @property
    def name(self) -> str:
        """What `parse` reads, with every key."""
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    def policy(self) -> RulePolicy:
        """The heuristic as a policy."""
        return RulePolicy(
            admit=admission_rule(self.admit, self.gate),
            preempt=_named("victim", VICTIMS, self.victim),
            chunk=chunk_rule(self.chunk),
        )


def admission_rule(order: str, gate: str = "none") -> Rule:
    """The rule of an admission order behind a gate.

    Raises:
        ValueError: The order or the gate is not known.
    """
    rule = _named("admit", ADMISSION, order)
    if gate == "none":
        return rule
    if gate == "watermark":
        return stop_unless(leaves_watermark, rule)
    share = _number(gate)
    if share is None:
        raise ValueError(f"gate: got {gate!r}; allowed: none, watermark or a number above 0")
    return stop_unless(peak_kv_within(share), rule)


def chunk_rule(name: str) -> Rule:
    """The rule of a chunk rule's name.

    Raises:
        ValueError: The name is not known.
    """
    kinds: tuple[tuple[str, Callable[[float], Rule]], ...] = (
        (r"1/(.+)", lambda parts: budget_share(1 / parts)),
        (r"slack-(.+)ms", lambda limit_ms: step_within(limit_ms / 1000)),
    )
    for pattern, make in kinds:
        match = re.fullmatch(pattern, name)
        number = match and _number(match[1])
        if number:
            return make(number)
    if name != "full":
        raise ValueError(
            f"chunk: got {name!r}; allowed: full, 1/N or slack-Nms, with a number N above 0"
        )
    return baseline


def grid(
    admit: tuple[str, ...] = ORDERS,
    gate: tuple[str, ...] = GATES,
    victim: tuple[str, ...] = tuple(VICTIMS),
    chunk: tuple[str, ...] = CHUNKS,
) -> tuple[Heuristic, ...]:
    """All combinations of the rules.

    Raises:
        ValueError: A rule is not known.
    """
    return tuple(Heuristic(*rules) for rules in product(admit, gate, victim, chunk))


def _named(key: str, rules: Mapping[str, Rule], name: str) -> Rule:
    if name not in rules:
        raise ValueError(f"{key}: got {name!r}; allowed: one of {', '.join(rules)}")
    return rules[name]


def _number(text: str) -> float | None:
    """A finite number above 0; None: it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


GRAMMAR = (
    f"admit={'|'.join(ADMISSION)},gate=none|watermark|SHARE,victim={'|'.join(VICTIMS)},"
    "chunk=full|1/N|slack-Nms"
)
"""The form of a heuristic's name, any of its parts left out."""
