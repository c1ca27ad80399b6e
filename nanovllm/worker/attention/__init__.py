"""Attention over the paged KV cache (chapters 4 and 10): one function, several backends.

    paged_attention(q, k_cache, v_cache, batch) -> out

q and out are [T, num_heads, head_dim]; the caches are one layer's. Row i of sequence b attends causally to positions
0 .. seqlens_k[b] - query_len[b] + i, whose K/V are found through block_tables[b]; this step's own K/V were written
before. Scores are scaled by head_dim ** -0.5; num_heads / num_kv_heads query heads share a KV head (grouped-query
attention, arXiv:2305.13245).
"""
