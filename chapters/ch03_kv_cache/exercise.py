"""Chapter 3, your part: three functions with which the real engine then runs.

Edit this file and run  python -m chapters check 3  as often as you like. The tasks are independent of each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.checkpoint import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """How many bytes K and V of ONE token take, over all layers together.

    config    sizes of a checkpoint. You need some of: config.num_hidden_layers, config.num_attention_heads,
              config.num_key_value_heads, config.head_dim, config.hidden_size
    itemsize  bytes of one number: 2 for bfloat16, 4 for float32

    Returns an int. Example: 30 layers, 9 query heads, 3 KV heads, head_dim 64, itemsize 2 -> 23040.
    The engine sizes its whole KV pool with this number.
    """
    raise NotImplementedError


def slot_mapping(block_table: list[int], start: int, end: int, write_start: int, block_size: int) -> list[int]:
    """The slot of each position that one sequence computes in one step.

    block_table  physical block ids of the sequence in logical order: positions 0 .. block_size - 1 are in block
                 block_table[0], the next block_size positions in block_table[1], and so on
    start, end   the step computes the positions start, start + 1, ..., end - 1
    write_start  positions before write_start are in the cache already and must not be written: their slot is -1.
                 It may be anything from start to end
    block_size   slots in a block; slot number = block id * block_size + offset in the block

    Returns end - start ints, one for each computed position, in order. Leave block_table unchanged.
    Example: slot_mapping([6, 2], start=2, end=6, write_start=3, block_size=4) -> [-1, 27, 8, 9]
    """
    raise NotImplementedError


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write K and V of T tokens into one layer's cache, in place.

    k_cache, v_cache  [num_blocks, block_size, num_kv_heads, head_dim]; change these very tensors
    k, v              [T, num_kv_heads, head_dim], ready to be written; leave them unchanged
    slots             [T], int64: slot s is offset s % block_size of block s // block_size.
                      Where it is -1, that token is not written. Any of the T may be -1, or all, or none

    Everything else in the caches keeps its value. Returns nothing.
    Example: with block_size 8, slots = [17, -1] writes k[0] to k_cache[2, 1] and v[0] to v_cache[2, 1], and no more.
    """
    raise NotImplementedError
