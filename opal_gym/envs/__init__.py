"""The Gymnasium environment around the simulation."""

from opal_gym.envs.opal_vllm import OpalVLLMEnv, Snapshot

__all__ = ["OpalVLLMEnv", "Snapshot"]
