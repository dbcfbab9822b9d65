"""Rendering as text, and render modes."""

from __future__ import annotations

import gymnasium
import pytest

from opal_gym.envs import OpalVLLMEnv
from opal_gym.envs.rendering import SHOWN_CANDIDATES
from tests.episodes import assert_same, baseline, make_env, play, random_legal
from tests.tiny import tiny_config, tiny_workload


def rendered(env: OpalVLLMEnv) -> str:
    text = env.render()
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("mode", ["hologram", "ANSI", "", 1])
def test_an_unsupported_mode_is_refused_with_what_is_allowed(mode: str) -> None:
    with pytest.raises(TypeError, match="render_mode") as refused:
        make_env("busy", render_mode=mode)
    assert repr(mode) in str(refused.value)
    assert "ansi" in str(refused.value)


def test_metadata_lists_what_can_be_rendered() -> None:
    assert "ansi" in OpalVLLMEnv.metadata["render_modes"]
    for mode in OpalVLLMEnv.metadata["render_modes"]:
        assert make_env("busy", render_mode=mode).render_mode == mode


def test_without_a_mode_nothing_is_rendered() -> None:
    env = make_env("busy")
    env.reset(seed=0)
    assert env.render_mode is None
    assert env.render() is None


def test_rendering_needs_an_episode() -> None:
    with pytest.raises(gymnasium.error.ResetNeeded):
        make_env("busy", render_mode="ansi").render()


def test_every_step_of_an_episode_is_rendered_with_its_question() -> None:
    env, choose = make_env("busy", render_mode="ansi"), random_legal(1)
    _, info = env.reset(seed=1)
    kinds, over = set(), False
    while not over:
        decision, text = env.decision, rendered(env)
        assert decision is not None
        assert f"{decision.kind.name}: {decision.num_candidates} candidates" in text
        assert ("STOP" in text.split(";")[0]) == decision.stop_allowed
        assert f"t = {info['time']:.3f} s" in text
        kinds.add(decision.kind.name)
        _, _, over, _, info = env.step(choose(info))
    assert kinds == {"CHUNK", "PREEMPT", "ADMIT"}
    text = rendered(env)
    assert "no decision" in text
    completed = int(info["episode_metrics"]["completed"])
    assert f"completed {completed}/{len(env.simulation.workload)}" in text


def test_a_hand_worked_picture() -> None:
    """At 1, A holds 3 of 7 blocks for its next token, and B is the only candidate."""
    env = OpalVLLMEnv(
        tiny_config(num_gpu_blocks_override=7), decisions=("ADMIT",), render_mode="ansi"
    )
    env.reset(options={"workload": tiny_workload([(0.0, 8, 10), (0.5, 8, 10)])})
    lines = rendered(env).splitlines()
    assert "t = 1.000 s" in lines[0]
    assert "rebuild 2" in lines[0]
    assert "completed 0/2" in lines[0]
    assert "preemptions 0" in lines[0]
    assert "3/7" in lines[1]
    assert "1/4 sequences, 0 in prefill" in lines[2]
    assert "1 waiting: 1" in lines[3]
    assert lines[4].startswith("ADMIT: 1 candidates, or STOP; baseline: 0")
    assert lines[6].split()[:2] == ["0", "1"]


def test_long_tables_are_cut() -> None:
    env = OpalVLLMEnv(tiny_config(), decisions=("ADMIT",), render_mode="ansi")
    env.reset(options={"workload": tiny_workload([(0.0, 4, 2)] * 30)})
    assert env.decision is not None
    assert env.decision.num_candidates == 30
    assert len(rendered(env).splitlines()) < 10 + SHOWN_CANDIDATES


def test_rendering_does_not_change_the_episode() -> None:
    env = make_env("busy", render_mode="ansi")
    expected = play(make_env("busy"), seed=2)
    _, info = env.reset(seed=2)
    for seen in expected[1:]:
        assert rendered(env) == rendered(env)
        result = env.step(baseline(info))
        info = result[4]
        assert_same(result, tuple(seen))


def test_gymnasium_makes_the_mode() -> None:
    env = gymnasium.make("OpalVLLM-v0", num_requests=3, render_mode="ansi")
    env.reset(seed=0)
    assert isinstance(env.render(), str)
    vector = gymnasium.make_vec("OpalVLLM-v0", num_envs=2, num_requests=3, render_mode="ansi")
    vector.reset(seed=0)
    frames = vector.render()
    assert frames is not None
    assert len(frames) == 2
    vector.close()
