"""CPUPlatform: C kernels, a KV pool from the start, steps recorded as calls of C functions (chapters 3 and 10)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.worker.cpu import memory
from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
from nanovllm.worker.cpu.recorded_step import RecordedStep, record_step
from nanovllm.worker.cpu.reorder import look_up_in_head, reorder_weight
from nanovllm.worker.cpu.threads import one_kind_of_threads, pytorch_multiplies, step_threads
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import Linear
from nanovllm.worker.model import Decoder
from nanovllm.worker.platform import Platform

if TYPE_CHECKING:
    from nanovllm.worker.loader import StoredWeight
    from nanovllm.worker.model_runner import ModelRunner


class CPUPlatform(Platform):
    """See worker/platform.py for the methods."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._freed_bytes = 0  # by weights that now lie in another order

    def choose_kernels(
        self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype
    ) -> tuple[Kernels, int | None]:
        if "c_kernels" not in config.optimizations:
            return TORCH_KERNELS, None
        kernels = load_cpu_kernels(
            model_config,
            dtype,
            everywhere=config.round_to is not None or model_config.is_quantized,
            kv_int8=config.kv_cache_dtype == "int8",
        )
        return kernels or TORCH_KERNELS, None

    def kv_format(
        self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, kernels: Kernels
    ) -> tuple[ModelConfig, torch.dtype]:
        if config.kv_cache_dtype != "int8":
            return model_config, dtype
        if kernels.library is None:
            raise ValueError("kv_cache_dtype='int8' needs the C kernels of a CPU; leave it out here")
        # The scale of a head's codes follows them: cpu/kv_cache.h.
        return replace(model_config, head_dim=model_config.head_dim + 2), torch.int8

    def free_bytes(self, config: EngineConfig) -> int:
        return memory.free_bytes(config.gpu_memory_utilization)

    @contextmanager
    def loading(self, runner: "ModelRunner") -> Iterator[None]:
        """Meanwhile a thread brings pages of the KV cache into memory."""
        prefaulting = memory.prefault(list(runner.kv_cache.data.flatten(0, 1)))
        try:
            yield
        finally:
            memory.REGION.close()
            memory.give_freed_memory_back()
            memory.keep_freed_memory()
            prefaulting.join()

    def read_linear(
        self, config: EngineConfig, kernels: Kernels
    ) -> "Callable[[Decoder, Linear, StoredWeight], None] | None":
        if "reordered_weights" not in config.optimizations:
            return None

        def read(model: Decoder, linear: Linear, stored: "StoredWeight") -> None:
            is_tied = linear.weight is model.embed_tokens
            # A rank keeps a table of its own, which has to be read: chapter 9's exercise looks rows up in it.
            keeps_table = is_tied and config.tensor_parallel_size > 1
            parts = None if keeps_table else stored.parts()
            if parts is None or not reorder_weight(linear, kernels, parts):
                stored.read()
                self._freed_bytes += linear.weight.nbytes
                reorder_weight(linear, kernels)
            if is_tied and not keeps_table:
                look_up_in_head(model, kernels)
            if self._freed_bytes > memory.KEPT_BYTES:
                memory.give_freed_memory_back()
                self._freed_bytes = 0

        return read

    def step_context(self, model: Decoder, kernels: Kernels) -> Callable[[], AbstractContextManager]:
        return step_threads(model, kernels)

    def tower_kernels(self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> Kernels | None:
        if "c_kernels" not in config.optimizations:
            return None
        return load_cpu_kernels(model_config, dtype, bidirectional=True)

    def tower_context(self, kernels: Kernels | None) -> AbstractContextManager:
        """On PyTorch's threads, which compute a part of it, or all of it."""
        return nullcontext() if kernels is None else one_kind_of_threads(on_pytorchs=True)

    def record_steps(self, runner: "ModelRunner") -> RecordedStep | None:
        return record_step(runner)

    def batch_invariant(self, model: Decoder, kernels: Kernels) -> str:
        """Instructions that multiply pairs or matrices of bf16, which some processors have, round in their own way.

        What PyTorch's libraries multiply, they sum up in an order that depends on the number of rows.
        """
        if kernels is TORCH_KERNELS or pytorch_multiplies(model):
            return "not promised"
        instructions = kernels.library.bits_depend_on().decode()
        where = f"on processors that multiply {instructions}" if instructions else "on every processor"
        return where if model.config.images is None else f"{where}; images: on processors like this one"
