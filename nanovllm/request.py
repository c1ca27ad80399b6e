"""Request: a prompt and its samples while they are generated, up to the RequestOutput (chapter 2).

A request owns its samples; a sample owns its sequence, its text and its logprobs. Neither knows the scheduler.
"""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.core.scheduler import ScheduledChunk
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.detokenizer import Detokenizer
from nanovllm.features.logprobs.entries import MAX_BYTES, make_entries
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger("nanovllm")


@dataclass
class Sample:
    """One of the n continuations of a prompt. logprobs: one dict a token, if the request asked for them."""

    seq: Sequence
    detokenizer: Detokenizer
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What may be shown: while the sample runs, only what later tokens cannot change."""
        seq, params = self.seq, self.detokenizer.params
        if not params.detokenize:
            return ""
        if seq.status is not SequenceStatus.FINISHED:
            return self.detokenizer.visible_text()
        if isinstance(seq.stop_reason, str):  # a stop string: the detokenizer has cut the text there
            return self.detokenizer.text
        is_cut = seq.ended_by_token and not params.include_stop_str_in_output
        return self.detokenizer.whole_text(seq.generated_token_ids[: -1 if is_cut else None])

    def take_logprobs(self, found: Any) -> None:
        """found: the sampler's TokenLogprobs of the first token that has none yet."""
        *before, token_id = self.seq.generated_token_ids[: len(self.logprobs) + 1][-MAX_BYTES - 1 :]
        tokenizer = self.detokenizer.tokenizer if self.detokenizer.params.detokenize else None
        self.logprobs.append(make_entries(tokenizer, found, token_id, before))

    def output(self, with_logprobs: bool) -> CompletionOutput:
        seq, logprobs, total = self.seq, None, None
        if with_logprobs:
            logprobs = list(self.logprobs)
            total = sum(entries[t].logprob for t, entries in zip(seq.generated_token_ids, logprobs, strict=True))
        ended = seq.finish_reason, seq.stop_reason
        return CompletionOutput(seq.sample_index, self.text, seq.generated_token_ids, *ended, total, logprobs)


@dataclass
class Request:
    """request_id is "" until it is queued. stream: somebody reads its text while it grows."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[Sample]
    stream: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None  # of the first admission of sample 0
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])  # the first has none

    @property
    def finished(self) -> bool:
        return all(sample.seq.status is SequenceStatus.FINISHED for sample in self.samples)

    def note_scheduled(self, seq: Sequence, now: float) -> None:
        """A step is about to work on this sequence. now: seconds of time.perf_counter()."""
        if seq.sample_index == 0 and self.num_cached_tokens is None:
            self.num_cached_tokens = seq.num_cached_tokens
            self.metrics.first_scheduled_time = now

    def take_tokens(self, chunk: ScheduledChunk, logprobs: list[Any], now: float) -> str | None:
        """Let the text grow by the tokens that a chunk gave, note their time, keep their logprobs.

        logprobs: a TokenLogprobs or None for each, and for guesses that did not hold. Returns the stop string that the
        text now ends with, if there is one; tokens behind it are dropped.
        """
        seq, sample, stop = chunk.seq, self.samples[chunk.seq.sample_index], None
        # Text that nobody reads while it grows is decoded once, at the end.
        if (self.stream and self.params.detokenize) or self.params.stop:
            stop = sample.detokenizer.append(seq.tokens[chunk.known_end : -1 if seq.ended_by_token else None])
            if stop is not None:
                del seq.tokens[seq.num_prompt_tokens + sample.detokenizer.num_tokens :]
        num_taken = len(seq.tokens) - chunk.known_end
        for found in filter(None, logprobs[:num_taken]):
            sample.take_logprobs(found)
        if seq.error:
            logger.warning("request %s ends with an error: %s", self.request_id, seq.error.splitlines()[0])
        if seq.sample_index == 0 and num_taken:
            self.metrics.first_token_time = self.metrics.first_token_time or now
            self.metrics.last_token_time = now
            self.metrics.count(len(chunk.guesses), num_taken)
        return stop

    def take_prompt_logprobs(self, position: int, found: Any) -> None:
        """found: the TokenLogprobs of the prompt's token at this position. Taken in order, or again from the first."""
        tokenizer = self.samples[0].detokenizer.tokenizer if self.params.detokenize else None
        *before, token_id = self.prompt_token_ids[max(0, position - MAX_BYTES) : position + 1]
        del self.prompt_logprobs[position:]
        self.prompt_logprobs.append(make_entries(tokenizer, found, token_id, before))

    def roll_back(self, chunk: ScheduledChunk) -> None:
        """The step that gave the newest tokens failed, and they are gone: so are their text, logprobs and counts."""
        seq, sample = chunk.seq, self.samples[chunk.seq.sample_index]
        num_lost = self.metrics.num_output_tokens - seq.num_generated_tokens
        if seq.sample_index == 0 and num_lost > 0:
            self.metrics.count(len(chunk.guesses), num_lost, sign=-1)
        del sample.logprobs[seq.num_generated_tokens :]
        if self.stream or self.params.stop:
            sample.detokenizer.restart(seq.generated_token_ids)

    def output(self) -> RequestOutput:
        """What there is so far."""
        completions = [sample.output(self.params.logprobs is not None) for sample in self.samples]
        prompt = self.request_id, self.prompt, self.prompt_token_ids
        counters = self.num_cached_tokens or 0, replace(self.metrics)
        prompt_logprobs = None if self.params.prompt_logprobs is None else list(self.prompt_logprobs)
        return RequestOutput(*prompt, completions, self.finished, *counters, prompt_logprobs)


def prefix_order(request: Request) -> tuple[str, int, list[int]]:
    """Requests that may share K/V are neighbours in this order."""
    seq = request.samples[0].seq
    return seq.cache_salt or "", seq.lora_id or 0, request.prompt_token_ids
