"""Request: a prompt and its samples while they are generated, up to the RequestOutput (chapter 2).

A request owns its samples; a sample owns its sequence, its text and its logprobs. Neither knows the scheduler.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.detokenizer import Detokenizer, decode
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams


@dataclass
class Sample:
    """One of the n continuations of a prompt. logprobs: one dict a token, if the request asked for them."""

    seq: Sequence
    detokenizer: Detokenizer
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What may be shown: while the sample runs, only what later tokens cannot change."""
        if self.seq.status is not SequenceStatus.FINISHED:
            return self.detokenizer.visible_text()
        if isinstance(self.seq.stop_reason, str):  # a stop string: the detokenizer has cut the text there
            return self.detokenizer.text
        ids = self.seq.generated_token_ids
        return decode(self.detokenizer.tokenizer, ids[:-1] if self.seq.finish_reason == "stop" else ids)

    def take_logprobs(self, found: Any) -> None:
        """found: the sampler's TokenLogprobs of the newest token."""

        def entry(token_id: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, decode(self.detokenizer.tokenizer, [token_id]))

        chosen = self.seq.tokens[-1]
        entries = {chosen: entry(chosen, found.logprob, found.rank)}
        for rank, (token_id, logprob) in enumerate(zip(found.top_token_ids, found.top_logprobs, strict=True), start=1):
            if token_id != chosen:
                entries[token_id] = entry(token_id, logprob, rank)
        self.logprobs.append(entries)

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

    @property
    def finished(self) -> bool:
        return all(sample.seq.status is SequenceStatus.FINISHED for sample in self.samples)

    def note_scheduled(self, seq: Sequence, now: float) -> None:
        """A step is about to work on this sequence. now: seconds of time.perf_counter()."""
        if seq.sample_index == 0 and self.num_cached_tokens is None:
            self.num_cached_tokens = seq.num_cached_tokens
            self.metrics.first_scheduled_time = now

    def take_token(self, seq: Sequence, token_logprobs: Any, now: float) -> str | None:
        """Note the time of the sequence's newest token, keep its logprobs (a TokenLogprobs or None), let its text grow.

        Returns the stop string that the text now ends with, if there is one.
        """
        sample = self.samples[seq.sample_index]
        if seq.sample_index == 0:
            self.metrics.first_token_time = self.metrics.first_token_time or now
            self.metrics.last_token_time = now
            self.metrics.num_output_tokens = seq.num_generated_tokens
        if token_logprobs is not None:
            sample.take_logprobs(token_logprobs)
        # Text that nobody reads while it grows is decoded once, at the end.
        if not (self.stream or self.params.stop) or seq.finish_reason == "stop":
            return None
        return sample.detokenizer.append([seq.tokens[-1]])

    def roll_back(self, seq: Sequence) -> None:
        """The step that sampled the newest token failed, and the token is gone: so are its text and its logprobs."""
        sample = self.samples[seq.sample_index]
        del sample.logprobs[seq.num_generated_tokens :]
        if self.stream or self.params.stop:
            sample.detokenizer.restart(seq.generated_token_ids)

    def output(self) -> RequestOutput:
        """What there is so far."""
        completions = [sample.output(self.params.logprobs is not None) for sample in self.samples]
        prompt = self.request_id, self.prompt, self.prompt_token_ids
        return RequestOutput(*prompt, completions, self.finished, self.num_cached_tokens or 0, replace(self.metrics))
