"""How an episode ends, and what may be called before and after."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.gauges import GAUGES
from opal_gym.sim.workloads import Workload
from tests.episodes import (
    SCENARIOS,
    Seen,
    assert_same,
    baseline,
    make_env,
    play,
    random_any,
    random_legal,
)
from tests.tiny import tiny_config, tiny_workload

# Each needs 101 or more of the pool's 100 blocks of 4 tokens.
TOO_LARGE = [(0.0, 401, 1), (1.0, 300, 101), (2.5, 399, 9)]


def stop(env: OpalVLLMEnv) -> int:
    return env.config.env.max_candidates


def assert_no_decision(env: OpalVLLMEnv, seen: Seen) -> None:
    """Kind all 0, no candidates, STOP only."""
    assert not seen.observation["kind"].any()
    assert not seen.observation["candidates"].any()
    only_stop = [0] * stop(env) + [1]
    assert seen.info["action_mask"].tolist() == only_stop
    assert env.action_masks().tolist() == [bool(legal) for legal in only_stop]
    assert seen.info["baseline_action"] == stop(env)
    assert env.decision is None


# --------------------------------------------------------------- without any decision


UNDECIDED: dict[str, dict[str, Any]] = {
    "nobody-asked": {"decisions": ()},
    "never-short": {"decisions": ("PREEMPT",)},
    "one-answer": {"overrides": {"worker.vllm_params.chunk_budgets": [16]}},
}


@pytest.mark.parametrize("case", UNDECIDED)
def test_without_decisions_the_first_step_ends_the_episode_with_all_the_reward(case: str) -> None:
    """A: tokens at 1, 2, 3. B arrives at 5.5: tokens at 6.5, 7.5. Mean E2E = (3 + 2) / 2."""
    env = OpalVLLMEnv(tiny_config(), **UNDECIDED[case])
    begin, last = play(env, options={"workload": tiny_workload([(0.0, 4, 3), (5.5, 4, 2)])})
    assert_no_decision(env, begin)
    assert_no_decision(env, last)
    assert (begin.info["time"], last.info["time"], last.info["dt"]) == (7.5, 7.5, 0.0)
    assert last.terminated
    assert not last.truncated
    assert last.reward == pytest.approx(-2.5)
    assert last.info["episode_metrics"]["illegal_actions"] == 0.0


@pytest.mark.parametrize("action", [0, 63])
def test_any_action_ends_an_episode_without_decisions(action: int) -> None:
    env = OpalVLLMEnv(tiny_config(), decisions=())
    env.reset(options={"workload": tiny_workload([(0.0, 4, 3)])})
    _, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated) == (-3.0, True, False)
    assert info["episode_metrics"]["illegal_actions"] == 1.0
    assert info["episode_metrics"]["illegal_action_share"] == 1.0


def test_a_workload_in_which_all_are_rejected_ends_at_the_first_step() -> None:
    env = OpalVLLMEnv(tiny_config())
    begin, last = play(env, options={"workload": tiny_workload(TOO_LARGE)})
    assert_no_decision(env, begin)
    assert_no_decision(env, last)
    assert last.terminated
    assert last.reward == 0.0
    assert set(last.info["rewards"].values()) == {0.0}
    metrics = last.info["episode_metrics"]
    assert (metrics["requests"], metrics["completed"], metrics["rejected"]) == (0.0, 0.0, 3.0)
    assert metrics["e2e_s"]["mean"] == 0.0


@pytest.mark.parametrize("order", [1, -1])
def test_rejections_at_either_end_do_not_delay_the_end(order: int) -> None:
    """Terminated when every request has completed *or been rejected*: here at 2, then at 2.5."""
    requests = [(0.0, 4, 2), (2.5, 401, 1)] if order == 1 else [(0.0, 401, 1), (0.0, 4, 2)]
    env = OpalVLLMEnv(tiny_config())
    episode = play(env, options={"workload": tiny_workload(requests)})
    assert episode[-1].terminated
    assert episode[-1].info["time"] == (2.5 if order == 1 else 2.0)
    assert episode[-1].info["episode_metrics"]["rejected"] == 1.0


# --------------------------------------------------------------------- termination


@pytest.mark.parametrize("name", SCENARIOS)
def test_terminated_once_everybody_completed_or_was_rejected(name: str) -> None:
    env = make_env(name)
    episode = play(env, random_any(5), seed=1)
    assert [seen.terminated for seen in episode[:-1]] == [False] * (len(episode) - 1)
    assert not any(seen.truncated for seen in episode)
    assert_no_decision(env, episode[-1])
    records = env.simulation.records
    assert len(records) + len(records.rejected) == len(env.simulation.workload)
    if not records.rejected:
        assert episode[-1].info["time"] == records.table["decode_done_time"].max()
    for seen in episode[1:-1]:
        assert seen.observation["kind"].sum() == 1.0
        assert "episode_metrics" not in seen.info


# ------------------------------------------------------------------------- horizon


@pytest.mark.parametrize("horizon_s", [1e-6, 0.4])
def test_never_truncated_at_the_first_step(horizon_s: float) -> None:
    """The horizon is reached before the first decision, even before the first arrival."""
    env = OpalVLLMEnv(tiny_config(), horizon_s=horizon_s, decisions=("ADMIT",))
    workload = tiny_workload([(0.25, 4, 9), (0.3, 4, 9)])
    begin, first, second = play(env, options={"workload": workload})
    for seen in (begin, first, second):
        assert_no_decision(env, seen)
        assert seen.info["time"] == horizon_s
    assert not first.truncated
    assert not first.terminated
    paid = max(0.0, horizon_s - 0.25) + max(0.0, horizon_s - 0.3)
    assert first.reward == pytest.approx(-paid / 2)
    assert second.truncated
    assert not second.terminated
    assert (second.reward, second.info["dt"]) == (0.0, 0.0)
    assert "episode_metrics" not in first.info


def test_a_first_step_that_reaches_the_horizon_is_followed_by_one_that_takes_no_time() -> None:
    """The first decision is at 0 (CHUNK); A alone runs from 0 to 9."""
    env = OpalVLLMEnv(tiny_config(), horizon_s=4.25)
    begin, first, second = play(env, options={"workload": tiny_workload([(0.0, 4, 9)])})
    assert begin.observation["kind"].tolist() == [1.0, 0.0, 0.0]
    assert (first.truncated, first.reward, first.info["dt"]) == (False, -4.25, 4.25)
    assert_no_decision(env, first)
    assert (second.truncated, second.reward, second.info["dt"]) == (True, 0.0, 0.0)
    assert second.info["time"] == 4.25


@pytest.mark.parametrize("name", ["busy", "busy-without-tier", "opal-docs", "slot8-chat"])
def test_up_to_the_horizon_the_episode_is_the_same(name: str) -> None:
    whole = play(make_env(name), random_legal(2), seed=3)
    horizon = 0.5 * whole[-1].info["time"]
    cut = play(make_env(name, horizon_s=horizon), random_legal(2), seed=3)
    assert len(cut) > 10
    assert cut[-1].truncated
    assert cut[-1].info["time"] == horizon
    assert_same(cut[:-1], whole[: len(cut) - 1])
    assert whole[len(cut) - 1].info["time"] >= horizon > cut[-2].info["time"]


@pytest.mark.parametrize("name", ["busy", "opal-docs"])
def test_a_horizon_after_the_end_changes_nothing(name: str) -> None:
    whole = play(make_env(name), seed=3)
    later = whole[-1].info["time"] + 1.0
    assert_same(play(make_env(name, horizon_s=later), seed=3), whole)


def test_metrics_of_a_truncated_episode_count_what_happened_before_the_horizon() -> None:
    """A completes at 2; B, from 2.5, would at 11.5, and has made four of nine steps at 6.75."""
    env = OpalVLLMEnv(tiny_config(), horizon_s=6.75)
    workload = tiny_workload([(0.0, 4, 2), (2.5, 4, 9), (20.0, 4, 1)])
    metrics = play(env, options={"workload": workload})[-1].info["episode_metrics"]
    assert (metrics["requests"], metrics["completed"]) == (2.0, 1.0)
    assert metrics["e2e_s"]["mean"] == 2.0
    assert metrics["duration_s"] == 6.75
    # Busy for 2 + 4 s at least, and for 0.25 s of the step under way.
    assert 6 / 6.75 <= metrics["gpu_busy_share"] <= 6.25 / 6.75


def test_the_last_observation_of_a_truncated_episode_is_that_of_the_horizon() -> None:
    """At 6.5, A (4 + 9) has made 6 tokens and makes the 7th: 11 in KV, so 3 of 100 blocks."""
    env = OpalVLLMEnv(tiny_config(), horizon_s=6.5)
    last = play(env, options={"workload": tiny_workload([(0.0, 4, 9)])})[-1]
    assert last.truncated
    free_blocks = dict(zip((g.name for g in GAUGES), last.observation["worker"], strict=True))
    assert free_blocks["free_blocks"] == pytest.approx(0.97)


# --------------------------------------------------------------- before and after


@pytest.mark.parametrize("horizon_s", [None, 1.0])
def test_a_step_after_the_end_raises_until_reset(horizon_s: float | None) -> None:
    env = make_env("busy", horizon_s=horizon_s)
    last = play(env, seed=1)[-1]
    time = env.simulation.env.now
    for _ in range(2):
        with pytest.raises(ResetNeeded, match="reset"):
            env.step(baseline(last.info))
        assert env.simulation.env.now == time
    assert_same(play(env, seed=0), play(make_env("busy", horizon_s=horizon_s), seed=0))


def test_whatever_needs_an_episode_raises_before_reset() -> None:
    env = make_env("busy")
    for call in (lambda: env.step(0), env.action_masks, env.snapshot, lambda: env.decision):
        with pytest.raises(ResetNeeded, match="reset"):
            call()


def test_an_empty_workload_is_refused_or_ends_at_the_first_step() -> None:
    none = np.zeros(0, np.int64)
    empty = Workload(np.zeros(0), none, none, none, none, none)
    env = OpalVLLMEnv(tiny_config())
    try:
        env.reset(options={"workload": empty})
    except ValueError:
        return
    _, reward, terminated, _, _ = env.step(stop(env))
    assert (reward, terminated) == (0.0, True)
