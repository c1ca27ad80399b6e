"""What a request in OpenAI's API is answered with: a body, whole or in chunks; of a batch job's line, its record."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nanovllm import CompletionOutput, RequestOutput
from nanovllm.features.logprobs.token_ends import TokenEnds
from nanovllm.features.reasoning.think import ReasoningCounter
from nanovllm.serving.openai.offsets import TextOffsets
from nanovllm.serving.openai.reading import Reader, Said, finish_reason
from nanovllm.serving.openai.shown import CHAT, COMPLETIONS, Shown

ReasoningCounters = dict[tuple[str, int], ReasoningCounter]  # (request id, index of the sample) -> of this choice


@dataclass(frozen=True, slots=True)
class Answer:
    """What one line got: a response body, or the reason why there is none. custom_id is None where it can't be read.

    warning: of what was asked for and left out; "" if nothing was.
    """

    line_number: int
    custom_id: str | None
    body: dict[str, Any] | None
    error: str | None = None
    warning: str = ""

    def record(self, record_id: str) -> dict[str, Any]:
        """The output line. `id` comes first: a resumed job looks there."""
        warning = {"warning": self.warning} if self.warning else {}
        response = {"status_code": 200, "request_id": record_id, "body": self.body} | warning if self.body else None
        error = {"code": "invalid_line", "message": self.error, "line": self.line_number} if self.error else None
        return {"id": record_id, "custom_id": self.custom_id, "response": response, "error": error}


def response_body(custom_id: str, url: str, model: str, shown: Shown, outputs: list[RequestOutput]) -> dict[str, Any]:
    """A chat completion or a text completion, as OpenAI's API gives it, with what vLLM adds to it."""
    choices = []
    pairs = [(output, sample) for output in outputs for sample in output.outputs]
    for index, (output, sample) in enumerate(pairs):
        logprobs, before = shown.logprobs(url, output, sample), shown.before_text(output)
        what: dict[str, Any] = {"text": before + sample.text}
        reason = sample.finish_reason
        if url == CHAT:
            fields, has_calls = shown.reading.message(sample.text, shown.has_nulls)
            if before:
                fields["content"] = before + (fields["content"] or "")
            what = {"message": {"role": "assistant"} | fields}
            reason = finish_reason(shown.reading, sample, has_calls)
        beside = shown.beside_choice(url, output, sample)
        choices.append({"index": index, **what, "logprobs": logprobs, **_ending(sample, reason), **beside})
    kind = "chat.completion" if url == CHAT else "text_completion"
    more = shown.prompt_fields(outputs[0]) if url == CHAT else {}
    return _head(custom_id, url, model, kind) | {"choices": choices, "usage": usage_of(outputs, shown, {})} | more


def usage_of(outputs: Iterable[RequestOutput], shown: Shown, counters: ReasoningCounters) -> dict[str, Any]:
    """Tokens in and out; of the latter, where a model's reasoning is looked for, those of it.

    counters: of the choices, added here. A stream keeps them, for they look only at what is new.
    """
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
    if (reasoning := shown.reading.reasoning) is not None:
        num_reasoning = 0
        for output in outputs:
            for sample in output.outputs:
                choice = output.request_id, sample.index
                if choice not in counters:
                    counters[choice] = ReasoningCounter(reasoning, shown.tokenizer)
                num_reasoning += counters[choice].count(sample.token_ids)
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return usage


class Chunks:
    """The same answer in pieces: outputs that grow become chunks that hold what is new.

    include_usage: a last chunk has it, as OpenAI's stream_options ask for. continuous_usage: then every chunk has that
    of its choice, as vLLM's do.
    """

    def __init__(
        self,
        answer_id: str,
        url: str,
        model: str,
        shown: Shown,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.url, self.shown = url, shown
        self.include_usage, self.continuous_usage = include_usage, include_usage and continuous_usage
        kind = "chat.completion.chunk" if url == CHAT else "text_completion"
        self._head = _head(answer_id, url, model, kind)
        self._num_read: dict[int, int] = {}  # choice -> characters
        self._num_sent: dict[int, int] = {}  # choice -> tokens
        self._readers: dict[int, Reader] = {}  # of choices whose text is not all content
        self._token_ends: dict[int, TokenEnds] = {}  # of choices whose logprobs go with their text
        self._text_offsets: dict[int, TextOffsets] = {}  # of completions with logprobs
        self._ended: set[int] = set()  # choices whose last chunk has been sent
        self._outputs: dict[int, RequestOutput] = {}  # by the place of their prompt
        self._counters: ReasoningCounters = {}

    def of(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Chunks with what this output has beyond the one before. place: of its prompt among those of the request."""
        self._outputs[place] = output
        for sample in output.outputs:
            index = place * len(output.outputs) + sample.index
            if index in self._ended:
                continue
            if sample.finished():
                self._ended.add(index)
            num_tokens = self._num_sent.get(index)
            has_tokens = len(sample.token_ids) > (num_tokens or 0)
            if self.shown.each_token and not has_tokens and not sample.finished():
                continue  # what there is of text goes with the next token
            news, reason = self._news(index, output, sample)
            if not self.shown.each_token and not news and not sample.finished():
                continue
            if self.url == CHAT and num_tokens is None:
                first = news[0] if news else Said({}, 0, 0)
                news = [first._replace(delta={"role": "assistant"} | first.delta), *news[1:]]
            head = self._head if self._num_sent else self._head | self.shown.beside_first_delta(self.url, output)
            more = {"usage": self._usage_of(output, sample)} if self.include_usage else {}
            name, nothing = ("delta", {}) if self.url == CHAT else ("text", "")
            *earlier, last = news or [Said(nothing, 0, 0)]
            for said in earlier:
                logprobs = self._logprobs_of(index, output, sample, said) if self.shown.by_text else None
                choice = {"index": index, name: said.delta, "logprobs": logprobs, "finish_reason": None}
                yield head | {"choices": [choice]} | more
            if self.shown.by_text:
                logprobs = self._logprobs_of(index, output, sample, last)
            else:
                offsets = self._text_offsets_of(index, output)
                logprobs = self.shown.logprobs(self.url, output, sample, num_tokens, offsets)
            beside = self.shown.beside_delta(self.url, output, sample, num_tokens)
            choice = {"index": index, name: last.delta, "logprobs": logprobs, **_ending(sample, reason), **beside}
            self._num_sent[index] = len(sample.token_ids)
            yield head | {"choices": [choice]} | more

    def _news(self, index: int, output: RequestOutput, sample: CompletionOutput) -> tuple[list[Said], str | None]:
        """What has come since the last time, each piece a delta's fields or a text; why the sample has ended.

        Nothing is returned twice: the caller has to send it.
        """
        is_first, reading = index not in self._num_read, self.shown.reading
        start = self._num_read.get(index, 0)
        text, before = sample.text[start:], self.shown.before_text(output) if is_first else ""
        self._num_read[index] = len(sample.text)
        if self.url != CHAT:
            return [Said(before + text, 0, 0)] if before + text else [], sample.finish_reason
        if reading.is_plain:
            is_shown = before + text or sample.finish_reason
            alone = Said({"content": before + text}, start, start + len(text))
            return [alone] if is_shown else [], sample.finish_reason
        if index not in self._readers:
            self._readers[index] = Reader(reading)
        reader = self._readers[index]
        said = [Said({"content": before}, 0, 0)] * bool(before) + reader.read(text, sample.finished())
        if not self.shown.by_text:  # the piece without text is there for its tokens
            said = [each for each in said if each.delta.get("content") != ""]
        return said, finish_reason(reading, sample, reader.has_called)

    def _logprobs_of(
        self, index: int, output: RequestOutput, sample: CompletionOutput, said: Said
    ) -> dict[str, Any] | None:
        """Those of the tokens that this piece of content is made of."""
        if self.shown.num_logprobs is None or "content" not in said.delta:
            return None
        if index not in self._token_ends:
            self._token_ends[index] = TokenEnds(self.shown.tokenizer, self.shown.params, output.prompt_token_ids)
        ends = self._token_ends[index]
        ends.grow(sample.token_ids, len(sample.text) if sample.finished() else None)
        return self.shown.logprobs_at(sample, ends.take(said.start, said.end))

    def _text_offsets_of(self, index: int, output: RequestOutput) -> TextOffsets | None:
        if self.url != COMPLETIONS or self.shown.num_logprobs is None:
            return None
        if index not in self._text_offsets:
            self._text_offsets[index] = self.shown.text_offsets(output)
        return self._text_offsets[index]

    def last(self) -> Iterator[dict[str, Any]]:
        if self.include_usage:
            yield self._head | {"choices": [], "usage": self._usage()}

    def _usage_of(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any] | None:
        """A chunk's: of its choice, so far."""
        if not self.continuous_usage:
            return None
        return usage_of([replace(output, outputs=[sample])], self.shown, self._counters)

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._outputs.values(), self.shown, self._counters)


def _head(answer_id: str, url: str, model: str, kind: str) -> dict[str, Any]:
    prefix = "cmpl" if url == COMPLETIONS else "chatcmpl"
    return {"id": f"{prefix}-{answer_id}", "object": kind, "created": int(time.time()), "model": model}


def _ending(sample: CompletionOutput, reason: str | None) -> dict[str, Any]:
    return {"finish_reason": reason, "stop_reason": sample.stop_reason}
