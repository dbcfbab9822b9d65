"""Schedulers for the simulated worker, and their evaluation."""

from agents.policies import make_policy, policy_names

__all__ = ["make_policy", "policy_names"]
