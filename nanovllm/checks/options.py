"""What each option of an LLM may be, as far as no checkpoint has to be asked."""

import os
from importlib import import_module
from numbers import Integral, Real
from typing import Any

from nanovllm.checks.values import MAX_INT32, SEED, Bounds, check_choice, check_field, list_of, shorten, size_of
from nanovllm.core.block_hash import HASH_FUNCTIONS

DTYPES = {"auto": "auto", "float": "float32", "half": "float16"} | {d: d for d in ("float32", "bfloat16", "float16")}
CHOICES = {  # option -> what may be said -> what is meant
    "dtype": DTYPES,
    "quantization": {name: name for name in ("int8", "int4")},
    "kv_cache_dtype": {"auto": "auto", "int8": "int8", "int8_per_token_head": "int8"},
    "scheduling_policy": {name: name for name in ("fcfs", "priority")},
    "runner": {name: name for name in ("auto", "generate", "pooling")},
    "convert": {name: name for name in ("auto", "none", "embed", "classify")},
    "load_format": {name: name for name in ("auto", "safetensors", "gguf", "dummy")},
    "prefix_caching_hash_algo": {name: name for name in HASH_FUNCTIONS}  # and vLLM's names for the same purpose
    | {"sha256_cbor": "sha256", "xxhash": "xxh64", "xxhash_cbor": "xxh64"},
}
CONFIGS = {  # option -> its class, imported when a value is given, and what a person may give
    "speculative_config": ("nanovllm.features.speculation.config", "SpeculativeConfig", "a dict"),
    "profiler_config": ("nanovllm.features.callers.profile", "ProfilerConfig", "a dict"),
    "kv_events_config": ("nanovllm.features.cache_reports.config", "KVEventsConfig", "a dict or a KVEventsConfig"),
    "pooler_config": ("nanovllm.features.pooling.params", "PoolerConfig", "a dict or a PoolerConfig"),
}
PLACES = dict.fromkeys(("model", "tokenizer"), "a checkpoint's directory or a hub id")
PLACES |= {"prefix_cache_dir": "a directory, of its own"}
PLACES |= {"revision": "a branch, tag or commit of the hub's", "generation_config": "'auto', 'vllm' or a directory"}
CACHES = ("kv_cache_memory_bytes", "state_cache_bytes", "prefix_cache_bytes", "cpu_cache_bytes")
SIZES = ("max_model_len", "max_num_batched_tokens", *CACHES)  # also as text: "8k"
OPTIMIZATIONS = ("reordered_weights", "c_kernels", "recorded_step", "triton", "flash_attn", "cuda_graphs")

OPTION_BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "block_size"), (Integral, 1, MAX_INT32)),
    "long_prefill_token_threshold": (Integral, 0, MAX_INT32),
    "max_model_len": (Integral, 2, MAX_INT32),
    "kv_cache_memory_bytes": (Integral, 1),
    **dict.fromkeys(("state_cache_bytes", "cpu_cache_bytes"), (Integral, 0)),
    "prefix_cache_bytes": (Integral, 1 << 20),
    "num_gpu_blocks_override": (Integral, 1, MAX_INT32),
    **dict.fromkeys(("max_loras", "max_lora_rank"), (Integral, 1, 1024)),  # vLLM's largest rank is 512
    "tensor_parallel_size": (Integral, 1, MAX_INT32),
    "gpu_memory_utilization": (Real, 0.01, 1.0),
    "kv_cache_metrics_sample": (Real, 1e-9, 1.0),
    "seed": SEED,
}


def check_option(name: str, value: Any, kind: Any) -> Any:
    """An EngineConfig's option in its one form. kind: its type. Raises ValueError."""
    if name in SIZES and isinstance(value, str):
        value = size_of(name, value)
    if name == "max_model_len" and isinstance(value, Integral) and value == -1:
        return None
    if name == "dtype":
        value = str(value).removeprefix("torch.")  # vLLM's scripts pass torch.bfloat16, too
    if name == "kv_cache_dtype" and str(value).startswith("fp8"):
        raise ValueError(f"kv_cache_dtype={value!r} is not supported; 'int8' takes as little memory")
    if name in CHOICES and value is not None:
        check_choice(name, value, CHOICES[name])
        return CHOICES[name][value]
    if name == "optimizations":
        for item in list_of(value, str, "names", name):
            check_choice(name, item, OPTIMIZATIONS)
        return tuple(list_of(value, str, "names", name))
    if name == "hf_overrides" and not isinstance(value, dict | None):
        raise ValueError(f"hf_overrides must be a dict of config.json's fields, found {shorten(value)}")
    if name in CONFIGS and value is not None:
        module, class_name, kinds = CONFIGS[name]
        config = getattr(import_module(module), class_name)
        if not isinstance(value, config | dict):
            raise ValueError(f"{name} must be {kinds}, found {shorten(value)}")
        return config(**value) if isinstance(value, dict) else value
    if name == "logits_processors":
        from nanovllm.features.logits_processors.classes import classes_of

        return classes_of(value)
    if name in PLACES and (value is not None or name == "model"):
        if not isinstance(value, str | os.PathLike) or not str(value):
            raise ValueError(f"{name} must be {PLACES[name]}, found {shorten(value)}")
        return str(value)
    return check_field(name, value, kind, OPTION_BOUNDS)
