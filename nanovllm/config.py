"""EngineConfig: what the caller chooses, checked before any work. What the checkpoint says is in checkpoint.py."""

from dataclasses import dataclass, fields
from typing import Any

from nanovllm.checks.options import OPTIMIZATIONS, check_option
from nanovllm.checks.vllm_names import Named
from nanovllm.sampling_params import option


@dataclass(frozen=True)
class EngineConfig(metaclass=Named):
    """Options of an LLM, with vLLM's names. None is the default."""

    # A directory that holds a checkpoint, a GGUF file, or a hub id such as "Qwen/Qwen3-0.6B" ("owner/name:Q8_0": of its
    # GGUF files the one of this quantization). "demo" and "demo:Q4_1" are the demo model, where no file is so called.
    model: str
    tokenizer: str | None = option(None, "another checkpoint's directory or hub id, to take the tokenizer from")
    revision: str | None = option(None, "branch, tag or commit of the hub's repository")
    load_format: str = option("auto", '"safetensors", "gguf", or "dummy": random weights, no file of weights is read')
    hf_overrides: dict[str, Any] | None = option(None, "fields of config.json, replaced")
    generation_config: str = option("auto", '"auto" (the checkpoint\'s), "vllm" (none), or a directory that has one')
    dtype: str = option("auto", '"auto" (the checkpoint\'s), "float32", "bfloat16" or "float16"')
    quantization: str | None = option(None, '"int8" or "int4": bits of the weights; None: as in the checkpoint')
    runner: str = option("auto", '"generate" texts, "pooling" (embeddings, scores), "auto": what the checkpoint is for')
    convert: str = option("auto", 'with a pooling runner, "embed" or "classify"; "auto" as the runner\'s')
    pooler_config: dict[str, Any] | Any = option(None, 'such as {"use_activation": false}: a PoolerConfig')
    kv_cache_dtype: str = option("auto", '"auto" (the weights\'), or "int8", on a CPU: half the memory of bfloat16')
    max_model_len: int | None = option(None, 'tokens, prompt and output, or "8k" (8,000), "8K" (8,192); -1: what fits')
    max_num_seqs: int = option(256, "sequences that run at a time")
    max_num_batched_tokens: int = option(2048, "tokens computed in one step; a longer prompt is computed in chunks")
    long_prefill_token_threshold: int = option(0, "of these, for one prompt at most; others get in beside it; 0: all")
    scheduling_policy: str = option("fcfs", '"fcfs": first come, first served; "priority": the lowest number first')
    block_size: int | None = option(None, "tokens in a block of the KV pool; None: what attention works best with")
    enable_prefix_caching: bool = option(True, "reuse the K/V of shared prefixes")
    prefix_caching_hash_algo: str = option("xxh64", '"xxh64" (fast), "sha256": tenants need not trust each other')
    prefix_cache_dir: str | None = option(None, "a directory that keeps cached prefixes when the process has ended")
    prefix_cache_bytes: int = option(10 << 30, "bytes that it may take, or as text: 10G")
    cpu_cache_bytes: int = option(0, "bytes for prefixes that the KV pool has evicted, in the CPU's memory")
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory to use; on a CPU, of half of what is free")
    kv_cache_memory_bytes: int | None = option(None, "bytes of each rank's KV pool; overrides gpu_memory_utilization")
    state_cache_bytes: int | None = option(None, "bytes for snapshots of a hybrid model's states; None: a quarter")
    num_gpu_blocks_override: int | None = option(None, "blocks of the KV pool; overrides kv_cache_memory_bytes")
    tensor_parallel_size: int = option(1, "ranks to split the model over, each a process; on GPUs, one for each")
    enforce_eager: bool = option(False, "plain PyTorch operations only, on any device: the same as optimizations=()")
    # On a CPU the first three are used (worker/cpu/), on a GPU the others (worker/cuda/).
    optimizations: tuple[str, ...] = option(OPTIMIZATIONS, "which to use, of those that the device has")
    enable_lora: bool = option(False, "requests may choose adapters (nanovllm/features/README.md)")
    max_loras: int = option(4, "adapters in memory, and so among the sequences that run at a time")
    max_lora_rank: int = option(16, "the largest rank of an adapter")
    speculative_config: dict[str, Any] | Any = option(None, 'who guesses tokens, such as {"method": "ngram"}')
    logits_processors: tuple[Any, ...] = option((), "classes whose objects change logits, in vLLM's form")
    kv_events_config: dict[str, Any] | Any = option(None, "who is told of cached blocks: a KVEventsConfig")
    kv_cache_metrics: bool = option(False, "measure how long cached blocks live, lie idle, wait for their next use")
    kv_cache_metrics_sample: float = option(0.01, "share of the blocks that are measured")
    profiler_config: dict[str, Any] | Any = option(None, "where start_profile() leaves its trace: a ProfilerConfig")
    seed: int = option(0, "requests without a seed of their own derive theirs from it")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.name != "model":
                value = f.default
            object.__setattr__(self, f.name, check_option(f.name, value, f.type))
        if self.enforce_eager:  # so that `name in config.optimizations` is the whole question, for every device
            object.__setattr__(self, "optimizations", ())
