"""Wrappers of `OpalVLLM-v0`: other actions, the mask in the observation, discounting by time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from opal_gym.envs.observations import Observation
from opal_gym.envs.opal_vllm import OpalVLLMEnv
from opal_gym.sim.candidates import FEATURES, INDEX
from opal_gym.sim.decision import STOP, Decision, DecisionKind

Rule = Callable[[Decision], int]
"""Answers the decisions of one kind: a candidate's index, or `STOP` where it is allowed."""

Info = dict[str, Any]

INNER_ACTIONS = ("action_mask", "baseline_action")
"""Keys of `info` that speak of the environment's own actions."""


class RuleActionWrapper(gym.Wrapper[Observation, Any, Observation, Any], RecordConstructorArgs):
    """An action picks a rule for each kind of decision, which holds for one batch rebuild.

    The action is `MultiDiscrete([admission rules, victim rules, chunk rules])`. The rules answer
    the pending decision and all that follow, until another rebuild asks or the episode ends;
    rewards, `info["rewards"]` and `info["dt"]` are sums over these. The observation is that of the
    decision that comes next. Every action is legal: `action_masks()` is all True, and `info` has
    neither `action_mask` nor `baseline_action`.

    Args:
        env: `OpalVLLM-v0`, or wrappers of it that take its actions.
        admit: Rules for ADMIT by name, such as `agents.grid.ADMISSION`.
        victim: Rules for PREEMPT, such as `agents.grid.VICTIMS`.
        chunk: Rules for CHUNK.

    Example:
        >>> import gymnasium, opal_gym
        >>> from opal_gym.envs import RuleActionWrapper
        >>> def baseline(decision):
        ...     return decision.baseline
        >>> def first(decision):
        ...     return 0
        >>> env = RuleActionWrapper(
        ...     gymnasium.make("OpalVLLM-v0"),
        ...     admit={"fifo": baseline, "first": first},
        ...     victim={"lwd": baseline},
        ...     chunk={"full": baseline},
        ... )
        >>> env.action_space
        MultiDiscrete([2 1 1])
        >>> env.action_of(admit="first", victim="lwd", chunk="full")
        array([1, 0, 0])
    """

    def __init__(
        self,
        env: gym.Env[Observation, np.int64],
        *,
        admit: Mapping[str, Rule],
        victim: Mapping[str, Rule],
        chunk: Mapping[str, Rule],
    ) -> None:
        RecordConstructorArgs.__init__(
            self, admit=dict(admit), victim=dict(victim), chunk=dict(chunk)
        )
        gym.Wrapper.__init__(self, env)
        self._base = _base_of(env)
        self._rules = {
            DecisionKind.ADMIT: dict(admit),
            DecisionKind.PREEMPT: dict(victim),
            DecisionKind.CHUNK: dict(chunk),
        }
        for kind, rules in self._rules.items():
            if not rules:
                raise ValueError(f"rules for {kind.name}: got none; allowed: at least one")
        self.action_space = spaces.MultiDiscrete([len(rules) for rules in self._rules.values()])

    def action_of(self, *, admit: str, victim: str, chunk: str) -> NDArray[np.int64]:
        """The action that picks rules by name.

        Raises:
            ValueError: A rule has no such name.
        """
        names = zip((admit, victim, chunk), self._rules.items(), strict=True)
        return np.array([_place(name, kind, rules) for name, (kind, rules) in names])

    def action_masks(self) -> NDArray[np.bool_]:
        """All True, shape (all rules,): sb3-contrib's form for `MultiDiscrete`."""
        return np.ones(sum(map(len, self._rules.values())), np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Resets the environment, see `OpalVLLMEnv.reset`."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, _without_actions(info)

    def step(
        self, action: NDArray[np.int64]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answers the pending rebuild's decisions by the rules that `action` picks.

        Raises:
            ValueError: The action is not in the action space.
        """
        chosen, rebuild = self._chosen(action), self._rebuild()
        total, elapsed, terms = 0.0, 0.0, dict[str, float]()
        over = False
        while not over:
            observation, reward, terminated, truncated, info = self._answer(chosen)
            total += float(reward)
            elapsed += info["dt"]
            terms = {name: terms.get(name, 0.0) + term for name, term in info["rewards"].items()}
            over = terminated or truncated or self._rebuild() != rebuild
        info = _without_actions({**info, "dt": elapsed, "rewards": terms})
        return observation, total, terminated, truncated, info

    def _chosen(self, action: NDArray[np.int64]) -> dict[DecisionKind, Rule]:
        numbers = np.asarray(action)
        if not self.action_space.contains(numbers):
            raise ValueError(f"action: got {action!r}; allowed: one of {self.action_space}")
        return {
            kind: list(rules.values())[number]
            for number, (kind, rules) in zip(numbers, self._rules.items(), strict=True)
        }

    def _rebuild(self) -> tuple[int, int] | None:
        """Which rebuild of which worker asks; None: no decision is pending."""
        decision = self._base.decision
        return None if decision is None else (decision.worker_id, decision.rebuild_id)

    def _answer(
        self, rules: Mapping[DecisionKind, Rule]
    ) -> tuple[Observation, Any, bool, bool, Info]:
        decision = self._base.decision
        answer = STOP if decision is None else rules[decision.kind](decision)
        return self.env.step(np.int64(self._base.action_of(answer)))


class PriorityActionWrapper(gym.Wrapper[Observation, Any, Observation, Any], RecordConstructorArgs):
    """An action is a weight for each candidate feature; the highest weighted sum is chosen.

    The action is a `Box` in [-1, 1] of shape (len(features) + 1,). A candidate's priority is
    Σ weight · feature, with features as they are observed, scaled into [-1, 1]; the action's last
    value is the priority of STOP. The legal choice with the highest priority is taken, of equal
    ones the first candidate, STOP last. An action answers one decision.

    Args:
        env: `OpalVLLM-v0`, or wrappers of it that keep its actions and its observation.
        features: Names of candidate features (`opal_gym.sim.candidates.FEATURES`); default: all.

    Example:
        Shortest predicted output first:

        >>> import gymnasium, numpy, opal_gym
        >>> from opal_gym.envs import PriorityActionWrapper
        >>> env = PriorityActionWrapper(
        ...     gymnasium.make("OpalVLLM-v0"), features=["predicted_output_tokens"]
        ... )
        >>> observation, info = env.reset(seed=0)
        >>> _ = env.step(numpy.array([-1.0, -1.0], numpy.float32))
    """

    def __init__(
        self, env: gym.Env[Observation, np.int64], features: Sequence[str] | None = None
    ) -> None:
        RecordConstructorArgs.__init__(self, features=features)
        gym.Wrapper.__init__(self, env)
        self._base = _base_of(env)
        names = list(INDEX) if features is None else list(features)
        for name in names:
            if name not in INDEX or names.count(name) > 1:
                raise ValueError(
                    f"features: got {name!r}; allowed: one or more of {', '.join(INDEX)}, each once"
                )
        self._columns = [INDEX[name] for name in names]
        self.action_space = spaces.Box(-1.0, 1.0, (len(names) + 1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Resets the environment, see `OpalVLLMEnv.reset`."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._noted(observation, info)

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answers the pending decision with the highest priority.

        Raises:
            ValueError: The action is not in the action space.
        """
        weights = np.asarray(action, np.float32)
        if not self.action_space.contains(weights):
            raise ValueError(f"action: got {action!r}; allowed: one of {self.action_space}")
        observation, reward, terminated, truncated, info = self.env.step(self._highest(weights))
        observation, info = self._noted(observation, info)
        return observation, float(reward), terminated, truncated, info

    def _noted(self, observation: Observation, info: Info) -> tuple[Observation, Info]:
        table = observation["candidates"].reshape(-1, len(FEATURES))
        self._features, self._mask = table[:, self._columns], info["action_mask"]
        return observation, _without_actions(info)

    def _highest(self, weights: NDArray[np.float32]) -> np.intp:
        # Summed row by row, so that equal rows have equal sums.
        candidates = (self._features * weights[:-1]).sum(axis=1)
        priorities = np.append(candidates, weights[-1])
        priorities[self._mask == 0] = -np.inf
        return priorities.argmax()


class MaskObservationWrapper(
    gym.Wrapper[dict[str, Any], np.int64, Any, np.int64], RecordConstructorArgs
):
    """Puts the action mask beside the observation, for learners that do not read `info`.

    The observation is a `Dict` of `observation` (what the environment observes) and `action_mask`
    (int8, shape (max_candidates + 1,)): PettingZoo's form. RLlib's examples of action masking call
    the first `observations`. For learners that take no nested `Dict` (Stable-Baselines3, RLlib's
    default encoders), flatten the inner one first:
    `MaskObservationWrapper(gymnasium.wrappers.FlattenObservation(env))`.

    Args:
        env: `OpalVLLM-v0`, or wrappers of it that take its actions.
        observation_key: Name of the inner observation.
    """

    def __init__(self, env: gym.Env[Any, np.int64], observation_key: str = "observation") -> None:
        RecordConstructorArgs.__init__(self, observation_key=observation_key)
        gym.Wrapper.__init__(self, env)
        _base_of(env)
        self._key = observation_key
        actions = env.action_space
        assert isinstance(actions, spaces.Discrete)
        self.observation_space = spaces.Dict(
            {
                observation_key: env.observation_space,
                "action_mask": spaces.Box(0, 1, (int(actions.n),), np.int8),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], Info]:
        """Resets the environment, see `OpalVLLMEnv.reset`."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(observation, info), info

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, Info]:
        """Steps the environment, see `OpalVLLMEnv.step`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(observation, info), float(reward), terminated, truncated, info

    def _with_mask(self, observation: Any, info: Info) -> dict[str, Any]:
        return {self._key: observation, "action_mask": info["action_mask"].copy()}


class TimeDiscountWrapper(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Discounts by simulated time: γ^dt with γ = exp(-1 / time constant).

    A fixed γ per decision lets an agent change its horizon by asking more often, for example with
    small chunks. Here `info["discount"]` is what the value of the next observation counts at this
    one, exp(-dt / time constant), so that returns are r₀ + d₀ (r₁ + d₁ (r₂ + …)). The reward is
    discounted inside the step, too, as one that accrues at a constant rate: times
    (1 - e^-x) / x with x = dt / time constant. Cutting a step in two therefore changes no return.
    `info["rewards"]` stays as it is.

    Args:
        env: `OpalVLLM-v0`, or wrappers of it.
        time_constant_s: Simulated seconds in which a reward loses 63 % of its worth.
    """

    def __init__(self, env: gym.Env[Any, Any], time_constant_s: float = 30.0) -> None:
        RecordConstructorArgs.__init__(self, time_constant_s=time_constant_s)
        gym.Wrapper.__init__(self, env)
        if not 0 < time_constant_s < math.inf:
            raise ValueError(
                f"time_constant_s: got {time_constant_s!r}; allowed: a finite number above 0"
            )
        self._time_constant_s = time_constant_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Info]:
        """Resets the environment, see `OpalVLLMEnv.reset`; the discount is 1."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, "discount": 1.0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """Steps the environment, see `OpalVLLMEnv.step`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        x = info["dt"] / self._time_constant_s
        within = -math.expm1(-x) / x if x else 1.0
        info = {**info, "discount": math.exp(-x)}
        return observation, float(reward) * within, terminated, truncated, info


def _base_of(env: gym.Env[Any, Any]) -> OpalVLLMEnv:
    """The environment itself, whose actions `env` must take."""
    base = env.unwrapped
    if not isinstance(base, OpalVLLMEnv):
        raise TypeError(f"env: got {base!r}; allowed: OpalVLLM-v0")
    if env.action_space != base.action_space:
        raise TypeError(
            f"env: got actions {env.action_space}; allowed: a wrapper that takes the actions of "
            f"OpalVLLM-v0, {base.action_space}"
        )
    return base


def _place(name: str, kind: DecisionKind, rules: Mapping[str, Rule]) -> int:
    if name not in rules:
        raise ValueError(f"rule for {kind.name}: got {name!r}; allowed: one of {', '.join(rules)}")
    return list(rules).index(name)


def _without_actions(info: Info) -> Info:
    """`info` without what it says of the inner actions."""
    return {key: value for key, value in info.items() if key not in INNER_ACTIONS}
