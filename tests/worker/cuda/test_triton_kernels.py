"""The Triton kernels against PyTorch: compiled where there is a GPU, elsewhere in Triton's interpreter.

The interpreter shows that the arithmetic and every offset are right; that a compiler and a GPU agree with it is known
only where there is one. It multiplies no bfloat16: tl.dot takes the bits for integers.
"""

import dataclasses
import itertools

import pytest
import torch

from nanovllm.worker.kernels import TORCH_KERNELS
from tests.marks import by_night
from tests.worker.cpu.test_kernels import TOLERANCE, ragged_batch
from tests.worker.cuda.backends import has_triton
from tests.worker.cuda.triton_interpreter import import_interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter of an earlier Triton stumbles over NumPy 2.4.
MIN_VERSION = None if DEVICE.type == "cuda" else "3.7"
pytest.importorskip("triton", MIN_VERSION, reason="Triton is not installed; it comes with PyTorch for CUDA")

if DEVICE.type == "cuda":
    if not has_triton():
        pytest.skip("the engine does not use Triton on this GPU", allow_module_level=True)
    from nanovllm.worker.cuda import triton_kernels
else:
    triton_kernels = import_interpreted()


def mixed(block_size: int) -> list[tuple[int, int]]:
    """(cached before, computed now): decodes, prompts, prefix hits, around the borders of blocks and of 64 keys."""
    begin = max(0, block_size - 9)
    borders = [(block_size - 1, 1), (block_size, 1), (begin, block_size - begin), (begin, block_size - begin + 1)]
    return [*borders, (2 * block_size, 3), *decodes(block_size)[3:6], (63, 2), (0, 64), (64, 16), (31, 130), (200, 1)]


def decodes(block_size: int) -> list[tuple[int, int]]:
    return [(before, 1) for before in (0, block_size - 1, block_size, 62, 63, 64, 300)]


def windowed(block_size: int) -> list[tuple[int, int]]:
    return [(block_size, 1), (62, 2), (31, 70), (300, 1)]


SHAPES = [(2, 2, 24, 4), (6, 2, 64, 16), (4, 1, 80, 5), (4, 1, 128, 1), (8, 1, 16, 256), (24, 1, 16, 16)]
CASES = list(itertools.product(SHAPES, TOLERANCE, (mixed, decodes)))
if DEVICE.type == "cpu":  # offsets do not depend on the dtype, and the interpreter is slow
    *most, last = SHAPES
    CASES = list(itertools.product(most, [torch.float32], (mixed, decodes)))
    CASES += itertools.product(SHAPES[:1], [torch.float16], (mixed, decodes))
    CASES += [by_night(*case) for case in itertools.product(SHAPES[1:3], [torch.float16], (mixed, decodes))]
    CASES += [by_night(last, torch.float32, lengths) for lengths in (mixed, decodes, windowed)]


# Every window where a GPU is quick; elsewhere one for each shape. Around a step's 32 or 64 keys and a block's border.
WINDOWS = (0, 1, 7, 32, 65, 129) if DEVICE.type == "cuda" else (0,)


@pytest.mark.parametrize(("shape", "dtype", "lengths"), CASES)
@pytest.mark.parametrize("window", WINDOWS)
def test_attention(dtype, lengths, shape, window):
    check_attention(dtype, lengths, shape, window)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the test before has all windows")
@pytest.mark.parametrize(("shape", "window"), list(zip(SHAPES, (7, 65, 32, 1, 129, 20), strict=True)))
def test_attention_with_a_window_in_the_interpreter(shape, window):
    check_attention(torch.float32, windowed, shape, window)


def check_attention(dtype, lengths, shape, window):
    num_heads, num_kv_heads, head_dim, block_size = shape
    torch.manual_seed(0)
    batch, num_blocks = ragged_batch(block_size, lengths(block_size))
    # As in the model, q is a part of a wider tensor.
    q = (3 * torch.randn(len(batch.positions), num_heads + 3, head_dim)).to(DEVICE, dtype)[:, :num_heads]
    k_cache, v_cache = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim).to(dtype)
    floats = q.float().cpu(), k_cache.float(), v_cache.float()
    expected = TORCH_KERNELS.paged_attention(*floats, batch, window).to(dtype)
    # What no token was written to, or lies in front of every window, is never looked at: a NaN would survive a mask.
    written = torch.zeros(num_blocks * block_size, dtype=torch.bool)
    for table, num_rows, num_keys in zip(batch.block_tables, batch.query_lens, batch.key_lens, strict=True):
        position = torch.arange(max(0, num_keys - num_rows + 1 - window) if window else 0, num_keys)
        written[table[position // block_size] * block_size + position % block_size] = True
    k_cache.flatten(0, 1)[~written] = torch.nan
    v_cache.flatten(0, 1)[~written] = torch.nan

    batch = dataclasses.replace(batch).to(DEVICE)  # a copy that has not worked anything out yet
    result = triton_kernels.paged_attention(q, k_cache.to(DEVICE), v_cache.to(DEVICE), batch, window)
    torch.testing.assert_close(result.cpu(), expected, atol=TOLERANCE[dtype], rtol=0)
    assert set(vars(batch)) == {field.name for field in dataclasses.fields(batch)}, "the device was asked for lengths"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_write_kv(dtype, block_size):
    torch.manual_seed(0)
    slots = [13, -1, 0, 7, 31, -1, 5, 20, 1]
    # As in the model, v is a part of a wider tensor; k is too, or is not when a norm has made a new one.
    k, v = torch.randn(len(slots), 10, 24).to(DEVICE, dtype)[:, 4:].split(3, dim=1)
    for new_k in (k, k.contiguous()):
        # In front of each cache lies one more block, where slot -1 would be.
        caches = torch.full((2, 1 + 40 // block_size, block_size, 3, 24), 7.0).to(DEVICE, dtype)
        expected = caches.clone()
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[:, 1 + slot // block_size, slot % block_size] = torch.stack((k[row], v[row]))
        layer = caches[0, 1:], caches[1, 1:]
        triton_kernels.write_kv(new_k, v, layer, torch.tensor(slots, device=DEVICE))
        assert torch.equal(caches, expected)


def test_a_pool_of_more_than_2_to_the_31_elements():
    torch.manual_seed(0)
    lengths, first_block = [(15, 1), (0, 20)], 2**31 // (16 * 16) - 1
    batch, num_blocks = ragged_batch(16, lengths)
    q, k = torch.randn(21, 2, 16).half().to(DEVICE), torch.randn(21, 1, 16).half().to(DEVICE)
    small = torch.randn(num_blocks, 16, 1, 16).half()
    large = torch.empty(first_block + num_blocks, 16, 1, 16, dtype=torch.float16, device=DEVICE)  # never touched: free
    large[first_block:] = small
    slots = batch.slot_mapping
    small.flatten(0, 1)[slots] = k.cpu()
    triton_kernels.write_kv(k, k, (large, large), (slots + first_block * 16).to(DEVICE))
    assert torch.equal(large[first_block:].cpu(), small)
    expected = TORCH_KERNELS.paged_attention(q.cpu(), small, small, batch)
    batch = dataclasses.replace(batch, block_tables=batch.block_tables + first_block).to(DEVICE)
    result = triton_kernels.paged_attention(q, large, large, batch)
    torch.testing.assert_close(result.cpu(), expected, atol=TOLERANCE[torch.float16], rtol=0)
