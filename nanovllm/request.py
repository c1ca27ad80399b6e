"""Request: a prompt and its samples while they are generated, up to the RequestOutput (chapter 2).

A request owns its samples; a sample owns its sequence, its text and its logprobs. Neither calls the scheduler; they
read its chunks.
"""

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanovllm import wings
from nanovllm.core.scheduler import ScheduledChunk
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.detokenizer import Detokenizer
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.features.callers.output_kind import OutputFilter
    from nanovllm.features.logprobs.scores import TokenLogprobs

logger = logging.getLogger("nanovllm")


@dataclass
class Sample:
    """One of the n continuations of a prompt. logprobs: one dict per token, if the request asked for them; their sum
    grows with them.

    The detokenizer gets each token as soon as it is accepted if there are stop strings to look for (from the scheduler,
    as seq.stop_checker); after each step if the text is read while it grows (add_tokens); otherwise all at the end.
    """

    seq: Sequence
    detokenizer: Detokenizer
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    @property
    def finished(self) -> bool:
        return self.seq.status is SequenceStatus.FINISHED

    @property
    def text(self) -> str:
        """The text that may be shown. While the sample runs, that is only the part that later tokens cannot change."""
        seq, params = self.seq, self.detokenizer.params
        if not params.detokenize:
            return ""
        if not self.finished:
            return self.detokenizer.visible_text()
        if isinstance(seq.stop_reason, str):  # a stop string: the detokenizer has cut the text there
            return self.detokenizer.text
        token_ids = seq.generated_token_ids
        if seq.ended_by_token and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self.detokenizer.whole_text(token_ids)

    @property
    def error(self) -> str:
        """Why it has ended with finish_reason "error"; "" if it has not."""
        if self.seq.finish_reason != "error":
            return ""
        reason = "".join(part.error for part in self.seq.parts.values())
        return reason or (
            "there is no token to choose: the logits hold NaN or infinity, or no token is allowed. With dtype='float16'"
            " the usual cause is overflow: hidden states exceed 65,504. Use 'bfloat16' or 'float32'"
        )

    def output(self, with_logprobs: bool) -> CompletionOutput:
        """Everything that the sample has so far."""
        seq = self.seq
        return CompletionOutput(
            index=seq.sample_index,
            text=self.text,
            token_ids=seq.generated_token_ids,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            cumulative_logprob=self.cumulative_logprob if with_logprobs else None,
            logprobs=list(self.logprobs) if with_logprobs else None,
        )


@dataclass
class Request:
    """A prompt, its samples, and what has been measured of them.

    request_id is "" until the request is queued, unless its caller has chosen one (LLMEngine.add_request). stream:
    step() returns an output for it after each token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[Sample]
    stream: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None  # prompt tokens found in the cache when sample 0 was first admitted
    pooled: "Tensor | None" = None  # with a pooling model: the embedding or scores, once the prompt has been computed
    output_filter: "OutputFilter | None" = None  # set if step() is to return something other than everything so far
    # One dict per prompt token. Nothing comes before the first token, so no logits say how likely it is.
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])

    @property
    def num_held_bytes(self) -> int:
        """Bytes that its prompt's parts, such as images, hold until it is finished."""
        return sum(part.num_bytes for part in self.samples[0].seq.parts.values())

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)

    @property
    def knows_prompt(self) -> bool:
        """Are the prompt's logprobs there, if they were asked for? Samples without them may overtake the first one."""
        return self.params.prompt_logprobs is None or len(self.prompt_logprobs) == len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(sample.seq.num_generated_tokens for sample in self.samples)

    @property
    def text_grows(self) -> bool:
        """Does somebody read its text while it grows? (Otherwise it is decoded once, at its end.)"""
        return self.stream and self.params.detokenize

    def mark_scheduled(self, seq: Sequence, now: float) -> None:
        """A step is about to work on this sequence. now: seconds of time.perf_counter()."""
        if seq.sample_index == 0 and self.metrics.first_scheduled_time is None:
            self.num_cached_tokens = seq.num_cached_tokens
            self.metrics.first_scheduled_time = now

    def add_tokens(self, chunk: ScheduledChunk, logprobs: "list[TokenLogprobs | None]", now: float) -> None:
        """Add the tokens that the scheduler has just appended to a sample to its text, logprobs and metrics.

        logprobs: an entry for each row of the chunk with logits; None if the request asks for no logprobs.
        """
        seq = chunk.seq
        sample = self.samples[seq.sample_index]
        new_token_ids = seq.tokens[chunk.known_end :]
        if self.text_grows and seq.stop_checker is None:
            shown_token_ids = new_token_ids[:-1] if seq.ended_by_token else new_token_ids
            sample.detokenizer.append(shown_token_ids)
        for token_logprobs in logprobs[: len(new_token_ids)]:  # rows after a rejected draft token are dropped
            if token_logprobs is not None:
                self._set_logprobs(sample.logprobs, seq.generated_token_ids, len(sample.logprobs), token_logprobs)
                sample.cumulative_logprob += token_logprobs.logprob
        if sample.error:
            logger.warning("request %s ends with an error: %s", self.request_id, sample.error.splitlines()[0])
        if seq.sample_index == 0 and new_token_ids:
            self.metrics.first_token_time = self.metrics.first_token_time or now
            self.metrics.last_token_time = now
            self.metrics.count(len(chunk.draft_token_ids), len(new_token_ids))

    def add_prompt_logprobs(self, position: int, token_logprobs: "TokenLogprobs") -> None:
        """Take in the logprobs of the prompt's token at this position. Those of earlier ones are known."""
        self._set_logprobs(self.prompt_logprobs, self.prompt_token_ids, position, token_logprobs)

    def _set_logprobs(
        self, entries: list, token_ids: list[int], position: int, token_logprobs: "TokenLogprobs"
    ) -> None:
        """Set entries[position] to the logprobs of token_ids[position], and drop any later entries.

        entries: the logprobs of a sample or of the prompt.
        """
        make_entries = wings.load("features.logprobs.entries").make_entries
        tokenizer = self.samples[0].detokenizer.tokenizer if self.params.detokenize else None
        del entries[position:]  # there are some if a prompt is computed again after a preemption or a failed step
        entries.append(make_entries(tokenizer, token_logprobs, token_ids, position))

    def roll_back(self, chunk: ScheduledChunk) -> None:
        """Undo what a failed step has added to the chunk's sequence, to its text and to its logprobs."""
        seq = chunk.seq
        sample = self.samples[seq.sample_index]
        if chunk.reaches_end:
            seq.truncate(chunk.known_end)
        if seq.sample_index == 0:
            num_counted = self.metrics.num_output_tokens - seq.num_generated_tokens  # by the step that has failed
            if num_counted > 0:
                self.metrics.count(len(chunk.draft_token_ids), num_counted, sign=-1)
            if seq.num_generated_tokens == 0:
                self.metrics.first_token_time = None
        del sample.logprobs[seq.num_generated_tokens :]
        sample.cumulative_logprob = 0.0
        for token_id, entries in zip(seq.generated_token_ids, sample.logprobs, strict=False):  # none if not asked for
            sample.cumulative_logprob += entries[token_id].logprob
        if self.output_filter is not None:
            self.output_filter.roll_back(seq.sample_index, seq.num_generated_tokens)
        sample.detokenizer.restart(seq.generated_token_ids)

    def filtered(self, output: RequestOutput) -> RequestOutput | None:
        """An output of this request in the form that its output_kind asks for. None if there is nothing to show."""
        return output if self.output_filter is None else self.output_filter.take(output)

    def output(self) -> RequestOutput:
        """Everything that the request has so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sample.output(with_logprobs=self.params.logprobs is not None) for sample in self.samples],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens or 0,
            metrics=replace(self.metrics),
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
        )


def prefix_order(request: Request) -> tuple[str, int, list[int]]:
    """The order in which the requests of one call are queued: those that may share K/V are neighbours."""
    seq = request.samples[0].seq
    return seq.cache_salt or "", seq.lora_id or 0, request.prompt_token_ids
