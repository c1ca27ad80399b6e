"""nanovllm: an LLM inference engine small enough to read in an afternoon.

`import nanovllm` is light: torch and transformers load when an `LLM` is built.
"""

from nanovllm.engine import LLMEngine
from nanovllm.engine_args import EngineArgs
from nanovllm.inputs import TextPrompt, TokensPrompt
from nanovllm.llm import LLM
from nanovllm.lora.request import LoRARequest
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "LLMEngine", "EngineArgs", "SamplingParams", "LoRARequest", "TextPrompt", "TokensPrompt"]
__all__ += ["RequestOutput", "CompletionOutput", "RequestMetrics", "Logprob"]
__version__ = "0.1.0"
