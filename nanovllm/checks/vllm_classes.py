"""Classes of vLLM's that belong to wings here, for `from nanovllm import ...`."""

from nanovllm.checks.flags import AsyncEngineArgs, EngineArgs
from nanovllm.checks.vllm_inputs import PromptType, TextPrompt, TokensPrompt
from nanovllm.features.lora.request import LoRARequest
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
from nanovllm.sampling_params import RequestOutputKind

__all__ = ["EngineArgs", "AsyncEngineArgs", "RequestOutputKind", "LoRARequest"]
__all__ += ["PromptType", "TextPrompt", "TokensPrompt"]
__all__ += ["PoolingParams", "PoolingOutput", "EmbeddingOutput", "ClassificationOutput", "ScoringOutput"]
__all__ += ["PoolingRequestOutput", "EmbeddingRequestOutput", "ClassificationRequestOutput", "ScoringRequestOutput"]
