"""Episodes to learn from: who decides in them, and what they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agents.evaluation import draw_workload
from agents.learning.inputs import Inputs
from agents.learning.pointer import PointerNetwork
from agents.learning.rollouts import Rollout, rollout
from agents.policies import make_policy
from opal_gym.config import Config, RewardTerm
from opal_gym.sim.decision import STOP, Decision, DecisionKind


@dataclass(frozen=True)
class Episode:
    """An episode that is to be run.

    Attributes:
        config: What is simulated.
        workload_seed: Seed of the workload.
        actor: Who decides: a network, whose choices are sampled, or a policy's name.
        seed: Of the sampled choices.
        kinds: The decisions that the actor answers; the baseline answers the others.
        reward: Weights of the reward's terms.
    """

    config: Config
    workload_seed: int
    actor: PointerNetwork | str
    seed: int
    kinds: tuple[DecisionKind, ...]
    reward: Mapping[RewardTerm, float]


def run_episode(episode: Episode) -> Rollout:
    """Runs an episode."""
    actor = episode.actor
    choose = (
        Demonstrator(actor, episode.seed)
        if isinstance(actor, str)
        else Sampler(actor, episode.seed)
    )
    workload = draw_workload(episode.config, episode.workload_seed)
    return rollout(episode.config, workload, choose, episode.kinds, episode.reward)


class Sampler:
    """Samples a choice with the probabilities of a network.

    Args:
        network: The weights.
        seed: Of the samples.
    """

    def __init__(self, network: PointerNetwork, seed: int) -> None:
        self._network = network
        self._rng = np.random.default_rng(seed)

    def __call__(self, decision: Decision, inputs: Inputs) -> tuple[int, float]:
        """The choice, n for STOP, and the logarithm of its probability."""
        logits = self._network.logits(inputs, stop_allowed=decision.stop_allowed)
        weights = np.exp(logits - logits.max()).cumsum(dtype=np.float64)
        choice = int(weights.searchsorted(self._rng.random() * weights[-1], side="right"))
        return choice, float(logits[choice] - logits.max() - np.log(weights[-1]))


class Demonstrator:
    """Does what a policy does.

    Args:
        policy: Its name.
        seed: Of its own randomness.
    """

    def __init__(self, policy: str, seed: int) -> None:
        self._policy = make_policy(policy)
        self._policy.reset(seed)

    def __call__(self, decision: Decision, inputs: Inputs) -> tuple[int, float]:
        """The choice, n for STOP; it was certain."""
        answer = self._policy.choose(decision)
        return (decision.num_candidates if answer == STOP else answer), 0.0
