"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from agents.grid import GRAMMAR, Heuristic
from agents.heuristics import (
    RandomPolicy,
    RulePolicy,
    first,
    most,
    stop,
)
from agents.learning.policy_file import PREFIX as PRETRAINED
from agents.learning.policy_file import load_policy
from agents.presets import PREFIX as PRESET
from agents.presets import load_preset
from opal_gym.sim.decision import Policy
from opal_gym.sim.policies import FifoLeastWorkPolicy

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "fifo-lwd": FifoLeastWorkPolicy,
        "vllm-fcfs": Heuristic(victim="latest").policy,
        "sjf": Heuristic("sjf").policy,
        "mem-sjf": Heuristic("mem-sjf").policy,
        "spf": Heuristic("spf").policy,
        "aged-sjf": Heuristic("aged").policy,
        "weighted-sjf": Heuristic("weighted-sjf").policy,
        "gate": Heuristic(gate="1.0").policy,
        "mem-sjf-gate": Heuristic("mem-sjf", gate="1.0").policy,
        "spf-slack": Heuristic("spf", chunk="slack-29ms").policy,
        "watermark": Heuristic(gate="watermark").policy,
        # Means what it says where the simulation tells true lengths:
        # simulation.length_information = "oracle".
        "oracle-combo": Heuristic("mem-sjf", "1.0", "longest", "1/16").policy,
        "most-work": lambda: RulePolicy(preempt=most("work_lost")),
        "random": RandomPolicy,
        "always-first": lambda: RulePolicy(admit=first, preempt=first, chunk=first),
        "always-stop": lambda: RulePolicy(admit=stop),
    }
)
"""What makes each policy; the reference baseline is the first."""


SINGLE_STAGE = "single-stage"
"""Not a policy of the vLLM worker but the worker without batching, to compare with."""

OTHERS = (
    f"{PRETRAINED}NAME (of agents/pretrained, or a file of scripts/train.py), "
    f"{PRESET}NAME (of agents/presets, or a preset's file), or a heuristic {GRAMMAR}"
)
"""What other names there are."""


def policy_names() -> list[str]:
    """Names that `make_policy` knows, the reference baseline first; there are also `OTHERS`."""
    return list(POLICIES)


def make_policy(name: str) -> Policy:
    """A new policy.

    Args:
        name: One of `policy_names()`; `pretrained:NAME`, which `scripts/train.py` has written;
            `preset:NAME`, which `scripts/tune.py` has written; or the rules of a heuristic, such
            as `admit=mem-sjf,gate=0.95,victim=longest,chunk=1/8`.

    Raises:
        ValueError: No policy has that name.
    """
    if name in POLICIES:
        return POLICIES[name]()
    try:
        if name.startswith(PRETRAINED):
            return load_policy(name.removeprefix(PRETRAINED))
        if name.startswith(PRESET):
            return Heuristic.parse(load_preset(name.removeprefix(PRESET))).policy()
        if "=" in name:
            return Heuristic.parse(name).policy()
    except ValueError as error:
        raise ValueError(f"policy {name!r}: {error}") from None
    raise ValueError(f"policy: got {name!r}; allowed: one of {', '.join(POLICIES)}; {OTHERS}")
