"""GGUF files of checkpoints, written by the gguf package as llama.cpp's converter writes them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

Quantize = Callable[[str, np.ndarray], tuple[np.ndarray, str]]  # (name, weight) -> its bytes, the name of their type


def of_type(name: str) -> Quantize:
    """All matrices in one type; norms and biases are float32 whatever the file is."""

    def quantize(_: str, weight: np.ndarray) -> tuple[np.ndarray, str]:
        kind = name if weight.ndim > 1 else "F32"
        return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind]), kind

    return quantize


def write_gguf(
    folder: Path,
    path: Path,
    quantize: Quantize = of_type("F32"),
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **changes: Any,
) -> Path:
    """Write a checkpoint as a GGUF file. extra: adds to what is written; changes: of metadata, None leaves it out."""
    config = json.loads((folder / "config.json").read_text())
    kind, tokenizer = config["model_type"], json.loads((folder / "tokenizer.json").read_text())
    kind = "llama" if kind == "mistral" else kind
    rope = config["rope_parameters"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": head_dim,
        "rope.freq_base": rope["rope_theta"],
    }
    if rope["rope_type"] == "linear":
        numbers |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    writer = gguf.GGUFWriter(path, changes.pop("architecture", kind))
    padding = [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    vocabulary = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens + padding,
        "token_type": [3 if token in special else 1 for token in tokens] + [5] * len(padding),
        "merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "eot_token_id": 3,
        "add_bos_token": False,
    }
    values = {f"{kind}.{name}": value for name, value in numbers.items()}
    values |= {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}
    values["tokenizer.chat_template"] = (folder / "chat_template.jinja").read_text()
    add_metadata(writer, values | changes)
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[kind], config["num_hidden_layers"]
    )
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(head_dim, **rope))
    for name, weight in load_file(folder / "model.safetensors").items():
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = weight.reshape(heads if "q_proj" in name else kv_heads, 2, -1, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        data, type_name = quantize(name, np.ascontiguousarray(weight))
        stem, _, ending = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", data, raw_dtype=gguf.GGMLQuantizationType[type_name])
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_vocabulary(tokenizer: dict[str, Any], config: dict[str, Any], path: Path, model: str, **changes: Any) -> Path:
    """A GGUF file without tensors of tokenizer.json and tokenizer_config.json, as llama.cpp's converter writes it.

    model: "gpt2" or "llama"; changes: of metadata, None leaves out.
    """
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    texts |= {token_id: token["content"] for token_id, token in added.items()}
    kinds = []
    for token_id in range(max(texts) + 1):
        text = texts.setdefault(token_id, f"[PAD{token_id}]")
        if text == tokenizer["model"].get("unk_token"):
            kinds.append(2)
        elif token_id in added:
            is_control = added[token_id]["special"] or text.startswith(("<|", "<｜"))
            kinds.append(3 if is_control else 4)
        elif model == "llama" and re.fullmatch("<0x[0-9A-F]{2}>", text):
            kinds.append(6)
        else:
            kinds.append(1 if text in tokenizer["model"]["vocab"] else 5)
    tokens = [texts[token_id] for token_id in range(len(texts))]
    if model == "llama":
        tokens = [text.replace("▁", " ") if kind == 4 else text for text, kind in zip(tokens, kinds, strict=True)]
    values = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in tokenizer["model"]["merges"]]
    if model == "llama":
        order = {}
        for place, pair in enumerate(merges):
            order.setdefault("".join(pair), place)
        values["tokenizer.ggml.scores"] = [-float(order.get(text, len(merges))) for text in tokens]
        values["tokenizer.ggml.add_space_prefix"] = "Prepend" in json.dumps(tokenizer["normalizer"])
    else:
        values["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    for name in ("bos", "eos", "unk", "pad"):
        text = config.get(f"{name}_token")
        text = text["content"] if isinstance(text, dict) else text
        if text in tokens:
            key = {"unk": "unknown", "pad": "padding"}.get(name, name)
            values[f"tokenizer.ggml.{key}_token_id"] = tokens.index(text)
    if "chat_template" in config:
        values["tokenizer.chat_template"] = config["chat_template"]
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    add_metadata(writer, values | changes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    kinds = {bool: "add_bool", str: "add_string", float: "add_float32", int: "add_uint32", list: "add_array"}
    for name, value in values.items():
        if value is not None:
            getattr(writer, kinds[type(value)])(name, value)


def llama3_divisors(
    head_dim: int, rope_theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, **rope: Any
) -> np.ndarray:
    """As convert_hf_to_gguf.py computes them."""
    wavelengths = 2 * np.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    original = rope["original_max_position_embeddings"]
    smooth = (original / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    divisors[wavelengths < original / high_freq_factor] = 1
    divisors[wavelengths > original / low_freq_factor] = factor
    return divisors.astype(np.float32)
