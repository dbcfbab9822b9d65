"""Rollouts as minibatches for Stable-Baselines3's losses, padded when they are asked for."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBufferSamples

from agents.learning.rollouts import Rollout
from opal_gym.envs.observations import KINDS
from opal_gym.sim.candidates import FEATURES

FloatArray = NDArray[np.float64]


class EpisodeBuffer:
    """The decisions of whole episodes, in the shape that `MaskablePPO.train` reads.

    Args:
        rollouts: The episodes.
        advantages: Of each episode's decisions.
        rng: Shuffles the minibatches.

    Attributes:
        values: Zeros; paired advantages need no critic.
        returns: Zeros.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[FloatArray],
        rng: np.random.Generator,
    ) -> None:
        self._rng = rng
        self._context = np.concatenate([each.context for each in rollouts])
        self._rows = np.concatenate([each.rows for each in rollouts])
        self._counts = np.concatenate([each.num_candidates for each in rollouts])
        self._first = np.cumsum(self._counts) - self._counts
        self._stop_allowed = np.concatenate([each.stop_allowed for each in rollouts])
        self._choice = np.concatenate([each.choice for each in rollouts])
        self._log_prob = np.concatenate([each.log_prob for each in rollouts])
        self._advantages = np.concatenate(advantages).astype(np.float32)
        self.values = self.returns = np.zeros(len(self._choice), np.float32)

    def __len__(self) -> int:
        """Number of decisions."""
        return len(self._choice)

    def get(self, batch_size: int) -> Generator[MaskableDictRolloutBufferSamples, None, None]:
        """All decisions once, in a new order, in minibatches of `batch_size`."""
        order = self._rng.permutation(len(self))
        for begin in range(0, len(order), batch_size):
            yield self.batch(order[begin : begin + batch_size])

    def batch(self, decisions: NDArray[np.int64]) -> MaskableDictRolloutBufferSamples:
        """Some decisions, with as many rows as the largest of them needs."""
        counts = self._counts[decisions]
        width = int(counts.max())
        column = np.arange(width)
        present = column < counts[:, None]
        rows = np.zeros((len(decisions), width, len(FEATURES)), np.float32)
        rows[present] = self._rows[(self._first[decisions][:, None] + column)[present]]
        legal = np.column_stack([present, self._stop_allowed[decisions]])
        choice = self._choice[decisions]
        context = torch.from_numpy(self._context[decisions])
        zeros = torch.zeros(len(decisions))
        return MaskableDictRolloutBufferSamples(
            observations={
                "kind": context[:, : len(KINDS)],
                "worker": context[:, len(KINDS) :],
                "candidates": torch.from_numpy(rows).flatten(1),
            },
            actions=torch.from_numpy(np.where(choice == counts, width, choice)),
            old_values=zeros,
            old_log_prob=torch.from_numpy(self._log_prob[decisions]),
            advantages=torch.from_numpy(self._advantages[decisions]),
            returns=zeros,
            action_masks=torch.from_numpy(legal),
        )
