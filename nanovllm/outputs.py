"""What a request gives back. Shaped like vLLM's classes of the same names."""

from dataclasses import dataclass
from typing import Any

from nanovllm.stats import TokenCounts


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token under the logits as they are before sampling parameters change them, but after a
    grammar's mask. rank 1 is the most likely token.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    token_ids includes the token that ended the sequence; text does not, unless include_stop_str_in_output.
    finish_reason is None while the sample runs, then "stop", "length", "abort" or "error". After "stop", stop_reason is
    the stop string or token id, or None for EOS. logprobs holds one dict per generated token, {token_id: Logprob}, and
    cumulative_logprob is their sum over the chosen tokens.

    "error" ends a sample that cannot go on: its logits hold NaN or infinity (damaged weights, an adapter with huge
    numbers), no token is allowed, its grammar has grown beyond llguidance's limits, or one of its logits_processors
    has raised. The tokens before the error are kept, a warning in the log says why, and other samples and requests go
    on. The server answers such a request with an error (status 500; 400 for a grammar), a batch job with an error
    record.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics(TokenCounts):
    """Points in time of a request, in seconds of time.perf_counter(); None until they have happened.

    The counters are those of the first sample: its output tokens, the draft tokens that were computed, and the draft
    tokens that became output, but for one that ended the sequence (chapter 13).
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def queue_time_s(self) -> float | None:
        """Seconds between arrival and the first step that worked on the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: seconds between arrival and the first token of the first sample."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, in seconds, of the first sample; None below two tokens."""
        if self.first_token_time is None or self.last_token_time is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its samples so far. prompt is None if token ids were given.

    num_cached_tokens: prompt tokens found in the prefix cache when sample 0 was first admitted. vLLM reports the number
    for the sample that ends last, which found what sample 0 had just computed; ours says what the prompt cost.
    prompt_logprobs: one dict per prompt token, like a sample's logprobs; None for the first token.

    output["text"] and output["token_ids"] are those of sample 0: nano-vllm's generate() returns a dict of these two.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    __iter__ = None  # without this, Python would iterate by calling __getitem__ with 0, 1, 2 ...

    def __getitem__(self, key: str) -> Any:
        if key not in ("text", "token_ids"):
            raise KeyError(f"{key!r}: a RequestOutput has the keys 'text' and 'token_ids'; all else is an attribute")
        return getattr(self.outputs[0], key)
