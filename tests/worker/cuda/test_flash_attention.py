"""The flash-attn backend against PyTorch: with the package where it runs, elsewhere with a stand-in for it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nanovllm.worker.cuda import flash_attention
from nanovllm.worker.kernels import TORCH_KERNELS
from tests.worker.cpu.test_kernels import RAGGED, TOLERANCE, ragged_batch
from tests.worker.cuda.backends import has_flash_attn
from tests.worker.cuda.flash_attn_stand_in import flash_attn_varlen_func


@pytest.fixture
def device(monkeypatch) -> torch.device:
    if has_flash_attn():
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
