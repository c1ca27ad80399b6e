"""nanovllm: an LLM inference engine small enough to read in an afternoon.

`import nanovllm` is light: each of its names is loaded when it is asked for, torch and transformers with an `LLM`.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
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
    from nanovllm.serving.async_llm import AsyncLLM

__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "SamplingParams", "RequestOutputKind", "AsyncLLM", "EngineArgs", "AsyncEngineArgs"]
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
            from nanovllm.checks.interruptions import interruptible_imports

            with interruptible_imports():
                return getattr(import_module(module), name)
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")


# Scripts for vLLM import more from these modules than their files have: classes, and modules below nanovllm.engine.
_SHARED = ("nanovllm.config", "nanovllm.engine", "nanovllm.outputs", "nanovllm.sampling_params")


class _Finder:
    """Finds this package's files, and for paths that have none asks compat/paths.py, where vLLM's and nano-vllm's are.

    compat is loaded when such a path or name is asked for, and no module of the engine has to know of it.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith("nanovllm."):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            from nanovllm.compat import paths

            return paths.find_spec(name)
        if name in _SHARED and spec.origin is not None:
            spec.loader = _SharedFile(name, spec.origin)
            spec.submodule_search_locations = []  # Python takes it for a package, and asks for modules below it
        return spec


class _SharedFile(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.__getattr__ = partial(_class_of_vllm, module.__name__)  # type: ignore[method-assign]


def _class_of_vllm(module: str, name: str) -> Any:
    """A module's __getattr__, which is asked for what its file does not have."""
    from nanovllm.compat import paths

    return paths.class_in(module, name)


if find_spec("nanovllm.compat"):  # the folder may be deleted
    # Before Python's own finder of files, and after whatever somebody has put before that.
    sys.meta_path.insert(sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0, _Finder)
