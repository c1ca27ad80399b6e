"""What an LLM with runner="pooling" is asked: embed, classify, score, encode. Arguments are vLLM's.

Each raises one ValueError that lists every bad prompt by its index, before any work is done. Common arguments:

    truncate_prompt_tokens   how many tokens of a text are kept, -1: as many as fit; with more, it is refused otherwise
    tokenization_kwargs      the same, and truncation_side, add_special_tokens
    lora_request, priority   as in LLM.generate
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.checks.names import known_names
from nanovllm.checks.values import make_all, shorten
from nanovllm.features.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from nanovllm.features.pooling.params import TASKS, PoolingParams, check_task
from nanovllm.prompts import one_per_prompt, split_prompts

if TYPE_CHECKING:
    from nanovllm.features.lora.lora_request import LoRARequest
    from nanovllm.features.pooling.requests import PoolingRequest
    from nanovllm.prompts import Prompt

    Params = PoolingParams | Sequence[PoolingParams] | None
    Adapters = list[LoRARequest | None] | LoRARequest | None
    Priorities = list[int] | int | None

# The options of all four, for the error that an unknown one gets.
OPTIONS = ("use_tqdm", "pooling_params", "lora_request", "priority", "truncate_prompt_tokens", "tokenization_kwargs")


def encode(
    llm: Any,
    prompts: "Prompt | Sequence[Prompt]",
    pooling_params: "Params" = None,
    *,
    use_tqdm: bool = True,
    lora_request: "Adapters" = None,
    priority: "Priorities" = None,
    pooling_task: str | None = None,
    truncate_prompt_tokens: int | None = None,
    tokenization_kwargs: dict[str, Any] | None = None,
    **unknown: Any,
) -> list[PoolingRequestOutput]:
    """Compute what embed() or classify() returns, as a tensor in outputs.data. pooling_task: "embed" or "classify"."""
    from nanovllm.features.pooling.requests import make_request, pooling_of

    known_names(unknown, (*OPTIONS, "pooling_task"), "encode")
    pooling_of(llm.engine, "encode()")
    if pooling_task is None:
        raise ValueError(f"encode() needs a pooling_task, {' or '.join(TASKS)}; or call embed() or classify()")
    check_task("pooling_task", pooling_task)
    given = split_prompts(prompts)
    if not given:
        raise ValueError("there must be a prompt, found an empty list")
    params = one_per_prompt("pooling_params", pooling_params, len(given))
    adapters = one_per_prompt("lora_request", lora_request, len(given))
    priorities = one_per_prompt("priority", priority, len(given))
    truncation = truncation_of(truncate_prompt_tokens, tokenization_kwargs)

    def make(each: tuple[Any, Any, Any, Any]) -> "PoolingRequest":
        prompt, params, adapter, priority = each
        return make_request(
            llm.engine, prompt, params, adapter, truncation=truncation, task=pooling_task, priority=priority
        )

    requests = make_all("prompts", list(zip(given, params, adapters, priorities, strict=True)), make)
    return llm.calls.complete(requests, use_tqdm)


def embed(
    llm: Any, prompts: "Prompt | Sequence[Prompt]", *, pooling_params: "Params" = None, **options: Any
) -> list[EmbeddingRequestOutput]:
    """outputs.embedding of each prompt: numbers, as a vector of length 1 if nothing else is asked."""
    options = known_names(options, OPTIONS, "embed")
    outputs = encode(llm, prompts, pooling_params, pooling_task="embed", **options)
    return list(map(EmbeddingRequestOutput.from_base, outputs))


def classify(
    llm: Any, prompts: "Prompt | Sequence[Prompt]", *, pooling_params: "Params" = None, **options: Any
) -> list[ClassificationRequestOutput]:
    """outputs.probs of each prompt, a number for each label of the checkpoint. options: encode's."""
    options = known_names(options, OPTIONS, "classify")
    outputs = encode(llm, prompts, pooling_params, pooling_task="classify", **options)
    return list(map(ClassificationRequestOutput.from_base, outputs))


def score(
    llm: Any,
    data_1: str | list[str],
    data_2: str | list[str],
    /,
    *,
    use_tqdm: bool = True,
    pooling_params: PoolingParams | None = None,
    lora_request: "Adapters" = None,
    priority: "Priorities" = None,
    truncate_prompt_tokens: int | None = None,
    tokenization_kwargs: dict[str, Any] | None = None,
    chat_template: str | None = None,
    **unknown: Any,
) -> list[ScoringRequestOutput]:
    """outputs.score of each pair: one query and one document, one and many, or as many of each.

    chat_template: how a cross-encoder's pair is written, messages of the roles query and document; an original
    Qwen3-Reranker has its own.
    """
    from nanovllm.features.pooling.requests import pooling_of
    from nanovllm.features.pooling.scoring import Pairs

    known_names(unknown, (*OPTIONS, "chat_template"), "score")
    pooling, pairs = pooling_of(llm.engine, "score()"), Pairs.of(data_1, data_2)
    if not isinstance(chat_template, str | None):
        raise ValueError(f"chat_template must be a template's text, found {shorten(chat_template)}")
    num = len(pairs.documents) + (len(pairs.queries) if pooling.task == "embed" else 0)
    adapters = one_per_prompt("lora_request", lora_request, num)
    priorities = one_per_prompt("priority", priority, num)
    truncation = truncation_of(truncate_prompt_tokens, tokenization_kwargs)
    requests = pairs.make_requests(
        llm.engine, pooling_params, adapters, truncation, chat_template, priorities=priorities
    )
    return pairs.scores(llm.engine, llm.calls.complete(requests, use_tqdm))


def truncation_of(num_tokens: int | None, more: dict[str, Any] | None) -> Any:
    from nanovllm.features.pooling.requests import Truncation

    if not isinstance(more, dict | None):
        raise ValueError(f"tokenization_kwargs must be a dict, found {shorten(more)}")
    return Truncation.of(**{"truncate_prompt_tokens": num_tokens, **(more or {})})
