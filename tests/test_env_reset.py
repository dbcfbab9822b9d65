"""`reset`: seeds, streams and options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.workloads import Workload, make_workload
from tests.episodes import SCENARIOS, assert_same, digest, make_env, play
from tests.tiny import tiny_config, tiny_workload

COLUMNS = (
    "arrival_time",
    "prompt_tokens",
    "output_tokens",
    "predicted_output_tokens",
    "tenant",
    "priority",
)


def columns(workload: Workload) -> dict[str, Any]:
    return {name: getattr(workload, name) for name in COLUMNS} | {"hash_ids": workload.hash_ids}


def workload_of(env: OpalVLLMEnv, **reset: Any) -> Workload:
    env.reset(**reset)
    return env.simulation.workload


def same(one: Workload, other: Workload) -> bool:
    return digest(columns(one)) == digest(columns(other))


# ---------------------------------------------------------------------------- seeds


def test_without_a_seed_the_stream_of_workloads_continues() -> None:
    env, twin = make_env("busy"), make_env("busy")
    workloads = [workload_of(env, seed=5), *(workload_of(env) for _ in range(4))]
    again = [workload_of(twin, seed=5), *(workload_of(twin) for _ in range(4))]
    assert all(same(one, other) for one, other in zip(workloads, again, strict=True))
    assert len({digest(columns(workload)) for workload in workloads}) == 5


def test_actions_do_not_disturb_the_stream() -> None:
    env, twin = make_env("slot8-chat"), make_env("slot8-chat")
    play(env, seed=5)
    twin.reset(seed=5)
    assert_same(play(env), play(twin))


def test_a_seed_restarts_the_stream() -> None:
    env = make_env("busy")
    first = workload_of(env, seed=5)
    others = [workload_of(env) for _ in range(3)]
    assert same(workload_of(env, seed=5), first)
    assert all(same(workload_of(env), other) for other in others)
    assert not same(workload_of(env, seed=6), first)


def test_environments_without_seeds_differ() -> None:
    assert not same(workload_of(make_env("busy")), workload_of(make_env("busy")))


# ------------------------------------------------------------------- workload_seed


@pytest.mark.parametrize("name", SCENARIOS)
def test_workload_seed_alone_decides_the_workload(name: str) -> None:
    options = {"workload_seed": 77}
    one = workload_of(make_env(name), seed=1, options=options)
    other = workload_of(make_env(name), seed=2, options=options)
    without = workload_of(make_env(name), options=options)
    assert same(one, other)
    assert same(one, without)
    assert not same(one, workload_of(make_env(name), options={"workload_seed": 78}))
    config = make_env(name).config
    assert same(
        one,
        make_workload(
            config.workload,
            77,
            length_information=config.simulation.length_information,
            hash_block_tokens=config.kvc.hash_block_tokens,
        ),
    )


def test_workload_seed_gives_the_same_requests_to_every_worker() -> None:
    """Common random numbers: another pool, budget or set of decisions meets the same requests."""
    env = make_env("busy")
    other = OpalVLLMEnv(
        env.config,
        overrides={"worker.vllm_params.num_gpu_blocks_override": 200},
        decisions=("ADMIT",),
        max_candidates=9,
    )
    options = {"workload_seed": 3}
    assert same(workload_of(env, options=options), workload_of(other, options=options))


# ---------------------------------------------------------------------- rate_scale


@pytest.mark.parametrize("scale", [0.5, 2.0, 3.7])
def test_rate_scale_moves_the_arrivals_and_nothing_else(scale: float) -> None:
    env = make_env("busy")
    one = workload_of(env, options={"workload_seed": 4})
    other = workload_of(env, options={"workload_seed": 4, "rate_scale": scale})
    np.testing.assert_allclose(other.arrival_time * scale, one.arrival_time, rtol=1e-9)
    assert other.load == pytest.approx(one.load * scale)
    these, those = columns(one), columns(other)
    del these["arrival_time"], those["arrival_time"]
    assert_same(these, those)


def test_rate_scale_goes_with_a_seed() -> None:
    plain = workload_of(make_env("busy"), seed=4)
    faster = workload_of(make_env("busy"), seed=4, options={"rate_scale": 2.0})
    np.testing.assert_allclose(faster.arrival_time * 2, plain.arrival_time, rtol=1e-9)


# ------------------------------------------------------------------------ workload


def test_a_workload_is_used_as_it_is() -> None:
    given = tiny_workload([(0.0, 4, 2), (1.25, 9, 3)], predicted=[7, 8])
    env = OpalVLLMEnv(tiny_config())
    for seed in (None, 1, 2):
        assert same(workload_of(env, seed=seed, options={"workload": given}), given)
    episode = play(env, options={"workload": given})
    assert_same(play(env, options={"workload": given}), episode)


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["seed", "workloads", "Workload_seed", "horizon_s"])
def test_an_unknown_option_is_refused_by_name(name: str) -> None:
    env = make_env("busy")
    with pytest.raises(ValueError, match=name) as refused:
        env.reset(seed=0, options={name: 1})
    for allowed in ("workload_seed", "rate_scale", "workload"):
        assert allowed in str(refused.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("workload_seed", -1),
        ("workload_seed", 1.5),
        ("workload_seed", "7"),
        ("rate_scale", 0.0),
        ("rate_scale", -1.0),
        ("rate_scale", float("nan")),
        ("rate_scale", float("inf")),
        ("rate_scale", "2"),
        ("workload", 3),
        ("workload", [1, 2]),
    ],
)
def test_an_impossible_option_is_refused(option: str, value: object) -> None:
    """`reset` documents ValueError; a TypeError would do for a wrong type."""
    with pytest.raises((ValueError, TypeError)):
        make_env("busy").reset(seed=0, options={option: value})


@pytest.mark.parametrize("option", ["workload_seed", "rate_scale", "workload"])
def test_none_as_an_option_is_refused_or_means_that_it_is_not_given(option: str) -> None:
    """Above all: the seed still decides everything."""
    plain = workload_of(make_env("busy"), seed=0)
    try:
        given = workload_of(make_env("busy"), seed=0, options={option: None})
    except (ValueError, TypeError):
        return
    assert same(given, plain)


def test_options_are_not_changed() -> None:
    options: dict[str, Any] = {"rate_scale": 2.0}
    make_env("busy").reset(seed=0, options=options)
    assert options == {"rate_scale": 2.0}


def test_a_refused_reset_leaves_a_usable_environment() -> None:
    env = make_env("slot8-chat")
    with pytest.raises(ValueError, match="unknown"):
        env.reset(seed=0, options={"nothing": 1})
    assert_same(play(env, seed=0), play(make_env("slot8-chat"), seed=0))
