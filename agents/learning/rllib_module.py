"""The pointer network as a module of RLlib's PPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule

from agents.learning.sb3_policy import PointerModule, unpacked

OBSERVATIONS, MASK = "observations", "action_mask"
"""Keys of what RLlib observes; see `opal_gym.envs.MaskObservationWrapper`."""


class PointerRLModule(TorchRLModule, ValueFunctionAPI):  # type: ignore[misc]
    """`PointerModule` on the observations of `MaskObservationWrapper(env, "observations")`.

    Illegal actions have probability 0. `model_config["hidden"]` says how many units the two hidden
    layers have. With several workers it does not read `others`.
    """

    def setup(self) -> None:
        """Makes the network."""
        units, second = self.model_config["hidden"]
        self.pointer = PointerModule((units, second))

    def _scores(self, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        observed = batch[Columns.OBS]
        logits, values = self.pointer(*unpacked(observed[OBSERVATIONS], observed[MASK]))
        return logits, values[:, 0]

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._scores(batch)[0]}

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The values go along, lest they be computed again."""
        logits, values = self._scores(batch)
        return {Columns.ACTION_DIST_INPUTS: logits, Columns.EMBEDDINGS: values}

    def compute_values(
        self, batch: dict[str, Any], embeddings: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The values of states, shape (batch,); `embeddings`: as `_forward_train` gave them."""
        return self._scores(batch)[1] if embeddings is None else embeddings
