"""CUDAPlatform: Triton or flash-attn, a KV pool of what is left, decode steps as CUDA graphs (chapters 3 and 10)."""

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.worker.cuda import graphs, memory
from nanovllm.worker.cuda.gpu_kernels import load_cuda_kernels
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.model import Decoder
from nanovllm.worker.platform import Platform

if TYPE_CHECKING:
    from nanovllm.features.images.prompt_images import PromptImages
    from nanovllm.worker.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")


class CUDAPlatform(Platform):
    """See worker/platform.py for the methods."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()))

    def choose_kernels(
        self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype
    ) -> tuple[Kernels, int | None]:
        return load_cuda_kernels(config, model_config.head_dim, dtype, self.device)

    def kv_format(
        self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, kernels: Kernels
    ) -> tuple[ModelConfig, torch.dtype]:
        if config.kv_cache_dtype == "int8":
            raise ValueError("kv_cache_dtype='int8' needs the C kernels of a CPU; leave it out here")
        return model_config, dtype

    def free_bytes(self, config: EngineConfig) -> None:
        """Weights and steps share the GPU's memory with the pool."""

    def profile_free_bytes(self, runner: "ModelRunner", largest_image: "PromptImages | None") -> int:
        why_not = graphs.why_no_graphs(runner)
        logger.info("CUDA graphs: %s", "yes" if why_not is None else f"none, because {why_not}")
        return memory.free_bytes(runner, largest_image, record_steps=partial(self.record_steps, runner))

    @torch.inference_mode()
    def record_steps(self, runner: "ModelRunner") -> graphs.DecodeGraphs | None:
        return graphs.DecodeGraphs(runner) if graphs.why_no_graphs(runner) is None else None

    def has_ended(self) -> bool:
        """After an illegal access, say, whatever a process asks of CUDA fails; not so after an OutOfMemoryError."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def batch_invariant(self, model: Decoder, kernels: Kernels) -> str:
        """Libraries choose their kernels by the number of rows."""
        return "not promised"
