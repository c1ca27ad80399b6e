"""What each option of an LLM and each parameter of a request may be, as far as no checkpoint has to be asked."""

import os
from numbers import Integral, Real
from typing import Any

from nanovllm.checks.values import (
    MAX_INT32,
    MAX_POSITIVE,
    MIN_POSITIVE,
    SEED,
    Bounds,
    bias_of,
    check_choice,
    check_field,
    list_of,
    shorten,
    size_of,
)
from nanovllm.core.block_hash import HASH_FUNCTIONS
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.features.speculation.config import SpeculativeConfig

DTYPES = {"auto": "auto", "float": "float32", "half": "float16"} | {d: d for d in ("float32", "bfloat16", "float16")}
CHOICES = {  # option -> what may be said -> what is meant
    "dtype": DTYPES,
    "quantization": {name: name for name in ("int8", "int4")},
    "load_format": {name: name for name in ("auto", "safetensors", "gguf", "dummy")},
    "prefix_caching_hash_algo": {name: name for name in HASH_FUNCTIONS}  # and vLLM's names for the same purpose
    | {"sha256_cbor": "sha256", "xxhash": "xxh64", "xxhash_cbor": "xxh64"},
}
PLACES = dict.fromkeys(("model", "tokenizer"), "a checkpoint's directory or a hub id")
PLACES |= {"revision": "a branch, tag or commit of the hub's", "generation_config": "'auto', 'vllm' or a directory"}
SIZES = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")  # also as text: "8k"
OPTIMIZATIONS = ("reordered_weights", "c_kernels", "triton", "flash_attn", "cuda_graphs")

OPTION_BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "block_size"), (Integral, 1, MAX_INT32)),
    "max_model_len": (Integral, 2, MAX_INT32),
    "kv_cache_memory_bytes": (Integral, 1),
    "num_gpu_blocks_override": (Integral, 1, MAX_INT32),
    **dict.fromkeys(("max_loras", "max_lora_rank"), (Integral, 1, 1024)),  # vLLM's largest rank is 512
    "tensor_parallel_size": (Integral, 1, MAX_INT32),
    "gpu_memory_utilization": (Real, 0.01, 1.0),
    "seed": SEED,
}
PARAMETER_BOUNDS: dict[str, Bounds] = {
    "n": (Integral, 1, 16_384),  # vLLM's limit
    "temperature": (Real, 0.0),
    "top_p": (Real, MIN_POSITIVE, 1.0),
    "top_k": (Integral, -1),
    "min_p": (Real, 0.0, 1.0),
    "seed": SEED,
    "max_tokens": (Integral, 1),
    "min_tokens": (Integral, 0),
    "logprobs": (Integral, -1),
    "prompt_logprobs": (Integral, -1),
    "repetition_penalty": (Real, MIN_POSITIVE, MAX_POSITIVE),
    "presence_penalty": (Real, -2.0, 2.0),
    "frequency_penalty": (Real, -2.0, 2.0),
}
LISTS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("stop", "bad_words"), (str, "strings")),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), (Integral, "ids")),
}


def check_option(name: str, value: Any, kind: Any) -> Any:
    """An EngineConfig's option in its one form. kind: its type. Raises ValueError."""
    if name in SIZES and isinstance(value, str):
        value = size_of(name, value)
    if name == "max_model_len" and isinstance(value, Integral) and value == -1:
        return None
    if name == "dtype":
        value = str(value).removeprefix("torch.")  # vLLM's scripts pass torch.bfloat16, too
    if name in CHOICES and value is not None:
        check_choice(name, value, CHOICES[name])
        return CHOICES[name][value]
    if name == "optimizations":
        for item in list_of(value, str, "names", name):
            check_choice(name, item, OPTIMIZATIONS)
        return tuple(list_of(value, str, "names", name))
    if name == "hf_overrides" and not isinstance(value, dict | None):
        raise ValueError(f"hf_overrides must be a dict of config.json's fields, found {shorten(value)}")
    if name == "speculative_config":
        if not isinstance(value, SpeculativeConfig | dict | None):
            raise ValueError(f"speculative_config must be a dict, found {shorten(value)}")
        return SpeculativeConfig(**value) if isinstance(value, dict) else value
    if name in PLACES and (value is not None or name == "model"):
        if not isinstance(value, str | os.PathLike) or not str(value):
            raise ValueError(f"{name} must be {PLACES[name]}, found {shorten(value)}")
        return str(value)
    return check_field(name, value, kind, OPTION_BOUNDS)


def check_parameter(name: str, value: Any, kind: Any) -> Any:
    """A SamplingParams' field in its one form. kind: its type. Raises ValueError."""
    if name in LISTS and (value is not None or name != "allowed_token_ids"):
        value = list_of(value, *LISTS[name], name=name)
        if "" in value:
            raise ValueError(f"{name} holds an empty string, which every text has everywhere")
        if name == "allowed_token_ids" and not value:
            raise ValueError("allowed_token_ids is empty: there is no token to choose; None allows all")
    if name == "logit_bias" and value is not None:
        return bias_of(value)
    if name == "structured_outputs" and not isinstance(value, StructuredOutputsParams | None):
        raise ValueError(f"structured_outputs must be a StructuredOutputsParams, found {type(value).__name__}")
    if name == "seed" and isinstance(value, Integral) and value == -1:
        return None
    return check_field(name, value, kind, PARAMETER_BOUNDS)
