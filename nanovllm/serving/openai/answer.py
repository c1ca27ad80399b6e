"""What a request in OpenAI's API is answered with: a body, whole or in chunks; of a batch job's line, its record."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nanovllm import CompletionOutput, RequestOutput
from nanovllm.serving.openai.shown import CHAT, COMPLETIONS, Shown


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


def response_body(
    custom_id: str, url: str, model: str, shown: Shown | None, outputs: list[RequestOutput]
) -> dict[str, Any]:
    """A chat completion or a text completion, as OpenAI's API gives it, with what vLLM adds to it."""
    choices, shown = [], shown or Shown()
    outputs = list(map(shown.cut, outputs))
    pairs = [(output, sample) for output in outputs for sample in output.outputs]
    for index, (output, sample) in enumerate(pairs):
        logprobs, text = shown.logprobs(url, output, sample), shown.before_text(output) + sample.text
        message = {"message": {"role": "assistant", "content": text, "refusal": None}}
        what = message if url == CHAT else {"text": text}
        beside = shown.beside_choice(url, output, sample)
        choices.append({"index": index, **what, "logprobs": logprobs, **_ending(sample), **beside})
    kind = "chat.completion" if url == CHAT else "text_completion"
    more = shown.of_prompt(outputs[0]) if url == CHAT else {}
    return _head(custom_id, url, model, kind) | {"choices": choices, "usage": usage_of(outputs)} | more


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


class Chunks:
    """The same answer in pieces: outputs that grow become chunks that hold what is new.

    include_usage: a last chunk has it, as OpenAI's stream_options ask for; continuous_usage: every chunk, as vLLM's do.
    """

    def __init__(
        self,
        answer_id: str,
        url: str,
        model: str,
        shown: Shown | None,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.url, self.shown = url, shown or Shown()
        self.include_usage, self.continuous_usage = include_usage, continuous_usage
        kind = "chat.completion.chunk" if url == CHAT else "text_completion"
        self._head = _head(answer_id, url, model, kind)
        self._sent: dict[int, tuple[int, int]] = {}  # choice -> characters and tokens
        self._ended: set[int] = set()  # choices whose last chunk has been sent
        self._outputs: dict[int, RequestOutput] = {}  # by the place of their prompt

    def of(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Chunks with what this output has beyond the one before. place: of its prompt among those of the request."""
        self._outputs[place] = output = self.shown.cut(output)
        usage = usage_of(self._outputs.values()) if self.continuous_usage else None
        for sample in output.outputs:
            index = place * len(output.outputs) + sample.index
            if index in self._ended:
                continue
            if sample.finished():
                self._ended.add(index)
            num_chars, num_tokens = self._sent.get(index, (0, 0))
            text, is_first = sample.text[num_chars:], index not in self._sent
            is_new = len(sample.token_ids) > num_tokens if self.shown.each_token else bool(text)
            if not is_new and sample.finish_reason is None:
                continue
            if is_first:
                text = self.shown.before_text(output) + text
            role = {"role": "assistant"} if is_first else {}
            what = {"delta": role | {"content": text}} if self.url == CHAT else {"text": text}
            sent = self.url, output, sample, None if is_first else num_tokens
            beside = self.shown.beside_delta(*sent)
            choice = {"index": index, **what, "logprobs": self.shown.logprobs(*sent), **_ending(sample), **beside}
            head = self._head if self._sent else self._head | self.shown.beside_first_delta(self.url, output)
            self._sent[index] = len(sample.text), len(sample.token_ids)
            yield head | {"choices": [choice]} | ({"usage": usage} if self.include_usage else {})

    def last(self) -> Iterator[dict[str, Any]]:
        if self.include_usage:
            yield self._head | {"choices": [], "usage": usage_of(self._outputs.values())}


def _head(answer_id: str, url: str, model: str, kind: str) -> dict[str, Any]:
    prefix = "cmpl" if url == COMPLETIONS else "chatcmpl"
    return {"id": f"{prefix}-{answer_id}", "object": kind, "created": int(time.time()), "model": model}


def _ending(sample: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
