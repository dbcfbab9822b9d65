"""What a configuration says of the GPU: datasheets, timing, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from opal_gym.config import Config, ConfigError, HardwareConfig, load_config
from opal_gym.sim.gpu_model import (
    GPU_CONSTANTS,
    GPU_SPECS,
    CalibratedGPUModel,
    SimpleConstants,
    SimpleGPUModel,
)
from opal_gym.sim.simulation import make_gpu_model
from tests.tiny import TINY

CONSTANTS = {
    "mfu_linear": 0.7,
    "mbu_weights": 0.8,
    "mfu_attention": 0.6,
    "mbu_kv": 0.75,
    "q": 2.0,
    "layer_overhead_s": 3e-5,
}


def config_of(hw: dict[str, Any], timing: dict[str, Any], model: str = "llama-3-8b") -> Config:
    return load_config(
        TINY, {"worker.hw": hw, "worker.inference_params": timing, "model.name": model}
    )


@pytest.mark.parametrize("gpu", sorted(GPU_SPECS))
def test_a_known_gpu_brings_its_datasheet(gpu: str) -> None:
    hw = HardwareConfig.model_validate({"gpu": gpu})
    assert (hw.memory_gb, hw.tflops, hw.mem_bw_TBps) == GPU_SPECS[gpu]
    assert HardwareConfig.model_validate({"gpu": gpu, "tflops": 1.5}).tflops == 1.5


def test_another_gpu_needs_its_datasheet() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of({"gpu": "B200", "tflops": 2250}, {"model": "roofline"})
    assert str(caught.value).splitlines() == [
        "configuration: worker.hw.memory_gb: missing; allowed: a value must be given",
        "configuration: worker.hw.mem_bw_TBps: missing; allowed: a value must be given",
    ]


def test_the_name_of_a_gpu_is_a_text() -> None:
    with pytest.raises(ConfigError, match=r"worker\.hw\.gpu: got \['H100'\]; allowed: a valid str"):
        load_config(TINY, {"worker.hw.gpu": ["H100"]})


def test_calibrated_takes_the_constants_of_the_gpu() -> None:
    model = make_gpu_model(config_of({"gpu": "H200", "tp": 2}, {"model": "calibrated"}))
    shape = config_of({}, {"model": "calibrated"}).model.shape
    expected = CalibratedGPUModel(shape, GPU_CONSTANTS["H200"], 989.0, 4.8, tp=2)
    assert model.step_latency([(0, 100)], [7]) == expected.step_latency([(0, 100)], [7])


def test_calibrated_is_the_simple_form_on_the_rtx_4090() -> None:
    base = make_gpu_model(config_of({"gpu": "RTX 4090"}, {"model": "calibrated"}))
    assert isinstance(base, SimpleGPUModel)
    timing = {"model": "calibrated", "step_overhead_s": 0.25}
    slower = make_gpu_model(config_of({"gpu": "RTX 4090"}, timing))
    difference = slower.step_latency([], [10]) - base.step_latency([], [10])
    assert difference == pytest.approx(0.25)


def test_a_fit_of_ones_own_in_both_forms() -> None:
    hw = {"gpu": "mine", "memory_gb": 48, "tflops": 150, "mem_bw_TBps": 0.9}
    full = config_of(hw, {"model": "calibrated", "constants": CONSTANTS, "step_overhead_s": 0.0})
    assert isinstance(make_gpu_model(full), CalibratedGPUModel)
    timing = {"model": "simple", "mfu": 0.5, "mbu": 0.6, "overhead_s": 0.003}
    simple = config_of(hw, timing)
    constants = SimpleConstants(mfu=0.5, mbu=0.6, overhead_s=0.003)
    expected = SimpleGPUModel(simple.model.shape, constants, 150.0, 0.9, tp=1)
    model = make_gpu_model(simple)
    assert model.step_latency([(5, 9)], [7]) == expected.step_latency([(5, 9)], [7])


@pytest.mark.parametrize(
    ("hw", "timing", "message"),
    [
        (
            {"gpu": "B200", "memory_gb": 192, "tflops": 2250, "mem_bw_TBps": 8},
            {"model": "calibrated"},
            "worker.hw.gpu: got 'B200'; allowed: one of H100, H200, A100, RTX 4090 for the calib",
        ),
        (
            {"gpu": "RTX 4090", "tp": 2},
            {"model": "calibrated"},
            "worker.hw.tp: got 2; allowed: 1 where the timing's link_bytes_per_s",
        ),
        (
            {"tp": 2},
            {"model": "simple", "mfu": 0.5, "mbu": 0.5},
            "worker.hw.tp: got 2; allowed: 1 where the timing's link_bytes_per_s",
        ),
        (
            {},
            {"model": "simple", "mfu": 0, "mbu": 0.5},
            "worker.inference_params.mfu: got 0; allowed: greater than 0",
        ),
        (
            {},
            {"model": "simple", "mfu": 0.5},
            "worker.inference_params.mbu: missing; allowed: a value must be given",
        ),
        (
            {},
            {"model": "calibrated", "constants": {**CONSTANTS, "q": 0.5}},
            "worker.inference_params.constants.q: got 0.5; allowed: greater than or equal to 1",
        ),
        (
            {},
            {"model": "calibrated", "constants": {**CONSTANTS, "mbu_KV": 0.5}},
            "worker.inference_params.constants.mbu_KV: unknown key (did you mean 'mbu_kv'?)",
        ),
        (
            {},
            {"model": "measured"},
            "worker.inference_params.model: got 'measured'; allowed: 'roofline', 'calibrated', "
            "'simple', 'synthetic'",
        ),
    ],
)
def test_impossible_timings_are_refused(
    hw: dict[str, Any], timing: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(hw, timing)
    assert f"configuration: {message}" in str(caught.value)
