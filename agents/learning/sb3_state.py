"""What a learner of Stable-Baselines3 goes on from: tensors and numbers, no code."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm


def model_state(model: BaseAlgorithm) -> dict[str, Any]:
    """Weights, the optimizer's state and counts."""
    policy: Any = model.policy
    return {
        "timesteps": model.num_timesteps,
        "updates": model._n_updates,
        "policy": policy.state_dict(),
        "optimizer": policy.optimizer.state_dict(),
    }


def restore_model(model: BaseAlgorithm, state: dict[str, Any]) -> None:
    """Takes up what `model_state` gave."""
    policy: Any = model.policy
    model.num_timesteps, model._n_updates = state["timesteps"], state["updates"]
    policy.load_state_dict(state["policy"])
    policy.optimizer.load_state_dict(state["optimizer"])
