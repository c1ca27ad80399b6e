"""EngineConfig: what the caller chooses, checked before any work. What the checkpoint says is in checkpoint.py."""

import os
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.core.block_hash import HASH_FUNCTIONS
from nanovllm.validation import MAX_INT32, SEED, Bounds, check_choice, check_fields, reject_unknown, shorten, tuple_of

DTYPES = {"auto": "auto", "float": "float32", "half": "float16"} | {d: d for d in ("float32", "bfloat16", "float16")}
QUANTIZATIONS = ("int8", "int4")
OPTIMIZATIONS = ("reordered_weights", "c_kernels", "triton", "flash_attn", "cuda_graphs")

NUMBERS: dict[str, Bounds] = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "block_size"), (Integral, 1, MAX_INT32)),
    "max_model_len": (Integral, 2, MAX_INT32),
    "kv_cache_memory_bytes": (Integral, 1),
    "num_gpu_blocks_override": (Integral, 1, MAX_INT32),
    "tensor_parallel_size": (Integral, 1, MAX_INT32),
    "gpu_memory_utilization": (Real, 0.01, 1.0),
    "seed": SEED,
}


@dataclass(frozen=True)
class EngineConfig:
    """Options of an LLM, with vLLM's names.

    model:                    a directory that holds a checkpoint, a GGUF file, or a hub id such as "Qwen/Qwen3-0.6B"
                              ("owner/name:Q8_0": of its GGUF files the one of this quantization)
    dtype:                    "auto" (the checkpoint's), "float32", "bfloat16" or "float16"
    quantization:             None (as in the checkpoint), "int8" or "int4": bits of the weights (worker/quantize.py)
    max_model_len:            tokens of one sequence, prompt and output; None: as many as model and KV pool allow
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
    seed:                     requests without a seed of their own derive theirs from it
    """

    model: str
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
    seed: int = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> "EngineConfig":
        reject_unknown(kwargs, (f.name for f in fields(cls)), "LLM")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not str(self.model):
            raise ValueError(f"model must be a checkpoint's directory or a hub id, found {shorten(self.model)}")
        check_fields(self, NUMBERS)
        dtype = str(self.dtype).removeprefix("torch.")  # vLLM's scripts pass torch.bfloat16, too
        check_choice("dtype", dtype, DTYPES)
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_choice("prefix_caching_hash_algo", self.prefix_caching_hash_algo, HASH_FUNCTIONS)
        optimizations = tuple_of(self.optimizations, str, "optimizations", "names")
        for name in optimizations:
            check_choice("optimizations", name, OPTIMIZATIONS)
        if self.enforce_eager:  # so that `name in config.optimizations` is the whole question, for every device
            optimizations = ()
        for name, value in dict(model=str(self.model), dtype=DTYPES[dtype], optimizations=optimizations).items():
            object.__setattr__(self, name, value)


def cache_folder() -> Path:
    """Where this project keeps what it downloads and compiles: nanovllm/ in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
