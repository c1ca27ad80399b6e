"""Paged attention by the flash-attn 2 package, on CUDA (chapter 10; arXiv:2307.08691).

One call serves prompts, decodes and batches of both. The package takes float16 and bfloat16, blocks of a multiple of
256 tokens and a head_dim of at most 256, on an Ampere GPU or a later one. A head_dim that is no multiple of 8 it pads,
which copies the whole cache at every call.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.worker.batch import Batch


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """What the layers of a step share.

    cu_seqlens_k   [B + 1]: where each sequence's keys would begin if they lay one after another
    """

    cu_seqlens_k: Tensor

    @classmethod
    def build(cls, batch: Batch) -> "FlashMetadata":
        return cls(F.pad(batch.seqlens_k.cumsum(0, dtype=torch.int32), (1, 0)))


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
    """See nanovllm.worker.attention for shapes and meaning."""
    from flash_attn import flash_attn_varlen_func  # not installed where nobody asks for it

    # Its causal mask, too, lets the last row of a sequence see all keys and each row before it one fewer.
    return flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.metadata(FlashMetadata).cu_seqlens_k,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_key_len,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),  # keys before a row's own and after it; -1: all
        block_table=batch.block_tables,
    )
