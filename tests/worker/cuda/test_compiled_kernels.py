"""The attention kernel, compiled by Triton for GPUs that are not here: it fits in their shared memory."""

import pytest
import torch

from tests.marks import by_night
from tests.pretend_gpu import SHARED_BYTES

triton = pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch for CUDA")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from nanovllm.worker.cuda.triton_kernels import _attention_kernel, tile_of  # noqa: E402

TYPES = {"fp16": torch.float16, "fp32": torch.float32}
ALIGNED = "out q k_cache v_cache cu_seqlens_q seqlens_k block_tables".split()  # addresses, to 16 bytes; strides, too
SIZES = [("fp16", 128), ("fp16", 256), ("fp32", 128), ("fp32", 256)]
LARGER = [(capability, *size) for capability in ((8, 0), (9, 0)) for size in SIZES]
SMALL = [pytest.param((8, 6), *size, marks=pytest.mark.ci) for size in SIZES]


@pytest.mark.parametrize(("capability", "dtype", "head_dim"), [*SMALL, *(by_night(*each) for each in LARGER)])
def test_a_prompt_fits_in_shared_memory(capability, dtype, head_dim):
    """Compiling takes seconds. The limits are those that Triton's driver reports."""
    tile, num_stages = tile_of(head_dim, TYPES[dtype].itemsize, SHARED_BYTES[capability])
    constants = dict(GROUP=4, BLOCK_SIZE=16, HEAD_DIM=head_dim, WINDOW=0, BLOCK_M=tile, BLOCK_N=tile, BLOCK_D=head_dim)
    names = _attention_kernel.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr") | {"scale": "fp32"}
    types |= dict.fromkeys(ALIGNED[:4], f"*{dtype}") | dict.fromkeys(ALIGNED[4:], "*i32")
    aligned = [*ALIGNED, *(name for name in names if name.endswith("_stride") and name != "table_stride")]
    source = ASTSource(
        fn=_attention_kernel,
        signature=types,
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    compiled = triton.compile(source, target=target, options=dict(num_stages=num_stages, num_warps=4))
    assert 0 < compiled.metadata.shared <= SHARED_BYTES[capability]
