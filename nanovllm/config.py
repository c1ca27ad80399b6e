"""EngineConfig: what the caller chooses, checked before any work. What the checkpoint says is in checkpoint.py."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nanovllm.option_checks import OPTIMIZATIONS, check_option
from nanovllm.speculative_config import SpeculativeConfig
from nanovllm.vllm_names import Named


@dataclass(frozen=True)
class EngineConfig(metaclass=Named):
    """Options of an LLM, with vLLM's names. None is the default.

    model:                    a directory that holds a checkpoint, a GGUF file, or a hub id such as "Qwen/Qwen3-0.6B"
                              ("owner/name:Q8_0": of its GGUF files the one of this quantization)
    tokenizer:                another checkpoint's directory or hub id, to take the tokenizer from
    revision:                 branch, tag or commit of the hub's repository
    load_format:              "auto", "safetensors", "gguf", or "dummy": random weights, no file of weights is read
    hf_overrides:             fields of config.json, replaced
    generation_config:        "auto" (the checkpoint's), "vllm" (none: vLLM's defaults), or a directory that has one
    dtype:                    "auto" (the checkpoint's), "float32", "bfloat16" or "float16"
    quantization:             None (as in the checkpoint), "int8" or "int4": bits of the weights (worker/quantize.py)
    max_model_len:            tokens of one sequence, prompt and output, "8k" is 8,000 and "8K" 8,192; None or -1: as
                              many as model and KV pool allow
    max_num_seqs:             sequences that run at a time
    max_num_batched_tokens:   tokens computed in one step; a longer prompt is computed in chunks
    block_size:               tokens in a block of the KV pool; None: what the attention backend works best with
    enable_prefix_caching:    reuse the K/V of shared prefixes
    prefix_caching_hash_algo: "xxh64" (fast) or "sha256" (for tenants who do not trust each other)
    gpu_memory_utilization:   share of a GPU's memory to use; on a CPU, share of half of the available memory
    kv_cache_memory_bytes:    size of each rank's KV pool in bytes; overrides gpu_memory_utilization
    num_gpu_blocks_override:  size of the KV pool in blocks; overrides kv_cache_memory_bytes
    tensor_parallel_size:     ranks to split the model over, each a process (on a GPU of its own, if there are GPUs)
    enforce_eager:            plain PyTorch operations only, on any device: the same as optimizations=()
    optimizations:            which to use: on a CPU "reordered_weights" (layers.py), "c_kernels" (cpu/kernels.py), on
                              a GPU "triton" and "flash_attn" (cuda/kernels.py) and "cuda_graphs" (cuda/graphs.py)
    enable_lora:              requests may choose adapters (lora/request.py)
    max_loras:                adapters in memory, and so among the sequences that run at a time
    max_lora_rank:            the largest rank of an adapter
    speculative_config:       who guesses tokens that a step checks together: {"method": "ngram"}, {"model": "..."} or
                              {"method": "self"} (speculative_config.py); None: nobody
    seed:                     requests without a seed of their own derive theirs from it
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    load_format: str = "auto"
    hf_overrides: dict[str, Any] | None = None
    generation_config: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "xxh64"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    optimizations: tuple[str, ...] = OPTIMIZATIONS
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    speculative_config: SpeculativeConfig | dict[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.name != "model":
                value = f.default
            object.__setattr__(self, f.name, check_option(f.name, value, f.type))
        if self.enforce_eager:  # so that `name in config.optimizations` is the whole question, for every device
            object.__setattr__(self, "optimizations", ())


def cache_folder() -> Path:
    """Where this project keeps what it downloads and compiles: nanovllm/ in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
