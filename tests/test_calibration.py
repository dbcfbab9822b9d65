"""Fits recover known constants from synthetic steps; unusable steps are refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from opal_gym.config import load_config
from opal_gym.sim.calibration import MeasuredStep, StepsError, fit, read_steps
from opal_gym.sim.gpu_model import (
    GPU_CONSTANTS,
    CalibratedGPUModel,
    GPUConstants,
    GPUModel,
    SimpleConstants,
    SimpleGPUModel,
)
from opal_gym.sim.llm_model import get_model
from opal_gym.sim.simulation import make_gpu_model
from tests.tiny import TINY

ROOT = Path(__file__).parent.parent
LLAMA = get_model("llama-3-8b")
TRUTH = SimpleConstants(mfu=0.55, mbu=0.72, overhead_s=0.0023)
SIMPLE = SimpleGPUModel(LLAMA, TRUTH, 120.0, 0.9, tp=1)
FULL = CalibratedGPUModel(LLAMA, GPU_CONSTANTS["A100"], 120.0, 0.9, tp=1)
PREFILLS = [((p, c),) for p in (0, 4096) for c in (16, 128, 512, 2048, 8192)]
DECODES = list(itertools.product((1, 8, 64, 256), (100, 1000, 4000)))


def steps_of(gpu: GPUModel, noise: float = 0.0) -> list[MeasuredStep]:
    """Prefills, decodes and both together, with log-normal noise."""
    rng = np.random.default_rng(1)
    batches = [(chunks, 0, 0) for chunks in PREFILLS]
    batches += [((), n, n * context) for n, context in DECODES]
    batches += [(PREFILLS[i % 5], n, n * context) for i, (n, context) in enumerate(DECODES)]
    return [
        MeasuredStep(*batch, gpu.batch_latency(*batch) * float(np.exp(noise * rng.normal())))
        for batch in batches
    ]


def test_the_simple_form_is_recovered() -> None:
    result = fit(steps_of(SIMPLE), LLAMA, tflops=120.0, mem_bw_TBps=0.9)
    assert isinstance(result.constants, SimpleConstants)
    assert result.constants.mfu == pytest.approx(0.55, rel=1e-6)
    assert result.constants.mbu == pytest.approx(0.72, rel=1e-6)
    assert result.constants.overhead_s == pytest.approx(0.0023, rel=1e-5)
    assert np.abs(result.relative_errors).max() < 1e-6


@pytest.mark.parametrize(
    ("gpu", "tflops", "bandwidth"), [("H100", 989, 3.35), ("A100", 312, 2.039)]
)
def test_the_full_form_is_recovered(gpu: str, tflops: float, bandwidth: float) -> None:
    truth = GPU_CONSTANTS[gpu]
    assert isinstance(truth, GPUConstants)
    model = CalibratedGPUModel(LLAMA, truth, tflops, bandwidth, tp=2)
    result = fit(
        steps_of(model),
        LLAMA,
        tflops=tflops,
        mem_bw_TBps=bandwidth,
        tp=2,
        form="full",
        allreduce_s=truth.allreduce_s,
        link_bytes_per_s=truth.link_bytes_per_s,
    )
    assert result.constants.model_dump() == pytest.approx(truth.model_dump(), rel=1e-4)


def test_noise_moves_the_constants_within_their_standard_errors() -> None:
    steps = steps_of(SIMPLE, noise=0.03)
    # One step in which the host slept.
    steps.append(MeasuredStep((), 8, 8000, 1.0))
    result = fit(steps, LLAMA, tflops=120.0, mem_bw_TBps=0.9)
    assert np.median(np.abs(result.relative_errors)) < 0.04
    for name, value in TRUTH.model_dump(include={"mfu", "mbu", "overhead_s"}).items():
        error = result.standard_errors[name]
        assert error > 0
        assert getattr(result.constants, name) == pytest.approx(value, abs=3 * error)
    assert result.constants.model_dump()["mfu"] == pytest.approx(0.55, rel=0.05)


@pytest.mark.parametrize("kind", ["prefills of one size", "single decodes"])
def test_steps_that_do_not_tell_the_constants_are_refused(kind: str) -> None:
    """Both read the same weights every time: which share of the time that takes is not seen."""
    if kind == "prefills of one size":
        steps = [step for step in steps_of(SIMPLE) if step.chunks == ((4096, 2048),)]
    else:
        steps = [step for step in steps_of(SIMPLE) if not step.chunks and step.num_decodes == 1]
    with pytest.raises(StepsError, match="the steps do not tell mfu, mbu, overhead_s;"):
        fit(3 * steps, LLAMA, tflops=120.0, mem_bw_TBps=0.9)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(StepsError, match="got 2 steps; allowed: at least 3"):
        fit(steps_of(SIMPLE)[:2], LLAMA, tflops=120.0, mem_bw_TBps=0.9)


def test_steps_are_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(
        "step,chunks,num_decodes,decode_context,seconds\n"
        "0,0+512 1536+256,0,0,0.0125\n"
        "1,,3,1234,0.0081\n"
        "2,64+1,1,7,0.009\n"
    )
    assert read_steps(path) == [
        MeasuredStep(((0, 512), (1536, 256)), 0, 0, 0.0125),
        MeasuredStep((), 3, 1234, 0.0081),
        MeasuredStep(((64, 1),), 1, 7, 0.009),
    ]


HEADER = "chunks,num_decodes,decode_context,seconds\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunks,num_decodes,seconds\n", ":1: decode_context: missing; allowed: a first line"),
        ("", ":1: chunks: missing"),
        (HEADER, ": got no step; allowed: at least one row"),
        (HEADER + ",1,5,0.1\n0-5,0,0,1\n", ":3: chunks: got '0-5'; allowed: cached+new of each"),
        (HEADER + "7+0,0,0,1\n", ":2: chunks: got '7+0'; allowed: "),
        (HEADER + ",-1,0,1\n", ":2: num_decodes: got '-1'; allowed: a whole number, at least 0"),
        (HEADER + ",3,2,1\n", ":2: decode_context: got '2'; allowed: at least num_decodes = 3"),
        (HEADER + ",0,0,1\n", ":2: num_decodes: got '0'; allowed: above 0 where chunks is empty"),
        (HEADER + ",1,5,nan\n", ":2: seconds: got 'nan'; allowed: a finite number above 0"),
        (HEADER + ",1,5\n", ":2: seconds: got None; allowed: a finite number above 0"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(StepsError) as caught:
        read_steps(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepsError, match=r"absent\.csv: not a readable CSV file"):
        read_steps(tmp_path / "absent.csv")


@pytest.mark.parametrize(("form", "truth"), [("simple", SIMPLE), ("full", FULL)])
def test_the_command_prints_a_timing_that_a_configuration_takes(
    tmp_path: Path, form: str, truth: GPUModel
) -> None:
    path = tmp_path / "steps.csv"
    rows = [
        f"{' '.join(f'{p}+{c}' for p, c in step.chunks)},{step.num_decodes},"
        f"{step.decode_context},{step.seconds!r}"
        for step in steps_of(truth)
    ]
    path.write_text(HEADER + "\n".join(rows))
    command = [sys.executable, "scripts/fit_gpu_model.py", str(path), "--form", form]
    command += ["--model", "llama-3-8b", "--tflops", "120", "--mem-bw-TBps", "0.9"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    timing = json.loads(run.stdout[run.stdout.index("{") :])
    hw = {"gpu": "mine", "memory_gb": 80, "tflops": 120, "mem_bw_TBps": 0.9}
    overrides = {"worker.hw": hw, "worker.inference_params": timing, "model.name": "llama-3-8b"}
    gpu = make_gpu_model(load_config(TINY, overrides))
    for batch in ((((0, 2048),), 0, 0), ((), 64, 64000)):
        assert gpu.batch_latency(*batch) == pytest.approx(truth.batch_latency(*batch), rel=1e-5)


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/fit_gpu_model.py", str(tmp_path / "absent.csv")]
    command += ["--tflops", "120", "--mem-bw-TBps", "0.9"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 2
    assert "absent.csv: not a readable CSV file" in run.stderr


def test_the_documents_example_is_a_file_of_steps(tmp_path: Path) -> None:
    text = (ROOT / "docs/gpu-model.md").read_text(encoding="utf-8")
    path = tmp_path / "steps.csv"
    path.write_text(text.split("```csv\n")[1].split("```")[0])
    assert read_steps(path)[1] == MeasuredStep(((0, 256), (1024, 256)), 16, 12800, 0.0352)
