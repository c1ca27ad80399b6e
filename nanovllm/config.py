"""EngineConfig: what the caller chooses. ModelConfig: what the checkpoint says. Both are checked before any work."""

import json
import math
import os
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.core.block_hash import HASH_FUNCTIONS
from nanovllm.sampling_params import check_number, reject_unknown

DTYPES = {"auto": "auto", "float": "float32", "half": "float16"} | {d: d for d in ("float32", "bfloat16", "float16")}
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
OPTIMIZATIONS = ("reordered_weights", "c_kernels", "triton", "flash_attn", "cuda_graphs")
REQUIRED_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
ROPE_SCALINGS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class EngineConfig:
    """Options of an LLM, with vLLM's names.

    model:                    a directory that holds a checkpoint, or a hub id such as "Qwen/Qwen3-0.6B"
    dtype:                    "auto" (the checkpoint's), "float32", "bfloat16" or "float16"
    max_model_len:            tokens of one sequence, prompt and output; None: as many as model and KV pool allow
    max_num_seqs:             sequences that run at a time
    max_num_batched_tokens:   tokens computed in one step; a longer prompt is computed in chunks
    block_size:               tokens in a block of the KV pool; None: what suits the attention backend
    enable_prefix_caching:    reuse the K/V of shared prefixes
    prefix_caching_hash_algo: "xxh64" (fast) or "sha256" (for tenants who do not trust each other)
    gpu_memory_utilization:   share of a GPU's memory to use, or on a CPU of half the memory that is available
    kv_cache_memory_bytes:    size of the KV pool (of each rank) in bytes; overrides what is found in the memory
    num_gpu_blocks_override:  size of the KV pool in blocks; overrides kv_cache_memory_bytes
    tensor_parallel_size:     ranks to split the model over, each a process (on a GPU of its own, if there are GPUs)
    enforce_eager:            on a GPU no CUDA graphs, on a CPU plain PyTorch operations only
    optimizations:            which to use: on a CPU "reordered_weights" (layers.py), "c_kernels" (cpu_kernels.py), on
                              a GPU "triton" and "flash_attn" (cuda_kernels.py) and "cuda_graphs" (cuda_graphs.py)
    seed:                     where requests without a seed of their own get theirs
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "xxh64"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    optimizations: tuple[str, ...] = OPTIMIZATIONS
    seed: int = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> "EngineConfig":
        reject_unknown(kwargs, (f.name for f in fields(cls)), "LLM")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", str(self.model))
        dtype = str(self.dtype).removeprefix("torch.")  # vLLM's scripts pass torch.bfloat16, too
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, found {self.dtype!r}")
        object.__setattr__(self, "dtype", DTYPES[dtype])
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            check_number(name, getattr(self, name), Integral, 1)
        for name in ("block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), Integral, 1)
        if self.max_model_len is not None:
            check_number("max_model_len", self.max_model_len, Integral, 2)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, Real, 0.01, 1.0)
        check_number("seed", self.seed, Integral)
        if self.prefix_caching_hash_algo not in HASH_FUNCTIONS:
            known = ", ".join(HASH_FUNCTIONS)
            raise ValueError(
                f"prefix_caching_hash_algo must be one of {known}, found {self.prefix_caching_hash_algo!r}"
            )
        for name in self.optimizations:
            if name not in OPTIMIZATIONS:
                raise ValueError(f"optimizations are {', '.join(OPTIMIZATIONS)}, found {name!r}")
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, found {getattr(self, name)!r}")


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


def cache_folder() -> Path:
    """Where this project keeps what it downloads and compiles: nanovllm/ in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"


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
