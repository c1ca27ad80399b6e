"""The KV cache: one tensor for all layers, its size and its layout (chapter 3)."""

import math
import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

from nanovllm.config import EngineConfig, ModelConfig

MAX_CPU_POOL_BYTES = 4 << 30


class KVCache:
    """K and V of every block: [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim].

    layers[i] is the pair (k_cache, v_cache) of layer i, each [num_blocks, block_size, num_kv_heads, head_dim].
    Blocks start as zeros: padded reads reach slots that nothing has been written to, and a NaN there would survive
    being masked (0 * NaN is NaN).
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (2, config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.data = (
            _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.layers = [(self.data[0, i], self.data[1, i]) for i in range(config.num_hidden_layers)]

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes


def num_blocks_for_pool(
    config: EngineConfig, model: ModelConfig, block_size: int, dtype: torch.dtype, max_model_len: int, free_bytes: int
) -> int:
    """Blocks of the pool. free_bytes: memory that may be used for it, as measured by the caller.

    Raises ValueError when not one block fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    block_bytes = block_size * model.kv_bytes_per_token(dtype.itemsize)
    pool_bytes = free_bytes if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    num_blocks = pool_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"the KV pool gets {pool_bytes / 1e6:.1f} MB and one block of {block_size} tokens needs "
            f"{block_bytes / 1e6:.1f} MB; free some memory or raise kv_cache_memory_bytes"
        )
    if config.kv_cache_memory_bytes is not None:
        return num_blocks
    # More than every sequence at its longest can never be used, except to keep prefixes longer.
    return min(num_blocks, config.max_num_seqs * math.ceil(max_model_len / block_size))


def free_cpu_bytes(utilization: float) -> int:
    """What the KV pool may take on a CPU: half of the available memory times `utilization`, 4 GiB at most."""
    return min(MAX_CPU_POOL_BYTES, int(_available_memory_bytes() * 0.5 * utilization))


def _available_memory_bytes() -> int:
    """Memory that new data can take without swapping; where the system does not tell (macOS), half of all there is."""
    try:
        with open("/proc/meminfo") as meminfo:
            fields = dict(line.split(":") for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the system hands out page by page at first use: a large pool costs nothing until it is filled."""
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ValueError(f"no {num_bytes / 1e9:.2f} GB of memory for the KV pool ({error}); lower its size") from error
    with suppress(AttributeError, OSError):  # a hint: fewer page faults, where system and kernel know it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
