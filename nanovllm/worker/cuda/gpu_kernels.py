"""Which kernels run on a GPU, and why (chapter 10).

flash-attn is the fastest where it can be used: half precision, blocks of a multiple of 256 tokens. Otherwise the Triton
kernels of triton_kernels.py compute attention, or PyTorch's operations where there is no Triton.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels, Pair, rotate_heads

logger = logging.getLogger("nanovllm")

FLASH_BLOCK_SIZE = 256  # flash-attn 2 reads a paged cache in blocks of a multiple of this


def load_cuda_kernels(config: EngineConfig, head_dim: int, dtype: torch.dtype) -> tuple[Kernels, int | None]:
    """The kernels for this model, and the block size that suits them (None: any)."""
    if "triton" not in config.optimizations or importlib.util.find_spec("triton") is None:
        logger.info("attention: PyTorch, because triton is %s", _off_or_missing("triton", config))
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


def _why_not_flash_attn(config: EngineConfig, head_dim: int, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn does not compute in {dtype}"
    if config.block_size is not None and config.block_size % FLASH_BLOCK_SIZE:
        return f"flash-attn needs a block_size that is a multiple of {FLASH_BLOCK_SIZE}, and it is {config.block_size}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "flash-attn needs an Ampere GPU or a later one"
    if head_dim > 256 or head_dim % 8:
        return f"flash-attn has no heads of {head_dim} dimensions"
    if "flash_attn" not in config.optimizations or importlib.util.find_spec("flash_attn") is None:
        return f"flash-attn is {_off_or_missing('flash_attn', config)}"
    return None


def _off_or_missing(name: str, config: EngineConfig) -> str:
    return "not installed" if name in config.optimizations else "switched off"
