"""Small things that vLLM's scripts import from all over vLLM, as far as they make sense with another engine."""

import gc
import logging
import socket
import uuid
from typing import Any

from nanovllm.checks.names import known_names
from nanovllm.tools.flags import FlexibleArgumentParser  # noqa: F401  vllm.utils has it, too

ChatCompletionMessageParam = dict[str, Any]
VLLMValidationError = VLLMClientError = ValueError  # what this engine raises for a person's mistake


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def random_uuid() -> str:
    """16 hexadecimal digits."""
    return uuid.uuid4().hex[:16]


def get_open_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get_tokenizer(tokenizer_name: str, **options: Any) -> Any:
    """The tokenizer of a checkpoint's directory, GGUF file or hub id, as an LLM has it.

    options: those of vLLM's, at the values that change nothing here.
    """
    from nanovllm.files.hub import resolve_tokenizer
    from nanovllm.files.tokenizer import load_tokenizer

    known_names(options, (), "get_tokenizer")
    return load_tokenizer(resolve_tokenizer(tokenizer_name))


class Platform:
    """What the engine computes on: CUDA where PyTorch has it, otherwise the CPU."""

    @property
    def device_type(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_cpu(self) -> bool:
        return not self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_tpu = is_out_of_tree = is_rocm

    def empty_cache(self) -> None:
        """Give back the memory of LLMs that nobody holds any more."""
        gc.collect()
        if self.is_cuda():
            import torch

            torch.cuda.empty_cache()


current_platform = Platform()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Platform.empty_cache(). Ranks end with their LLM, and Ray is not used: shutdown_ray changes nothing."""
    current_platform.empty_cache()
