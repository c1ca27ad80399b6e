"""A checkpoint: where its files are and what its config.json says (chapter 1). No torch: a mistake is found at once."""

import json
import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.config import DTYPES
from nanovllm.validation import check_number

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
REQUIRED_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
ROPE_SCALINGS = ("default", "linear", "llama3")


def resolve_checkpoint(model: str) -> Path:
    """The directory of a checkpoint: `model` itself, or where the hub's copy of it was downloaded to."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    looks_local = path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1
    if looks_local:
        found = "is a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"model {model!r} {found}; give a checkpoint's directory or a hub id like 'owner/name'")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(
            f"model {model!r} is not a local directory and could not be downloaded from the hub: {reason}"
        ) from error


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
    rope_scaling: dict[str, Any]  # rope_type and what that type needs
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: frozenset[int] = frozenset()
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token over all layers, `itemsize` bytes a number."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * itemsize

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read and check a checkpoint's configuration. ValueError for what this engine would compute wrongly."""
        path = directory / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no config.json, so it is not a checkpoint directory")
        config = _read_json(path)
        architecture = (config.get("architectures") or ["none named"])[0]
        if architecture not in ARCHITECTURES:
            raise ValueError(f"{path}: architecture {architecture} is not one of {', '.join(ARCHITECTURES)}")
        _reject_unimplemented(config, path)

        required = [
            *REQUIRED_SIZES,
            "max_position_embeddings",
            "rms_norm_eps",
            *(["head_dim"] if architecture == "Qwen3ForCausalLM" else []),
        ]
        if missing := [name for name in required if config.get(name) is None]:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        for name in required:
            is_size = name != "rms_norm_eps"
            check_number(f"{path}: {name}", config[name], Integral if is_size else Real, 1 if is_size else 0.0)
        num_heads = config["num_attention_heads"]
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{path}: {num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        _check_rope(rope, path)
        # Llama and Qwen3 say attention_bias (all four projections); Qwen2 always has it, on q, k and v.
        attention_bias = bool(config.get("attention_bias", False))
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        return cls(
            architecture=architecture,
            **{name: config[name] for name in REQUIRED_SIZES},
            max_position_embeddings=config["max_position_embeddings"],
            num_key_value_heads=num_kv_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=rope,
            qkv_bias=is_qwen2 or attention_bias,
            o_bias=not is_qwen2 and attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=_checkpoint_dtype(config, path),
            eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or []),
            generation=generation,
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _reject_unimplemented(config: dict[str, Any], path: Path) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown method")
        raise ValueError(
            f"{path}: the checkpoint is quantized ({method}); use an unquantized one in bf16, fp16 or fp32"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"{path}: hidden_act is {activation!r}, only 'silu' is supported")
    # Qwen2 configs carry a sliding_window size and say beside it whether it is used.
    sliding = config.get("use_sliding_window", config.get("sliding_window") is not None)
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if sliding or layer_types:
        raise ValueError(f"{path}: sliding-window attention is not supported, only full attention in every layer")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path}: partial_rotary_factor is {config['partial_rotary_factor']}, only 1.0 is supported")


def _check_rope(rope: dict[str, Any], path: Path) -> None:
    kind = rope["rope_type"]
    if kind not in ROPE_SCALINGS:
        raise ValueError(f"{path}: rotary scaling {kind!r} is not one of {', '.join(ROPE_SCALINGS)}")
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }[kind]
    if missing := [name for name in needed if name not in rope]:
        raise ValueError(f"{path}: rotary scaling {kind!r} lacks {', '.join(missing)}")
    for name in needed:
        check_number(f"{path}: {name} of the rotary scaling", rope[name], Real, math.nextafter(0.0, 1.0))


def _checkpoint_dtype(config: dict[str, Any], path: Path) -> str:
    """transformers writes `dtype` since version 5, `torch_dtype` before; without either, weights are float32."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES or dtype == "auto":
        raise ValueError(f"{path}: weights of dtype {dtype!r} are not supported, only float32, bfloat16 and float16")
    return DTYPES[dtype]
