"""The pointer network in PyTorch, as a policy for sb3-contrib's MaskablePPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.maskable.distributions import MaskableCategoricalDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from agents.learning.inputs import CONTEXT
from agents.learning.pointer import PointerNetwork
from opal_gym.sim.candidates import FEATURES, INDEX

HIDDEN = (48, 48)
"""Hidden units of the two layers."""

INPUT_GAIN = 4.0
"""Inputs lie in [0, 1] and most are logarithms; weights begin larger by this."""

ILLEGAL = -1e8


class PointerModule(nn.Module):
    """`agents.learning.pointer.PointerNetwork` with a value head.

    The value of a state has a hidden layer of its own over the context and the candidates' maximum.

    Args:
        hidden: Units of the two hidden layers.
    """

    def __init__(self, hidden: tuple[int, int] = HIDDEN) -> None:
        super().__init__()
        units, second = hidden
        self.features = nn.Linear(len(FEATURES), units, bias=False)
        self.context = nn.Linear(CONTEXT, units)
        self.stop = nn.Parameter(torch.zeros(units))
        self.own = nn.Linear(units, second)
        self.pooled = nn.Linear(units, second, bias=False)
        self.logit = nn.Linear(second, 1, bias=False)
        self.value = nn.Sequential(
            nn.Linear(CONTEXT + units, second), nn.Tanh(), nn.Linear(second, 1)
        )
        for layer, gain in ((self.features, INPUT_GAIN), (self.context, INPUT_GAIN)):
            nn.init.orthogonal_(layer.weight, gain)
        nn.init.normal_(self.stop)
        nn.init.orthogonal_(self.logit.weight, 0.1)

    def forward(
        self, context: torch.Tensor, rows: torch.Tensor, legal: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits, of STOP last, and the value.

        Args:
            context: Shape (batch, CONTEXT).
            rows: Candidates, shape (batch, n, len(FEATURES)).
            legal: Which choices are legal, shape (batch, n + 1).

        Returns:
            Logits, shape (batch, n + 1), and values, shape (batch, 1).
        """
        stop = self.stop.expand(len(rows), 1, -1)
        choices = torch.cat([self.features(rows), stop], dim=1)
        encoded = torch.tanh(choices + self.context(context)[:, None])
        # tanh is above -1, so an illegal choice is never the greatest.
        masked = encoded.masked_fill(~legal[..., None], -1.0)
        hidden = torch.tanh(self.own(encoded) + self.pooled(masked.amax(dim=1))[:, None])
        logits = self.logit(hidden)[..., 0].masked_fill(~legal, ILLEGAL)
        # STOP is left out, so that the value can be told without a mask.
        state = torch.cat([context, masked[:, :-1].amax(dim=1)], dim=1)
        return logits, self.value(state)

    def network(self) -> PointerNetwork:
        """The weights without the value head, for NumPy."""
        weights = {
            "features": self.features.weight.T,
            "context": self.context.weight.T,
            "bias": self.context.bias,
            "stop": self.stop,
            "own": self.own.weight.T,
            "pooled": self.pooled.weight.T,
            "hidden_bias": self.own.bias,
            "logit": self.logit.weight[0],
        }
        return PointerNetwork.of(
            {name: array.detach().numpy().copy() for name, array in weights.items()}
        )

    def load_network(self, network: PointerNetwork) -> None:
        """Takes the weights of `network`; the value head stays."""
        targets = {
            "features": self.features.weight,
            "context": self.context.weight,
            "bias": self.context.bias,
            "stop": self.stop,
            "own": self.own.weight,
            "pooled": self.pooled.weight,
            "hidden_bias": self.own.bias,
            "logit": self.logit.weight,
        }
        with torch.no_grad():
            for name, array in network.arrays().items():
                target = targets[name]
                target.copy_(torch.from_numpy(np.atleast_2d(array).T).reshape(target.shape))


def unpacked(
    obs: Mapping[str, torch.Tensor], action_masks: NDArray[np.bool_] | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments of `PointerModule` from observations and masks.

    Args:
        obs: `kind`, `worker` and `candidates`, shape (batch, n * len(FEATURES)).
        action_masks: Shape (batch, n + 1); None: all candidates that are present, and STOP.
    """
    rows = obs["candidates"].reshape(len(obs["candidates"]), -1, len(FEATURES))
    context = torch.cat([obs["kind"], obs["worker"]], dim=1)
    if action_masks is None:
        present = rows[..., INDEX["present"]] > 0
        legal = torch.cat([present, torch.ones_like(present[:, :1])], dim=1)
    else:
        legal = torch.as_tensor(action_masks, device=rows.device).bool().reshape(len(rows), -1)
    return context, rows, legal


class PointerPolicy(MaskableActorCriticPolicy):
    """A pointer network for `MaskablePPO` on `OpalVLLM-v0`.

    Without masks it takes a candidate's `present` for its legality, and STOP for legal. With
    several workers it does not read `others`.

    Args:
        observation_space: That of `OpalVLLM-v0`.
        action_space: That of `OpalVLLM-v0`.
        lr_schedule: Learning rate, by the part of the training that is left.
        hidden: Units of the two hidden layers.

    Example:
        >>> import gymnasium, opal_gym
        >>> from sb3_contrib import MaskablePPO
        >>> from agents.learning.sb3_policy import PointerPolicy
        >>> model = MaskablePPO(PointerPolicy, gymnasium.make("OpalVLLM-v0"), n_steps=16)
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        hidden: tuple[int, int] = HIDDEN,
        **kwargs: Any,
    ) -> None:
        self.hidden = hidden
        kwargs.setdefault("features_extractor_class", CombinedExtractor)
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        self.pointer = PointerModule(self.hidden)
        self.optimizer = self.optimizer_class(
            self.pointer.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "hidden": self.hidden}

    def _scores(
        self, obs: PyTorchObs, action_masks: NDArray[np.bool_] | torch.Tensor | None
    ) -> tuple[MaskableCategoricalDistribution, torch.Tensor]:
        assert isinstance(obs, dict)
        context, rows, legal = unpacked(obs, action_masks)
        logits, values = self.pointer(context, rows, legal)
        distribution = MaskableCategoricalDistribution(logits.shape[1])
        distribution.proba_distribution(logits).apply_masking(legal)
        return distribution, values

    def forward(
        self,
        obs: PyTorchObs,
        deterministic: bool = False,
        action_masks: NDArray[np.bool_] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions, values and logarithms of the actions' probabilities."""
        distribution, values = self._scores(obs, action_masks)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(
        self,
        obs: PyTorchObs,
        actions: torch.Tensor,
        action_masks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values, logarithms of the actions' probabilities, and entropies."""
        distribution, values = self._scores(obs, action_masks)
        entropy = distribution.entropy()
        return values, distribution.log_prob(actions), entropy

    def get_distribution(
        self, obs: PyTorchObs, action_masks: NDArray[np.bool_] | None = None
    ) -> MaskableCategoricalDistribution:
        """The distribution over the actions."""
        return self._scores(obs, action_masks)[0]

    def predict_values(self, obs: PyTorchObs) -> torch.Tensor:
        """The values of states."""
        return self._scores(obs, None)[1]
