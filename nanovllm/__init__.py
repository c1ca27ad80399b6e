"""nanovllm: an LLM inference engine small enough to read in an afternoon.

`import nanovllm` is light: torch and transformers load when an `LLM` is built.
"""

import nanovllm.checks.sampling  # noqa: F401  puts the checks in front of SamplingParams, before one is made
from nanovllm.checks.flags import AsyncEngineArgs, EngineArgs
from nanovllm.checks.vllm_inputs import PromptType, TextPrompt, TokensPrompt
from nanovllm.checks.vllm_paths import load_lazily as __getattr__  # noqa: F401  AsyncLLM; more paths to import from
from nanovllm.engine import LLMEngine
from nanovllm.features.lora.request import LoRARequest
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["LLM", "LLMEngine", "EngineArgs", "AsyncLLM", "AsyncEngineArgs", "SamplingParams", "RequestOutputKind"]
__all__ += ["LoRARequest", "PromptType", "TextPrompt", "TokensPrompt"]
__all__ += ["RequestOutput", "CompletionOutput", "RequestMetrics", "Logprob"]
__version__ = "0.1.0"
