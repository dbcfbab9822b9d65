"""Imitation: a pointer network learns to do what a policy does, to begin better than at random."""

from __future__ import annotations

import torch
from torch import nn

from agents.learning.rollout_buffer import EpisodeBuffer
from agents.learning.sb3_policy import PointerModule, unpacked


def imitate(
    module: PointerModule,
    demonstrations: EpisodeBuffer,
    *,
    epochs: int,
    batch_size: int = 256,
    learning_rate: float = 1e-2,
) -> float:
    """Fits a network to demonstrated choices by cross-entropy.

    Args:
        module: The network.
        demonstrations: Decisions and what was chosen.
        epochs: Passes over them; the learning rate falls to 0 on the way.
        batch_size: Decisions of a minibatch.
        learning_rate: Adam's at the beginning.

    Returns:
        Share of the last epoch's decisions in which the network's best was the demonstrated one.
    """
    optimizer = torch.optim.Adam(module.parameters(), lr=learning_rate)
    batches = epochs * -(-len(demonstrations) // batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, batches)
    agreed = 0
    for _ in range(epochs):
        agreed = 0
        for batch in demonstrations.get(batch_size):
            logits, _ = module(*unpacked(batch.observations, batch.action_masks))
            loss = nn.functional.cross_entropy(logits, batch.actions)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            agreed += int((logits.argmax(dim=1) == batch.actions).sum())
    return agreed / len(demonstrations)


def soften(module: PointerModule, factor: float) -> None:
    """Scales all logits: an imitated network is so sure of itself that it explores nothing."""
    with torch.no_grad():
        module.logit.weight *= factor
