"""A checkpoint's files -> the fields of ModelConfig: which models there are, and what the code of each computes.

The numbers come from transformers' configuration object. What a plain Llama does not have is read in the folder of its
feature, which is imported where a checkpoint has it.
"""

import logging
import os
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.checks.values import MIN_POSITIVE, Bounds, check_choice, numbers_of, shorten, typed
from nanovllm.config import DTYPES
from nanovllm.files.config_json import make_config, read_json, read_object, sampling_of, with_overrides
from nanovllm.files.end_tokens import end_tokens, gguf_sources, overriding

logger = logging.getLogger("nanovllm")

# model_type -> how the names of its architectures begin: of language models, and of models that hold one.
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Mistral",
    "smollm3": "SmolLM3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_vl_text": "Qwen3",
}
COMPOSITES = {"idefics3": "Idefics3", "smolvlm": "SmolVLM", "qwen3_vl": "Qwen3VL"}
COMPOSITES |= {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
MODEL_TYPES = FAMILIES | COMPOSITES
WINDOWED = ("mistral", "ministral", "smollm3", "qwen2", "qwen3", "qwen3_moe")  # some of their layers may be
HYBRID = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
# How the names of architectures end.
GENERATES, SEES_IMAGES = "ForCausalLM", "ForConditionalGeneration"
POOLS = {"Model": "embed", "ForSequenceClassification": "classify"}

# Where others say how they have quantized a checkpoint's weights: fields of config.json, and files beside it.
QUANTIZATION_FIELDS = ("quantization_config", "compression_config", "quantization")  # the last one: MLX
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")

# Bounds that no model comes near: a damaged file is refused before anything of its size is built.
SIZE: Bounds = (Integral, 1, 2**24)
COUNT: Bounds = (Integral, 1, 2**10)
NUMBERS: dict[str, Bounds] = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": COUNT,
    "max_position_embeddings": SIZE,
    "rms_norm_eps": (Real, MIN_POSITIVE, 1.0),
}
ROPE_THETA: dict[str, Bounds] = {"rope_theta": (Real, MIN_POSITIVE)}


def read_model_fields(
    directory: Path, overrides: dict[str, Any], generation_config: str, engine_config: Any = None
) -> dict[str, Any]:
    """See ModelConfig.from_directory."""
    folder = directory.parent if directory.is_file() else directory  # a GGUF file's is beside it, if it has one
    place = folder if generation_config in ("auto", "vllm") else Path(os.path.expanduser(generation_config))
    generation_path = place / "generation_config.json"
    if place is not folder and not generation_path.is_file():
        raise FileNotFoundError(f"generation_config={generation_config!r}: there is no {generation_path}")
    generation = read_json(generation_path) if generation_path.is_file() else {}
    # What ends an answer is no default of sampling: it is read of "vllm", too.
    ends = [(generation_path.name, generation.get("eos_token_id"))]
    if generation_config == "vllm":
        generation = {}
    file = None
    if directory.is_file():
        from nanovllm.files.gguf_file import GGUFFile

        file = GGUFFile(directory)
        path, fields = directory, file.config()
        ends = gguf_sources(file.metadata) + ends
    else:
        path = directory / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no config.json, so it is not a checkpoint directory")
        if path.with_name("adapter_config.json").is_file():
            told = "the adapter beside it (adapter_config.json) is not applied; a request may choose it: lora_request"
            logger.warning("%s: %s", path, told)
        fields = read_object(path)
        inner = fields.get("text_config")
        text_ends = [inner.get("eos_token_id")] if isinstance(inner, dict) else []
        ends = [*((path.name, eos) for eos in (fields.get("eos_token_id"), *text_ends)), *ends]
    found = fields_of(with_overrides(fields, overrides, path), engine_config, path)
    found["end_tokens"] = end_tokens(overriding(overrides) or ends, found["vocab_size"], path)
    found["generation"] = sampling_of(generation, generation_path)
    _check_method(engine_config, "gguf" if file is not None else getattr(found["published"], "method", None), path)
    if file is not None:
        found["rope_scaling"] |= file.rope_divisors(found["head_dim"])
        found["is_quantized"] = file.is_quantized
    return found


def _check_method(engine_config: Any, own: str | None, path: Path) -> None:
    """Raise ValueError unless the quantization that the caller names, if any, is the checkpoint's own."""
    named = None if engine_config is None or engine_config.round_to else engine_config.quantization
    if named in (None, own):
        return
    would = 'leave quantization out, or choose "int8" or "int4"' if own is None else f"leave it out, or write {own!r}"
    holds = "weights that nobody has quantized" if own is None else f"weights of {own}"
    raise ValueError(f"quantization={named!r}, and {path} has {holds}; {would}")


def fields_of(fields: dict[str, Any], engine_config: Any, path: Path) -> dict[str, Any]:
    """What a config.json says. fields: that file's. engine_config: an EngineConfig, or None. Raises ValueError."""
    architecture, made_for = _architecture_of(fields, path)
    whole = make_config(fields, path)
    text = whole.get_text_config()
    # Inside another model's config.json, a file may say what it was made of.
    text.model_type = type(text).model_type  # pyrefly: ignore[read-only]
    _reject_what_changes_all(whole, text, path)
    check_choice(f"{path}: model_type of text_config", text.model_type, FAMILIES)
    family = FAMILIES[text.model_type]
    check_choice(f"{path}: hidden_act", text.hidden_act, ("silu",))
    published = _published_of(whole, text, path)
    pooling = _pooling_of(text, architecture, made_for, engine_config, path)
    images = None
    if made_for == SEES_IMAGES and fields.get("vision_config"):
        from nanovllm.features.images.image_config import read_images

        images = read_images(whole, fields, architecture, path)
    tied = getattr(whole if made_for == SEES_IMAGES else text, "tie_word_embeddings", False)
    return {
        "architecture": f"{family}{GENERATES}",
        "dtype": _dtype_of(whole, text, path),
        "is_quantized": published is not None and bool(published.schemes),
        "published": published,
        **_numbers_of(text, family, path),
        **_biases_of(text, family),
        **_rope_of(text, family, path),
        **_layer_kinds_of(text, path),
        **_experts_of(text, family, path),
        **_hybrid_of(text, family, path),
        "qk_norm": family.startswith("Qwen3"),
        "tie_word_embeddings": bool(tied) and pooling is None,
        "pooling": pooling,
        "images": images,
    }


def _reject_what_changes_all(whole: Any, text: Any, path: Path) -> None:
    """Raise ValueError for fields that transformers heeds, whatever the model, and this engine does not."""
    if any(getattr(config, "is_heterogeneous", False) for config in (whole, text)):
        raise ValueError(f"{path}: per_layer_config gives some layers other sizes or kinds, which is not supported")
    if any(not getattr(config, "is_causal", True) for config in (whole, text)):
        raise ValueError(f"{path}: its tokens see later ones (is_causal is false), so no KV cache can hold them")
    if named := getattr(whole, "transformers_weights", None):
        raise ValueError(
            f"{path}: transformers_weights names {shorten(named)}; name that file model.safetensors, and leave the "
            "field out"
        )


def _architecture_of(fields: dict[str, Any], path: Path) -> tuple[str, str]:
    """(name, what it is made for: its ending). Raises ValueError unless it is one of those of its model_type."""
    named = [] if fields.get("architectures") is None else typed(fields, "architectures", [], path)
    model_type: Any = fields.get("model_type")
    if model_type in ("llama", "mistral", "ministral"):  # the same models, under two names
        named = [str(name).replace("LLaMA", "Llama").replace("Ministral", "Mistral") for name in named]
    known = _architectures_of(model_type) if isinstance(model_type, str) else []
    if named and named[0] not in known:
        from nanovllm.features.pooling.pooling_config import reject_encoder

        reject_encoder(named[0], path)
    check_choice(f"{path}: model_type", model_type, MODEL_TYPES)
    architecture = named[0] if named else known[0]
    check_choice(f"{path}: architecture of a {model_type}", architecture, known)
    return architecture, architecture.removeprefix(MODEL_TYPES[model_type])


def _architectures_of(model_type: str) -> list[str]:
    """The first one is meant where a file names none. [] for a model_type that is not known."""
    beginning = MODEL_TYPES.get(model_type)
    endings = [SEES_IMAGES] if model_type in COMPOSITES else []
    if beginning in FAMILIES.values():
        endings += [GENERATES] if beginning in HYBRID else [GENERATES, *POOLS]
    return [f"{beginning}{ending}" for ending in endings]


def _numbers_of(text: Any, family: str, path: Path) -> dict[str, Any]:
    """Those in NUMBERS. Raises ValueError for what is out of bounds or does not fit together."""
    given = {name: getattr(text, name, None) for name in NUMBERS}
    if family == "Qwen3_5Moe":  # every layer has experts, and none the MLP of this size
        given["intermediate_size"] = text.shared_expert_intermediate_size
    if given["head_dim"] is None:  # a class without this field leaves it to the model
        checked = {name: given[name] for name in ("hidden_size", "num_attention_heads")}
        sizes = numbers_of(checked, NUMBERS, path)
        given["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    numbers = numbers_of(given, NUMBERS, path)
    num_heads, num_kv_heads, head_dim = (
        numbers[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if num_heads % num_kv_heads:
        raise ValueError(f"{path}: {num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    if head_dim % 2:
        raise ValueError(f"{path}: head_dim is {head_dim}; it must be even, rotary embedding turns pairs")
    return numbers


def _biases_of(text: Any, family: str) -> dict[str, bool]:
    """Which linear layers have one. Qwen2 has it on q, k and v, and Mistral has none, whatever a file says."""
    is_told = family not in ("Qwen2", "Mistral")
    attention_bias = is_told and text.attention_bias
    return {
        "qkv_bias": family == "Qwen2" or attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": family in ("Llama", "SmolLM3") and text.mlp_bias,
    }


def _dtype_of(whole: Any, text: Any, path: Path) -> str:
    """Where the configuration does not say it: that of the weights, as transformers' dtype="auto"."""
    dtype = whole.dtype or text.dtype
    if dtype is None and not any(path.parent.glob("*.safetensors")):  # load_format="dummy"
        return "float32"
    if dtype is None:
        from nanovllm.files.tensor_files import dtype_of_weights

        return dtype_of_weights(path.parent)
    name = str(dtype).removeprefix("torch.")
    check_choice(f"{path}: dtype of the weights", name, [d for d in DTYPES if d != "auto"])
    return DTYPES[name]


def _rope_of(text: Any, family: str, path: Path) -> dict[str, Any]:
    """rope_scaling, rope_theta, and perhaps how many positions there are once the angles are scaled."""
    text.standardize_rope_params()  # as transformers' models do it once more when they begin
    given: dict[str, Any] = {name: value for name, value in text.rope_parameters.items() if value is not None}
    is_plain = given.keys() == {"rope_type", "rope_theta"} and given.get("rope_type") == "default"
    if is_plain and family not in HYBRID:
        return {"rope_scaling": {"rope_type": "default"}} | numbers_of(given, ROPE_THETA, f"{path}: rotary embedding")
    from nanovllm.features.positions.rope_config import read_rope

    return read_rope(given, family in HYBRID, path)


def _pooling_of(text: Any, architecture: str, made_for: str, engine_config: Any, path: Path) -> Any:
    is_asked_for = engine_config is not None and (
        engine_config.runner == "pooling"
        or engine_config.convert in ("embed", "classify")
        or engine_config.pooler_config is not None
    )
    is_sentence_transformer = path.name == "config.json" and path.with_name("modules.json").is_file()
    if made_for not in POOLS and not is_asked_for and not is_sentence_transformer:
        return None
    from nanovllm.features.pooling.pooling_config import read_pooling

    return read_pooling(text, architecture, POOLS.get(made_for, "generate"), engine_config, path)


def _experts_of(text: Any, family: str, path: Path) -> dict[str, Any]:
    if family not in ("Qwen3Moe", "Qwen3Next", "Qwen3_5Moe"):
        return {}
    from nanovllm.features.experts.expert_config import read_experts

    return read_experts(text, family, path)


def _published_of(whole: Any, text: Any, path: Path) -> Any:
    in_config = any(getattr(config, name, None) for config in (whole, text) for name in QUANTIZATION_FIELDS)
    is_beside = path.name == "config.json" and any(path.with_name(name).is_file() for name in QUANTIZATION_FILES)
    if not in_config and not is_beside:
        return None
    from nanovllm.features.published.schemes import read_published

    return read_published(whole, text, path)


def _layer_kinds_of(text: Any, path: Path) -> dict[str, Any]:
    if text.model_type not in WINDOWED:
        if window := getattr(text, "sliding_window", None):
            kind = text.model_type
            logger.warning(
                "%s: sliding_window (%s) is not used: a %s sees all tokens in every layer, as in transformers' forward "
                "pass. transformers' generate() drops older keys from its cache, so its longer answers may differ",
                path,
                window,
                kind,
            )
        return {}
    from nanovllm.features.positions.layer_kinds import read_layer_kinds

    return read_layer_kinds(text, path)


def _hybrid_of(text: Any, family: str, path: Path) -> dict[str, Any]:
    if family not in HYBRID:
        return {}
    from nanovllm.features.hybrid.hybrid_config import read_hybrid

    return read_hybrid(text, path)
