"""What a ModelRunner does differently on a GPU (chapters 3 and 10). cpu/platform.py has the same functions."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.cuda.gpu_kernels import load_cuda_kernels
from nanovllm.worker.cuda.graphs import DecodeGraphs
from nanovllm.worker.cuda.memory import make_pool
from nanovllm.worker.kernels import Kernels


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def choose_kernels(runner: Any) -> tuple[Kernels, int | None]:
    """(kernels, the block size that suits them; None: any)."""
    return load_cuda_kernels(runner.config, runner.local_config.head_dim, runner.dtype)


def kv_numbers(runner: Any) -> tuple[ModelConfig, torch.dtype]:
    """What keys and values are held as: (sizes of the model as the KV cache sees them, dtype)."""
    if runner.config.kv_cache_dtype == "int8":
        raise ValueError("kv_cache_dtype='int8' needs the C kernels of a CPU; leave it out here")
    return runner.local_config, runner.dtype


def begin_pool(runner: Any) -> None:
    """Only finish_pool() knows what the weights leave."""


def finish_load(runner: Any) -> Callable[[], AbstractContextManager]:
    """The weights are there. Returns what every step runs in."""
    return nullcontext


def same_bits(runner: Any) -> str:
    """Libraries choose their kernels by the number of rows."""
    return "not promised"


def finish_pool(runner: Any) -> DecodeGraphs | None:
    """The largest KV pool that a step leaves room for, and decode graphs that read it."""
    return make_pool(runner)
