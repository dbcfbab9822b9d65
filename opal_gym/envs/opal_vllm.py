"""The environment `OpalVLLM-v0`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from opal_gym.config import Config, load_config
from opal_gym.envs.observations import Observation, ObservationBuilder
from opal_gym.envs.rendering import render_ansi
from opal_gym.envs.rewards import TERMS, RewardFunction, RewardTerms, WeightedReward
from opal_gym.sim.decision import STOP, Decision, DecisionKind
from opal_gym.sim.simulation import Simulation
from opal_gym.sim.workloads import Workload, make_workload

OPTIONS: Mapping[str, tuple[Any, Callable[[Any], bool], str]] = {
    "workload_seed": (int | np.integer, lambda seed: seed >= 0, "an integer, at least 0"),
    "rate_scale": (
        int | float | np.number,
        lambda scale: 0 < scale < math.inf,
        "a finite number above 0",
    ),
    "workload": (Workload, lambda workload: len(workload) > 0, "a Workload with requests"),
}
"""Keys of `reset`'s options, with the type, the condition and the description of their values."""


@dataclass(frozen=True)
class Snapshot:
    """The state of an environment: how its episode began, and every action since.

    SimPy's generators cannot be copied, so `restore` replays the episode. A snapshot pickles.
    """

    config: Config
    options: Mapping[str, Any]
    actions: tuple[int, ...]
    rng_state: Mapping[str, Any]


class OpalVLLMEnv(gym.Env[Observation, np.int64]):
    """Schedule the requests of a simulated vLLM worker.

    ## Description
    A vLLM worker serves LLM requests on a GPU by continuous batching: prompts are prefilled in
    chunks, then every decoding request makes one token a step, and all of them share the GPU's
    KV-cache blocks. The batch persists until something changes; then the worker pauses and asks
    how it should be rebuilt. Each `step` answers one such question and runs the simulation to the
    next. The reference baseline admits in FIFO order and evicts whoever has done the least work.

    ## Action Space
    `Discrete(max_candidates + 1)`: the index of a candidate of the pending decision, or, as the
    last index, STOP.

    | kind | the question | candidates |
    |---|---|---|
    | CHUNK | prefill tokens per step until the next rebuild? | budgets, largest first |
    | PREEMPT | blocks are short: who is evicted? | running requests, least work done first |
    | ADMIT | who is admitted next, or STOP? | waiting requests that fit, in queue order |

    `action_masks()` (bool) and `info["action_mask"]` (int8) say which actions are legal. An illegal
    action never raises: the first candidate is taken, and `episode_metrics` counts it. An action
    outside the space raises `ValueError`.

    ## Observation Space
    A `Dict` of one-dimensional float32 boxes:

    - `kind`, shape (3,): CHUNK, PREEMPT or ADMIT, one-hot; all 0 when no decision is pending.
    - `worker`, shape (15,): the gauges of the worker (`opal_gym.sim.gauges.GAUGES`): free blocks,
      running and waiting requests, token budgets, predicted peak KV, arrival rate, …
    - `candidates`, shape (max_candidates * 21,): the candidate table, row-major
      (`opal_gym.sim.candidates.FEATURES`): lengths, predicted output and KV area, waiting time,
      blocks, predicted peak KV of the batch, slack to the objectives, …
    - `others`, only with several workers: like `worker`, the mean over the other workers. One
      policy schedules all workers; `info["worker_id"]` says whose question is pending.

    Every feature is scaled into [0, 1] ([-1, 1] for slack) and clipped there; both tables name its
    unit and scale. True output lengths are never observed, only predictions of them
    (`length_information`).

    ## Rewards
    `latency` by default: -(1/n) ∫ N dt over the step, with N = requests in the system and n = the
    episode's requests that are not rejected. The sum over an episode is minus the mean end-to-end
    latency in seconds (Little's law). Other terms: `slowdown`, `ttft`, `goodput`, `throughput`,
    `preemption` (`opal_gym.envs.rewards.TERMS`); `reward` takes a term's name, a mapping from
    terms to weights, or a function of the terms. Every step's terms are in `info["rewards"]`.

    ## Starting State
    `reset` draws a workload from its seed and runs to the first decision; the reward accrued until
    then belongs to the first step. An episode without any decision begins with `kind` all 0 and
    only STOP legal; its first step ends it.

    ## Episode End
    Terminated when every request has completed or been rejected. Truncated when the simulated time
    reaches `horizon_s`, but never at the first step: an episode whose first step reaches the
    horizon is truncated at the second, which takes no time and earns nothing.

    ## Information
    `action_mask`; `rewards`: the step's reward terms; `dt`: simulated seconds of the step (for
    discounting by γ^dt); `time`: simulated time, s; `rebuild_id`, `worker_id`: of the pending
    decision; `baseline_action`: what the reference baseline would do; at the end
    `episode_metrics` (`opal_gym.sim.metrics`). All scalars are floats.

    ## Arguments
    - `scenario`: a packaged scenario's name, a JSON file, a mapping or a `Config`.
    - `overrides`: values by dotted key, such as `{"worker.vllm_params.max_num_seqs": 8}`.
    - `decisions`, `max_candidates`, `horizon_s`, `num_requests`, `load`, `length_information`:
      short for the overrides of these names.
    - `reward`: see Rewards.
    - `render_mode`: None or `"ansi"`.

    `reset(seed, options)` takes the options `workload_seed` (the workload alone; the same seed
    gives the same requests to every policy), `rate_scale` (arrivals are this much faster) and
    `workload` (a `Workload` to use as it is; the seed then only moves random routing).

    ## Version History
    - v0: initial version.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - declared so by gymnasium.Env
        "render_modes": ["ansi"],
        "render_fps": 10,
    }

    def __init__(
        self,
        scenario: str | Path | Mapping[str, Any] | Config = "mem-chat-burst",
        *,
        overrides: Mapping[str, Any] | None = None,
        decisions: tuple[str, ...] | list[str] | None = None,
        max_candidates: int | None = None,
        horizon_s: float | None = None,
        num_requests: int | None = None,
        load: float | tuple[float, float] | None = None,
        length_information: str | None = None,
        reward: str | Mapping[str, float] | RewardFunction | None = None,
        render_mode: str | None = None,
    ) -> None:
        settings: dict[str, Any] = {
            "env.decisions": decisions,
            "env.max_candidates": max_candidates,
            "env.horizon_s": horizon_s,
            "workload.num_requests": num_requests,
            "workload.arrivals.load": load,
            "simulation.length_information": length_information,
        }
        if reward is not None and not callable(reward):
            settings["env.reward"] = {reward: 1.0} if isinstance(reward, str) else dict(reward)
        given = {key: value for key, value in settings.items() if value is not None}
        self.config = load_config(scenario, {**(overrides or {}), **given})
        if self.config.worker.kind != "vllm":
            raise ValueError(
                f"worker.kind: got {self.config.worker.kind!r}; allowed: 'vllm', the worker that "
                "asks for decisions"
            )
        if render_mode not in (None, *self.metadata["render_modes"]):
            # A TypeError, since Stable-Baselines3's make_vec_env asks for rgb_array and takes that
            # for a no.
            raise TypeError(f"render_mode: got {render_mode!r}; allowed: None or 'ansi'")
        self.render_mode = render_mode
        self._reward = reward if callable(reward) else WeightedReward(self.config.env.reward)
        self._stop = self.config.env.max_candidates
        self._observations = ObservationBuilder(
            self.config.env.max_candidates, self.config.simulation.num_workers
        )
        self.observation_space = self._observations.space
        self.action_space = spaces.Discrete(self._stop + 1)
        self._simulation: Simulation | None = None

    @property
    def decisions(self) -> tuple[str, ...]:
        """Kinds of question that the agent answers; the baseline answers the others."""
        kinds: tuple[str, ...] = self.config.env.decisions
        return kinds

    @property
    def simulation(self) -> Simulation:
        """The simulation of the current episode."""
        if self._simulation is None:
            raise gym.error.ResetNeeded("call reset() before using the environment")
        return self._simulation

    @property
    def decision(self) -> Decision | None:
        """The pending decision; None when the episode is over, or has none."""
        return self.simulation.pending

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draws a workload and runs to the first decision.

        Args:
            seed: Seed of all that follows; None continues the previous stream of workloads.
            options: `workload_seed`, `rate_scale`, `workload`.

        Raises:
            ValueError: An option is unknown or impossible.
        """
        super().reset(seed=seed)
        options = dict(options or {})
        _check_options(options)
        if "workload" not in options:
            options.setdefault("workload_seed", int(self.np_random.integers(2**31)))
        return self._begin(options)

    def _begin(self, options: dict[str, Any]) -> tuple[Observation, dict[str, Any]]:
        self._options = options
        self._actions: list[int] = []
        self._illegal_actions = 0
        self._over = False
        self._simulation = Simulation(
            self.config,
            self._make_workload(options),
            outside=[DecisionKind[name] for name in self.decisions],
            horizon_s=self.config.env.horizon_s,
            routing_seed=options.get("workload_seed", 0),
        )
        self._terms = RewardTerms(self._simulation)
        self._advance()
        return self._observe(), self._info(dict.fromkeys(TERMS, 0.0), dt=0.0)

    def _make_workload(self, options: Mapping[str, Any]) -> Workload:
        length_information = self.config.simulation.length_information
        given: Workload | None = options.get("workload")
        if given is not None:
            return given.with_length_information(length_information)
        return make_workload(
            self.config.workload,
            options["workload_seed"],
            length_information=length_information,
            hash_block_tokens=self.config.kvc.hash_block_tokens,
            rate_scale=options.get("rate_scale", 1.0),
        )

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answers the pending decision and runs to the next.

        Args:
            action: A candidate's index, or `max_candidates` for STOP.

        Raises:
            ValueError: The action is not in the action space.
        """
        simulation = self.simulation
        if self._over:
            raise gym.error.ResetNeeded("the episode is over; call reset()")
        before = simulation.env.now
        self._act(self._checked(action))
        self._advance()
        terms = self._terms.step()
        terminated = simulation.done
        truncated = simulation.horizon_reached and not terminated and len(self._actions) > 1
        self._over = terminated or truncated
        info = self._info(terms, dt=simulation.env.now - before)
        if self._over:
            info["episode_metrics"] = self._episode_metrics()
        return self._observe(), float(self._reward(terms)), terminated, truncated, info

    def _checked(self, action: np.int64 | int) -> int:
        """The action as an int."""
        try:
            number = index(action)
        except TypeError:
            number = -1
        if not 0 <= number <= self._stop:
            raise ValueError(f"action: got {action!r}; allowed: 0 to {self._stop} (STOP)")
        return number

    def _advance(self) -> None:
        """Runs to the next decision, and notes which actions it allows."""
        decision = self.simulation.advance()
        self._mask = np.zeros(self._stop + 1, np.int8)
        if decision is None:
            self._mask[self._stop] = True
        else:
            self._mask[: decision.num_candidates] = True
            self._mask[self._stop] = decision.stop_allowed

    def _act(self, action: int) -> None:
        if not self._mask[action]:
            self._illegal_actions += 1
            answer = 0
        else:
            answer = STOP if action == self._stop else action
        self._actions.append(action)
        simulation = self.simulation
        if simulation.pending is not None:
            simulation.answer(answer)

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are legal, shape (max_candidates + 1,); never all False."""
        assert self.simulation
        mask: NDArray[np.bool_] = self._mask.astype(np.bool_)
        return mask

    def action_of(self, answer: int) -> int:
        """The action that stands for a policy's answer: an index, or STOP."""
        return self._stop if answer == STOP else answer

    def snapshot(self) -> Snapshot:
        """The state of the episode, to be restored here or in another process."""
        assert self.simulation
        return Snapshot(
            self.config,
            dict(self._options),
            tuple(self._actions),
            self.np_random.bit_generator.state,
        )

    def restore(self, snapshot: Snapshot) -> tuple[Observation, dict[str, Any]]:
        """Replays a snapshot of an environment with the same configuration.

        Returns:
            What the last `step` (or `reset`) before the snapshot returned as observation and info.

        Raises:
            ValueError: The snapshot is of another configuration.
        """
        if snapshot.config != self.config:
            raise ValueError("snapshot: taken with another configuration; allowed: the same one")
        self.np_random.bit_generator.state = dict(snapshot.rng_state)
        observation, info = self._begin(dict(snapshot.options))
        for action in snapshot.actions:
            observation, _, _, _, info = self.step(action)
        return observation, info

    def render(self) -> str | None:
        """The worker and the pending decision as text, in render mode `"ansi"`."""
        if self.render_mode is None:
            return None
        return render_ansi(self.simulation, self.decision)

    def __getstate__(self) -> dict[str, Any]:
        if self._simulation is not None:
            raise TypeError(
                "a running OpalVLLM environment cannot be copied or pickled: "
                "use snapshot() and restore()"
            )
        return self.__dict__

    def _observe(self) -> Observation:
        return self._observations.build(self.simulation)

    def _info(self, rewards: dict[str, float], dt: float) -> dict[str, Any]:
        simulation = self.simulation
        decision, worker = simulation.pending, simulation.worker
        baseline = STOP if decision is None else decision.baseline
        return {
            "action_mask": self._mask.copy(),
            "rewards": rewards,
            "dt": float(dt),
            "time": float(simulation.env.now),
            "rebuild_id": float(worker.rebuild_id),
            "worker_id": float(worker.worker_id),
            "baseline_action": float(self.action_of(baseline)),
        }

    def _episode_metrics(self) -> dict[str, Any]:
        metrics = self.simulation.metrics()
        metrics["illegal_actions"] = float(self._illegal_actions)
        metrics["illegal_action_share"] = self._illegal_actions / len(self._actions)
        return metrics


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"options: unknown key {name!r}; allowed: {', '.join(OPTIONS)}")
        kind, is_allowed, allowed = OPTIONS[name]
        if not isinstance(value, kind) or not is_allowed(value):
            raise ValueError(f"options[{name!r}]: got {value!r}; allowed: {allowed}")
    if "workload" in options and "rate_scale" in options:
        raise ValueError(
            f"options['rate_scale']: got {options['rate_scale']!r}; allowed: without 'workload', "
            "whose arrival times are used as they are"
        )
