"""A stand-in for the one function of flash-attn that is called, with the package's own checks."""

import torch


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """What flash-attn 2.8.3 takes and checks with a block table (mha_varlen_fwd in csrc/flash_attn/flash_api.cpp)."""
    assert (dropout_p, softcap, alibi_slopes, return_attn_probs) == (0.0, 0.0, None, False)
    assert window_size == (-1, -1) or (window_size[0] >= 0 and window_size[1] == 0)
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    num_seqs, (num_rows, num_heads, head_dim) = len(cu_seqlens_q) - 1, q.shape
    num_pages, page_size, num_kv_heads, _ = k.shape
    assert page_size % 256 == 0 and head_dim % 8 == 0 and head_dim <= 256 and num_heads % num_kv_heads == 0
    assert k.shape == v.shape == (num_pages, page_size, num_kv_heads, head_dim)
    assert all(x.stride(-1) == 1 for x in (q, k, v, block_table))
    assert all(x.dtype == torch.int32 for x in (cu_seqlens_q, cu_seqlens_k, block_table))
    assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous()
    assert cu_seqlens_q.shape == cu_seqlens_k.shape == (num_seqs + 1,) and block_table.shape[0] == num_seqs > 0
    # Not checked by the package: it would leave out rows and keys beyond these. More than there are only cost time.
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(cu_seqlens_k.diff().max())
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0 and cu_seqlens_q[-1] == num_rows
    if max_seqlen_q == 1 and num_heads > num_kv_heads:
        assert num_rows == num_seqs, "row b is then taken for sequence b, whatever cu_seqlens_q says"

    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty_like(q)
    for b in range(num_seqs):
        rows, num_keys = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1]), int(cu_seqlens_k.diff()[b])
        pages = block_table[b, : -(-num_keys // page_size)].long()
        keys = k[pages].flatten(0, 1)[:num_keys].float().repeat_interleave(num_heads // num_kv_heads, 1)
        values = v[pages].flatten(0, 1)[:num_keys].float().repeat_interleave(num_heads // num_kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float() * scale, keys)
        if causal:  # aligned to the bottom right corner
            diagonal, ones = num_keys - scores.shape[1], torch.ones_like(scores[0], dtype=torch.bool)
            seen = ones.tril(diagonal)
            if window_size[0] >= 0:
                seen &= ones.triu(diagonal - window_size[0])
            scores.masked_fill_(~seen, -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out
