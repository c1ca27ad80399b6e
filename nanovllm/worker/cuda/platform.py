"""CUDAPlatform: Triton or flash-attn, a KV pool of what is left, decode steps as CUDA graphs (chapters 3 and 10)."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.worker.cuda import graphs, memory
from nanovllm.worker.cuda.gpu_kernels import load_cuda_kernels
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.kv_cache import KVCache
from nanovllm.worker.layers import Linear
from nanovllm.worker.model import Decoder
from nanovllm.worker.platform import ForwardPass, Platform

if TYPE_CHECKING:
    from nanovllm.features.images.prompt_images import PromptImages

logger = logging.getLogger("nanovllm")


class CUDAPlatform(Platform):
    """See worker/platform.py for the methods."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def choose_kernels(
        self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype
    ) -> tuple[Kernels, int | None]:
        return load_cuda_kernels(config, model_config.head_dim, dtype)

    def kv_format(
        self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, kernels: Kernels
    ) -> tuple[ModelConfig, torch.dtype]:
        if config.kv_cache_dtype == "int8":
            raise ValueError("kv_cache_dtype='int8' needs the C kernels of a CPU; leave it out here")
        return model_config, dtype

    def free_bytes(self, config: EngineConfig) -> None:
        """Weights and steps share the GPU's memory with the pool."""

    def kv_cache_allocated(self, kv_cache: KVCache) -> None:
        """Its pages are there."""

    def finish_linear(self, config: EngineConfig, kernels: Kernels, model: Decoder, linear: Linear) -> None:
        """The kernels read weights as they are."""

    def step_context(self, model: Decoder, kernels: Kernels) -> Callable[[], AbstractContextManager]:
        return nullcontext

    def profile_free_bytes(
        self,
        config: EngineConfig,
        forward_pass: ForwardPass,
        run: Callable[[SchedulerOutput], object],
        max_model_len: int,
        block_size: int,
        largest_image: "PromptImages | None",
    ) -> int:
        why_not = graphs.why_no_graphs(config, forward_pass)
        logger.info("CUDA graphs: %s", "yes" if why_not is None else f"none, because {why_not}")
        return memory.free_bytes(
            config,
            model=forward_pass.model,
            device=self.device,
            max_model_len=max_model_len,
            block_size=block_size,
            largest_image=largest_image,
            run=run,
            record_steps=lambda: self.record_steps(config, forward_pass, max_model_len, block_size),
        )

    @torch.inference_mode()
    def record_steps(
        self, config: EngineConfig, forward_pass: ForwardPass, max_model_len: int, block_size: int
    ) -> graphs.DecodeGraphs | None:
        if graphs.why_no_graphs(config, forward_pass) is not None:
            return None
        return graphs.DecodeGraphs(
            forward_pass,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            device=self.device,
        )

    def batch_invariant(self, model: Decoder, kernels: Kernels) -> str:
        """Libraries choose their kernels by the number of rows."""
        return "not promised"
