"""Sums of measured kernels: a step worked out by hand, and the calibrated model's errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agents.kernel_errors import CASES, KINDS, kernel_errors
from agents.operator_tables import OperatorTables
from opal_gym.sim.llm_model import LLMModel

DATA = Path(__file__).parents[1] / "../shared/data/latency"
needs_data = pytest.mark.skipif(
    not (DATA / "aic_h100_allreduce.csv").exists(), reason="needs the measured operator tables"
)

TINY = LLMModel(
    name="tiny",
    hidden=256,
    layers=3,
    heads=2,
    kv_heads=2,
    head_dim=128,
    intermediate=512,
    vocab=1024,
    params=1,
    max_model_len=4096,
)


def write_tables(folder: Path) -> None:
    """A product takes m/100 + n/1000 + k/1000 ms, up to n and k of 1,024."""
    sizes = (128, 256, 512, 1024)
    rows = [
        f"{m},{n},{k},{m / 100 + n / 1000 + k / 1000}"
        for m in (1, 16, 1024)
        for n in sizes
        for k in sizes
    ]
    gemm = "\n".join(["m,n,k,latency", *rows])
    (folder / "aic_h100_gemm_bf16.csv").write_text(gemm)
    for name, column in (("context", "isl"), ("generation", "step")):
        text = f"batch_size,{column},num_heads,num_key_value_heads,latency\n"
        text += "1,100,2,2,0.7\n4,100,2,2,0.3\n1,100,1,1,0.5\n4,100,1,1,0.2\n8,100,1,1,0.4\n"
        (folder / f"aic_h100_{name}_attention_bf16_hd128.csv").write_text(text)
    rows = [
        f"2,{n},vllm_{b},{n / 1e5 * f}"
        for n in (256, 2**20)
        for b, f in (("graph", 1), ("eager", 2))
    ]
    text = "\n".join(["num_gpus,message_size,backend,latency", *rows])
    (folder / "aic_h100_allreduce.csv").write_text(text)


def elementwise_s(tokens: int, intermediate: int) -> float:
    """Two norms of 2 reads and 2 writes, and an activation of 2 reads and a write, of 2 bytes."""
    moved = tokens * (2 * 4 * 256 + 3 * intermediate) * 2
    return moved / (0.8 * 3.35e12) + 9e-6


def test_a_mixed_step_by_hand(tmp_path: Path) -> None:
    """A chunk of 60 after 40 cached tokens, and four decodes at 100: 64 tokens."""
    write_tables(tmp_path)
    tables = OperatorTables(tmp_path)
    # q/k/v 768 by 256, o 256 by 256, gate/up 1024 by 256, down 256 by 512; 64 / 100 each.
    products = 4 * 0.64 + (768 + 256) / 1000 + 512 / 1000 + (1024 + 256) / 1000 + 768 / 1000
    attention = 0.7 * (100**2 - 40**2) / 100**2 + 0.3
    head = 5 / 100 + (1024 + 256) / 1000
    expected = 3 * ((products + attention) * 1e-3 + elementwise_s(64, 512)) + head * 1e-3
    assert tables.step_s(TINY, 1, [(40, 60)], (4, 100)) == pytest.approx(expected)


def test_a_prefill_on_two_gpus_by_hand(tmp_path: Path) -> None:
    """Products, heads and the MLP are halved; two all-reduces of tokens · hidden elements."""
    write_tables(tmp_path)
    # q/k/v 384 by 256, o 256 by 128, gate/up 512 by 256, down 256 by 256; 512 by 256 the head.
    products = 4 * 4 + (384 + 256 + 256 + 128 + 512 + 256 + 256 + 256) / 1000
    comm = 2 * 400 * 256 / 1e5
    expected = 3 * ((products + 0.2 + comm) * 1e-3 + elementwise_s(400, 256))
    expected += (4 / 100 + (512 + 256) / 1000) * 1e-3
    seconds = OperatorTables(tmp_path).step_s(TINY, 2, [(0, 100)] * 4, (0, 0))
    assert seconds == pytest.approx(expected)


@pytest.mark.parametrize(("prompts", "tokens_outside_of_graphs"), [(4, 0), (8, 800)])
def test_only_steps_above_512_tokens_reduce_eagerly(
    tmp_path: Path, prompts: int, tokens_outside_of_graphs: int
) -> None:
    write_tables(tmp_path)
    tables = OperatorTables(tmp_path)
    graph, eager = (
        tables.step_s(TINY, 2, [(0, 100)] * prompts, (0, 0), eager=eager) for eager in (False, True)
    )
    # Twice the time, twice in each of three layers.
    slower_ms = 3 * 2 * tokens_outside_of_graphs * 256 / 1e5
    assert eager - graph == pytest.approx(slower_ms * 1e-3)


def test_the_output_head_is_several_products_where_the_table_is_too_narrow(tmp_path: Path) -> None:
    write_tables(tmp_path)
    wide = LLMModel(**{**TINY.__dict__, "vocab": 3000})
    tables = OperatorTables(tmp_path)
    narrow_ms = 5 / 100 + (1024 + 256) / 1000
    # Three products of 1,000 columns.
    wide_ms = 3 * (5 / 100 + (1000 + 256) / 1000)
    step = ([(40, 60)], (4, 100))
    difference = tables.step_s(wide, 1, *step) - tables.step_s(TINY, 1, *step)
    assert difference == pytest.approx((wide_ms - narrow_ms) * 1e-3)


def test_which_models_the_tables_hold(tmp_path: Path) -> None:
    write_tables(tmp_path)
    tables = OperatorTables(tmp_path)
    assert tables.has(TINY, 1)
    assert tables.has(TINY, 2)
    assert not tables.has(LLMModel(**{**TINY.__dict__, "heads": 4}), 1)
    assert not tables.has(LLMModel(**{**TINY.__dict__, "head_dim": 64}), 1)


@needs_data
def test_the_calibrated_h100_agrees_with_its_kernels() -> None:
    results = kernel_errors(OperatorTables(DATA), "H100")
    assert len(results) == len(CASES) * len(KINDS)
    errors = {
        kind: np.abs(np.concatenate([r.relative for r in results if r.kind == kind]))
        for kind in KINDS
    }
    for kind in KINDS:
        assert np.median(errors[kind]) <= 0.042
        assert np.quantile(errors[kind], 0.9) <= 0.09
    everything = np.concatenate(list(errors.values()))
    assert np.median(everything) <= 0.04
    assert np.quantile(everything, 0.9) <= 0.09
