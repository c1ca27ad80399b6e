"""What a ModelRunner does differently on a CPU (chapters 3 and 10). cuda/platform.py has the same functions."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.cpu import memory
from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
from nanovllm.worker.cpu.recorded_step import RecordedStep, record_step
from nanovllm.worker.cpu.reorder import reorder_weights
from nanovllm.worker.cpu.threads import pytorch_multiplies, step_threads
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels


def device() -> torch.device:
    return torch.device("cpu")


def choose_kernels(runner: Any) -> tuple[Kernels, int | None]:
    """(kernels, the block size that suits them; None: any)."""
    in_c = "c_kernels" in runner.config.optimizations
    everywhere = runner.config.quantization is not None or runner.model_config.is_quantized
    kv_int8 = runner.config.kv_cache_dtype == "int8"
    found = load_cpu_kernels(runner.local_config, runner.dtype, everywhere, kv_int8) if in_c else None
    return found or TORCH_KERNELS, None


def kv_numbers(runner: Any) -> tuple[ModelConfig, torch.dtype]:
    """What keys and values are held as: (sizes of the model as the KV cache sees them, dtype).

    Raises ValueError for int8 without the C kernels.
    """
    config = runner.local_config
    if runner.config.kv_cache_dtype != "int8":
        return config, runner.dtype
    if runner.kernels.library is None:
        raise ValueError("kv_cache_dtype='int8' needs the C kernels of a CPU; leave it out here")
    return replace(
        config, head_dim=config.head_dim + 2
    ), torch.int8  # behind a head's codes is its scale: cpu/kv_cache.h


def begin_pool(runner: Any) -> None:
    """Reserve the KV pool, and let a thread bring its pages into memory while the weights are read."""
    runner.make_pool(memory.free_bytes(runner.config.gpu_memory_utilization))
    runner.prefaulting = memory.prefault(list(runner.kv_cache.data.flatten(0, 1)))


def finish_load(runner: Any) -> Callable[[], AbstractContextManager]:
    """The weights are there. Returns what every step runs in."""
    if "reordered_weights" in runner.config.optimizations:
        reorder_weights(runner.model, runner.kernels)
    return step_threads(runner.model, runner.kernels)


def same_bits(runner: Any) -> str:
    """Where a row's logits have the same bits, whatever the step's other rows, chunks, cache hits or threads are.

    Instructions that multiply pairs or matrices of bf16, which some processors have, round in their own way. What
    PyTorch's libraries multiply, they sum up in an order that depends on the number of rows.
    """
    if runner.kernels is TORCH_KERNELS or pytorch_multiplies(runner.model):
        return "not promised"
    instructions = runner.kernels.library.bits_depend_on().decode()
    return f"on processors that multiply {instructions}" if instructions else "on every processor"


def finish_pool(runner: Any) -> RecordedStep | None:
    """Everything that a step reads has its place: record the step."""
    memory.keep_freed_memory()
    runner.prefaulting.join()
    return record_step(runner)
