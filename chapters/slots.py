"""The KV cache as a chapter shows it, slot by slot, whatever layout the machine's kernels have inside a block."""

from nanovllm.worker.kernels import Kernels, Pair


def in_slots(kv_layer: Pair, kernels: Kernels) -> Pair:
    """K and V of a layer, each [num_blocks, block_size, num_kv_heads, head_dim]. cpu/attention.h has the C layout."""
    if kernels.library is None:
        return kv_layer
    k_cache, v_cache = kv_layer
    num_blocks, size, num_heads, head_dim = k_cache.shape
    k_columns = k_cache.view(num_blocks, num_heads, -1, size, kernels.library.unit_size())
    v_rows = v_cache.view(num_blocks, num_heads, size, head_dim)
    return k_columns.permute(0, 3, 1, 2, 4).flatten(3), v_rows.transpose(1, 2)
