"""A checkpoint's files -> the fields of ModelConfig: which architectures there are, and what each says where.

What a plain Llama does not have is read in the folder of its feature, which is imported where a checkpoint has it.
"""

from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_choice, typed
from nanovllm.files.config_json import (
    biases_of,
    dtype_of,
    plain_rope,
    read_json,
    reject_unimplemented,
    sampling_of,
    sizes_of,
)
from nanovllm.files.end_tokens import end_tokens, gguf_sources

LLAMA = "LlamaForCausalLM"
HYBRID = [f"Qwen3_5{kind}For{task}" for kind in ("", "Moe") for task in ("CausalLM", "ConditionalGeneration")]
HYBRID.append("Qwen3NextForCausalLM")
ARCHITECTURES = [
    LLAMA,
    *(f"{name}ForCausalLM" for name in ("Mistral", "SmolLM3", "Qwen2", "Qwen3", "Qwen3Moe")),
    *HYBRID,
]
# Fields that differ from layer to layer, or say that a layer's window is used.
OF_LAYERS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}


def read_model_fields(
    directory: Path, overrides: dict[str, Any], generation_config: str, asked: Any = None
) -> dict[str, Any]:
    """See ModelConfig.from_directory."""
    if "text_config" in overrides:
        from nanovllm.features.hybrid.hybrid_config import text_overrides

        overrides = text_overrides(overrides)
    folder = directory.parent if directory.is_file() else directory  # a GGUF file's is beside it, if it has one
    place = folder if generation_config in ("auto", "vllm") else Path(generation_config)
    generation_path = place / "generation_config.json"
    if place is not folder and not generation_path.is_file():
        raise FileNotFoundError(f"generation_config={generation_config!r}: there is no {generation_path}")
    generation = read_json(generation_path) if generation_path.is_file() else {}
    # What ends an answer is no default of sampling: it is read of "vllm", too.
    ends = [(generation_path.name, generation.get("eos_token_id"))]
    generation = {} if generation_config == "vllm" else {n: x for n, x in generation.items() if n not in overrides}
    if directory.is_file():
        from nanovllm.files.gguf_file import GGUFFile

        file = GGUFFile(directory)
        config = file.config()
        ends = gguf_sources(file.metadata) + ends
        if "eos_token_id" in overrides:
            ends = [("hf_overrides", overrides["eos_token_id"])]
        found = _fields(_overridden(config, overrides), generation, ends, directory, generation_path, asked)
        found["rope_scaling"] |= file.rope_divisors(found["head_dim"])
        return found | {"is_quantized": file.is_quantized}
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json, so it is not a checkpoint directory")
    config = read_json(path)
    inner = config.get("text_config")
    of_text = [inner.get("eos_token_id")] if isinstance(inner, dict) else []
    ends = [*((path.name, eos) for eos in (config.get("eos_token_id"), *of_text)), *ends]
    if "eos_token_id" in overrides:
        ends = [("hf_overrides", overrides["eos_token_id"])]
    if "text_config" in config:
        from nanovllm.features.images.image_config import language_config

        config = language_config(config, path, overrides)
    return _fields(_overridden(config, overrides), generation, ends, path, generation_path, asked)


def _overridden(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """config.json with other values, without what is null."""
    if overrides:
        from nanovllm.features.positions.rope_config import with_overrides

        return with_overrides(config, overrides)
    return {name: value for name, value in config.items() if value is not None}


def _fields(
    config: dict[str, Any],
    generation: dict[str, Any],
    ends: list[tuple[str, Any]],
    path: Path,
    generation_path: Path,
    asked: Any,
) -> dict[str, Any]:
    architecture = str((typed(config, "architectures", [], path) or ["none named"])[0])
    kind = "generate"
    if architecture not in ARCHITECTURES:
        from nanovllm.features.pooling.pooling_config import kind_of

        architecture, kind = kind_of(architecture)
    check_choice(f"{path}: architecture", architecture, ARCHITECTURES)
    is_qwen3 = architecture.startswith("Qwen3")
    reject_unimplemented(config, path)
    if architecture.startswith("Qwen3_5Moe"):  # every layer has experts
        config = {"intermediate_size": config.get("shared_expert_intermediate_size", 512), **config}
    pooling = _pooling_of(config, kind, asked, path)
    rope = _rope_of(config, architecture, path)
    numbers = sizes_of({**config, **rope}, ["head_dim"] * is_qwen3, path)
    num_layers = numbers["num_hidden_layers"]
    return {
        "architecture": architecture,
        **numbers,
        **_experts_of(config, architecture, num_layers, path),
        "rope_scaling": rope,
        **biases_of(config, architecture, path),
        "qk_norm": is_qwen3,
        "tie_word_embeddings": typed(config, "tie_word_embeddings", False, path) and pooling is None,
        "pooling": pooling,
        "dtype": dtype_of(config, path),
        **_layer_kinds_of(config, architecture, num_layers, path),
        "end_tokens": end_tokens(ends, numbers["vocab_size"], path),
        "generation": sampling_of(generation, generation_path),
        **_hybrid_of({**config, **rope}, architecture, num_layers, path),
        "images": config.get("images"),
    }


def _pooling_of(config: dict[str, Any], kind: str, asked: Any, path: Path) -> Any:
    is_asked_for = asked is not None and (asked.runner == "pooling" or asked.convert in ("embed", "classify"))
    is_sentence_transformer = path.name == "config.json" and path.with_name("modules.json").is_file()
    if kind == "generate" and not is_asked_for and not is_sentence_transformer:
        return None
    from nanovllm.features.pooling.pooling_config import read_pooling

    return read_pooling(config, kind, asked, path)


def _rope_of(config: dict[str, Any], architecture: str, path: Path) -> dict[str, Any]:
    is_hybrid = architecture in HYBRID
    plain = None if is_hybrid else plain_rope(config, path)
    if plain is not None:
        return plain
    from nanovllm.features.positions.rope_config import read_rope

    return read_rope(config, path, is_hybrid)


def _experts_of(config: dict[str, Any], architecture: str, num_layers: int, path: Path) -> dict[str, Any]:
    if "Moe" not in architecture and not architecture.startswith("Qwen3Next"):
        return {}
    from nanovllm.features.experts.expert_config import read_experts

    return read_experts(config, architecture, num_layers, path)


def _layer_kinds_of(config: dict[str, Any], architecture: str, num_layers: int, path: Path) -> dict[str, Any]:
    if architecture in HYBRID or (architecture == LLAMA and OF_LAYERS.isdisjoint(config)):
        return {}
    from nanovllm.features.positions.layer_kinds import read_layer_kinds

    return read_layer_kinds(config, architecture, num_layers, path)


def _hybrid_of(config: dict[str, Any], architecture: str, num_layers: int, path: Path) -> dict[str, Any]:
    if architecture not in HYBRID:
        return {}
    from nanovllm.features.hybrid.hybrid_config import read_hybrid

    return read_hybrid(config, num_layers, path)
