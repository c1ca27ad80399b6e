"""Sizes of models that everybody can download."""

from typing import Any

from nanovllm.checkpoint import ModelConfig

# What config.json says: vocabulary, hidden, intermediate, layers, heads, KV heads, head size, embeddings tied?
PUBLISHED = {
    "Qwen3-0.6B": (151_936, 1_024, 3_072, 28, 16, 8, 128, True),
    "Llama-2-7B": (32_000, 4_096, 11_008, 32, 32, 32, 128, False),
    "Llama-3.1-8B": (128_256, 4_096, 14_336, 32, 32, 8, 128, False),
    "Llama-3.1-70B": (128_256, 8_192, 28_672, 80, 64, 8, 128, False),
}


def published_config(name: str) -> ModelConfig:
    return config_of(*PUBLISHED[name], is_qwen3=name.startswith("Qwen3"))


def config_of(*sizes: int, is_qwen3: bool = False) -> ModelConfig:
    """A ModelConfig from these sizes, in the order of PUBLISHED; fields that change no size get ordinary values."""
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    fields: dict[str, Any] = dict(zip([*names.split(), "head_dim"], sizes[:-1], strict=True))
    fields |= dict(tie_word_embeddings=bool(sizes[-1]), qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=is_qwen3)
    fields |= dict(max_position_embeddings=131_072, rope_theta=1e6, rope_scaling={"rope_type": "default"})
    architecture = "Qwen3ForCausalLM" if is_qwen3 else "LlamaForCausalLM"
    return ModelConfig(architecture=architecture, rms_norm_eps=1e-6, dtype="bfloat16", **fields)
