"""The Gymnasium environment around the simulation."""

from opal_gym.envs.opal_vllm import OpalVLLMEnv, Snapshot
from opal_gym.envs.wrappers import (
    MaskObservationWrapper,
    PriorityActionWrapper,
    RuleActionWrapper,
    TimeDiscountWrapper,
)

__all__ = [
    "MaskObservationWrapper",
    "OpalVLLMEnv",
    "PriorityActionWrapper",
    "RuleActionWrapper",
    "Snapshot",
    "TimeDiscountWrapper",
]
