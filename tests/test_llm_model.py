"""Model shapes and the KV memory they leave."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from opal_gym.sim.llm_model import MODELS, get_model, num_gpu_blocks

KV_BYTES_PER_TOKEN = {
    "llama-3-8b": 131072,
    "llama-3.1-8b": 131072,
    "llama-3-70b": 327680,
    "llama-3.1-70b": 327680,
    "llama-2-7b": 524288,
    "llama-2-13b": 819200,
    "llama-2-70b": 327680,
    "qwen2.5-7b": 57344,
    "qwen2.5-14b": 196608,
    "qwen2.5-32b": 262144,
    "qwen2.5-72b": 327680,
    "mistral-7b": 131072,
    "mixtral-8x7b": 131072,
    "mixtral-8x22b": 229376,
    "granite-3.3-8b": 163840,
}

MAX_MODEL_LEN = {
    "llama-3-8b": 8192,
    "llama-3.1-8b": 131072,
    "llama-3-70b": 8192,
    "llama-3.1-70b": 131072,
    "llama-2-7b": 4096,
    "llama-2-13b": 4096,
    "llama-2-70b": 4096,
    "qwen2.5-7b": 32768,
    "qwen2.5-14b": 32768,
    "qwen2.5-32b": 32768,
    "qwen2.5-72b": 32768,
    "mistral-7b": 32768,
    "mixtral-8x7b": 32768,
    "mixtral-8x22b": 65536,
    "granite-3.3-8b": 131072,
}


def test_table_values_match_the_published_configurations() -> None:
    assert {name: m.kv_bytes_per_token for name, m in MODELS.items()} == KV_BYTES_PER_TOKEN
    assert {name: m.max_model_len for name, m in MODELS.items()} == MAX_MODEL_LEN
    assert all(name == model.name for name, model in MODELS.items())


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"granite-3.3-8b"}))
def test_params_are_the_sum_of_the_parts(name: str) -> None:
    """Matrices, embedding, head, norms and (Qwen only) q, k, v biases: an independent count."""
    model = MODELS[name]
    embedding_and_head = 2 * model.hidden * model.vocab
    norms = (2 * model.layers + 1) * model.hidden
    qkv_width = (model.heads + 2 * model.kv_heads) * model.head_dim
    biases = model.layers * qkv_width if name.startswith("qwen") else 0
    mlp = 3 * model.layers * model.hidden * model.intermediate
    idle_experts = (model.experts - model.active_experts) * mlp
    parts = model.layer_weights + idle_experts + embedding_and_head + norms + biases
    assert model.params == parts


def test_granite_has_the_reference_params_with_one_tied_embedding() -> None:
    model = get_model("granite-3.3-8b")
    assert model.params == 8_170_860_544
    # The head is the embedding, so it counts once; the count leaves out the final norm.
    norms = model.params - model.layer_weights - model.hidden * model.vocab
    assert norms == 2 * model.layers * model.hidden


def test_llama_8b_by_hand() -> None:
    model = get_model("llama-3.1-8b")
    # 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    assert model.layer_weights == 6_979_321_856
    assert model.model_size_bytes == 16_060_522_496
    # 2 * (6979321856 + 4096 * 128256)
    assert model.forward_bytes(1) == model.forward_bytes(2048) == 15_009_316_864


def test_mixtral_by_hand() -> None:
    model = get_model("mixtral-8x7b")
    # A layer: attention 2 * 4096 * 40 * 128 = 41,943,040; router 4096 * 8 = 32,768; an expert
    # 3 * 4096 * 14336 = 176,160,768, of which a token takes two.
    assert model.layer_weights == 32 * (41_943_040 + 32_768 + 2 * 176_160_768)
    # The published "active parameters" count the embedding and the head as well.
    active = model.layer_weights + 2 * 4096 * 32000
    assert active == pytest.approx(12.88e9, rel=1e-3)
    assert model.params == pytest.approx(46.703e9, rel=1e-4)


@pytest.mark.parametrize(
    ("tokens", "experts_read"), [(1, 2.0), (2, 3.5), (3, 4.625), (64, 8.0), (2048, 8.0)]
)
def test_the_experts_that_a_mixture_reads(tokens: int, experts_read: float) -> None:
    """8 (1 - 0.75 ** tokens): 2 of 8 for one token; for two, 2 + 2 * 6/8."""
    model = get_model("mixtral-8x7b")
    other = 32 * (41_943_040 + 32_768) + 4096 * 32000
    expected = 2 * (other + 32 * experts_read * 176_160_768)
    assert model.forward_bytes(tokens) == pytest.approx(expected, rel=1e-8)


def test_models_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        get_model("mistral-7b").layers = 1  # type: ignore[misc]


def test_unknown_model_is_refused_with_the_allowed_names() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt-5'; allowed: granite.*qwen2"):
        get_model("gpt-5")


@pytest.mark.parametrize(("memory_gb", "blocks"), [(80, 26534), (36, 8511)])
def test_blocks_of_the_seed(memory_gb: float, blocks: int) -> None:
    granite = get_model("granite-3.3-8b")
    assert num_gpu_blocks(granite, memory_gb=memory_gb, tp=1, block_size=16) == blocks


def test_blocks_with_tensor_parallelism_utilization_and_reserve() -> None:
    model = get_model("llama-3-8b")
    # (2 * 24 * 2**30 - 16060522496) / (16 * 131072) = 16917.75
    assert num_gpu_blocks(model, memory_gb=24, tp=2, block_size=16) == 16917
    # (2 * (24 * 0.75 - 1.5) * 2**30 - 16060522496) / (32 * 131072) = 4618.87
    blocks = num_gpu_blocks(
        model,
        memory_gb=24,
        tp=2,
        block_size=32,
        gpu_memory_utilization=0.75,
        activation_reserve_gb=1.5,
    )
    assert blocks == 4618


def test_blocks_are_not_positive_when_the_weights_do_not_fit() -> None:
    model = get_model("llama-3-8b")
    # (8 * 2**30 - 16060522496) / (16 * 131072) = -3562.25
    assert num_gpu_blocks(model, memory_gb=8, tp=1, block_size=16) == -3563
