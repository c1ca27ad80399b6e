"""The KV cache: one tensor for all layers, and its layout (chapter 3). How many blocks it gets: checks/pool.py."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.cpu.memory import lazy_zeros

if TYPE_CHECKING:
    from nanovllm.core.snapshots.state import StateSlots


@dataclass(frozen=True, slots=True)
class KVPool:
    """What the control plane needs to know of the KV cache. num_bytes: over all ranks."""

    num_blocks: int
    block_size: int
    max_model_len: int  # what the caller asked for, or the most that model and pool allow
    num_bytes: int
    states: "StateSlots | None" = None  # of a hybrid model


def device_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros on a GPU. Raises ValueError where they do not fit."""
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        num_bytes, free_bytes = math.prod(shape) * dtype.itemsize, torch.cuda.mem_get_info()[0]
        raise ValueError(
            f"the KV pool takes {num_bytes / 1e9:.3f} GB and the GPU has {free_bytes / 1e9:.3f} GB left; lower "
            "kv_cache_memory_bytes or num_gpu_blocks_override, or leave them out: then the pool takes what is left"
        ) from None


class KVCache:
    """K and V of every block: [2, num_kv_layers, num_blocks, block_size, num_kv_heads, head_dim].

    layers[i] is the pair (k_cache, v_cache) of layer i, each [num_blocks, block_size, num_kv_heads, head_dim]. Inside a
    block, kernels may order the numbers in their own way, as those of cpu/attention.h do.
    Sequences keep their blocks until they end, those too that lie in front of every layer's window: block tables are
    append-only, and the prefix cache finds a block only through the one before it. A window saves reading, not memory.
    Blocks start as zeros: padded reads reach slots that nothing has been written to, and a NaN there would survive
    being masked (0 * NaN is NaN).
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: Any, states: Any = None
    ) -> None:
        """states: of a hybrid model's other layers, which are put between these (features/hybrid/state_pool.py)."""
        shape = (2, config.num_kv_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.data = lazy_zeros(shape, dtype) if device.type == "cpu" else device_zeros(shape, dtype, device)
        self.num_bytes = self.data.nbytes
        kv_layers: list = [(self.data[0, i], self.data[1, i]) for i in range(config.num_kv_layers)]
        self.layers = kv_layers if states is None else states.join(kv_layers)
