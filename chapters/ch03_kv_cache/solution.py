"""Chapter 3, our part: the functions of exercise.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.checkpoint import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


def pool_blocks(
    config: ModelConfig,
    block_size: int,
    itemsize: int,
    given_bytes: int | None,
    free_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """See exercise.py."""
    # 2: K and V. KV heads, since query heads share them; head_dim, since not every model has hidden_size / heads.
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    pool_bytes = free_bytes if given_bytes is None else given_bytes
    num_blocks = pool_bytes // (block_size * token_bytes)  # a part of a block is no block
    if num_blocks < 1:
        raise ValueError(f"no block of {block_size} tokens fits into {pool_bytes} bytes")
    if given_bytes is None:
        blocks_of_a_sequence = -(-max_model_len // block_size)  # its last block is its own, full or not
        num_blocks = min(num_blocks, max_num_seqs * blocks_of_a_sequence)
    return num_blocks


def window_slots(block_table: list[int], start: int, end: int, window: int, block_size: int) -> list[list[int]]:
    """See exercise.py."""

    def slot(position: int) -> int:
        index, offset = divmod(position, block_size)
        return block_table[index] * block_size + offset

    rows = []
    for position in range(start, end):
        first = max(0, position + 1 - window) if window else 0  # the row's own position is one of the `window`
        rows.append([slot(seen) for seen in range(first, position + 1)])
    return rows


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """See exercise.py."""
    wanted = slots >= 0  # an index of -1 would mean the last slot
    block_ids, offsets = slots[wanted] // k_cache.shape[1], slots[wanted] % k_cache.shape[1]
    k_cache[block_ids, offsets] = k[wanted]
    v_cache[block_ids, offsets] = v[wanted]
