"""Model shapes from a Hugging Face ``config.json``, and what is refused in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opal_gym.config import ConfigError, load_config
from opal_gym.sim.hf_config import read_hf_config
from opal_gym.sim.llm_model import get_model
from tests.tiny import TINY

# As published, without keys that have nothing to do with the shape.
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
LLAMA_2_7B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
QWEN2_5_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama-3-8b", LLAMA_3_8B),
        ("llama-2-7b", LLAMA_2_7B),
        ("qwen2.5-7b", QWEN2_5_7B),
        ("mixtral-8x7b", MIXTRAL_8X7B),
    ],
)
def test_a_published_config_gives_the_shape_of_the_table(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert read_hf_config(write(folder, config)) == get_model(name)


def test_tied_embeddings_and_a_head_dim_of_its_own(tmp_path: Path) -> None:
    config = {**LLAMA_3_8B, "tie_word_embeddings": True, "head_dim": 64}
    model = read_hf_config(write(tmp_path, config))
    assert model.head_dim == 64
    assert model.kv_bytes_per_token == 65536
    attention = 2 * 4096 * 40 * 64
    layers = 32 * (attention + 3 * 4096 * 14336 + 2 * 4096)
    assert model.params == layers + 4096 * 128256 + 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: got 0; allowed: greater than or equal to 1"),
        ({"vocab_size": "many"}, "vocab_size: got 'many'; allowed: a valid integer"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: got 5; allowed: a divisor of num_att"),
        ({"hidden_size": 4100}, "hidden_size: got 4100; allowed: a multiple of num_attention_he"),
        ({"model_type": "gemma2"}, "model_type: got 'gemma2'; allowed: 'llama', 'mistral', 'mixtr"),
        ({"torch_dtype": "float32"}, "torch_dtype: got 'float32'; allowed: 'bfloat16' or 'float16"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config: got {'bits': 4}; allowed: none: only weights of 16 bits",
        ),
        ({"model_type": "mixtral"}, "num_local_experts: got None; allowed: a number above 0 for"),
        (
            {**MIXTRAL_8X7B, "num_experts_per_tok": 9},
            "num_experts_per_tok: got 9; allowed: at most num_local_experts = 8",
        ),
    ],
)
def test_an_impossible_config_names_file_key_value_and_what_is_allowed(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, {**LLAMA_3_8B, **change})
    with pytest.raises(ConfigError) as caught:
        read_hf_config(path)
    assert f"{path}: {message}" in str(caught.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, {k: v for k, v in LLAMA_3_8B.items() if k != "num_hidden_layers"})
    with pytest.raises(ConfigError, match=r"config\.json: num_hidden_layers: missing"):
        read_hf_config(path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json: "):
        read_hf_config(path)


def test_a_configuration_takes_its_model_from_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {**LLAMA_3_8B, "num_hidden_layers": 16})
    overrides = {"model": {"name": "half-a-llama", "config_json": str(path)}}
    config = load_config(TINY, overrides)
    assert config.model.shape.layers == 16
    assert config.max_model_len == 8192
    assert load_config(config).model.shape == config.model.shape


def test_a_mistake_in_the_file_is_one_in_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, {**LLAMA_3_8B, "vocab_size": -1})
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, {"model.config_json": str(path)})
    expected = f"configuration: model.config_json: {path}: vocab_size: got -1; allowed: greater"
    assert str(caught.value).startswith(expected)
    absent = tmp_path / "absent.json"
    with pytest.raises(ConfigError, match=r"model.config_json: .*absent.json: not a readable"):
        load_config(TINY, {"model.config_json": str(absent)})
