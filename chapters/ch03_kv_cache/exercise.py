"""Exercises of chapter 3. Edit this file, then:  python -m chapters check 3

Three functions with which the real engine then runs. The tasks are independent of each other.
"""

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
    """How many blocks the KV pool gets. (The engine's num_blocks_for_pool.)

    config         sizes of a checkpoint. You need some of: config.num_hidden_layers, config.num_attention_heads,
                   config.num_key_value_heads, config.head_dim, config.hidden_size
    block_size     tokens in a block
    itemsize       bytes of one number: 2 for bfloat16, 4 for float32
    given_bytes    what the user has set aside for the pool; None: nothing was said
    free_bytes     memory that was measured: what is free for the pool at most
    max_num_seqs   so many sequences run at a time, at most
    max_model_len  and none of them is ever longer than this, prompt and answer together

    A pool consists of whole blocks, and K and V of all layers must fit. If the user has said how large the pool is to
    be, it gets as many blocks as fit into that, whatever else is true. Otherwise it gets as many as fit into what is
    free, but no more than the engine can ever need: as many as max_num_seqs sequences of max_model_len tokens hold when
    none shares a block with another. (Remember what a block is: two sequences cannot write into one.)

    Raise ValueError if not even one block fits.

    Example: 30 layers, 9 query heads, 3 KV heads, head_dim 64, itemsize 2: a token takes 23040 bytes, and a block of 16
    tokens 368640. Given 1,000,000 bytes: 2 blocks. Nothing given, 1 GB free, 4 sequences of 100 tokens: 28 blocks.
    """
    raise NotImplementedError


def window_slots(block_table: list[int], start: int, end: int, window: int, block_size: int) -> list[list[int]]:
    """The slots that attention reads for each row of one sequence in one step.

    block_table  physical block ids of the sequence in logical order: positions 0 .. block_size - 1 are in block
                 block_table[0], the next block_size positions in block_table[1], and so on. It may have more blocks
                 than are read here
    start, end   the step computes the positions start, start + 1, ..., end - 1: a row for each
    window       in some models the rows of some layers see only the last few tokens: `window` of them, the row's own
                 included (arXiv:2004.05150). 0: there is no window, and a row sees all positions up to its own
    block_size   slots in a block; slot number = block id * block_size + offset in the block

    Attention is causal. K and V of all rows of the step have been written already; those of earlier positions are in
    the cache, too, wherever they are: a window saves reading, and the sequence keeps all its blocks.

    Returns end - start lists, one for each row, in order: the slots of the positions that this row sees, the earliest
    position first. Leave block_table unchanged.
    Example: window_slots([6, 2], start=3, end=6, window=3, block_size=4) -> [[25, 26, 27], [26, 27, 8], [27, 8, 9]]
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
