"""Shapes of the language models a worker can serve, and the KV memory they leave.

The shapes are those of the models' published configurations; granite-3.3-8b is the seed's own
model, with the values that ``reference/gpu-model.md`` gives. ``hf_config`` reads other shapes from
a Hugging Face ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

GIB = 1024**3


@dataclass(frozen=True)
class LLMModel:
    """Shape of a decoder-only transformer with grouped-query attention and a gated MLP.

    In a mixture of experts (Mixtral), every layer has `experts` MLPs, of which a token passes
    through `active_experts`. A dense model is the case of one expert.

    Attributes:
        name: Name by which a configuration selects the model.
        hidden: Width of the residual stream.
        layers: Number of transformer layers.
        heads: Number of query heads.
        kv_heads: Number of key/value heads.
        head_dim: Width of one head.
        intermediate: Width of the MLP, or of one expert's.
        vocab: Number of entries in the vocabulary.
        params: Total number of parameters, embeddings included.
        max_model_len: Longest sequence (prompt and output), in tokens.
        dtype_bytes: Bytes of one weight and of one KV element.
        experts: MLPs in a layer.
        active_experts: MLPs that one token passes through.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    params: int
    max_model_len: int
    dtype_bytes: int = 2
    experts: int = 1
    active_experts: int = 1

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes over all layers (a key and a value each)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def layer_weights(self) -> int:
        """P_lin: number of weights in the layers' matrices that one token is multiplied with.

        These are q, k, v, o, gate, up and down (of a mixture the active experts', and the router).
        Embeddings, the output head, norms and biases are not in it (``reference/gpu-model.md``).
        """
        return self.layers * (self._shared_weights + self.active_experts * self._expert_weights)

    @property
    def _shared_weights(self) -> int:
        """Weights of a layer that every token passes through: the attention's, the router's."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + router

    @property
    def _expert_weights(self) -> int:
        """Weights of one MLP: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def model_size_bytes(self) -> int:
        """Bytes of GPU memory that all parameters take."""
        return self.params * self.dtype_bytes

    def forward_bytes(self, tokens: int) -> float:
        """B_w: bytes of the weights that one forward pass reads, the layers' and the output head's.

        Of a mixture's experts, those are read that at least one token is routed to. Assumption:
        every token picks its experts evenly and independently of the others (what the load
        balancing in training aims at), so that of E experts, k a token, E·(1 - (1 - k/E)^tokens)
        are read. Real routing is uneven, and reads fewer in small batches.

        Args:
            tokens: Tokens in the pass, at least 1; a dense model's bytes do not depend on it.
        """
        experts_read = self.experts * (1 - (1 - self.active_experts / self.experts) ** tokens)
        layer = self._shared_weights + experts_read * self._expert_weights
        return self.dtype_bytes * (self.layers * layer + self.hidden * self.vocab)


_LLAMA_3_8B = LLMModel(
    name="llama-3-8b",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    params=8_030_261_248,
    max_model_len=8192,
)
_LLAMA_3_70B = LLMModel(
    name="llama-3-70b",
    hidden=8192,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate=28672,
    vocab=128256,
    params=70_553_706_496,
    max_model_len=8192,
)
_MODELS = (
    _LLAMA_3_8B,
    _LLAMA_3_70B,
    # Llama 3.1 keeps the shapes of Llama 3; only its context window is longer.
    replace(_LLAMA_3_8B, name="llama-3.1-8b", max_model_len=131072),
    replace(_LLAMA_3_70B, name="llama-3.1-70b", max_model_len=131072),
    LLMModel(
        name="llama-2-7b",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        head_dim=128,
        intermediate=11008,
        vocab=32000,
        params=6_738_415_616,
        max_model_len=4096,
    ),
    LLMModel(
        name="llama-2-13b",
        hidden=5120,
        layers=40,
        heads=40,
        kv_heads=40,
        head_dim=128,
        intermediate=13824,
        vocab=32000,
        params=13_015_864_320,
        max_model_len=4096,
    ),
    LLMModel(
        name="llama-2-70b",
        hidden=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=28672,
        vocab=32000,
        params=68_976_648_192,
        max_model_len=4096,
    ),
    LLMModel(
        name="qwen2.5-7b",
        hidden=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate=18944,
        vocab=152064,
        params=7_615_616_512,
        max_model_len=32768,
    ),
    LLMModel(
        name="qwen2.5-14b",
        hidden=5120,
        layers=48,
        heads=40,
        kv_heads=8,
        head_dim=128,
        intermediate=13824,
        vocab=152064,
        params=14_770_033_664,
        max_model_len=32768,
    ),
    LLMModel(
        name="qwen2.5-32b",
        hidden=5120,
        layers=64,
        heads=40,
        kv_heads=8,
        head_dim=128,
        intermediate=27648,
        vocab=152064,
        params=32_763_876_352,
        max_model_len=32768,
    ),
    LLMModel(
        name="qwen2.5-72b",
        hidden=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=29568,
        vocab=152064,
        params=72_706_203_648,
        max_model_len=32768,
    ),
    LLMModel(
        name="mistral-7b",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=32000,
        params=7_241_732_096,
        max_model_len=32768,
    ),
    LLMModel(
        name="mixtral-8x7b",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=32000,
        params=46_702_792_704,
        max_model_len=32768,
        experts=8,
        active_experts=2,
    ),
    LLMModel(
        name="mixtral-8x22b",
        hidden=6144,
        layers=56,
        heads=48,
        kv_heads=8,
        head_dim=128,
        intermediate=16384,
        vocab=32000,
        params=140_620_634_112,
        max_model_len=65536,
        experts=8,
        active_experts=2,
    ),
    LLMModel(
        name="granite-3.3-8b",
        hidden=4096,
        layers=40,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=12800,
        vocab=49159,
        params=8_170_860_544,
        max_model_len=131072,
    ),
)

MODELS: Mapping[str, LLMModel] = MappingProxyType({model.name: model for model in _MODELS})
"""The models by name."""


def get_model(name: str) -> LLMModel:
    """Returns the model of that name.

    Args:
        name: A key of ``MODELS``.

    Returns:
        The model's shape.

    Raises:
        ValueError: If there is no such model.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; allowed: {', '.join(sorted(MODELS))}")
    return MODELS[name]


def num_gpu_blocks(
    model: LLMModel,
    *,
    memory_gb: float,
    tp: int,
    block_size: int,
    gpu_memory_utilization: float = 1.0,
    activation_reserve_gb: float = 0.0,
) -> int:
    """Number of KV blocks that fit beside the weights.

    The rule is the seed page's "Tensor Parallelism Memory Model": the GPUs' memory is one pool
    that holds the weights once. The defaults of the last two arguments give the seed's formula;
    a real vLLM uses 0.9 and 1.2 to 3 GB (DESIGN section 5).

    Args:
        model: The model served.
        memory_gb: Memory of one GPU, in units of 1024**3 bytes.
        tp: Number of GPUs (tensor parallelism).
        block_size: Tokens in one block.
        gpu_memory_utilization: Fraction of the memory the worker may use.
        activation_reserve_gb: Memory kept for activations on each GPU, in units of 1024**3 bytes.

    Returns:
        The number of whole blocks; zero or negative when the weights leave no room.
    """
    usable_bytes = (memory_gb * gpu_memory_utilization - activation_reserve_gb) * tp * GIB
    free_bytes = usable_bytes - model.model_size_bytes
    return math.floor(free_bytes / (block_size * model.kv_bytes_per_token))
