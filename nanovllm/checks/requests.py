"""What only the engine can say about a request: tokens and parameters. SamplingParams has checked the rest."""

from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import check_number, check_range, shorten
from nanovllm.core.sequence import Sequence
from nanovllm.prompts import parse_prompt
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

IMAGE_KEYS = frozenset(("multi_modal_data", "mm_processor_kwargs"))  # of a prompt


class CheckedRequest(NamedTuple):
    """What a caller asks for, in the engine's terms. text: the prompt's, if it was one."""

    text: str | None
    token_ids: list[int]
    images: Any  # a PromptImages, if the prompt has some
    params: SamplingParams
    cache_salt: str | None
    adapter: Any
    priority: int
    bad_words: Any
    processors: list[Any]

    @property
    def lora_id(self) -> int | None:
        return None if self.adapter is None else self.adapter.lora_id

    def add_to(self, seq: Sequence) -> None:
        """What a sequence carries for features."""
        seq.images = self.images
        seq.bad_words, seq.adapter, seq.priority = self.bad_words, self.adapter, self.priority
        if self.processors or self.params.logits_processors:
            from nanovllm.features.logits_processors.functions import CallersFunctions

            of_engine = [make() for make in self.processors]
            seq.functions = CallersFunctions([*of_engine, *self.params.logits_processors])


def check_request(
    engine: "LLMEngine", prompt: Any, params: SamplingParams, lora_request: Any, priority: Any, request_id: Any
) -> CheckedRequest:
    """Everything that a caller can get wrong, and the prompt tokenized. Raises ValueError."""
    if not isinstance(request_id, str | None):
        raise ValueError(f"request_id must be a string, found {shorten(request_id)}")
    check_generates(engine)
    pictures = None
    if isinstance(prompt, dict) and not IMAGE_KEYS.isdisjoint(prompt):
        from nanovllm.features.images.requests import split_prompt

        prompt, pictures = split_prompt(engine, prompt)
    text, token_ids, cache_salt = parse_prompt(engine.tokenizer, prompt, engine.check_length)
    params = check_params(params, engine.model_config)
    vocab_size, max_model_len = engine.model_config.vocab_size, engine.scheduler.max_model_len
    num_generated = 1 if params.generates else 0
    check_token_ids(token_ids, vocab_size, max_model_len, num_generated)
    if (params.logits_processors or engine.config.logits_processors) and engine.config.tensor_parallel_size > 1:
        raise ValueError("logits_processors need tensor_parallel_size=1: a function cannot be sent to the ranks")
    priority = check_priority(priority, engine.config.scheduling_policy)
    adapter = None if lora_request is None else engine.known_adapters.check(lora_request)
    bad_words = None
    if params.bad_words:
        from nanovllm.features.logits_processors.bad_words import BadWords  # a table of all tokens' bytes

        bad_words = BadWords(engine.tokenizer, list(params.bad_words), engine.model_config.vocab_size)
    processors = []
    if engine.config.logits_processors:
        from nanovllm.features.logits_processors.classes import check_classes

        processors = check_classes(engine, params)
    images = None
    if pictures is not None:  # the most work comes last
        token_ids, images = pictures.expand(token_ids, max_model_len - num_generated)
        check_token_ids(token_ids, vocab_size, max_model_len, num_generated)
    return CheckedRequest(text, token_ids, images, params, cache_salt, adapter, priority, bad_words, processors)


def check_priority(given: Any, policy: str) -> int:
    """A request's priority; None is 0. Raises ValueError for one that this order of scheduling does not know."""
    priority = check_number("priority", 0 if given is None else given, Integral)
    if priority and policy != "priority":
        reason = f"priority={priority} asks for another order than first come, first served"
        raise ValueError(f"{reason}; leave it out, or start with scheduling_policy='priority'")
    return priority


def check_generates(engine: "LLMEngine") -> None:
    """Raises ValueError for an engine that gives embeddings or scores."""
    if (pooling := engine.model_config.pooling) is not None:
        works = "score() and classify() (POST /score, /rerank, /pooling)"
        if pooling.task == "embed":
            works = "embed() and score() (POST /v1/embeddings, /score, /rerank)"
        raise ValueError(f"runner='pooling', with which this model was loaded, samples no tokens: ask it by {works}")


def check_params(params: SamplingParams, model: ModelConfig) -> SamplingParams:
    """A copy of the parameters, in which -1 logprobs are as many as there are tokens. Raises ValueError.

    With logprob_token_ids it asks for logprobs, too: a sample that has some makes them known.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be a SamplingParams, found {type(params).__name__}")
    params = params.clone()
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        check_range(f"a token id of {name}", getattr(params, name) or (), 0, model.vocab_size - 1)
    if params.logprob_token_ids:
        params.logprobs = len(params.logprob_token_ids)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) == -1:
            setattr(params, name, model.vocab_size)
        check_number(name, getattr(params, name) or 0, Integral, 0, model.vocab_size)
    _check_some_token_is_left(params, model)
    return params


def check_token_ids(token_ids: list[int], vocab_size: int, max_model_len: int, num_generated: int) -> None:
    """Raise a ValueError for a prompt that no step could compute. num_generated: the fewest tokens that follow it."""
    if not token_ids:
        raise ValueError("the prompt is empty: there is no token to continue from")
    if len(token_ids) > max_model_len - num_generated:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens; max_model_len is {max_model_len}, prompt and output "
            f"together, so at most {max_model_len - num_generated} fit"
        )
    if (at := next((i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size), None)) is not None:
        vocabulary = f"the vocabulary (0 to {vocab_size - 1})"
        raise ValueError(f"token id {shorten(token_ids[at])} at position {at} is outside {vocabulary}")


def _check_some_token_is_left(params: SamplingParams, model: ModelConfig) -> None:
    if not params.min_tokens:
        return
    stop_ids = {*params.stop_token_ids, *model.eos_token_ids}
    allowed = range(model.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if stop_ids.issuperset(allowed):
        raise ValueError(f"before min_tokens={params.min_tokens}, so many stop_token_ids leave no token to choose")
