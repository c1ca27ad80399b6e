"""Fields of config.json and generation_config.json: read, and refused where this engine would compute wrongly."""

import json
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.checks.names import bounds_of
from nanovllm.checks.values import MIN_POSITIVE, Bounds, check_choice, numbers_of, shorten, typed
from nanovllm.config import DTYPES
from nanovllm.sampling_params import SamplingParams

SAMPLING = SamplingParams.__dataclass_fields__
GENERATION = {
    name: bounds_of(SAMPLING[name]) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}
GENERATION |= {"max_new_tokens": bounds_of(SAMPLING["max_tokens"])}
# Bounds that no model comes near: a damaged file is refused before anything of its size is built.
SIZES = "vocab_size hidden_size intermediate_size max_position_embeddings".split()
COUNTS = "num_hidden_layers num_attention_heads num_key_value_heads head_dim".split()
NUMBERS: dict[str, Bounds] = dict.fromkeys(SIZES, (Integral, 1, 2**24)) | dict.fromkeys(COUNTS, (Integral, 1, 2**10))
ROPE_THETA: dict[str, Bounds] = {"rope_theta": (Real, MIN_POSITIVE)}
NUMBERS |= {"rms_norm_eps": (Real, MIN_POSITIVE, 1.0)} | ROPE_THETA

# transformers' values of fields that config.json lacks, which differ from one model_type to the next. A field that is
# there and null is not missing: it says that there is none.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096},
    "qwen3_moe": {"sliding_window": 4096},
    "smollm3": {"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True},
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file, with its model_type's defaults, without what is null.

    Raises ValueError, for code to be run, too.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    if value.get("auto_map"):
        raise ValueError(f"{path}: auto_map asks to run the checkpoint's own code, which is never done")
    defaults = DEFAULTS.get(str(value.get("model_type")), {})
    return {name: found for name, found in (defaults | value).items() if found is not None}


def sampling_of(generation: dict[str, Any], path: Path) -> dict[str, Any]:
    """generation_config.json in the names of SamplingParams."""
    found = numbers_of(generation, GENERATION, path)
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found if typed(generation, "do_sample", True, path) else found | {"temperature": 0.0}


def reject_unimplemented(config: dict[str, Any], path: Path) -> None:
    if quantization := config.get("quantization_config"):
        found = f"the checkpoint is quantized ({shorten(quantization)})"
        raise ValueError(f"{path}: {found}; use an unquantized one in bf16, fp16 or fp32")
    check_choice(f"{path}: hidden_act", config.get("hidden_act", "silu"), ("silu",))


def sizes_of(config: dict[str, Any], also_required: list[str], path: Path) -> dict[str, Any]:
    """The numbers in NUMBERS. Raises ValueError for what is missing, out of bounds or does not fit together."""
    if missing := [name for name in (*SIZES, *COUNTS[:2], "rms_norm_eps", *also_required) if name not in config]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    numbers = numbers_of({"rope_theta": 10000.0, **config}, NUMBERS, path)
    num_heads = numbers["num_attention_heads"]
    num_kv_heads = numbers.setdefault("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"{path}: {num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = numbers.setdefault("head_dim", numbers["hidden_size"] // num_heads)
    if head_dim == 0 or head_dim % 2:
        raise ValueError(f"{path}: head_dim is {head_dim}; it must be even, rotary embedding turns pairs")
    return numbers


def biases_of(config: dict[str, Any], architecture: str, path: Path) -> dict[str, Any]:
    """Which linear layers have one. Most say attention_bias, all four projections; Qwen2 has it on q, k and v."""
    is_qwen2, is_qwen = architecture == "Qwen2ForCausalLM", architecture.startswith("Qwen")
    attention_bias = typed(config, "attention_bias", False, path)
    return {
        "qkv_bias": is_qwen2 or attention_bias,
        "o_bias": not is_qwen2 and attention_bias,
        "mlp_bias": not is_qwen and typed(config, "mlp_bias", False, path),
    }


def plain_rope(config: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """The fields of a rotary embedding that is not scaled; None: features/positions/rope_config.py has to look."""
    given = [config[name] for name in ("rope_parameters", "rope_scaling") if name in config]
    for each in given:
        if not isinstance(each, dict) or each.keys() - {"rope_type", "rope_theta"}:
            return None
        if (each.get("rope_type") or "default") != "default":
            return None
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    fields: dict[str, Any] = next((each for each in given if each), {})
    fields = {name: value for name, value in fields.items() if value is not None}
    return {"rope_type": "default"} | numbers_of(fields, ROPE_THETA, f"{path}: rotary scaling")


def dtype_of(config: dict[str, Any], path: Path) -> str:
    """transformers writes `dtype` since version 5, `torch_dtype` before; without either, weights are float32."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    check_choice(f"{path}: dtype of the weights", dtype, [d for d in DTYPES if d != "auto"])
    return DTYPES[dtype]
