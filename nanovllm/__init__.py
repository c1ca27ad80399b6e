"""nanovllm: an LLM inference engine small enough to read in a weekend.

`import nanovllm` is light: each of its names is loaded when it is asked for, torch and transformers with an `LLM`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.compat.command_line import AsyncEngineArgs, EngineArgs
    from nanovllm.compat.inputs import PromptType, TextPrompt, TokensPrompt
    from nanovllm.engine import LLMEngine
    from nanovllm.features.lora.lora_request import LoRARequest
    from nanovllm.features.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from nanovllm.features.pooling.params import PoolingParams
    from nanovllm.llm import LLM
    from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from nanovllm.sampling_params import RequestOutputKind, SamplingParams
    from nanovllm.serving.async_llm import AsyncLLM, AsyncLLMEngine

__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine", "EngineArgs", "AsyncEngineArgs"]
__all__ += ["SamplingParams", "RequestOutputKind"]
__all__ += ["RequestOutput", "CompletionOutput", "RequestMetrics", "Logprob", "LoRARequest"]
__all__ += ["PromptType", "TextPrompt", "TokensPrompt"]
__all__ += ["PoolingParams", "PoolingOutput", "EmbeddingOutput", "ClassificationOutput", "ScoringOutput"]
__all__ += ["PoolingRequestOutput", "EmbeddingRequestOutput", "ClassificationRequestOutput", "ScoringRequestOutput"]

_MODULES = {  # a module -> what `from nanovllm import ...` takes from it
    "nanovllm.llm": ["LLM"],
    "nanovllm.engine": ["LLMEngine"],
    "nanovllm.sampling_params": ["SamplingParams", "RequestOutputKind"],
    "nanovllm.outputs": ["RequestOutput", "CompletionOutput", "RequestMetrics", "Logprob"],
    "nanovllm.serving.async_llm": ["AsyncLLM", "AsyncLLMEngine"],
    "nanovllm.compat.command_line": ["EngineArgs", "AsyncEngineArgs"],
    "nanovllm.compat.inputs": ["PromptType", "TextPrompt", "TokensPrompt"],
    "nanovllm.features.lora.lora_request": ["LoRARequest"],
    "nanovllm.features.pooling.params": ["PoolingParams"],
    "nanovllm.features.pooling.outputs": [
        "PoolingOutput",
        "EmbeddingOutput",
        "ClassificationOutput",
        "ScoringOutput",
        "PoolingRequestOutput",
        "EmbeddingRequestOutput",
        "ClassificationRequestOutput",
        "ScoringRequestOutput",
    ],
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            from nanovllm.checks.callers import importing

            with importing():
                return getattr(import_module(module), name)
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """With the names that have not been asked for yet: an editor or a notebook offers them."""
    return sorted({*globals(), *__all__})


if find_spec("nanovllm.compat"):  # the folder may be deleted
    import_module("nanovllm.compat.finder").install()
