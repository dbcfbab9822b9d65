"""Actions: legal, illegal, and outside of the action space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.decision import STOP, Decision, DecisionKind, Policy
from opal_gym.sim.simulation import Simulation
from tests.episodes import (
    SCENARIOS,
    assert_same,
    baseline,
    make_env,
    random_any,
    random_legal,
)
from tests.tiny import WorkerLog, tiny_config, tiny_workload

SUBSETS = [
    (),
    ("CHUNK",),
    ("PREEMPT",),
    ("ADMIT",),
    ("CHUNK", "ADMIT"),
    ("PREEMPT", "ADMIT"),
    ("CHUNK", "PREEMPT", "ADMIT"),
]


@pytest.mark.parametrize("name", SCENARIOS)
def test_random_actions_legal_or_not_never_raise(name: str) -> None:
    """1,250 steps in each of 8 scenarios, over as many episodes as they take."""
    env = make_env(name)
    rng = np.random.default_rng(17)
    observation, info = env.reset(seed=17)
    illegal = steps = 0
    for _ in range(1250):
        mask = env.action_masks()
        assert mask.any()
        assert info["action_mask"].tolist() == mask.tolist()
        assert env.observation_space.contains(observation)
        action = rng.integers(mask.size)
        illegal += not mask[action]
        steps += 1
        observation, reward, terminated, truncated, info = env.step(action)
        assert np.isfinite(reward)
        if terminated or truncated:
            assert env.action_masks().any()
            assert info["action_mask"].any()
            assert env.observation_space.contains(observation)
            metrics = info["episode_metrics"]
            assert metrics["illegal_actions"] == illegal
            assert metrics["illegal_action_share"] == pytest.approx(illegal / steps)
            illegal = steps = 0
            observation, info = env.reset()


@pytest.mark.parametrize("name", ["busy", "busy-completion", "opal-docs"])
def test_an_illegal_action_takes_the_first_candidate(name: str) -> None:
    env, twin, draw = make_env(name), make_env(name), random_any(8)
    _, info = env.reset(seed=2)
    twin.reset(seed=2)
    substituted, taken, over = 0, 0, False
    while not over:
        action = draw(info)
        legal = action if info["action_mask"][action] else 0
        substituted += legal != action
        taken += 1
        steps = env.step(action), twin.step(legal)
        info, over = steps[0][4], steps[0][2]
        if over:
            counts = [step[4]["episode_metrics"].pop("illegal_actions") for step in steps]
            shares = [step[4]["episode_metrics"].pop("illegal_action_share") for step in steps]
            assert counts == [substituted, 0.0]
            assert shares == [pytest.approx(substituted / taken), 0.0]
        assert_same(*steps)
    assert substituted > 10


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_mask_is_what_the_decision_allows(name: str) -> None:
    env, choose = make_env(name), random_legal(0)
    _, info = env.reset(seed=1)
    stops, over = set(), False
    while not over:
        decision, mask = env.decision, info["action_mask"]
        assert decision is not None
        assert mask.shape == (env.config.env.max_candidates + 1,)
        assert 1 <= decision.num_candidates <= env.config.env.max_candidates
        legal = [env.action_of(answer) for answer in decision.legal_answers()]
        assert np.flatnonzero(mask).tolist() == sorted(legal)
        assert bool(mask[-1]) == decision.stop_allowed
        if decision.kind is not DecisionKind.ADMIT:
            assert not mask[-1], "STOP answers ADMIT only"
        assert mask.sum() >= 2, "no question is asked when there is only one possible answer"
        assert mask[baseline(info)] == 1
        stops.add(decision.stop_allowed)
        _, _, over, _, info = env.step(choose(info))
    assert stops == {True, False}


def test_stop_is_the_last_action_and_ends_the_admissions() -> None:
    """A alone runs from 0; B and C are asked about at 1, and STOP leaves them in the queue."""
    env = OpalVLLMEnv(tiny_config(), decisions=("ADMIT",), max_candidates=5)
    assert env.action_space == spaces.Discrete(6)
    workload = tiny_workload([(0.0, 4, 9), (0.25, 4, 1), (0.5, 4, 1)])
    env.reset(options={"workload": workload})
    assert env.action_masks().tolist() == [True, True, False, False, False, True]
    env.step(1)  # C first: from 1 to 2
    assert env.action_masks().tolist() == [True, False, False, False, False, True]
    _, _, _, _, info = env.step(5)  # then nobody until the next rebuild, at 2
    assert info["time"] == 2.0
    assert env.action_masks().tolist() == [True, False, False, False, False, True]
    _, _, _, _, info = env.step(0)  # B: from 2 to 3
    assert info["episode_metrics"]["illegal_actions"] == 0.0
    done = env.simulation.records.table
    assert dict(zip(done["request_id"].tolist(), done["decode_done_time"], strict=True)) == {
        2: 2.0,
        1: 3.0,
        0: 9.0,
    }


@pytest.mark.parametrize(
    "action", [-1, 13, 10**9, 1.0, 0.5, "0", None, np.array([0]), np.float32(0), [0]]
)
def test_an_action_outside_the_space_raises_and_changes_nothing(action: Any) -> None:
    env, twin = make_env("busy"), make_env("busy")
    _, info = env.reset(seed=1)
    twin.reset(seed=1)
    for _ in range(25):
        with pytest.raises(ValueError, match="action"):
            env.step(action)
        result = env.step(baseline(info))
        assert_same(result, twin.step(baseline(info)))
        info = result[4]


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, np.uint8, np.array])
def test_every_integer_type_is_taken(kind: Any) -> None:
    env = make_env("slot8-chat")
    _, info = env.reset(seed=1)
    over = False
    while not over:
        _, _, over, _, info = env.step(kind(baseline(info)))
    assert info["episode_metrics"]["illegal_actions"] == 0.0


def test_action_of_stands_for_a_policys_answer() -> None:
    env = OpalVLLMEnv(tiny_config(), max_candidates=7)
    assert [env.action_of(answer) for answer in (0, 3, 6, STOP)] == [0, 3, 6, 7]


# ------------------------------------------------------------------ env.decisions


class SubsetPolicy(Policy):
    """Random answers to some kinds, the baseline's to the others; notes what it answered."""

    def __init__(self, kinds: tuple[str, ...], seed: int) -> None:
        self._kinds = kinds
        self._rng = np.random.default_rng(seed)
        self.answers: list[int] = []

    def choose(self, decision: Decision) -> int:
        if decision.kind.name not in self._kinds:
            return decision.baseline
        self.answers.append(int(self._rng.choice(decision.legal_answers())))
        return self.answers[-1]


@pytest.mark.parametrize("kinds", SUBSETS, ids=lambda kinds: "+".join(kinds) or "none")
@pytest.mark.parametrize("name", ["busy-without-tier", "mem-chat-burst"])
def test_only_the_chosen_kinds_are_asked_and_the_baseline_answers_the_others(
    name: str, kinds: tuple[str, ...]
) -> None:
    env = make_env(name, decisions=kinds)
    env.reset(seed=0)
    policy = SubsetPolicy(kinds, seed=4)
    with WorkerLog() as in_process:
        Simulation(env.config, env.simulation.workload, policy).run()
    assert bool(policy.answers) == bool(kinds)

    answers = iter(policy.answers)
    with WorkerLog() as driven:
        _, info = env.reset(seed=0)
        over = False
        while not over:
            decision = env.decision
            if decision is None:
                action = env.action_of(STOP)
            else:
                assert decision.kind.name in kinds
                action = env.action_of(next(answers))
            _, _, over, _, info = env.step(action)
    assert next(answers, None) is None
    assert driven.events == in_process.events
    assert info["episode_metrics"]["illegal_actions"] == 0.0


def test_decisions_come_from_the_argument_or_the_configuration() -> None:
    assert make_env("busy").decisions == ("CHUNK", "PREEMPT", "ADMIT")
    assert make_env("busy", decisions=["ADMIT"]).decisions == ("ADMIT",)
    assert make_env("busy", overrides={"env.decisions": ["CHUNK"]}).decisions == ("CHUNK",)
    with pytest.raises(ValueError, match="decisions"):
        make_env("busy", decisions=("EVICT",))


@pytest.mark.parametrize("rows", [1, 4, 5, 6])
def test_max_candidates_bounds_actions_observations_and_decisions(rows: int) -> None:
    """A CHUNK question has 5 budgets, so fewer rows are refused, or hold fewer budgets."""
    try:
        env = make_env("busy", max_candidates=rows)
    except ValueError:
        assert rows < 5
        return
    assert env.action_space == spaces.Discrete(rows + 1)
    sizes = set()
    draw = random_any(1)
    _, info = env.reset(seed=0)
    over = False
    while not over:
        assert env.decision is not None
        sizes.add(env.decision.num_candidates)
        observation, _, over, _, info = env.step(draw(info))
        assert env.observation_space.contains(observation)
    assert max(sizes) <= rows
