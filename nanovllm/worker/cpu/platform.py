"""What a ModelRunner does differently on a CPU (chapters 3 and 10). cuda/platform.py has the same functions."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from nanovllm.worker.cpu import memory
from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
from nanovllm.worker.cpu.reorder import reorder_weights
from nanovllm.worker.cpu.threads import step_threads
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels


def device() -> torch.device:
    return torch.device("cpu")


def choose_kernels(runner: Any) -> tuple[Kernels, int | None]:
    """(kernels, the block size that suits them; None: any)."""
    in_c = "c_kernels" in runner.config.optimizations
    in_pairs = runner.config.quantization is None
    found = load_cpu_kernels(runner.local_config, runner.dtype, in_pairs) if in_c else None
    return found or TORCH_KERNELS, None


def begin_pool(runner: Any) -> None:
    """Reserve the KV pool, and let a thread bring its pages into memory while the weights are read."""
    runner.make_pool(memory.free_bytes(runner.config.gpu_memory_utilization))
    runner.prefaulting = memory.prefault(list(runner.kv_cache.data.flatten(0, 1)))


def finish_load(runner: Any) -> Callable[[], AbstractContextManager]:
    """The weights are there. Returns what every step runs in."""
    if "reordered_weights" in runner.config.optimizations:
        reorder_weights(runner.model, runner.kernels)
    return step_threads(runner.model, runner.kernels)


def finish_pool(runner: Any) -> None:
    memory.keep_freed_memory()
    runner.prefaulting.join()
