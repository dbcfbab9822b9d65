"""No scheduler can see the true output lengths before they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from opal_gym.envs import OpalVLLMEnv
from opal_gym.sim.workloads import Workload
from tests.episodes import (
    SCENARIOS,
    Chooser,
    assert_same,
    baseline,
    digest,
    make_env,
    random_legal,
)
from tests.tiny import tiny_config, tiny_workload


class Shown(NamedTuple):
    """What an agent could use of a decision."""

    observation: dict[str, Any]
    mask: Any
    baseline_action: float
    time: float
    rebuild_id: float
    table: Any
    gauges: Any
    latency: float
    ttft: float


def watch(env: OpalVLLMEnv, workload: Workload, choose: Chooser) -> list[Shown]:
    """All that is shown of an episode's decisions."""
    shown = []
    observation, info = env.reset(options={"workload": workload})
    over = False
    while not over:
        decision = env.decision
        assert decision is not None
        shown.append(
            Shown(
                observation,
                info["action_mask"],
                info["baseline_action"],
                info["time"],
                info["rebuild_id"],
                decision.candidates.values,
                decision.gauges.values,
                info["rewards"]["latency"],
                info["rewards"]["ttft"],
            )
        )
        observation, _, over, _, info = env.step(choose(info))
    return shown


def late_finisher(env: OpalVLLMEnv) -> int:
    """A request that completed after half of the others, and whose output could be much longer."""
    table = env.simulation.records.table
    longest = min(
        env.config.max_model_len,
        env.config.total_gpu_blocks * env.config.worker.vllm_params.block_size,
    )
    room = table["prompt_tokens"] + longer(table["output_tokens"]) <= longest
    finishers = table["request_id"][room]
    return int(finishers[len(finishers) // 2])


def longer(output: Any) -> Any:
    return 3 * output + 7


def end_of(env: OpalVLLMEnv, request: int) -> float:
    """When a request completed, s."""
    table = env.simulation.records.table
    return float(table["decode_done_time"][table["request_id"] == request][0])


def check(
    env: OpalVLLMEnv, twin: OpalVLLMEnv, workload: Workload, seed: int | None
) -> tuple[int, bool]:
    """Compares what is shown up to the first completion that differs.

    Returns:
        How many decisions there were before it, and whether any after it differed.
    """

    def chooser() -> Chooser:
        return baseline if seed is None else random_legal(seed)

    shown = watch(env, workload, chooser())
    changed = late_finisher(env)
    output = workload.output_tokens.copy()
    output[changed] = longer(output[changed])
    also = watch(twin, replace(workload, output_tokens=output), chooser())
    until = min(end_of(env, changed), end_of(twin, changed))
    before = [one for one in shown if one.time < until]
    assert_same([one for one in also if one.time < until], before)
    return len(before), digest(also) != digest(shown)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *((name, None) for name in SCENARIOS if name != "opal-docs"),
        ("busy", 5),
        ("busy-completion", 6),
        ("mem-longctx", 7),
    ],
)
def test_decisions_do_not_depend_on_true_lengths(name: str, seed: int | None) -> None:
    """Driven by the baseline, or by random answers."""
    env, twin = make_env(name), make_env(name)
    compared, differs = 0, False
    for workload_seed in range(2):
        env.reset(options={"workload_seed": workload_seed})
        before, later = check(env, twin, env.simulation.workload, seed)
        compared += before
        differs |= later
    assert compared > 30
    if name in ("busy", "busy-without-tier"):
        assert differs, "the two workloads do differ"


@pytest.mark.parametrize("information", ["predicted", "none"])
def test_the_documented_worker_does_not_see_them_either(information: str) -> None:
    """`opal-docs` is an oracle by default; without the oracle it is as blind as the others."""
    env, twin = (make_env("opal-docs", length_information=information) for _ in range(2))
    env.reset(options={"workload_seed": 1})
    assert check(env, twin, env.simulation.workload, None)[0] > 20


def test_an_oracle_does_see_them() -> None:
    """The test can fail: under `oracle` the very first ADMIT differs."""
    config = tiny_config({"simulation.length_information": "oracle"})
    first = []
    for output in (3, 30):
        env = OpalVLLMEnv(config, decisions=("ADMIT",))
        workload = tiny_workload([(0.0, 4, output), (0.0, 4, output)], predicted=[3, 3])
        first.append(env.reset(options={"workload": workload})[0]["candidates"])
    assert not np.array_equal(*first)


def test_without_length_information_predictions_do_not_matter() -> None:
    env, twin = (make_env("busy", length_information="none") for _ in range(2))
    env.reset(options={"workload_seed": 3})
    workload = env.simulation.workload
    other = replace(workload, predicted_output_tokens=workload.output_tokens[::-1].copy())
    assert_same(watch(env, workload, random_legal(0)), watch(twin, other, random_legal(0)))


@pytest.mark.parametrize("information", ["predicted", "oracle", "none"])
def test_length_information_decides_what_the_table_shows(information: str) -> None:
    env = OpalVLLMEnv(tiny_config({"simulation.length_information": information}))
    workload = tiny_workload([(0.0, 4, 3), (0.0, 4, 9)], predicted=[5, 6])
    env.reset(options={"workload": workload})
    env.step(0)
    assert env.decision is not None
    table = env.decision.candidates
    seen = {"predicted": [5.0, 6.0], "oracle": [3.0, 9.0], "none": [0.0, 0.0]}[information]
    assert table["predicted_output_tokens"].tolist() == seen
    assert table["predicted_kv_area"].tolist() == [out * (4 + out / 2) for out in seen]
    if information == "none":
        # predicted remaining = max(1, predicted − generated) = 1: nothing is known of anybody.
        assert table["predicted_remaining"].tolist() == [1.0, 1.0]
