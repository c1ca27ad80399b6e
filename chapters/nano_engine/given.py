"""What the course gives to a nano engine: a checkpoint's configuration and tokenizer, and a tiny checkpoint.

Both are long stories (files/, checkpoint.py) and neither is what an engine is about.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from nanovllm.checkpoint import ModelConfig
from nanovllm.files.tokenizer import load_tokenizer, with_eos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def read_checkpoint(directory: Path) -> tuple[ModelConfig, Any]:
    """The configuration (nanovllm/checkpoint.py lists its fields) and the tokenizer of a checkpoint directory.

    The tokenizer is transformers': tokenizer.encode(text) gives token ids, and tokenizer.decode(token_ids) a text.
    Raises ValueError for a checkpoint that is no plain Llama: a nano engine would compute it wrongly.
    """
    config = ModelConfig.from_directory(directory)
    odd = [name for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "is_quantized") if getattr(config, name)]
    if config.architecture != "LlamaForCausalLM" or config.rope_scaling.get("rope_type") != "default" or odd:
        what = ", ".join([config.architecture, f"rotary embedding {config.rope_scaling.get('rope_type')}", *odd])
        raise ValueError(f"a nano engine reads a plain Llama, such as the demo model; {directory} is {what}")
    tokenizer = load_tokenizer(directory)
    return with_eos(config, tokenizer, directory), tokenizer


SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
END = "<|end|>"


def make_tiny_llama(directory: Path, *, is_tied: bool = True, num_files: int = 1, seed: int = 0) -> Path:
    """Write a Llama with random weights into this directory, for machines without the demo model. Returns it.

    Its tokenizer has a token for each byte. Its logits are far apart, so that rounding decides nothing.
    """
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(str(directory))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "dtype": "float32",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": is_tied,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (directory / "config.json").write_text(json.dumps(config | SIZES), "utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: random_weight(name, shape, generator) for name, shape in shapes(is_tied).items()}
    names = list(tensors)
    for number in range(num_files):
        suffix = "" if num_files == 1 else f"-{number + 1:05}-of-{num_files:05}"
        save_file({name: tensors[name] for name in names[number::num_files]}, directory / f"model{suffix}.safetensors")
    return directory


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast  # a second or more, and the first steps need no tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + noise / 10 if name.endswith("norm.weight") else noise / 5


def shapes(is_tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama's weights, as checkpoints have them."""
    hidden, inner, vocab = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"]
    q_size, kv_size = (SIZES[name] * SIZES["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
    if not is_tied:
        found["lm_head.weight"] = (vocab, hidden)
    return found
