"""Model shapes from a Hugging Face ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from opal_gym.config_errors import ConfigError, RefusedError, explain, read_json_object
from opal_gym.sim.llm_model import LLMModel

Count = Annotated[int, Field(ge=1)]


class HFConfig(BaseModel):
    """The keys of a ``config.json`` that a model's shape follows from; others are ignored.

    Every architecture allowed here is that of `LLMModel`: grouped-query attention over the whole
    context (a sliding window is ignored, as a prompt within it sees no difference), and a gated
    MLP or a mixture of them, in weights of 16 bits.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    model_type: Literal["llama", "mistral", "mixtral", "qwen2", "granite"]
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count
    tie_word_embeddings: bool = False
    torch_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    num_local_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    quantization_config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> HFConfig:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads is not None and heads % kv_heads:
            raise RefusedError(
                "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}"
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise RefusedError(
                "hidden_size",
                self.hidden_size,
                f"a multiple of num_attention_heads = {heads} where head_dim is not given",
            )
        if self.quantization_config is not None:
            raise RefusedError(
                "quantization_config",
                self.quantization_config,
                "none: only weights of 16 bits are modelled",
            )
        if self.model_type == "mixtral":
            self._check_experts()
        return self

    def _check_experts(self) -> None:
        for key in ("num_local_experts", "num_experts_per_tok"):
            if getattr(self, key) is None:
                raise RefusedError(key, None, "a number above 0 for model_type 'mixtral'")
        assert self.num_local_experts is not None
        assert self.num_experts_per_tok is not None
        if self.num_experts_per_tok > self.num_local_experts:
            raise RefusedError(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"at most num_local_experts = {self.num_local_experts}",
            )

    def shape(self, name: str) -> LLMModel:
        """The model's shape, with its parameters counted part by part.

        Args:
            name: What to call it.
        """
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        is_mixture = self.model_type == "mixtral"
        experts = (self.num_local_experts or 1) if is_mixture else 1
        active_experts = (self.num_experts_per_tok or 1) if is_mixture else 1
        attention = 2 * self.hidden_size * (self.num_attention_heads + kv_heads) * head_dim
        # Of these architectures, only Qwen2 has biases at q, k and v.
        if self.model_type == "qwen2":
            attention += (self.num_attention_heads + 2 * kv_heads) * head_dim
        router = self.hidden_size * experts if is_mixture else 0
        mlps = experts * 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size
        embeddings = self.hidden_size * self.vocab_size * (1 if self.tie_word_embeddings else 2)
        layers = self.num_hidden_layers * (attention + router + mlps + norms)
        return LLMModel(
            name=name,
            hidden=self.hidden_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=self.intermediate_size,
            vocab=self.vocab_size,
            params=layers + embeddings + self.hidden_size,
            max_model_len=self.max_position_embeddings,
            experts=experts,
            active_experts=active_experts,
        )


def read_hf_config(path: str | Path) -> LLMModel:
    """Reads a model's shape; its name is that of the folder which holds the file.

    Args:
        path: A ``config.json`` as published with the model.

    Raises:
        ConfigError: The file cannot be read, or a key is missing, impossible, or of an architecture
            that is not modelled; the message names the file, the key, the value and what is
            allowed.
    """
    path = Path(path)
    data = read_json_object(path)
    try:
        return HFConfig.model_validate(data).shape(path.resolve().parent.name)
    except ValidationError as error:
        raise ConfigError(explain(str(path), data, HFConfig, error)) from None
