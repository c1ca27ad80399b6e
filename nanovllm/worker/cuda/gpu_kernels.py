"""Which kernels run on a GPU, and why (chapter 10).

flash-attn is the fastest where it can be used: half precision, blocks of a multiple of 256 tokens. Otherwise the Triton
kernels of triton_kernels.py compute attention, or PyTorch's operations where Triton does not work or the GPU is older
than Ampere: Triton no longer uses the tensor cores there.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.worker.batch import Batch
from nanovllm.worker.cuda.dtypes import AMPERE
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels, Pair, rotate_heads

logger = logging.getLogger("nanovllm")

FLASH_BLOCK_SIZE = 256  # flash-attn 2 reads a paged cache in blocks of a multiple of this


def load_cuda_kernels(
    config: EngineConfig, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Kernels, int | None]:
    """The kernels for this model, and the block size that suits them (None: any)."""
    if "triton" not in config.optimizations:
        logger.info("attention: PyTorch, because triton is switched off")
        return TORCH_KERNELS, None
    why_no_triton = triton_problem(device)
    if why_no_triton is not None:
        logger.warning("attention: PyTorch, because %s", why_no_triton)
        return TORCH_KERNELS, None
    from nanovllm.worker.cuda import triton_kernels

    why_not = _why_not_flash_attn(config, head_dim, dtype)
    attention: Callable[[Tensor, Tensor, Tensor, Batch, int], Tensor]
    block_size: int | None = None
    if why_not is None:
        from nanovllm.worker.cuda import flash_attention

        logger.info("attention: flash-attn")
        attention = flash_attention.paged_attention
        block_size = FLASH_BLOCK_SIZE
    else:
        logger.info("attention: Triton, because %s", why_not)
        attention = triton_kernels.paged_attention

    def rotary_and_write(q: Tensor, k: Tensor, v: Tensor, cos_sin: Pair | None, kv_layer: Pair, batch: Batch) -> None:
        if cos_sin is not None:
            cos, sin = cos_sin
            rotate_heads(q, k, cos, sin)
        triton_kernels.write_kv(k, v, kv_layer, batch.slot_mapping)

    return replace(TORCH_KERNELS, rotary_and_write=rotary_and_write, paged_attention=attention), block_size


def triton_problem(device: torch.device) -> str | None:
    """Why the Triton kernels cannot be used on this GPU; None if they can. One is compiled and run to find out."""
    if torch.cuda.get_device_capability(device) < AMPERE:
        return "the Triton kernels need an Ampere GPU or a later one"
    try:
        from nanovllm.worker.cuda import triton_kernels

        row = torch.zeros(1, 1, 16, device=device, dtype=torch.float32)
        cache = row[None]
        triton_kernels.write_kv(row, row, (cache, cache), torch.zeros(1, device=device, dtype=torch.int64))
    except Exception as error:  # no Triton, or no C compiler or Python.h, which it needs at its first launch
        return f"Triton does not work here ({type(error).__name__}: {error})"
    return None


def flash_attn_problem() -> str | None:
    """Why the flash-attn package cannot be used, whatever the GPU and the model are; None if it can."""
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401 (flash-attn 4 lacks it)
    except Exception as error:  # a build for another PyTorch raises what it likes
        return f"flash-attn cannot be imported ({error})"
    return None


def _why_not_flash_attn(config: EngineConfig, head_dim: int, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn does not compute in {dtype}"
    if config.block_size is not None and config.block_size % FLASH_BLOCK_SIZE:
        return f"flash-attn needs a block_size that is a multiple of {FLASH_BLOCK_SIZE}, and it is {config.block_size}"
    if head_dim > 256 or head_dim % 8:
        return f"flash-attn has no heads of {head_dim} dimensions"
    if "flash_attn" not in config.optimizations:
        return "flash-attn is switched off"
    return flash_attn_problem()
