"""Schedulers for the simulated worker, and their evaluation."""

from agents.learning.policy_file import load_policy
from agents.policies import make_policy, policy_names

__all__ = ["load_policy", "make_policy", "policy_names"]
