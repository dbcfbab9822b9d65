"""Wrappers: rules and priorities as actions, the mask in the observation, discounting by time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import FlattenObservation

from agents import make_policy
from agents.evaluation import run_in_process
from agents.grid import ADMISSION, VICTIMS, admission_rule, chunk_rule
from opal_gym.config import load_config
from opal_gym.envs import (
    MaskObservationWrapper,
    OpalVLLMEnv,
    PriorityActionWrapper,
    RuleActionWrapper,
    TimeDiscountWrapper,
)
from opal_gym.sim.candidates import INDEX
from opal_gym.sim.decision import Decision
from tests.episodes import BUSY, SCENARIOS, assert_same, baseline, play
from tests.tiny import TINY, tiny_workload

CHUNKS = {name: chunk_rule(name) for name in ("full", "1/8")}
Wrapped = gymnasium.Env[Any, Any]

QUEUE = ((0.0, 4, 5), (0.5, 8, 4), (0.5, 12, 2), (0.5, 4, 3))
"""One sequence at a time, 1 s a step, and the prefill's step makes the first token.

So a request of n output tokens runs for n seconds. Request 0 runs from 0 to 5; then 1, 2 and 3,
which arrived at 0.5, wait for the worker. CHUNK is not asked of the agent.
"""


def queue_env(**kwargs: Any) -> OpalVLLMEnv:
    one = {"worker.vllm_params.max_num_seqs": 1}
    return OpalVLLMEnv(TINY, overrides=one, decisions=["ADMIT"], **kwargs)


def queue_options() -> dict[str, Any]:
    return {"workload": tiny_workload(QUEUE)}


def busy(**kwargs: Any) -> Wrapped:
    return gymnasium.make("OpalVLLM-v0", scenario=BUSY, **kwargs)


def with_rules(env: Wrapped) -> RuleActionWrapper:
    return RuleActionWrapper(env, admit=ADMISSION, victim=VICTIMS, chunk=CHUNKS)


def constant(env: Wrapped, action: Any, **reset: Any) -> list[tuple[float, dict[str, Any]]]:
    """The rewards and infos of an episode with one action."""
    env.reset(**reset)
    steps: list[tuple[float, dict[str, Any]]] = []
    over = False
    while not over:
        _, reward, terminated, truncated, info = env.step(action)
        steps.append((float(reward), info))
        over = terminated or truncated
    return steps


class TestRuleActions:
    def test_pick_rules_by_name(self) -> None:
        env = with_rules(busy())
        assert env.action_space == spaces.MultiDiscrete([6, 3, 2])
        action = env.action_of(admit="sjf", victim="longest", chunk="1/8")
        assert action.tolist() == [2, 2, 1]
        with pytest.raises(ValueError, match="rule for PREEMPT: got 'sjf'; allowed: one of lwd, "):
            env.action_of(admit="sjf", victim="sjf", chunk="full")

    @pytest.mark.parametrize(
        ("admit", "ends"),
        [
            ("fifo", [5, 9, 11, 14]),
            ("sjf", [5, 14, 7, 10]),  # 2 (2 tokens) to 7, 3 (3 tokens) to 10, 1 to 14
            ("spf", [5, 12, 14, 8]),  # 3 (a prompt of 4) to 8, 1 (of 8) to 12, 2 to 14
        ],
    )
    def test_serve_in_the_order_of_the_rule(self, admit: str, ends: list[int]) -> None:
        base = queue_env()
        env = with_rules(base)
        action = env.action_of(admit=admit, victim="lwd", chunk="full")
        steps = constant(env, action, options=queue_options())
        table = np.sort(base.simulation.records.table, order="request_id")
        assert table["decode_done_time"].tolist() == ends
        mean = np.mean(np.subtract(ends, [0, 0.5, 0.5, 0.5]))
        assert sum(reward for reward, _ in steps) == pytest.approx(-mean)

    @pytest.mark.parametrize(
        ("rules", "policy"),
        [
            ({"admit": "fifo", "victim": "lwd", "chunk": "full"}, "fifo-lwd"),
            (
                {"admit": "mem-sjf", "victim": "longest", "chunk": "1/8"},
                "admit=mem-sjf,victim=longest,chunk=1/8",
            ),
        ],
    )
    def test_held_over_an_episode_are_the_policy_of_these_rules(
        self, rules: Mapping[str, str], policy: str
    ) -> None:
        env = with_rules(busy())
        steps = constant(env, env.action_of(**rules), seed=3, options={"workload_seed": 3})
        metrics = steps[-1][1]["episode_metrics"]
        _, expected = run_in_process(load_config(BUSY), make_policy(policy), 3)
        assert expected["preemptions"] > 0
        assert_same({name: metrics[name] for name in expected}, expected)

    def test_hold_for_one_rebuild(self) -> None:
        """Each step answers all questions of one rebuild, and no other's."""
        asked: list[Decision] = []

        def note(decision: Decision) -> int:
            asked.append(decision)
            return decision.baseline

        one = {"note": note}
        env = RuleActionWrapper(busy(), admit=one, victim=one, chunk=one)
        env.reset(seed=3)
        rebuilds: list[int] = []
        over = False
        while not over:
            asked.clear()
            _, _, terminated, truncated, _ = env.step(np.zeros(3, np.int64))
            assert len({decision.rebuild_id for decision in asked}) == 1
            rebuilds.append(asked[0].rebuild_id)
            over = terminated or truncated
        assert rebuilds == sorted(set(rebuilds))

    def test_rewards_and_times_are_sums(self) -> None:
        single = play(OpalVLLMEnv(BUSY), seed=7)
        env = with_rules(busy())
        steps = constant(env, np.zeros(3, np.int64), seed=7)
        assert len(steps) < len(single) - 1
        assert sum(reward for reward, _ in steps) == pytest.approx(sum(s.reward for s in single))
        assert sum(info["dt"] for _, info in steps) == pytest.approx(
            sum(s.info["dt"] for s in single)
        )
        for term in single[0].info["rewards"]:
            total = sum(info["rewards"][term] for _, info in steps)
            assert total == pytest.approx(sum(s.info["rewards"][term] for s in single)), term

    def test_an_episode_without_a_decision_takes_one_step(self) -> None:
        env = with_rules(queue_env())
        options = {"workload": tiny_workload([(0.0, 4, 3)])}
        ((reward, info),) = constant(env, np.zeros(3, np.int64), options=options)
        assert reward == -3
        assert info["episode_metrics"]["completed"] == 1

    def test_gates_are_rules_too(self) -> None:
        gates = {gate: admission_rule("sjf", gate) for gate in ("none", "0.5")}
        env = RuleActionWrapper(busy(), admit=gates, victim=VICTIMS, chunk=CHUNKS)
        preemptions = [
            constant(env, np.array([row, 0, 0]), seed=3)[-1][1]["episode_metrics"]["preemptions"]
            for row in (0, 1)
        ]
        assert preemptions[0] > preemptions[1]

    def test_are_all_legal(self) -> None:
        env = with_rules(busy())
        _, info = env.reset(seed=0)
        assert env.action_masks().tolist() == [True] * (6 + 3 + 2)
        assert "action_mask" not in info
        for bad in ([6, 0, 0], [0, 0], 1):
            with pytest.raises(ValueError, match="action: got"):
                env.step(np.array(bad))

    def test_need_at_least_one_rule(self) -> None:
        with pytest.raises(ValueError, match="rules for PREEMPT: got none"):
            RuleActionWrapper(busy(), admit=ADMISSION, victim={}, chunk=CHUNKS)


class TestPriorityActions:
    @pytest.mark.parametrize(
        ("features", "weights", "ends"),
        [
            (["predicted_output_tokens"], [-1, -1], [5, 14, 7, 10]),  # the shortest output
            (["prompt_tokens"], [-1, -1], [5, 12, 14, 8]),  # the shortest prompt
            (["prompt_tokens"], [1, 0], [5, 11, 7, 14]),  # the longest: 2, 1, 3
            (["prompt_tokens"], [0, -1], [5, 9, 11, 14]),  # all equal: in queue order
            # The shortest prompt, but the output weighs twice as much; scaled by log(1 + 131072)
            # = 11.8 and log(1 + 16384) = 9.7:
            # 1: log 9 / 11.8 + 2 log 5 / 9.7 = .52; 2: log 13 / 11.8 + 2 log 3 / 9.7 = .44;
            # 3: log 5 / 11.8 + 2 log 4 / 9.7 = .42. So 3 to 8, 2 to 10, 1 to 14.
            (["prompt_tokens", "predicted_output_tokens"], [-0.5, -1, -1], [5, 14, 10, 8]),
        ],
    )
    def test_choose_the_highest_weighted_sum(
        self, features: list[str], weights: list[float], ends: list[int]
    ) -> None:
        base = queue_env()
        env = PriorityActionWrapper(base, features)
        constant(env, np.array(weights, np.float32), options=queue_options())
        table = np.sort(base.simulation.records.table, order="request_id")
        assert table["decode_done_time"].tolist() == ends

    @pytest.mark.parametrize(("stop", "chosen"), [(0.4, "STOP"), (0.2, "candidate"), (-1, "first")])
    def test_stop_has_a_priority_of_its_own(self, stop: float, chosen: str) -> None:
        """Request 0 runs; 1 to 3 wait for one of 4 slots: prompts of 8, 12 and 4 tokens.

        The highest priority is that of request 2: log(1 + 12) / log(1 + 131072) = .22.
        """
        overrides = {"worker.vllm_params.max_num_batched_tokens": 64}
        base = OpalVLLMEnv(TINY, overrides=overrides, decisions=["ADMIT"])
        env = PriorityActionWrapper(base, ["prompt_tokens"])
        _, info = env.reset(options=queue_options())
        while info["time"] < 1:  # when the worker is empty, the oldest is admitted unasked
            _, _, _, _, info = env.step(np.array([1, -1], np.float32))
        assert base.decision is not None
        assert base.decision.num_candidates == 3
        before = base.snapshot()
        weight = -1 if chosen == "first" else 1
        env.step(np.array([weight, stop], np.float32))
        action = base.snapshot().actions[len(before.actions)]
        # The shortest prompt, 4 tokens, is the last of the three: -.14 is above -1.
        assert (
            action == {"STOP": base.config.env.max_candidates, "candidate": 1, "first": 2}[chosen]
        )

    def test_stop_is_never_taken_where_it_is_not_allowed(self) -> None:
        base = queue_env()
        env = PriorityActionWrapper(base, ["prompt_tokens"])
        steps = constant(env, np.array([-1, 1], np.float32), options=queue_options())
        assert steps[-1][1]["episode_metrics"]["completed"] == 4
        assert steps[-1][1]["episode_metrics"]["illegal_actions"] == 0

    def test_every_action_is_legal_in_a_busy_episode(self) -> None:
        env = PriorityActionWrapper(busy())
        assert env.action_space == spaces.Box(-1, 1, (len(INDEX) + 1,), np.float32)
        env.action_space.seed(0)
        env.reset(seed=2)
        over = False
        while not over:
            _, _, terminated, truncated, info = env.step(env.action_space.sample())
            over = terminated or truncated
        assert info["episode_metrics"]["illegal_actions"] == 0
        assert info["episode_metrics"]["preemptions"] > 0

    @pytest.mark.parametrize("bad", [[2, 0], [math.nan, 0], [0], [[0, 0]]])
    def test_outside_the_space_are_refused(self, bad: list[Any]) -> None:
        env = PriorityActionWrapper(busy(), ["prompt_tokens"])
        env.reset(seed=0)
        with pytest.raises(ValueError, match="action: got"):
            env.step(np.array(bad, np.float32))

    @pytest.mark.parametrize("features", [["prompt"], ["weight", "weight"]])
    def test_unknown_features_are_refused(self, features: list[str]) -> None:
        with pytest.raises(ValueError, match=rf"features: got '{features[0]}'; allowed:.*weight"):
            PriorityActionWrapper(busy(), features)


class TestMaskInTheObservation:
    @pytest.mark.parametrize("key", ["observation", "observations"])
    def test_is_that_of_info(self, key: str) -> None:
        env = MaskObservationWrapper(busy(), key)
        single = play(OpalVLLMEnv(BUSY), seed=5)
        observation, info = env.reset(seed=5)
        for seen, after in zip(single, [*single[1:], None], strict=True):
            assert env.observation_space.contains(observation)
            np.testing.assert_array_equal(observation["action_mask"], seen.info["action_mask"])
            assert_same(observation[key], seen.observation)
            if after is not None:
                observation, _, _, _, info = env.step(np.int64(baseline(info)))

    def test_stands_beside_a_flat_observation(self) -> None:
        env = MaskObservationWrapper(FlattenObservation(busy()))
        observation, info = env.reset(seed=5)
        assert isinstance(env.observation_space, spaces.Dict)
        assert observation["observation"].shape == env.observation_space["observation"].shape
        np.testing.assert_array_equal(observation["action_mask"], info["action_mask"])


class TestTimeDiscount:
    def test_of_a_hand_worked_episode(self) -> None:
        """Of the four requests, one mean each: 4 in the system from .5 to 5, and so on.

        The first question comes at 5 s, of requests 1, 2 and 3; with 1 served first to 9, the
        second at 9 s, of 2 and 3; from there 2 runs to 11 and 3, unasked, to 14.
        """
        env = TimeDiscountWrapper(queue_env(), time_constant_s=10)
        steps = constant(env, np.int64(0), options=queue_options())
        assert [info["dt"] for _, info in steps] == [4, 5]
        discounts = [info["discount"] for _, info in steps]
        assert discounts == pytest.approx([math.exp(-0.4), math.exp(-0.5)])
        # Raw: .5·1 + 4.5·4 until 5 s and 4·3 until 9 s; then 2·2 + 3·1; over 4.
        raw = [30.5 / 4, 7 / 4]
        within = [(1 - math.exp(-x)) / x for x in (0.4, 0.5)]
        expected = [-value * share for value, share in zip(raw, within, strict=True)]
        assert [reward for reward, _ in steps] == pytest.approx(expected)
        assert [-info["rewards"]["latency"] for _, info in steps] == pytest.approx(raw)

    def test_cutting_a_step_in_two_changes_no_return(self) -> None:
        """A reward of -3 a second for 4 s, in one step, or in steps of 1 s and 3 s."""

        class Steps(gymnasium.Wrapper[Any, Any, Any, Any]):
            def __init__(self, lengths: list[float]) -> None:
                super().__init__(queue_env())
                self.lengths = lengths

            def step(self, action: Any) -> Any:
                dt = self.lengths.pop(0)
                return None, -3 * dt, not self.lengths, False, {"dt": dt}

        def discounted(lengths: list[float]) -> float:
            env = TimeDiscountWrapper(Steps(lengths), time_constant_s=5)
            total, factor, over = 0.0, 1.0, False
            while not over:
                _, reward, over, _, info = env.step(0)
                total += factor * reward
                factor *= info["discount"]
            return total

        # ∫ -3 e^(-t/5) dt over 4 s
        assert discounted([4.0]) == pytest.approx(-15 * (1 - math.exp(-0.8)))
        assert discounted([1.0, 3.0]) == pytest.approx(discounted([4.0]))

    def test_no_time_costs_nothing(self) -> None:
        env = TimeDiscountWrapper(busy(), time_constant_s=5)
        _, info = env.reset(seed=3)
        assert info["discount"] == 1
        over, zeros = False, 0
        while not over:
            _, reward, terminated, truncated, info = env.step(np.int64(baseline(info)))
            assert info["discount"] == pytest.approx(math.exp(-info["dt"] / 5))
            if info["dt"] == 0:
                zeros += 1
                assert reward == pytest.approx(info["rewards"]["latency"])
            over = terminated or truncated
        assert zeros > 0

    def test_is_the_same_inside_and_around_rule_actions(self) -> None:
        """Only the last answer of a rebuild takes time; the reward until the first question, which
        belongs to the first step, is the exception."""
        action = np.zeros(3, np.int64)
        inside = constant(with_rules(TimeDiscountWrapper(busy(), 5)), action, seed=3)
        around = constant(TimeDiscountWrapper(with_rules(busy()), 5), action, seed=3)
        assert [info["discount"] for _, info in inside] == [info["discount"] for _, info in around]
        assert [r for r, _ in inside][1:] == pytest.approx([r for r, _ in around][1:])

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
    def test_impossible_time_constants_are_refused(self, bad: float) -> None:
        with pytest.raises(ValueError, match="time_constant_s: got"):
            TimeDiscountWrapper(busy(), bad)


class TestAll:
    WRAPPERS: Mapping[str, Any] = {
        "rules": with_rules,
        "priorities": PriorityActionWrapper,
        "mask": MaskObservationWrapper,
        "discount": TimeDiscountWrapper,
        "rules-discount": lambda env: with_rules(TimeDiscountWrapper(env)),
        "flat-mask": lambda env: MaskObservationWrapper(FlattenObservation(env)),
    }

    @pytest.mark.filterwarnings("error", "ignore:.*different from the unwrapped version")
    @pytest.mark.parametrize("scenario", ["busy", "busy-workers", "slot8-chat"])
    @pytest.mark.parametrize("wrapper", WRAPPERS)
    def test_pass_gymnasiums_checker(self, wrapper: str, scenario: str) -> None:
        env = gymnasium.make("OpalVLLM-v0", **SCENARIOS[scenario])
        check_env(self.WRAPPERS[wrapper](env), skip_render_check=True)

    @pytest.mark.parametrize("wrapper", ["rules", "priorities", "mask"])
    def test_take_only_environments_with_the_actions_of_opal_vllm(self, wrapper: str) -> None:
        with pytest.raises(TypeError, match=r"allowed: OpalVLLM-v0"):
            self.WRAPPERS[wrapper](gymnasium.make("CartPole-v1"))
        with pytest.raises(TypeError, match="got actions MultiDiscrete"):
            self.WRAPPERS[wrapper](with_rules(busy()))

    def test_the_stack_can_be_described(self) -> None:
        spec = MaskObservationWrapper(TimeDiscountWrapper(busy(), 7.0)).spec
        assert spec is not None
        names = [each.name for each in spec.additional_wrappers]
        assert names == ["TimeDiscountWrapper", "MaskObservationWrapper"]


class TestLearning:
    """A few steps of Stable-Baselines3's learners."""

    @pytest.fixture(autouse=True)
    def _needs_sb3(self) -> None:
        pytest.importorskip("stable_baselines3", reason="needs the extra `train`")

    @pytest.mark.slow
    @pytest.mark.parametrize("wrapper", ["rules", "priorities", "discount", "flat-mask"])
    def test_ppo(self, wrapper: str) -> None:
        from stable_baselines3 import PPO

        env = TestAll.WRAPPERS[wrapper](busy(num_requests=12))
        model = PPO(
            "MultiInputPolicy", env, n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0
        )
        assert model.learn(64).num_timesteps == 64

    @pytest.mark.slow
    @pytest.mark.parametrize("wrapper", ["discount", "flat-mask"])
    def test_dqn(self, wrapper: str) -> None:
        from stable_baselines3 import DQN

        env = TestAll.WRAPPERS[wrapper](busy(num_requests=12))
        model = DQN(
            "MultiInputPolicy", env, buffer_size=100, learning_starts=20, device="cpu", seed=0
        )
        assert model.learn(60).num_timesteps == 60

    @pytest.mark.slow
    def test_maskable_ppo_takes_rule_actions(self) -> None:
        sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs the extra `train`")
        env = with_rules(busy(num_requests=12))
        model = sb3_contrib.MaskablePPO(
            "MultiInputPolicy", env, n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0
        )
        assert model.learn(64).num_timesteps == 64
