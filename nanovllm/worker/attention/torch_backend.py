"""Paged attention in plain PyTorch, for any device and dtype: the backend that the others are tested against.

It gathers each sequence's blocks into contiguous K and V and hands them to PyTorch's attention. Sequences with one
query row (decodes) go together, padded to the longest of a group; longer ones go one by one.
"""

import torch
import torch.nn.functional as F

from nanovllm.worker.batch import Batch

# Sequences are grouped so that a group's gathered keys stay within this many rows, padding included.
MAX_GATHERED_ROWS = 1 << 16


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch) -> torch.Tensor:
    """See nanovllm.worker.attention for shapes and meaning."""
    out = torch.empty_like(q)
    decodes = [b for b, num_rows in enumerate(batch.query_lens) if num_rows == 1]
    for group in _groups(sorted(decodes, key=batch.key_lens.__getitem__), batch.key_lens):
        rows = batch.cu_seqlens_q[group].long()
        out[rows] = _decode(q[rows], k_cache, v_cache, batch, group)
    row = 0
    for b, num_rows in enumerate(batch.query_lens):
        if num_rows > 1:
            out[row : row + num_rows] = _prefill(q[row : row + num_rows], k_cache, v_cache, batch, b)
        row += num_rows
    return out


def _groups(by_length: list[int], key_lens: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for b in by_length:
        if not groups or (len(groups[-1]) + 1) * key_lens[b] > MAX_GATHERED_ROWS:
            groups.append([])
        groups[-1].append(b)
    return groups


def _decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch, group: list[int]
) -> torch.Tensor:
    """One query row for each of n sequences. q: [n, num_heads, head_dim]."""
    n, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    max_len = max(batch.key_lens[b] for b in group)
    tables = batch.block_tables[group, : -(-max_len // block_size)]
    # [n, num_kv_heads, padded_len, head_dim]; index_select is several times faster here than k_cache[tables].
    k = k_cache.index_select(0, tables.flatten()).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
    v = v_cache.index_select(0, tables.flatten()).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
    # The query heads that share a KV head become query rows, so K and V are not repeated.
    q = q.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = torch.arange(k.shape[2], device=q.device) < batch.seqlens_k[group, None]  # [n, padded_len]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    return out.reshape(n, num_heads, head_dim)


def _prefill(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch, b: int) -> torch.Tensor:
    """The rows of one sequence. q: [rows, num_heads, head_dim]."""
    num_rows, num_heads, head_dim = q.shape
    num_keys, (block_size, num_kv_heads) = batch.key_lens[b], k_cache.shape[1:3]
    table = batch.block_tables[b, : -(-num_keys // block_size)]
    k = k_cache.index_select(0, table).view(-1, num_kv_heads, head_dim)[:num_keys].transpose(0, 1)
    v = v_cache.index_select(0, table).view(-1, num_kv_heads, head_dim)[:num_keys].transpose(0, 1)
    group_size = num_heads // num_kv_heads
    k, v = k.repeat_interleave(group_size, 0), v.repeat_interleave(group_size, 0)
    # Row i sits at position num_keys - num_rows + i and sees the keys up to itself.
    mask = None
    if num_rows != num_keys:
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_rows)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=mask is None
    )
    return out[0].transpose(0, 1)
