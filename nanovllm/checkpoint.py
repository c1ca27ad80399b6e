"""What a checkpoint's config.json says (chapter 1). No torch: a mistake is found at once.

A GGUF file is a whole checkpoint, too: gguf_file.py reads its metadata.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.config import DTYPES
from nanovllm.sampling_params import NUMBERS as SAMPLING
from nanovllm.validation import MAX_POSITIVE, MIN_POSITIVE, Bounds, check_choice, check_number, shorten

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Bounds that no model comes near: a damaged file is refused before anything of its size is built.
SIZES = "vocab_size hidden_size intermediate_size max_position_embeddings".split()
COUNTS = "num_hidden_layers num_attention_heads num_key_value_heads head_dim".split()
NUMBERS: dict[str, Bounds] = dict.fromkeys(SIZES, (Integral, 1, 2**24)) | dict.fromkeys(COUNTS, (Integral, 1, 2**10))
NUMBERS |= {"rms_norm_eps": (Real, MIN_POSITIVE, 1.0), "rope_theta": (Real, MIN_POSITIVE)}
FACTOR: Bounds = (Real, MIN_POSITIVE, MAX_POSITIVE)
LLAMA3 = dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), FACTOR)
LLAMA3 |= {"original_max_position_embeddings": NUMBERS["max_position_embeddings"]}
ROPE_SCALINGS: dict[str, dict[str, Bounds]] = {"default": {}, "linear": {"factor": FACTOR}, "llama3": LLAMA3}
GENERATION = {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
GENERATION |= {"max_new_tokens": SAMPLING["max_tokens"]}


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
    eos_token_ids: frozenset[int] = frozenset()
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json as options of SamplingParams

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token over all layers, `itemsize` bytes a number."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * itemsize

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read and check the configuration in a checkpoint's directory, or in its GGUF file.

        ValueError for what this engine would compute wrongly.
        """
        if directory.is_file():
            from nanovllm.gguf_file import GGUFFile

            file = GGUFFile(directory)
            checked = cls._checked(file.config(), {}, directory, directory)
            return replace(checked, rope_scaling=checked.rope_scaling | file.rope_divisors(checked.head_dim))
        path, generation_path = directory / "config.json", directory / "generation_config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no config.json, so it is not a checkpoint directory")
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return cls._checked(read_json(path), generation, path, generation_path)

    @classmethod
    def _checked(
        cls, config: dict[str, Any], generation: dict[str, Any], path: Path, generation_path: Path
    ) -> "ModelConfig":
        architecture = (_get(config, "architectures", [], path) or ["none named"])[0]
        check_choice(f"{path}: architecture", architecture, ARCHITECTURES)
        is_llama, is_qwen2, is_qwen3 = (architecture == name for name in ARCHITECTURES)
        _reject_unimplemented(config, path)
        rope = _rope(config, path)
        required = [*SIZES, *COUNTS[:2], "rms_norm_eps", *["head_dim"] * is_qwen3]
        if missing := [name for name in required if name not in config]:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        numbers = _numbers({"rope_theta": 10000.0, **config, **rope}, NUMBERS, path)
        num_heads = numbers["num_attention_heads"]
        num_kv_heads = numbers.setdefault("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"{path}: {num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
        head_dim = numbers.setdefault("head_dim", numbers["hidden_size"] // num_heads)
        if head_dim == 0 or head_dim % 2:
            raise ValueError(f"{path}: head_dim is {head_dim}; it must be even, rotary embedding turns pairs")
        # Llama and Qwen3 say attention_bias (all four projections); Qwen2 always has it, on q, k and v.
        attention_bias = _get(config, "attention_bias", False, path)
        return cls(
            architecture=architecture,
            **numbers,
            rope_scaling=rope,
            qkv_bias=is_qwen2 or attention_bias,
            o_bias=not is_qwen2 and attention_bias,
            mlp_bias=is_llama and _get(config, "mlp_bias", False, path),
            qk_norm=is_qwen3,
            tie_word_embeddings=_get(config, "tie_word_embeddings", False, path),
            dtype=_checkpoint_dtype(config, path),
            eos_token_ids=check_eos({**config, **generation}.get("eos_token_id"), numbers["vocab_size"], path),
            generation=_sampling(generation, generation_path),
        )


def check_eos(eos: Any, vocab_size: int, where: Path) -> frozenset[int]:
    """eos_token_id of a checkpoint's files, a number, a list of numbers or None, as a set. Raises ValueError."""
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return frozenset(check_number(f"{where}: eos_token_id", i, Integral, 0, vocab_size - 1) for i in ids)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file, without what is null. Raises ValueError, for code to be run, too."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    if value.get("auto_map"):
        raise ValueError(f"{path}: auto_map asks to run the checkpoint's own code, which is never done")
    return {name: found for name, found in value.items() if found is not None}


def _get(config: dict[str, Any], name: str, default: Any, path: Path) -> Any:
    """A list, an object or a bool: whatever the default is."""
    value = config.get(name, default)
    if type(value) is not type(default):
        raise ValueError(f"{path}: {name} must be a {type(default).__name__}, found {shorten(value)}")
    return value


def _numbers(config: dict[str, Any], bounds: Mapping[str, Bounds], where: Any) -> dict[str, Any]:
    """Those of the numbers that are there, each within its bounds."""
    return {n: check_number(f"{where}: {n}", config[n], *bounds[n]) for n in bounds if n in config}


def _sampling(generation: dict[str, Any], path: Path) -> dict[str, Any]:
    """generation_config.json in the names of SamplingParams."""
    found = _numbers(generation, GENERATION, path)
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found if _get(generation, "do_sample", True, path) else found | {"temperature": 0.0}


def _reject_unimplemented(config: dict[str, Any], path: Path) -> None:
    if quantization := config.get("quantization_config"):
        found = f"the checkpoint is quantized ({shorten(quantization)})"
        raise ValueError(f"{path}: {found}; use an unquantized one in bf16, fp16 or fp32")
    check_choice(f"{path}: hidden_act", config.get("hidden_act", "silu"), ("silu",))
    # Qwen2 configs carry a sliding_window size and say beside it whether it is used.
    sliding = _get(config, "use_sliding_window", "sliding_window" in config, path)
    if sliding or any(kind != "full_attention" for kind in _get(config, "layer_types", [], path)):
        raise ValueError(f"{path}: sliding-window attention is not supported, only full attention in every layer")


def _rope(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The rotary embedding: rope_type, what that type needs, and perhaps rope_theta."""
    given = _get(config, "rope_parameters", {}, path) or _get(config, "rope_scaling", {}, path)
    given = {name: value for name, value in given.items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    check_choice(f"{path}: rotary scaling", kind, ROPE_SCALINGS)
    if unknown := given.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *LLAMA3}:
        raise ValueError(f"{path}: {shorten(sorted(unknown))} of the rotary scaling is not supported")
    if (turned := {**config, **given}.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"{path}: partial_rotary_factor is {shorten(turned)}, only 1.0 is supported")
    if missing := [name for name in ROPE_SCALINGS[kind] if name not in given]:
        raise ValueError(f"{path}: rotary scaling {kind!r} lacks {', '.join(missing)}")
    rope = _numbers(given, NUMBERS | ROPE_SCALINGS[kind], f"{path}: rotary scaling")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(f"{path}: low_freq_factor of the rotary scaling must be below high_freq_factor")
    return {"rope_type": kind} | rope


def _checkpoint_dtype(config: dict[str, Any], path: Path) -> str:
    """transformers writes `dtype` since version 5, `torch_dtype` before; without either, weights are float32."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    check_choice(f"{path}: dtype of the weights", dtype, [d for d in DTYPES if d != "auto"])
    return DTYPES[dtype]
