"""EngineConfig: what the caller chooses, checked before any work. What the checkpoint says is in checkpoint.py."""

import os
from dataclasses import Field, dataclass, fields
from importlib import import_module
from numbers import Integral
from typing import Any

from nanovllm.checks.names import check_option, names_checked, option
from nanovllm.checks.values import HIGHEST_SEED, LOWEST_SEED, MAX_INT32, check_choice, list_of, shorten, size_of
from nanovllm.core.block_hash import HASH_FUNCTIONS

DTYPES = {
    "auto": "auto",
    "float": "float32",
    "half": "float16",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
BITS = ("int8", "int4")  # to which the weights of any checkpoint may be rounded
# A checkpoint's own method may be named, too (files/model_fields.py compares). vLLM's scripts may name a kernel for it.
CHECKPOINT_METHODS = {name: name for name in ("fp8", "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf")}
CHECKPOINT_METHODS |= {f"{name}_marlin": name for name in ("gptq", "awq")}
CHOICES = {  # option -> value that may be given -> value that the option has then
    "dtype": DTYPES,
    "quantization": {name: name for name in BITS} | CHECKPOINT_METHODS,
    "tower_quantization": {"int8": "int8"},
    "kv_cache_dtype": {"auto": "auto", "int8": "int8", "int8_per_token_head": "int8"},
    "scheduling_policy": {name: name for name in ("fcfs", "priority")},
    "runner": {name: name for name in ("auto", "generate", "pooling")},
    "convert": {name: name for name in ("auto", "none", "embed", "classify")},
    "load_format": {name: name for name in ("auto", "safetensors", "gguf", "dummy")},
    "prefix_caching_hash_algo": {name: name for name in HASH_FUNCTIONS}  # and vLLM's names of such functions
    | {"sha256_cbor": "sha256", "xxhash": "xxh64", "xxhash_cbor": "xxh64"},
}
CONFIGS = {  # option -> module and class, imported when a value is given; what an error says may be given
    "speculative_config": ("nanovllm.features.speculation.speculative_config", "SpeculativeConfig", "a dict"),
    "profiler_config": ("nanovllm.features.callers.profile", "ProfilerConfig", "a dict"),
    "kv_events_config": (
        "nanovllm.features.cache_reports.kv_events_config",
        "KVEventsConfig",
        "a dict or a KVEventsConfig",
    ),
    "pooler_config": ("nanovllm.features.pooling.params", "PoolerConfig", "a dict or a PoolerConfig"),
}
# options about images, checked in features/images/options.py
MEDIA = ("limit_mm_per_prompt", "mm_processor_kwargs", "allowed_local_media_path", "allowed_media_domains")
PATH_OPTIONS = {  # option -> what an error says may be given
    "model": "a checkpoint's directory or a hub id",
    "tokenizer": "a checkpoint's directory or a hub id",
    "prefix_cache_dir": "a directory, of its own",
    "revision": "a branch, tag or commit of the hub's",
    "generation_config": "'auto', 'vllm' or a directory",
}
CACHES = ("kv_cache_memory_bytes", "state_cache_bytes", "prefix_cache_bytes", "cpu_cache_bytes")
SIZES = ("max_model_len", "max_num_batched_tokens", *CACHES)  # may be given as text, such as "8k"
OPTIMIZATIONS = ("reordered_weights", "c_kernels", "recorded_step", "triton", "flash_attn", "cuda_graphs")


@names_checked("LLM")
@dataclass(frozen=True)
class EngineConfig:
    """Options of an LLM, with vLLM's names. None stands for an option's default."""

    # A directory that holds a checkpoint, a GGUF file, or a hub id such as "Qwen/Qwen3-0.6B". "owner/name:Q8_0" is the
    # GGUF file of that quantization. "demo" and "demo:Q4_1" are the demo model, unless there is a file of that name.
    model: str
    tokenizer: str | None = option(None, "directory or hub id of another checkpoint, whose tokenizer to use")
    revision: str | None = option(None, "branch, tag or commit of the hub's repository")
    load_format: str = option("auto", '"safetensors", "gguf", or "dummy": random weights, no file of weights is read')
    hf_overrides: dict[str, Any] | None = option(None, "fields that replace those of config.json")
    generation_config: str = option(
        "auto", 'where generation_config.json is: "auto" (the checkpoint), "vllm" (none), or a directory'
    )
    dtype: str = option("auto", '"auto" (the checkpoint\'s), "float32", "bfloat16" or "float16"')
    quantization: str | None = option(
        None, '"int8" or "int4": bits to round the weights to; None, or the checkpoint\'s own method: as they are'
    )
    runner: str = option("auto", '"generate" texts, "pooling" (embeddings, scores), "auto": what the checkpoint is for')
    convert: str = option(
        "auto", 'what a pooling runner returns: "embed" or "classify"; "auto": what the checkpoint is for'
    )
    pooler_config: dict[str, Any] | Any = option(
        None, 'a PoolerConfig, or its fields, such as {"use_activation": false}'
    )
    kv_cache_dtype: str = option(
        "auto", '"auto" (as the weights), or "int8" (on a CPU only): half the memory of bfloat16'
    )
    max_model_len: int | None = option(
        None,
        'tokens of a prompt and its output; "8k" is 8,000, "8K" is 8,192, and -1 is what fits',
        low=2,
        high=MAX_INT32,
    )
    max_num_seqs: int = option(256, "sequences that run at a time", low=1, high=MAX_INT32)
    max_num_batched_tokens: int = option(
        2048, "tokens computed in one step; a longer prompt is computed in chunks", low=1, high=MAX_INT32
    )
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step, which leaves room for others; 0: no limit", low=0, high=MAX_INT32
    )
    scheduling_policy: str = option("fcfs", '"fcfs": first come, first served; "priority": the lowest number first')
    block_size: int | None = option(
        None, "tokens in a block of the KV pool; None: what attention works best with", low=1, high=MAX_INT32
    )
    enable_prefix_caching: bool = option(True, "reuse the K/V of shared prefixes")
    prefix_caching_hash_algo: str = option("xxh64", '"xxh64" (fast), or "sha256" if tenants do not trust each other')
    prefix_cache_dir: str | None = option(None, "a directory in which cached prefixes outlive the process")
    prefix_cache_bytes: int = option(
        10 << 30, "most bytes to keep in prefix_cache_dir, as a number or as text: 10G", low=1 << 20
    )
    cpu_cache_bytes: int = option(0, "bytes for prefixes that the KV pool has evicted, in the CPU's memory", low=0)
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory to use; on a CPU the KV pool gets this share of half the free memory, 4 GiB at most",
        low=0.01,
        high=1.0,
    )
    kv_cache_memory_bytes: int | None = option(
        None, "bytes of each rank's KV pool; overrides gpu_memory_utilization", low=1
    )
    state_cache_bytes: int | None = option(
        None, "bytes for snapshots of a hybrid model's states; None: a quarter of the memory for K/V and states", low=0
    )
    num_gpu_blocks_override: int | None = option(
        None, "blocks of the KV pool; overrides kv_cache_memory_bytes", low=1, high=MAX_INT32
    )
    tensor_parallel_size: int = option(
        1, "ranks to split the model over: one process each, and one GPU each if there are any", low=1, high=MAX_INT32
    )
    enforce_eager: bool = option(False, "plain PyTorch operations only, on any device: the same as optimizations=()")
    # On a CPU the first three are used (worker/cpu/), on a GPU the others (worker/cuda/).
    optimizations: tuple[str, ...] = option(OPTIMIZATIONS, "optimizations to use, of those that the device has")
    enable_lora: bool = option(False, "requests may choose adapters (nanovllm/features/README.md)")
    max_loras: int = option(4, "adapters in memory: the running sequences use at most this many", low=1, high=1024)
    max_lora_rank: int = option(16, "the largest rank of an adapter", low=1, high=1024)
    speculative_config: dict[str, Any] | Any = option(None, 'who proposes draft tokens, such as {"method": "ngram"}')
    limit_mm_per_prompt: dict[str, int] | None = option(None, 'most images of a prompt: {"image": 4}; None: 16')
    mm_processor_kwargs: dict[str, Any] | None = option(None, "options of the image processor, for every image")
    tower_quantization: str | None = option(
        None, '"int8" (on a CPU only): bits to round the linear layers to that look at images; None: as they are'
    )
    allowed_local_media_path: str | None = option(None, "a folder whose images a client may name; None: no folder's")
    allowed_media_domains: tuple[str, ...] = option((), "hosts from which images are fetched by http(s); (): from none")
    logits_processors: tuple[Any, ...] = option((), "classes whose objects change logits, in vLLM's form")
    kv_events_config: dict[str, Any] | Any = option(
        None, "a KVEventsConfig, or its fields: who is told of cached blocks"
    )
    kv_cache_metrics: bool = option(False, "measure how long cached blocks live, lie idle, wait for their next use")
    kv_cache_metrics_sample: float = option(0.01, "share of the blocks that are measured", low=1e-9, high=1.0)
    profiler_config: dict[str, Any] | Any = option(
        None, "a ProfilerConfig, or its fields: where start_profile() writes"
    )
    seed: int = option(
        0, "requests without a seed of their own derive theirs from it", low=LOWEST_SEED, high=HIGHEST_SEED
    )

    def __post_init__(self) -> None:
        """Check each option and bring it into its one form. Raises ValueError."""
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.name != "model":
                value = f.default
            object.__setattr__(self, f.name, _checked(f, value))
        if self.enforce_eager:  # so that other code needs to ask only whether `name in config.optimizations`
            object.__setattr__(self, "optimizations", ())

    @property
    def round_to(self) -> str | None:
        """ "int8" or "int4", to which the weights are rounded while they are read. None: they stay as they are."""
        return self.quantization if self.quantization in BITS else None

    @property
    def max_num_logits(self) -> int:
        """Rows of logits in the largest step. Speculation keeps the drafts of all sequences together within it."""
        speculative: Any = self.speculative_config
        return self.max_num_seqs + (0 if speculative is None else speculative.num_speculative_tokens)


def check_config(config: Any) -> EngineConfig:
    """`config`, if it is one. Raises ValueError."""
    if not isinstance(config, EngineConfig):
        example = "EngineConfig(model=...) and EngineArgs(model=...) are, and LLM(model, ...) makes one itself"
        raise ValueError(f"an engine is made of its options, found {shorten(config)}; {example}")
    return config


def _checked(f: Field, value: Any) -> Any:
    """The value of an option in its one form. Raises ValueError."""
    name = f.name
    if name in SIZES and isinstance(value, str):
        value = size_of(name, value)
    if name == "max_model_len" and isinstance(value, Integral) and value == -1:
        return None
    if name == "dtype":
        value = str(value).removeprefix("torch.")  # vLLM's scripts pass torch.bfloat16, too
    if name == "kv_cache_dtype" and str(value).startswith("fp8"):
        raise ValueError(f"kv_cache_dtype={value!r} is not supported; 'int8' takes as little memory, on a CPU")
    if name in CHOICES and value is not None:
        check_choice(name, value, CHOICES[name])
        return CHOICES[name][value]
    if name == "optimizations":
        names = list_of(value, str, "names", name)
        for item in names:
            check_choice(name, item, OPTIMIZATIONS)
        return tuple(names)
    if name == "hf_overrides" and not isinstance(value, dict | None):
        raise ValueError(f"hf_overrides must be a dict of config.json's fields, found {shorten(value)}")
    if name in MEDIA:
        if not value:
            return f.default
        from nanovllm.features.images.options import checked_option

        return checked_option(name, value)
    if name in CONFIGS and value is not None:
        module, class_name, kinds = CONFIGS[name]
        config_class = getattr(import_module(module), class_name)
        if not isinstance(value, config_class | dict):
            raise ValueError(f"{name} must be {kinds}, found {shorten(value)}")
        return config_class(**value) if isinstance(value, dict) else value
    if name == "logits_processors":
        if value == ():
            return ()
        from nanovllm.features.logits_processors.classes import classes_of

        return classes_of(value)
    if name in PATH_OPTIONS and (value is not None or name == "model"):
        if not isinstance(value, str | os.PathLike) or not str(value):
            raise ValueError(f"{name} must be {PATH_OPTIONS[name]}, found {shorten(value)}")
        return str(value)
    return check_option(f, value)
