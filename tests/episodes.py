"""Whole episodes of the environment: driven, compared to the last bit, and hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from opal_gym.envs import OpalVLLMEnv
from opal_gym.envs.observations import Observation

Info = dict[str, Any]
Chooser = Callable[[Info], int]
"""A driver's answer to a step: an action."""

BUSY: dict[str, Any] = {
    "name": "busy",
    "simulation": {"check_invariants": True},
    "worker": {
        "vllm_params": {
            "max_num_seqs": 12,
            "max_num_batched_tokens": 256,
            "block_size": 16,
            "num_gpu_blocks_override": 80,
            "max_kvc_ready_requests": 2,
            "rebuild_on": "change",
            "first_token_at_prefill_end": True,
        },
        "inference_params": {
            "model": "synthetic",
            "base_s": 0.01,
            "per_prefill_token_s": 1e-4,
            "per_decode_s": 5e-4,
            "per_context_token_s": 1e-6,
        },
    },
    "kvc": {
        "hash_block_tokens": 64,
        "tiers": [{"name": "CPUMemory", "capacity_GB": 0.5, "bandwidth_GBps": 0.5}],
    },
    "workload": {
        "kind": "synthetic",
        "num_requests": 24,
        "arrivals": {"rate_per_s": 5.0},
        "tenants": [
            {
                "name": "chat",
                "share": 0.5,
                "prompt": {"kind": "lognormal", "median": 60, "sigma": 0.8, "max": 400},
                "output": {"kind": "lognormal", "median": 60, "sigma": 0.8, "max": 300},
                "slo": "interactive",
            },
            {
                "name": "rag",
                "share": 0.4,
                "prompt": {"kind": "lognormal", "median": 260, "sigma": 0.3, "min": 200},
                "output": {"kind": "lognormal", "median": 40, "sigma": 0.5, "max": 200},
                "prefix": {"num_prefixes": 3, "tokens": 192},
                "slo": "conversational",
                "weight": 2.0,
            },
            {
                "name": "huge",
                "share": 0.1,
                "prompt": {"kind": "fixed", "tokens": 1279},
                "output": {"kind": "lognormal", "median": 1.5, "sigma": 0.5},
                "weight": 0.2,
            },
        ],
    },
    "env": {"max_candidates": 12},
}
"""All there is: shortage of blocks, fetches, tenants, objectives, and rejections of the huge."""

SCENARIOS: dict[str, dict[str, Any]] = {
    "busy": {"scenario": BUSY},
    "busy-completion": {
        "scenario": BUSY,
        "overrides": {
            "worker.vllm_params.rebuild_on": "completion",
            "worker.vllm_params.first_token_at_prefill_end": False,
        },
    },
    "busy-without-tier": {"scenario": BUSY, "overrides": {"kvc.tiers": []}},
    "busy-workers": {
        "scenario": BUSY,
        "overrides": {
            "simulation.num_workers": 2,
            "router.policy": "MaxPrefix",
            "worker.vllm_params.num_gpu_blocks_override": 60,
        },
    },
    "opal-docs": {"scenario": "opal-docs", "num_requests": 24},
    "slot8-chat": {"scenario": "slot8-chat", "num_requests": 30},
    "mem-chat-burst": {
        "scenario": "mem-chat-burst",
        "num_requests": 32,
        "overrides": {"worker.vllm_params.num_gpu_blocks_override": 400},
    },
    "mem-longctx": {
        "scenario": "mem-longctx",
        "num_requests": 32,
        "overrides": {"worker.vllm_params.num_gpu_blocks_override": 1100},
    },
    "prod-mix": {
        "scenario": "prod-mix",
        "num_requests": 24,
        "overrides": {"worker.vllm_params.num_gpu_blocks_override": 1100},
    },
}
"""Keyword arguments of environments, by name."""


class Seen(NamedTuple):
    """What a driver sees of a step; of `reset`, a reward of 0."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: Info


def make_env(name: str, **kwargs: Any) -> OpalVLLMEnv:
    """The environment of `SCENARIOS[name]`, with further arguments."""
    return OpalVLLMEnv(**{**SCENARIOS[name], **kwargs})


def baseline(info: Info) -> int:
    """What the reference baseline does."""
    return int(info["baseline_action"])


def random_legal(seed: int) -> Chooser:
    """Legal actions, equally likely."""
    rng = np.random.default_rng(seed)
    return lambda info: int(rng.choice(np.flatnonzero(info["action_mask"])))


def random_any(seed: int) -> Chooser:
    """Actions of the action space, legal or not, equally likely."""
    rng = np.random.default_rng(seed)
    return lambda info: int(rng.integers(len(info["action_mask"])))


def play(env: OpalVLLMEnv, choose: Chooser = baseline, **reset: Any) -> list[Seen]:
    """An episode from `reset(**reset)` to its end."""
    seen = [Seen(*_after_reset(env.reset(**reset)))]
    while not (seen[-1].terminated or seen[-1].truncated):
        seen.append(Seen(*env.step(choose(seen[-1].info))))
    return seen


def _after_reset(result: tuple[Observation, Info]) -> tuple[Observation, float, bool, bool, Info]:
    return result[0], 0.0, False, False, result[1]


def leaves(value: Any, path: str = "") -> list[tuple[str, str, bytes]]:
    """All that `value` holds, as (path, type, bits); containers may be nested."""
    if isinstance(value, Mapping):
        parts = [leaf for key in value for leaf in leaves(value[key], f"{path}.{key}")]
        return [(path, "mapping", str(sorted(map(str, value))).encode()), *parts]
    if isinstance(value, (list, tuple)):
        parts = [leaf for k, part in enumerate(value) for leaf in leaves(part, f"{path}[{k}]")]
        return [(path, "sequence", str(len(value)).encode()), *parts]
    if isinstance(value, np.ndarray):
        return [(path, f"{value.dtype}{value.shape}", value.tobytes())]
    if isinstance(value, float):
        return [(path, type(value).__name__, value.hex().encode())]
    return [(path, type(value).__name__, repr(value).encode())]


def assert_same(one: Any, other: Any) -> None:
    """`one` and `other` are equal in structure, types and bits."""
    these, those = leaves(one), leaves(other)
    assert [leaf[:2] for leaf in these] == [leaf[:2] for leaf in those]
    different = [this[0] for this, that in zip(these, those, strict=True) if this != that]
    assert not different, f"{len(different)} of {len(these)} values differ: {different[:5]}"


def digest(value: Any) -> str:
    """A hash of structure, types and bits, the same in every process."""
    sha = hashlib.sha256()
    for path, kind, bits in leaves(value):
        sha.update(f"{path}|{kind}|{len(bits)}|".encode() + bits)
    return sha.hexdigest()
