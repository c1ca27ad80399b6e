"""What an engine on a GPU may compute with. The first one that works here is what LLM(...) chooses."""

import torch

from nanovllm.worker.cuda.dtypes import AMPERE
from nanovllm.worker.cuda.gpu_kernels import flash_attn_problem, triton_problem
from nanovllm.worker.model_runner import platform_of_this_machine

BACKENDS = {
    "flash-attn, graphs": ("triton", "flash_attn", "cuda_graphs"),
    "flash-attn": ("triton", "flash_attn"),
    "Triton, graphs": ("triton", "cuda_graphs"),
    "Triton": ("triton",),
    "PyTorch": (),
}


def has_bfloat16() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= AMPERE


def has_triton() -> bool:
    """Does the engine use its Triton kernels here?"""
    return torch.cuda.is_available() and triton_problem(platform_of_this_machine().device) is None


def has_flash_attn() -> bool:
    return has_triton() and flash_attn_problem() is None


def installed_backends() -> list[str]:
    works = {"triton": has_triton(), "flash_attn": has_flash_attn(), "cuda_graphs": True}
    return [name for name, needs in BACKENDS.items() if all(works[need] for need in needs)]
