"""Step latencies: reference values, the span's bit-equality, and the unloaded request."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opal_gym.sim.gpu_model import (
    GPU_CONSTANTS,
    GPU_SPECS,
    CalibratedGPUModel,
    Chunk,
    GPUConstants,
    GPUModel,
    RooflineGPUModel,
    SimpleConstants,
    SimpleGPUModel,
    SyntheticGPUModel,
)
from opal_gym.sim.llm_model import get_model

H100, H200, A100, RTX_4090 = (GPU_CONSTANTS[name] for name in ("H100", "H200", "A100", "RTX 4090"))
LLAMA = get_model("llama-3-8b")
GRANITE = get_model("granite-3.3-8b")

ALL_MODELS: dict[str, GPUModel] = {
    "roofline": RooflineGPUModel(GRANITE, 989.5, 3.3, tp=1),
    "roofline-tp2": RooflineGPUModel(LLAMA, 312.0, 2.039, tp=2, a=3.7, b=23.1),
    "h100": CalibratedGPUModel(LLAMA, H100, 989.0, 3.35, tp=1),
    "h200": CalibratedGPUModel(GRANITE, H200, 989.0, 4.8, tp=1, step_overhead_s=0.0),
    "a100-tp4": CalibratedGPUModel(get_model("llama-3-70b"), A100, 312.0, 2.039, tp=4),
    "mixtral": CalibratedGPUModel(get_model("mixtral-8x7b"), H100, 989.0, 3.35, tp=2),
    "rtx-4090": SimpleGPUModel(LLAMA, RTX_4090, 165.2, 1.008, tp=1),
    "simple-mixtral-tp4": SimpleGPUModel(
        get_model("mixtral-8x7b"),
        SimpleConstants(
            mfu=0.6, mbu=0.8, overhead_s=0.002, allreduce_s=2e-5, link_bytes_per_s=20e9
        ),
        200.0,
        1.5,
        tp=4,
    ),
    "constant": SyntheticGPUModel(0.01),
    "synthetic": SyntheticGPUModel(0.0011, 1.7e-5, 2.3e-4, 3.1e-8),
}
every_model = pytest.mark.parametrize("gpu", ALL_MODELS.values(), ids=ALL_MODELS.keys())


@pytest.mark.parametrize(
    ("chunks", "decode_contexts", "milliseconds"),
    [
        ([(0, 2048)], [], "45.6539"),
        ([], [1000], "7.9360"),
        ([], [1000] * 64, "10.9332"),
        ([(1536, 512)], [1000] * 64, "18.8684"),
        ([(0, 256)], [], "9.7860"),
        ([(0, 256)] * 8, [], "44.1679"),
    ],
)
def test_calibrated_reference_values(
    chunks: list[Chunk], decode_contexts: list[int], milliseconds: str
) -> None:
    latency = ALL_MODELS["h100"].step_latency(chunks, decode_contexts)
    assert f"{latency * 1e3:.4f}" == milliseconds


@pytest.mark.parametrize(
    ("total_context", "cached_prefix", "seconds"),
    [
        (1000, 0, "0.0169400129"),
        (8192, 0, "0.1777940669"),
        (16384, 8192, "0.2666883874"),
    ],
)
def test_roofline_reference_prefills(total_context: int, cached_prefix: int, seconds: str) -> None:
    latency = ALL_MODELS["roofline"].get_prefill_latency(total_context, cached_prefix)
    assert f"{latency:.10f}" == seconds


@pytest.mark.parametrize(
    ("contexts", "seconds"), [([1000], "0.0050016852"), ([2048] * 8, "0.0057654775")]
)
def test_roofline_reference_decodes(contexts: list[int], seconds: str) -> None:
    assert f"{ALL_MODELS['roofline'].get_decode_latency_batch(contexts):.10f}" == seconds


def test_roofline_takes_the_longest_prefill_or_the_decode() -> None:
    gpu = ALL_MODELS["roofline"]
    long, short = gpu.get_prefill_latency(1000, 0), gpu.get_prefill_latency(200, 100)
    decode = gpu.get_decode_latency_batch([1000])
    assert short < decode < long
    assert gpu.step_latency([(0, 1000), (100, 100)], [1000]) == long
    assert gpu.step_latency([(100, 100), (100, 100)], [1000]) == decode
    assert gpu.step_latency([], []) == 0.0


def test_what_the_roofline_rule_lets_a_scheduler_exploit() -> None:
    """Prefill beside decodes, and beside other prefill, is free by it; it is not on a GPU."""
    roofline, calibrated = RooflineGPUModel(LLAMA, 989.0, 3.35, tp=1), ALL_MODELS["h100"]
    decodes = [500] * 32
    assert roofline.step_latency([(0, 256)], decodes) == roofline.step_latency([], decodes)
    assert calibrated.step_latency([(0, 256)], decodes) > 1.25 * calibrated.step_latency(
        [], decodes
    )
    eight = roofline.step_latency([(0, 256)] * 8, [])
    assert eight == roofline.step_latency([(0, 256)], [])
    assert f"{eight * 1e3:.2f}" == "3.37"
    assert calibrated.step_latency([(0, 256)] * 8, []) > 4 * calibrated.step_latency([(0, 256)], [])


def test_roofline_divides_by_tp() -> None:
    one, four = (RooflineGPUModel(GRANITE, 989.5, 3.3, tp=tp) for tp in (1, 4))
    assert four.get_prefill_latency(3000, 700) == pytest.approx(
        one.get_prefill_latency(3000, 700) / 4, rel=1e-14
    )
    assert four.get_decode_latency_batch([500, 9]) == pytest.approx(
        one.get_decode_latency_batch([500, 9]) / 4, rel=1e-14
    )


def test_calibrated_with_tensor_parallelism_by_hand() -> None:
    """The reference's formula written out for Llama-3-70B on two H200."""
    layer_weights, head = 68_451_041_280, 8192 * 128256
    tokens, num_seqs = 300 + 2, 1 + 2
    linear = 2 * (layer_weights * tokens + head * num_seqs) / (0.714 * 989e12 * 2)
    weights = 2 * (layer_weights + head) / (0.857 * 4.8e12 * 2)
    attention = 4 * 80 * 64 * 128 * (300 * 200 + 300**2 / 2) / (0.668 * 989e12 * 2)
    kv_read = 327680 * (1000 + 500) / (0.828 * 4.8e12 * 2)
    comm = 2 * 80 * tokens * 8192 * 2 * 2 * (1 / 2) / 328e9 + 2 * 80 * 3.8e-6
    fused = (linear**2.11 + weights**2.11) ** (1 / 2.11)
    expected = fused + attention + kv_read + 80 * 40.7e-6 + comm + 3e-3

    gpu = CalibratedGPUModel(get_model("llama-3-70b"), H200, 989.0, 4.8, tp=2)
    assert gpu.step_latency([(200, 300)], [1000, 500]) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(("tp", "default_s"), [(1, 1.5e-3), (2, 3e-3), (8, 3e-3)])
def test_calibrated_step_overhead(tp: int, default_s: float) -> None:
    default = CalibratedGPUModel(LLAMA, H100, 989.0, 3.35, tp)
    without = CalibratedGPUModel(LLAMA, H100, 989.0, 3.35, tp, step_overhead_s=0.0)
    difference = default.step_latency([], [10]) - without.step_latency([], [10])
    assert difference == pytest.approx(default_s)


@pytest.mark.parametrize(
    "constants", [RTX_4090, H100.model_copy(update={"link_bytes_per_s": None})]
)
def test_tensor_parallelism_needs_the_links_bandwidth(
    constants: GPUConstants | SimpleConstants,
) -> None:
    model = SimpleGPUModel if isinstance(constants, SimpleConstants) else CalibratedGPUModel
    model(LLAMA, constants, 165.2, 1.008, tp=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tp 2 needs link_bytes_per_s"):
        model(LLAMA, constants, 165.2, 1.008, tp=2)  # type: ignore[arg-type]


def test_constants_are_the_references_rows() -> None:
    assert (H100.mfu_linear, H100.mbu_weights, H100.mfu_attention) == (0.705, 0.874, 0.65)
    assert (H100.mbu_kv, H100.q, H100.link_bytes_per_s) == (0.857, 2.23, 287e9)
    assert (A100.layer_overhead_s, A100.allreduce_s) == (53.6e-6, 10.1e-6)
    assert SimpleConstants(mfu=1.09, mbu=0.93, overhead_s=0.0) == RTX_4090
    assert set(GPU_CONSTANTS) == set(GPU_SPECS)
    assert GPU_SPECS["RTX 4090"][1:] == (165.2, 1.008)
    assert GPU_SPECS["H200"][1:] == (989.0, 4.8)


def test_simple_form_by_hand() -> None:
    """The RTX 4090's row on Llama-3-8B: a chunk of 300 after 200, decodes at 1,000 and 500."""
    layer_weights, head = 6_979_321_856, 4096 * 128256
    pairs = 300 * 200 + 300**2 / 2 + 1500
    flops = 2 * layer_weights * 302 + 2 * head * 3 + 4 * 32 * 32 * 128 * pairs
    moved = 2 * (layer_weights + head) + 131072 * (500 + 1500)
    expected = flops / (1.09 * 165.2e12) + moved / (0.93 * 1.008e12)
    latency = ALL_MODELS["rtx-4090"].step_latency([(200, 300)], [1000, 500])
    assert latency == pytest.approx(expected, rel=1e-13)


def test_simple_form_of_a_mixture_with_tensor_parallelism_by_hand() -> None:
    """Three tokens of Mixtral on four GPUs: 4.625 of 8 experts are read."""
    shared, expert, head = 41_943_040 + 32_768, 176_160_768, 4096 * 32000
    flops = 2 * 32 * (shared + 2 * expert) * 3 + 2 * head * 3 + 4 * 32 * 4096 * 600
    moved = 2 * (32 * (shared + 4.625 * expert) + head) + 131072 * 600
    comm = 2 * 32 * 3 * 4096 * 2 * 2 * (3 / 4) / 20e9 + 2 * 32 * 2e-5
    expected = flops / (0.6 * 200e12 * 4) + moved / (0.8 * 1.5e12 * 4) + 0.002 + comm
    latency = ALL_MODELS["simple-mixtral-tp4"].step_latency([], [100, 200, 300])
    assert latency == pytest.approx(expected, rel=1e-13)


def test_calibrated_mixture_by_hand() -> None:
    """One token of Mixtral on two H100 reads two experts of a layer."""
    shared, expert, head = 41_943_040 + 32_768, 176_160_768, 4096 * 32000
    active = 32 * (shared + 2 * expert) + head
    linear = 2 * active / (0.705 * 989e12 * 2)
    weights = 2 * active / (0.874 * 3.35e12 * 2)
    fused = (linear**2.23 + weights**2.23) ** (1 / 2.23)
    kv_read = 131072 * 1000 / (0.857 * 3.35e12 * 2)
    comm = 2 * 32 * 4096 * 2 * 2 * (1 / 2) / 287e9 + 2 * 32 * 4.5e-6
    expected = fused + kv_read + 32 * 39.5e-6 + comm + 3e-3
    assert ALL_MODELS["mixtral"].step_latency([], [1000]) == pytest.approx(expected, rel=1e-13)


def test_synthetic_terms() -> None:
    gpu = SyntheticGPUModel(1.0, 0.5, 0.25, 0.125)
    # 1 + 0.5 * (3 + 5) + 0.25 * 2 + 0.125 * (8 + 16); cached tokens cost nothing.
    assert gpu.step_latency([(7, 3), (0, 5)], [8, 16]) == 8.5
    assert SyntheticGPUModel(0.01).step_latency([(7, 3)], [8, 16]) == 0.01


def _random_batch(rng: random.Random) -> tuple[list[Chunk], list[int]]:
    chunks = [
        (rng.choice([0, rng.randrange(100_000)]), rng.randint(1, 4096))
        for _ in range(rng.randrange(5))
    ]
    contexts = [rng.randint(1, 130_000) for _ in range(rng.choice([0, 1, 7, 256]))]
    if not chunks and not contexts:
        contexts = [1]
    return chunks, contexts


@every_model
def test_span_is_bit_equal_to_its_steps(gpu: GPUModel) -> None:
    rng = random.Random(1)
    num_steps = 40
    for _ in range(200):
        chunks, contexts = _random_batch(rng)
        span = gpu.span_latencies(chunks, len(contexts), sum(contexts), num_steps)
        assert span.shape == (num_steps,)
        assert span.dtype == np.float64
        steps = [
            gpu.step_latency([(p + s * c, c) for p, c in chunks], [k + s for k in contexts])
            for s in range(num_steps)
        ]
        assert all(type(latency) is float for latency in steps)
        assert span.tolist() == steps
        assert gpu.batch_latency(chunks, len(contexts), sum(contexts)) == steps[0]


@every_model
@given(
    chunks=st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 4096)), max_size=4),
    contexts=st.lists(st.integers(1, 100_000), min_size=1, max_size=8),
    more=st.integers(1, 1000),
)
def test_more_work_never_takes_less_time(
    gpu: GPUModel, chunks: list[Chunk], contexts: list[int], more: int
) -> None:
    before = gpu.step_latency(chunks, contexts) * (1 - 1e-12)
    assert before > 0
    assert gpu.step_latency(chunks, [contexts[0] + more, *contexts[1:]]) >= before
    assert gpu.step_latency(chunks, [*contexts, more]) >= before
    assert gpu.step_latency([*chunks, (0, more)], contexts) >= before
    for i, (p, c) in enumerate(chunks):
        rest = chunks[:i] + chunks[i + 1 :]
        assert gpu.step_latency([*rest, (p, c + more)], contexts) >= before
        assert gpu.step_latency([*rest, (p + more, c)], contexts) >= before


@every_model
def test_single_phase_calls(gpu: GPUModel) -> None:
    assert gpu.get_prefill_latency(700, 300) == gpu.step_latency([(300, 400)], [])
    assert gpu.get_prefill_latency(300, 300) == 0.0
    assert gpu.get_decode_latency_batch([5, 900]) == gpu.step_latency([], [5, 900])
    assert gpu.get_decode_latency_batch([]) == 0.0


@every_model
@pytest.mark.parametrize("first_token_at_prefill_end", [True, False])
@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "chunk_tokens"),
    [(1, 1, 2048), (2048, 1, 2048), (5000, 300, 2048), (6144, 77, 2048), (130, 9, 1)],
)
def test_unloaded_latency_is_the_sum_of_its_steps(
    gpu: GPUModel,
    first_token_at_prefill_end: bool,
    prompt_tokens: int,
    output_tokens: int,
    chunk_tokens: int,
) -> None:
    expected, done, generated = 0.0, 0, 0
    while done < prompt_tokens:
        chunk = min(chunk_tokens, prompt_tokens - done)
        expected += gpu.step_latency([(done, chunk)], [])
        done += chunk
    if first_token_at_prefill_end:
        generated = 1
    while generated < output_tokens:
        expected += gpu.step_latency([], [prompt_tokens + generated])
        generated += 1

    latency = gpu.unloaded_latency(
        prompt_tokens, output_tokens, chunk_tokens, first_token_at_prefill_end
    )
    assert type(latency) is float
    assert latency == pytest.approx(expected, rel=1e-12)


def test_unloaded_latency_by_hand() -> None:
    gpu = SyntheticGPUModel(1.0, 0.5, 0.25, 0.125)
    # Chunks of 4, 4, 2: 3 + 3 + 2. Decodes at 11, 12 (and 10): 1.25 + context / 8 each.
    assert gpu.unloaded_latency(10, 3, 4, True) == 8.0 + 2 * 1.25 + 23 / 8
    assert gpu.unloaded_latency(10, 3, 4, False) == 8.0 + 3 * 1.25 + 33 / 8
