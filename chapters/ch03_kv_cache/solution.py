"""Chapter 3, our part: the functions of exercise.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.checkpoint import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """See exercise.py."""
    # 2: K and V. KV heads, since query heads share them; head_dim, since not every model has hidden_size / heads.
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize


def slot_mapping(block_table: list[int], start: int, end: int, write_start: int, block_size: int) -> list[int]:
    """See exercise.py."""
    slots = []
    for position in range(start, end):
        if position < write_start:
            slots.append(-1)  # computed, but not written: the row stays, or all rows after it would get wrong slots
            continue
        index, offset = divmod(position, block_size)
        slots.append(block_table[index] * block_size + offset)
    return slots


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """See exercise.py."""
    wanted = slots >= 0  # an index of -1 would mean the last slot
    block_ids, offsets = slots[wanted] // k_cache.shape[1], slots[wanted] % k_cache.shape[1]
    k_cache[block_ids, offsets] = k[wanted]
    v_cache[block_ids, offsets] = v[wanted]
