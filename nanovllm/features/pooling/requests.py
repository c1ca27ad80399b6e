"""PoolingRequest: a prompt whose last hidden state is wanted, from its checks to its PoolingRequestOutput.

To the scheduler its sequence is one like all others: it is cut into chunks, found in the prefix cache, preempted. It
ends with the step that computes its last token, from which nothing is sampled (Sequence.is_pooling).
"""

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

from nanovllm.checks.names import known_names
from nanovllm.checks.values import check_choice, check_number, check_range, check_switch, shorten
from nanovllm.core.scheduler import ScheduledChunk
from nanovllm.core.sequence import Sequence
from nanovllm.detokenizer import Detokenizer
from nanovllm.features.pooling.outputs import PoolingOutput, PoolingRequestOutput
from nanovllm.features.pooling.params import PoolingParams
from nanovllm.features.pooling.pooling_config import IDENTITY, SIGMOID, PoolingConfig, check_dimensions
from nanovllm.files.prompt_length import PromptTooLong
from nanovllm.outputs import RequestMetrics
from nanovllm.prompts import check_priority, parse_prompt, tokenize
from nanovllm.request import Request, Sample
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

logger = logging.getLogger("nanovllm")

SAMPLES_NOTHING = dict(temperature=0.0, max_tokens=1, seed=0, detokenize=False)
NOT_FINITE = "its hidden state holds NaN or infinity: the weights, or an adapter, have numbers that are too large"


@dataclass(frozen=True)
class Truncation:
    """How a text becomes tokens: how many of them are kept at most, and of which end.

    truncate_prompt_tokens   None: a prompt that is too long is refused; -1: as many as fit
    truncation_side          "right" keeps the first tokens, "left" the last; None: as the tokenizer says
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool = True

    @classmethod
    def of(cls, **given: Any) -> "Truncation":
        """Raises ValueError."""
        given = known_names(given, cls.__dataclass_fields__, "tokenization_kwargs")
        found = cls(**{name: value for name, value in given.items() if value is not None})
        if found.truncate_prompt_tokens is not None:
            check_number("truncate_prompt_tokens", found.truncate_prompt_tokens, Integral, -1)
        if found.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens=0 leaves no token; -1 keeps as many as fit")
        if found.truncation_side is not None:
            check_choice("truncation_side", found.truncation_side, ("left", "right"))
        check_switch("add_special_tokens", found.add_special_tokens)
        return found

    def num_kept(self, engine: "LLMEngine") -> int | None:
        """The most tokens that a prompt keeps; None: none is cut. Raises ValueError."""
        limit, num = engine.scheduler.max_model_len, self.truncate_prompt_tokens
        if num is not None and num > limit:
            raise ValueError(f"truncate_prompt_tokens={num} is more than max_model_len={limit}")
        return limit if num == -1 else num

    def side(self, engine: "LLMEngine") -> str:
        return str(self.truncation_side or getattr(engine.tokenizer, "truncation_side", "right"))

    def apply(self, engine: "LLMEngine", prompt: Any) -> tuple[list[int], str | None]:
        """(token ids, cache salt) of a prompt in any of its forms. Raises ValueError."""
        tokenizer, num_kept, side = engine.tokenizer, self.num_kept(engine), self.side(engine)
        special = partial(tokenizer, add_special_tokens=self.add_special_tokens)
        text, token_ids, salt = parse_prompt(special, prompt, *([engine.check_length] if num_kept is None else []))
        if num_kept is None or len(token_ids) <= num_kept:
            return token_ids, salt
        # As the tokenizers' own truncation, which is a setting that threads would share: special tokens stay.
        plain = token_ids if text is None else tokenize(tokenizer, text, add_special_tokens=False)
        num_special = len(token_ids) - len(plain)
        starts = (i for i in range(num_special + 1) if token_ids[i : i + len(plain)] == plain)
        if (start := next(starts, None)) is None or num_special >= num_kept:
            plain, num_special, start = token_ids, 0, 0
        num_plain = num_kept - num_special
        kept = plain[-num_plain:] if side == "left" else plain[:num_plain]
        return token_ids[:start] + kept + token_ids[start + len(plain) :], salt


def pooling_of(engine: "LLMEngine", what: str) -> PoolingConfig:
    """Raises ValueError for an LLM that generates. what: was asked of it."""
    if (pooling := engine.model_config.pooling) is None:
        raise ValueError(f"{what} needs an LLM that was built with runner='pooling' (--runner pooling); this generates")
    return pooling


class PoolingSample(Sample):
    @property
    def error(self) -> str:
        return NOT_FINITE if self.seq.finish_reason == "error" else ""


@dataclass
class PoolingRequest(Request):
    """Its one sample generates nothing."""

    pooling_params: PoolingParams = field(kw_only=True)
    pooling: PoolingConfig = field(kw_only=True)

    def add_tokens(self, chunk: ScheduledChunk, logprobs: list[Any], now: float) -> None:
        """The step has computed its last token, and pooled."""
        assert self.pooled is not None
        if not bool(self.pooled.isfinite().all()):
            chunk.seq.finish_reason = "error"
            logger.warning("request %s ends with an error: %s", self.request_id, self.samples[0].error)
        self.metrics.first_token_time = self.metrics.last_token_time = now

    def output(self) -> Any:
        import torch

        seq = self.samples[0].seq
        error = "the request was aborted" if seq.finish_reason == "abort" else self.samples[0].error or None
        is_there = self.pooled is not None and seq.finish_reason == "stop"
        data = torch.empty(0, dtype=torch.float32, device="cpu")
        if is_there:
            data = activated(self.pooled, self.pooling_params, self.pooling)
        cached = self.num_cached_tokens or 0
        return PoolingRequestOutput(
            self.request_id, PoolingOutput(data), self.prompt_token_ids, cached, self.finished, error
        )


def make_request(
    engine: "LLMEngine",
    prompt: Any,
    params: PoolingParams | None = None,
    lora_request: Any = None,
    truncation: Truncation = Truncation(),
    request_id: str | None = None,
    task: str | None = None,
    priority: int | None = None,
) -> PoolingRequest:
    """Check and tokenize one prompt; LLMEngine.enqueue() takes it from there. Raises ValueError."""
    pooling = pooling_of(engine, "a request for an embedding or a score")
    if not isinstance(request_id, str | None):
        raise ValueError(f"request_id must be a string, found {shorten(request_id)}")
    params = check_params(params, pooling, task, engine.model_config.hidden_size)
    token_ids, salt = truncation.apply(engine, prompt)
    limit, vocab_size = engine.scheduler.max_model_len, engine.model_config.vocab_size
    if not 0 < len(token_ids) <= limit:
        what = f"a prompt must have 1 to {limit} tokens (max_model_len), found {len(token_ids)}"
        raise PromptTooLong(f"{what}; truncate_prompt_tokens=-1 cuts it", limit) if token_ids else ValueError(what)
    check_range("a token id of the prompt", token_ids, 0, vocab_size - 1)
    priority = check_priority(priority, engine.config.scheduling_policy)
    adapter = None if lora_request is None else engine.known_adapters.check(lora_request)
    nothing = SamplingParams(**SAMPLES_NOTHING)
    lora_id = None if adapter is None else adapter.lora_id
    seq = Sequence(pooling.without_padding(token_ids), nothing, cache_salt=salt, lora_id=lora_id)
    seq.priority, seq.is_pooling = priority, True
    if adapter is not None:
        seq.parts["adapter"] = adapter
    return PoolingRequest(
        request_id=request_id or "",
        prompt=None,
        prompt_token_ids=token_ids,
        params=nothing,
        samples=[PoolingSample(seq, Detokenizer(engine.tokenizer, nothing))],
        stream=False,
        metrics=RequestMetrics(arrival_time=time.perf_counter()),
        pooling_params=params,
        pooling=pooling,
    )


def check_params(
    params: PoolingParams | None, pooling: PoolingConfig, task: str | None, hidden_size: int
) -> PoolingParams:
    """A copy in which nothing is None but what stays so. task: that of the method which was called."""
    if not isinstance(params, PoolingParams | None):
        raise ValueError(f"pooling_params must be a PoolingParams, found {type(params).__name__}")
    params = PoolingParams() if params is None else PoolingParams(**vars(params))
    asked = task or params.task or pooling.task
    if params.task not in (None, asked) or asked != pooling.task:
        wrong = params.task if asked == pooling.task else asked
        way = "built without a score head: it embeds" if pooling.task == "embed" else "built to classify"
        hint = "classify" if pooling.task == "embed" else "embed"
        raise ValueError(f"task {wrong!r} is asked of an LLM that was {way}; convert={hint!r} builds the other kind")
    params.task = pooling.task
    if params.use_activation is None:
        params.use_activation = pooling.use_activation
    if pooling.task == "classify" and params.dimensions is not None:
        raise ValueError(f"dimensions={params.dimensions} are an embedding's, and this LLM classifies; leave them out")
    params.dimensions = pooling.dimensions if params.dimensions is None else params.dimensions
    check_dimensions(params.dimensions, pooling.allowed, hidden_size)
    return params


def activated(pooled: Any, params: PoolingParams, pooling: PoolingConfig) -> Any:
    """What the request asked for, of one row of the head: float32 [dimensions] or [num_labels]."""
    data = pooled[: params.dimensions]
    if not params.use_activation:
        return data
    if pooling.task == "embed":
        return data / data.norm().clamp(min=1e-12)
    if pooling.activation == IDENTITY:
        return data
    return data.sigmoid() if pooling.activation == SIGMOID else data.softmax(-1)
