"""The KV cache: one tensor for all layers, its layout, and how many blocks its pool gets (chapter 3)."""

import logging
import math
import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import check_number
from nanovllm.config import EngineConfig
from nanovllm.worker.batch import cdiv

if TYPE_CHECKING:
    from nanovllm.core.snapshots.state import StateSlots
    from nanovllm.features.hybrid.state_pool import StatePool

logger = logging.getLogger("nanovllm")

MAX_NUM_BLOCKS = 2**22  # each is a Python object of the block manager


@dataclass(frozen=True, slots=True)
class KVPool:
    """The pool's sizes, all that the control plane needs to know of the KV cache.

    num_bytes: over all ranks; a rank's own ModelRunner says its share, and ParallelRunner adds them up.
    """

    num_blocks: int
    block_size: int
    max_model_len: int  # what the caller asked for, or the most that model and pool allow
    num_bytes: int
    states: "StateSlots | None" = None  # None unless the model is a hybrid one


def num_blocks_for_pool(
    config: EngineConfig, model: ModelConfig, block_size: int, itemsize: int, max_model_len: int, free_bytes: int
) -> int:
    """How many blocks the pool gets. itemsize: bytes of a number. free_bytes: memory that was measured for the pool.

    Raises ValueError if not even one block fits, or if more are asked for than any machine holds.
    """
    block_bytes = block_size * model.kv_bytes_per_token(itemsize)
    pool_bytes = free_bytes if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    num_blocks = pool_bytes // block_bytes
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif num_blocks < 1:
        needed = f"one block of {block_size} tokens needs {block_bytes / 1e6:.1f} MB"
        if pool_bytes < 0:  # on a GPU, weights and steps come out of the same share of its memory
            raise ValueError(
                f"gpu_memory_utilization={config.gpu_memory_utilization} is {-pool_bytes / 1e6:.1f} MB too little even "
                f"without a KV pool, of which {needed}; raise it, or lower max_num_batched_tokens, max_num_seqs or "
                "state_cache_bytes"
            )
        raise ValueError(
            f"the KV pool gets {pool_bytes / 1e6:.1f} MB and {needed}; free some memory or raise kv_cache_memory_bytes"
        )
    elif config.kv_cache_memory_bytes is None:
        # max_num_seqs sequences of max_model_len tokens use no more. Others would only keep cached prefixes longer.
        num_blocks = min(num_blocks, config.max_num_seqs * cdiv(max_model_len, block_size))
    check_number("the size of the KV pool in bytes", num_blocks * block_bytes, Integral)
    return check_number("the size of the KV pool in blocks", num_blocks, Integral, 1, MAX_NUM_BLOCKS)


def max_model_len_of_pool(config: EngineConfig, num_blocks: int, block_size: int, max_model_len: int) -> int:
    """How many tokens one sequence may have in this pool, max_model_len at most.

    Raises ValueError if the caller has asked for more than the pool holds.
    """
    num_tokens = num_blocks * block_size
    if num_tokens >= max_model_len:
        return max_model_len
    if config.max_model_len is not None or num_tokens < 2:
        raise ValueError(
            f"one sequence of max_model_len={max_model_len} tokens does not fit in the KV pool of "
            f"{num_blocks} blocks x {block_size} tokens; lower max_model_len or enlarge the pool "
            "(kv_cache_memory_bytes, num_gpu_blocks_override)"
        )
    logger.info("max_model_len %d -> %d: what the KV pool holds", max_model_len, num_tokens)
    return num_tokens


class KVCache:
    """K and V of every block: [2, num_kv_layers, num_blocks, block_size, num_kv_heads, head_dim].

    layers[i] is the pair (k_cache, v_cache) of layer i, each [num_blocks, block_size, num_kv_heads, head_dim]. Inside a
    block, kernels may order the numbers in their own way, as those of cpu/attention.h do.

    A sequence keeps all its blocks until it ends, even those that no layer's window reaches any more: block tables are
    append-only, and the prefix cache finds a block only through the one before it. A window saves reading, not memory.

    Blocks start as zeros: padded reads reach slots that nothing has been written to, and a NaN there would survive
    being masked (0 * NaN is NaN). attention.py deals with what earlier sequences have left in a block.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: "StatePool | None" = None,
    ) -> None:
        """Raises ValueError if the cache does not fit.

        states: the states of a hybrid model's other layers; join() puts these layers between the ones with K and V.
        """
        shape = (2, config.num_kv_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.data = lazy_zeros(shape, dtype) if device.type == "cpu" else device_zeros(shape, dtype, device)
        self.num_bytes = self.data.nbytes
        self.layers: list[Any] = [(self.data[0, i], self.data[1, i]) for i in range(config.num_kv_layers)]
        if states is not None:
            self.layers = states.join(self.layers)


def lazy_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, what: str = "the KV pool", remedy: str = "lower its size"
) -> Tensor:
    """Zeros whose pages the system provides at first use: a large pool costs nothing until it is filled.

    Raises ValueError, which says what the memory was for, and a remedy, if there is not so much.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        if sys.platform == "win32":
            memory = mmap.mmap(-1, num_bytes)
        else:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ValueError(f"no {num_bytes / 1e9:.2f} GB of memory for {what} ({error}); {remedy}") from error
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # a hint: fewer page faults, where the kernel knows it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def device_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on a GPU. Raises ValueError if they do not fit."""
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        num_bytes = math.prod(shape) * dtype.itemsize
        free_bytes, _ = torch.cuda.mem_get_info()
        raise ValueError(
            f"the KV pool takes {num_bytes / 1e9:.3f} GB and the GPU has {free_bytes / 1e9:.3f} GB left; lower "
            "kv_cache_memory_bytes or num_gpu_blocks_override, or leave them out: then the pool takes what is left"
        ) from None
