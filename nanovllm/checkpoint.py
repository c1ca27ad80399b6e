"""What a checkpoint's config.json says (chapter 1). It does not import torch, so a mistake is found at once.

A GGUF file is a whole checkpoint, too: files/gguf_file.py reads its metadata.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.files.model_fields import read_model_fields

if TYPE_CHECKING:
    from nanovllm.config import EngineConfig
    from nanovllm.features.images.image_config import ImageConfig
    from nanovllm.features.pooling.pooling_config import PoolingConfig
    from nanovllm.features.published.schemes import Published


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a checkpoint and what its architecture computes (config.json and generation_config.json)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]  # rope_type and its fields; partial_rotary_factor; divisors, if a GGUF file has them
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str
    is_quantized: bool = False  # the files hold weights of few bits
    published: "Published | None" = None  # how others have quantized them
    num_experts: int = 0  # in each layer of expert_layers, which has this many MLPs instead of one
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0  # of an MLP that every token passes beside its experts; 0: there is none
    expert_layers: frozenset[int] = frozenset()
    windows: dict[int, int] = field(default_factory=dict)  # {layer: keys a row sees, its own included}; others: all
    layers_without_rotary: frozenset[int] = frozenset()
    norm_offset: float = 0.0  # norms multiply by this plus their weight
    hybrid: Any = None  # a HybridConfig or None (features/hybrid): layers with a state of fixed size instead of K/V
    images: "ImageConfig | None" = None  # a tower looks at images, and placeholders stand for them
    pooling: "PoolingConfig | None" = None  # embeddings or scores are wanted instead of tokens
    end_tokens: dict[int, tuple[str, ...]] = field(default_factory=dict)  # {token that ends an answer: who says so}
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json as options of SamplingParams

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.end_tokens)

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values: all, unless it is a hybrid model."""
        return self.num_hidden_layers - (0 if self.hybrid is None else len(self.hybrid.linear_layers))

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that the rotary embedding turns."""
        return int(self.head_dim * self.rope_scaling.get("partial_rotary_factor", 1.0))

    @property
    def default_max_model_len(self) -> int:
        """max_model_len where the caller gives none."""
        if self.pooling is not None and self.pooling.max_model_len is not None:
            return self.pooling.max_model_len
        return self.max_position_embeddings

    @property
    def most_positions(self) -> int:
        """The largest max_model_len. Of a model with linear scaling, more than it has by default.

        Of some, max_position_embeddings is how many positions there are after scaling, of others how many there were
        before (vicuna-7b-v1.5-16k: 4096, by a factor of 4). Nothing in the file says which.
        """
        if self.rope_scaling.get("rope_type") != "linear":
            return self.max_position_embeddings
        return int(self.max_position_embeddings * max(self.rope_scaling["factor"], 1.0))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token over all layers, `itemsize` bytes a number."""
        return 2 * self.num_kv_layers * self.num_key_value_heads * self.head_dim * itemsize

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        overrides: dict[str, Any] | None = None,
        generation_config: str = "auto",
        engine_config: "EngineConfig | None" = None,
    ) -> "ModelConfig":
        """Read and check the configuration in a checkpoint's directory, or in its GGUF file.

        overrides: fields that replace those of config.json. generation_config: where generation_config.json is: "auto"
        (the checkpoint), "vllm" (none) or a directory. engine_config: says whether tokens, embeddings or scores are
        wanted; None: tokens.

        Raises ValueError for a checkpoint that this engine would compute wrongly.
        """
        return cls(**read_model_fields(directory, overrides or {}, generation_config, engine_config))
