"""What a request in OpenAI's API is answered with: a body, whole or in chunks; of a batch job's line, its record."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from nanovllm import CompletionOutput, Logprob, RequestOutput

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one line got: a response body, or the reason why there is none. custom_id is None where it can't be read."""

    line_number: int
    custom_id: str | None
    body: dict[str, Any] | None
    error: str | None = None

    def record(self, record_id: str) -> dict[str, Any]:
        """The output line. `id` comes first: a resumed job looks there."""
        response = {"status_code": 200, "request_id": record_id, "body": self.body} if self.body else None
        error = {"code": "invalid_line", "message": self.error, "line": self.line_number} if self.error else None
        return {"id": record_id, "custom_id": self.custom_id, "response": response, "error": error}


def response_body(
    custom_id: str, url: str, model: str, num_logprobs: int | None, outputs: list[RequestOutput]
) -> dict[str, Any]:
    """A chat completion or a text completion, as OpenAI's API gives it, with vLLM's stop_reason."""
    choices = []
    for index, sample in enumerate(sample for output in outputs for sample in output.outputs):
        logprobs = _logprobs(url, sample, num_logprobs)
        message = {"message": {"role": "assistant", "content": sample.text, "refusal": None}}
        what = message if url == CHAT else {"text": sample.text}
        choices.append({"index": index, **what, "logprobs": logprobs, **_ending(sample)})
    kind = "chat.completion" if url == CHAT else "text_completion"
    return _head(custom_id, url, model, kind) | {"choices": choices, "usage": usage_of(outputs)}


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
        num_logprobs: int | None,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.url, self.num_logprobs = url, num_logprobs
        self.include_usage, self.continuous_usage = include_usage, continuous_usage
        kind = "chat.completion.chunk" if url == CHAT else "text_completion"
        self._head = _head(answer_id, url, model, kind)
        self._sent: dict[int, tuple[int, int]] = {}  # choice -> characters and tokens
        self._ended: set[int] = set()  # choices whose last chunk has been sent
        self._outputs: dict[int, RequestOutput] = {}  # by the place of their prompt

    def of(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Chunks with what this output has beyond the one before. place: of its prompt among those of the request."""
        self._outputs[place] = output
        usage = usage_of(self._outputs.values()) if self.continuous_usage else None
        for sample in output.outputs:
            index = place * len(output.outputs) + sample.index
            if index in self._ended:
                continue
            if sample.finished():
                self._ended.add(index)
            num_chars, num_tokens = self._sent.get(index, (0, 0))
            text = sample.text[num_chars:]
            is_new = len(sample.token_ids) > num_tokens if self.num_logprobs is not None else bool(text)
            if not is_new and sample.finish_reason is None:
                continue
            role = {} if index in self._sent else {"role": "assistant"}
            what = {"delta": role | {"content": text}} if self.url == CHAT else {"text": text}
            logprobs = _logprobs(self.url, sample, self.num_logprobs, num_tokens)
            self._sent[index] = len(sample.text), len(sample.token_ids)
            choice = {"index": index, **what, "logprobs": logprobs, **_ending(sample)}
            yield self._head | {"choices": [choice]} | ({"usage": usage} if self.include_usage else {})

    def last(self) -> Iterator[dict[str, Any]]:
        if self.include_usage:
            yield self._head | {"choices": [], "usage": usage_of(self._outputs.values())}


def _head(answer_id: str, url: str, model: str, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if url == CHAT else "cmpl"
    return {"id": f"{prefix}-{answer_id}", "object": kind, "created": int(time.time()), "model": model}


def _ending(sample: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}


def _logprobs(url: str, sample: CompletionOutput, num_top: int | None, first: int = 0) -> dict[str, Any] | None:
    """Those of the tokens from the first on. num_top: how many of the likeliest beside each; None: no logprobs."""
    if num_top is None:
        return None
    found = list(zip(sample.token_ids, sample.logprobs or [], strict=True))
    rows = [(entries[t], sorted(entries.values(), key=lambda e: e.rank)[:num_top]) for t, entries in found[first:]]
    if url == CHAT:
        return {"content": [_entry(chosen) | {"top_logprobs": list(map(_entry, top))} for chosen, top in rows]}
    lengths = (len(entries[token].decoded_token or "") for token, entries in found)
    return {
        "tokens": [chosen.decoded_token for chosen, _ in rows],
        "token_logprobs": [chosen.logprob for chosen, _ in rows],
        # Of tokens that look alike (pieces of a character) the last one stays: the chosen, else the most likely.
        "top_logprobs": [{e.decoded_token: e.logprob for e in [*reversed(top), chosen]} for chosen, top in rows],
        "text_offset": list(accumulate(lengths, initial=0))[first:-1],
    }


def _entry(logprob: Logprob) -> dict[str, Any]:
    token = logprob.decoded_token or ""
    return {"token": token, "logprob": logprob.logprob, "bytes": list(token.encode())}
