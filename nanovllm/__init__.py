"""nanovllm: an LLM inference engine small enough to read in an afternoon.

`import nanovllm` is light: torch and transformers load when an `LLM` is built.
"""

from nanovllm.checks import vllm_classes
from nanovllm.checks.vllm_classes import *  # noqa: F403  vLLM's classes that belong to wings here
from nanovllm.checks.vllm_paths import load_lazily as __getattr__  # noqa: F401  AsyncLLM; more paths to import from
from nanovllm.engine import LLMEngine
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "LLMEngine", "SamplingParams"]
__all__ += vllm_classes.__all__
__all__ += ["AsyncLLM"]  # noqa: F405  loaded when it is asked for
__all__ += ["RequestOutput", "CompletionOutput", "RequestMetrics", "Logprob"]
__version__ = "0.1.0"
