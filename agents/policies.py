"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from agents.heuristics import (
    RandomPolicy,
    RulePolicy,
    first,
    least,
    most,
    stop,
)
from opal_gym.sim.decision import Policy
from opal_gym.sim.policies import FifoLeastWorkPolicy

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "fifo-lwd": FifoLeastWorkPolicy,
        "vllm-fcfs": lambda: RulePolicy(preempt=most("admission_rank")),
        "sjf": lambda: RulePolicy(admit=least("predicted_output_tokens")),
        "spf": lambda: RulePolicy(admit=least("prompt_tokens")),
        "most-work": lambda: RulePolicy(preempt=most("work_lost")),
        "random": RandomPolicy,
        "always-first": lambda: RulePolicy(admit=first, preempt=first, chunk=first),
        "always-stop": lambda: RulePolicy(admit=stop),
    }
)
"""What makes each policy; the reference baseline is the first."""


SINGLE_STAGE = "single-stage"
"""Not a policy of the vLLM worker but the worker without batching, to compare with."""


def policy_names() -> list[str]:
    """Names that `make_policy` knows, the reference baseline first."""
    return list(POLICIES)


def make_policy(name: str) -> Policy:
    """A new policy.

    Raises:
        ValueError: No policy has that name.
    """
    if name not in POLICIES:
        raise ValueError(f"policy: got {name!r}; allowed: one of {', '.join(POLICIES)}")
    return POLICIES[name]()
