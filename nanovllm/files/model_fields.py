"""A checkpoint's files -> the fields of ModelConfig: which architectures there are, and what each says where."""

from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_choice, typed
from nanovllm.features.experts.config import read_experts
from nanovllm.features.hybrid.config import ARCHITECTURES as HYBRID
from nanovllm.features.hybrid.config import read_hybrid, text_config, text_overrides
from nanovllm.features.pooling.config import kind_of, read_pooling
from nanovllm.features.positions.layer_kinds import read_layer_kinds
from nanovllm.features.positions.rope_config import read_rope, with_overrides
from nanovllm.files.config_json import biases_of, dtype_of, read_json, reject_unimplemented, sampling_of, sizes_of
from nanovllm.files.end_tokens import end_tokens, gguf_sources

ARCHITECTURES = [f"{name}ForCausalLM" for name in ("Llama", "Mistral", "SmolLM3", "Qwen2", "Qwen3", "Qwen3Moe")]
ARCHITECTURES += HYBRID


def read_model_fields(
    directory: Path, overrides: dict[str, Any], generation_config: str, asked: Any = None
) -> dict[str, Any]:
    """See ModelConfig.from_directory."""
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
        config, ends = file.config(), gguf_sources(file.metadata) + ends
        ends = [("hf_overrides", overrides["eos_token_id"])] if "eos_token_id" in overrides else ends
        found = _fields(with_overrides(config, overrides), generation, ends, directory, generation_path, asked)
        found["rope_scaling"] |= file.rope_divisors(found["head_dim"])
        return found | {"is_quantized": file.is_quantized}
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json, so it is not a checkpoint directory")
    config = read_json(path)
    inner = config.get("text_config")
    of_text = [inner.get("eos_token_id")] if isinstance(inner, dict) else []
    ends = [*((path.name, eos) for eos in (config.get("eos_token_id"), *of_text)), *ends]
    ends = [("hf_overrides", overrides["eos_token_id"])] if "eos_token_id" in overrides else ends
    config = with_overrides(text_config(config, path), overrides)
    return _fields(config, generation, ends, path, generation_path, asked)


def _fields(
    config: dict[str, Any],
    generation: dict[str, Any],
    ends: list[tuple[str, Any]],
    path: Path,
    generation_path: Path,
    asked: Any,
) -> dict[str, Any]:
    architecture, kind = kind_of(str((typed(config, "architectures", [], path) or ["none named"])[0]))
    check_choice(f"{path}: architecture", architecture, ARCHITECTURES)
    is_qwen3 = architecture.startswith("Qwen3")
    reject_unimplemented(config, path)
    if architecture.startswith("Qwen3_5Moe"):  # every layer has experts
        config = {"intermediate_size": config.get("shared_expert_intermediate_size", 512), **config}
    pooling = read_pooling(config, kind, asked, path)
    rope = read_rope(config, path, architecture in HYBRID)
    numbers = sizes_of({**config, **rope}, ["head_dim"] * is_qwen3, path)
    num_layers = numbers["num_hidden_layers"]
    return {
        "architecture": architecture,
        **numbers,
        **read_experts(config, architecture, num_layers, path),
        "rope_scaling": rope,
        **biases_of(config, architecture, path),
        "qk_norm": is_qwen3,
        "tie_word_embeddings": typed(config, "tie_word_embeddings", False, path) and pooling is None,
        "pooling": pooling,
        "dtype": dtype_of(config, path),
        **({} if architecture in HYBRID else read_layer_kinds(config, architecture, num_layers, path)),
        "end_tokens": end_tokens(ends, numbers["vocab_size"], path),
        "generation": sampling_of(generation, generation_path),
        **read_hybrid({**config, **rope}, architecture, num_layers, path),
    }
