"""The flash-attn backend against PyTorch: with the package where it runs, elsewhere with a stand-in for it."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from nanovllm.worker.cuda import flash_attention
from nanovllm.worker.kernels import TORCH_KERNELS
from tests.worker.cpu.test_kernels import RAGGED, TOLERANCE, ragged_batch


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
    # Not checked by the package: it would leave out rows and keys beyond these, or go through more than there are.
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
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


@pytest.fixture
def device(monkeypatch) -> torch.device:
    if torch.cuda.is_available() and find_spec("flash_attn"):
        return torch.device("cuda")
    stand_in = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    return torch.device("cpu")


LENGTHS = {
    "mixed": [*RAGGED, (255, 1), (256, 1), (0, 256), (0, 257), (512, 3)],
    "decodes": [(before, 1) for before in (0, 254, 255, 256, 600)],
    "prompt": [(0, 300)],
}


def case(lengths, block_size, num_heads, num_kv_heads, head_dim, dtype, device):
    torch.manual_seed(0)
    batch, num_blocks = ragged_batch(block_size, lengths)
    k_cache, v_cache = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim).to(device, dtype)
    # As in the model, q is a part of a wider tensor.
    q = (3 * torch.randn(len(batch.positions), num_heads + 3, head_dim)).to(device, dtype)[:, :num_heads]
    return q, k_cache, v_cache, batch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 24), (6, 2, 64), (8, 1, 128)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attention(device, lengths, num_heads, num_kv_heads, head_dim, dtype):
    q, k_cache, v_cache, batch = case(lengths, 256, num_heads, num_kv_heads, head_dim, dtype, device)
    for window in (0, 1, 100, 300):
        expected = TORCH_KERNELS.paged_attention(*(x.float().cpu() for x in (q, k_cache, v_cache)), batch, window)
        result = flash_attention.paged_attention(q, k_cache, v_cache, batch.to(device), window)
        torch.testing.assert_close(result.cpu().float(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.float16), (256, torch.float32)])
def test_what_it_does_not_take(device, block_size, dtype):
    q, k_cache, v_cache, batch = case([(3, 2), (5, 1)], block_size, 4, 2, 64, dtype, device)
    with pytest.raises((AssertionError, RuntimeError)):
        flash_attention.paged_attention(q, k_cache, v_cache, batch.to(device))
