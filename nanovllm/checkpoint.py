"""What a checkpoint's config.json says (chapter 1). No torch: a mistake is found at once.

A GGUF file is a whole checkpoint, too: gguf_file.py reads its metadata.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_choice, typed
from nanovllm.features.experts.config import read_experts
from nanovllm.features.positions.layer_kinds import read_layer_kinds
from nanovllm.features.positions.rope_config import read_rope, with_overrides
from nanovllm.files.config_json import (
    biases_of,
    check_eos,
    dtype_of,
    read_json,
    reject_unimplemented,
    sampling_of,
    sizes_of,
)

ARCHITECTURES = [f"{name}ForCausalLM" for name in ("Llama", "Mistral", "SmolLM3", "Qwen2", "Qwen3", "Qwen3Moe")]


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
    rope_scaling: dict[str, Any]  # rope_type and what that type needs; divisors of the frequencies, of a GGUF file
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str
    num_experts: int = 0  # of each layer in expert_layers, the ones that have several MLPs
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    expert_layers: frozenset[int] = frozenset()
    windows: dict[int, int] = field(default_factory=dict)  # {layer: keys that a row sees, its own included}; not: all
    layers_without_rotary: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json as options of SamplingParams

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token over all layers, `itemsize` bytes a number."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * itemsize

    @classmethod
    def from_directory(
        cls, directory: Path, overrides: dict[str, Any] | None = None, generation_config: str = "auto"
    ) -> "ModelConfig":
        """Read and check the configuration in a checkpoint's directory, or in its GGUF file.

        overrides: fields of config.json. generation_config: "auto", "vllm" (none) or the directory that has one.

        ValueError for what this engine would compute wrongly.
        """
        overrides = overrides or {}
        place = directory if generation_config in ("auto", "vllm") else Path(generation_config)
        generation_path = place / "generation_config.json"
        if place is not directory and not generation_path.is_file():
            raise FileNotFoundError(f"generation_config={generation_config!r}: there is no {generation_path}")
        is_read = generation_config != "vllm" and generation_path.is_file()
        generation = {n: x for n, x in (read_json(generation_path) if is_read else {}).items() if n not in overrides}
        if directory.is_file():
            from nanovllm.files.gguf_file import GGUFFile

            file = GGUFFile(directory)
            checked = cls._checked(with_overrides(file.config(), overrides), generation, directory, generation_path)
            return replace(checked, rope_scaling=checked.rope_scaling | file.rope_divisors(checked.head_dim))
        path = directory / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no config.json, so it is not a checkpoint directory")
        return cls._checked(with_overrides(read_json(path), overrides), generation, path, generation_path)

    @classmethod
    def _checked(
        cls, config: dict[str, Any], generation: dict[str, Any], path: Path, generation_path: Path
    ) -> "ModelConfig":
        architecture = (typed(config, "architectures", [], path) or ["none named"])[0]
        check_choice(f"{path}: architecture", architecture, ARCHITECTURES)
        is_qwen3 = architecture.startswith("Qwen3")
        reject_unimplemented(config, path)
        rope = read_rope(config, path)
        numbers = sizes_of({**config, **rope}, ["head_dim"] * is_qwen3, path)
        return cls(
            architecture=architecture,
            **numbers,
            **read_experts(config, architecture, numbers["num_hidden_layers"], path),
            rope_scaling=rope,
            **biases_of(config, architecture, path),
            qk_norm=is_qwen3,
            tie_word_embeddings=typed(config, "tie_word_embeddings", False, path),
            dtype=dtype_of(config, path),
            **read_layer_kinds(config, architecture, numbers["num_hidden_layers"], path),
            eos_token_ids=check_eos({**config, **generation}.get("eos_token_id"), numbers["vocab_size"], path),
            generation=sampling_of(generation, generation_path),
        )
