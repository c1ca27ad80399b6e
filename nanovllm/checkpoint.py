"""What a checkpoint's config.json says (chapter 1). No torch: a mistake is found at once.

A GGUF file is a whole checkpoint, too: gguf_file.py reads its metadata.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.files.model_fields import read_model_fields


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
    rope_scaling: dict[str, Any]  # rope_type, what it needs, partial_rotary_factor; divisors, of a GGUF file
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str
    is_quantized: bool = False  # the file holds weights of few bits
    num_experts: int = 0  # of each layer in expert_layers, the ones that have several MLPs
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0  # of an MLP beside the experts that every token meets; 0: there is none
    expert_layers: frozenset[int] = frozenset()
    windows: dict[int, int] = field(default_factory=dict)  # {layer: keys that a row sees, its own included}; not: all
    layers_without_rotary: frozenset[int] = frozenset()
    norm_offset: float = 0.0  # norms multiply by this plus their weight
    hybrid: Any = None  # features/hybrid/hybrid_config.py: layers whose memory does not grow
    images: Any = None  # features/images/image_config.py: a tower looks at pictures, placeholders stand for them
    pooling: Any = None  # features/pooling/pooling_config.py: no tokens are wanted, but embeddings or scores
    end_tokens: dict[int, tuple[str, ...]] = field(default_factory=dict)  # {token: who calls it an end of an answer}
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json as options of SamplingParams

    @property
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

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token over all layers, `itemsize` bytes a number."""
        return 2 * self.num_kv_layers * self.num_key_value_heads * self.head_dim * itemsize

    @classmethod
    def from_directory(
        cls, directory: Path, overrides: dict | None = None, generation_config: str = "auto", asked: Any = None
    ) -> "ModelConfig":
        """Read and check the configuration in a checkpoint's directory, or in its GGUF file.

        overrides: fields of config.json. generation_config: "auto", "vllm" (none) or the directory that has one.
        asked: an EngineConfig, which says whether tokens are wanted; None: they are.

        ValueError for what this engine would compute wrongly.
        """
        return cls(**read_model_fields(directory, overrides or {}, generation_config, asked))
