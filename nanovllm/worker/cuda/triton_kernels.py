"""Paged attention and the writing of K/V as Triton kernels: any dtype, any block size (chapter 10).

One kernel serves prompts, decodes and batches of both. A program takes one tile of query rows of one sequence and one
KV head, and walks once over that sequence's keys, BLOCK_N at a time, finding each through the block table (vLLM's
PagedAttention, arXiv:2309.06180). The scores of a step are folded into a running maximum, sum and weighted sum of
values, so that no row of scores is ever whole in memory (FlashAttention, arXiv:2205.14135).

Nothing here asks the device anything, and the launch depends on nothing but shapes and batch.max_query_len, so a call
can be captured in a CUDA graph. The last dimension of q, k, v and of the caches is contiguous. A sequence's keys are
not split over several programs (Flash-Decoding does that), so a lone decode leaves most of a large GPU idle.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.worker.batch import Batch

# The score of a key that a row does not see. Not infinity: infinity - infinity is no number.
MASKED = tl.constexpr(-1e30)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
    """See nanovllm.worker.attention for shapes and meaning."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    assert k_cache.stride() == v_cache.stride(), "one set of strides serves both caches"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    # The query heads of a group become rows of one tile, so that they load K/V once. 16 is the least that tl.dot takes.
    # Decodes mostly get the 16.
    group_size, block_dim = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    num_rows = batch.max_query_len * group_size
    full_tile, num_stages = tile_of(block_dim, q.element_size(), shared_bytes(q.device) if q.is_cuda else None)
    tile_rows = 16 if num_rows <= 16 else full_tile
    grid = (triton.cdiv(num_rows, tile_rows), num_kv_heads, len(batch.seqlens_k))
    _attention_kernel[grid](
        out, q, k_cache, v_cache, batch.cu_seqlens_q, batch.seqlens_k, batch.block_tables,
        head_dim**-0.5 * math.log2(math.e),
        *out.stride()[:2], *q.stride()[:2], *k_cache.stride()[:3], batch.block_tables.stride(0),
        GROUP=group_size, BLOCK_SIZE=block_size, HEAD_DIM=head_dim, WINDOW=window,
        BLOCK_M=tile_rows, BLOCK_N=full_tile, BLOCK_D=block_dim,
        num_stages=num_stages,
    )  # fmt: skip
    return out


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have: the limit at which Triton itself refuses a kernel."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def tile_of(block_dim: int, itemsize: int, shared_bytes: int | None) -> tuple[int, int]:
    """(rows, stages): query rows, and keys, of a tile; in 2 stages the next keys come while these are multiplied.

    64 half-precision rows, or 32 in float32, is what registers hold. With heads of 256 dimensions one stage of half as
    many rows is what the 99 KB of a consumer GPU have room for. shared_bytes: what a program may have; None: no limit.
    """
    rows = 128 // itemsize
    for tile, stages in ((rows, 2), (rows, 1), (rows // 2, 1)):
        needed = itemsize * tile * (block_dim * (1 + 2 * stages) + tile)  # of q, of K and V, of the weights
        if shared_bytes is None or needed <= shared_bytes:
            break
    return tile, stages


@triton.jit(do_not_specialize=["table_stride"])  # it changes from batch to batch: one compiled kernel for all of them
def _attention_kernel(
    out, q, k_cache, v_cache, cu_seqlens_q, seqlens_k, block_tables,
    scale,
    out_row_stride, out_head_stride, q_row_stride, q_head_stride, block_stride, slot_stride, kv_head_stride,
    table_stride,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(cu_seqlens_q + seq)
    num_tokens = tl.load(cu_seqlens_q + seq + 1) - first_token
    if tile * BLOCK_M >= num_tokens * GROUP:  # the grid is as wide as the longest sequence needs
        return
    num_computed = tl.load(seqlens_k + seq) - num_tokens  # keys in front of the first row

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # a token's GROUP heads are neighbours
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    position = num_computed + token  # [BLOCK_M]: the last key that each row sees
    dim = tl.arange(0, BLOCK_D)
    # Offsets are 64 bits wide before they are multiplied: the cache may have more than 2**31 elements.
    packed_row = (first_token + token).to(tl.int64)
    inside = (token < num_tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = packed_row * q_row_stride + head * q_head_stride
    q_tile = tl.load(q + q_offset[:, None] + dim[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]

    running_max = tl.full([BLOCK_M], MASKED, tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_tokens - 1)
    num_keys = num_computed + last_token + 1  # no row of this tile sees more
    start = 0
    if WINDOW > 0:  # no row of this tile sees a key before the first row's window
        start = tl.maximum(num_computed + tile * BLOCK_M // GROUP + 1 - WINDOW, 0)
    for first_key in range(start, num_keys, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        block = tl.load(block_tables + seq * table_stride + key // BLOCK_SIZE, mask=key < num_keys, other=0)
        kv_offset = block.to(tl.int64) * block_stride + key % BLOCK_SIZE * slot_stride + kv_head * kv_head_stride
        kv_offset = kv_offset[:, None] + dim[None, :]
        present = (key < num_keys)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_cache + kv_offset, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
        v = tl.load(v_cache + kv_offset, mask=present, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * scale  # "ieee": float32 stays float32
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, MASKED)  # [BLOCK_M, BLOCK_N]
        # As BLOCK_M <= BLOCK_N, every row sees a key of the first step. One that did not would give weight 1 to what it
        # does not see, until its first key makes rescale 0.
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])  # scale holds log2(e): the hardware's exponential is base 2
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        running_max = new_max
    out_offset = packed_row * out_row_stride + head * out_head_stride
    result = (acc / running_sum[:, None]).to(q_tile.dtype)
    tl.store(out + out_offset[:, None] + dim[None, :], result, mask=inside)


def write_kv(k: Tensor, v: Tensor, kv_layer: tuple[Tensor, Tensor], slot_mapping: Tensor) -> None:
    """Store k and v [T, num_kv_heads, head_dim] at their slots of a layer's pair of caches; slot -1 is not written."""
    k_cache, v_cache = kv_layer
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k_cache.stride() == v_cache.stride(), "one set of strides serves both caches"
    _write_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping,
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1], HEAD_DIM=head_dim, SIZE=num_kv_heads * head_dim,
        BLOCK=triton.next_power_of_2(num_kv_heads * head_dim),
    )  # fmt: skip


@triton.jit
def _write_kernel(
    k, v, k_cache, v_cache, slot_mapping,
    k_row_stride, k_head_stride, v_row_stride, v_head_stride, block_stride, slot_stride, kv_head_stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    i = tl.arange(0, BLOCK)
    head, dim, inside = i // HEAD_DIM, i % HEAD_DIM, i < SIZE
    cached = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * kv_head_stride + dim
    new_k = tl.load(k + token * k_row_stride + head * k_head_stride + dim, mask=inside)
    new_v = tl.load(v + token * v_row_stride + head * v_head_stride + dim, mask=inside)
    tl.store(k_cache + cached, new_k, mask=inside)
    tl.store(v_cache + cached, new_v, mask=inside)
