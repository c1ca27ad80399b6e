"""What a line of a batch job is answered with: a body of OpenAI's API, or an error."""

import time
from dataclasses import dataclass
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
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    make_choice = _chat_choice if url == CHAT else _completion_choice
    samples = [sample for output in outputs for sample in output.outputs]
    return {
        "id": f"{'chatcmpl' if url == CHAT else 'cmpl'}-{custom_id}",
        "object": "chat.completion" if url == CHAT else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {"index": index, **make_choice(sample, num_logprobs)}
            | {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
            for index, sample in enumerate(samples)
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        },
    }


def _chat_choice(sample: CompletionOutput, num_top: int | None) -> dict[str, Any]:
    def entry(logprob: Logprob) -> dict[str, Any]:
        token = logprob.decoded_token or ""
        return {"token": token, "logprob": logprob.logprob, "bytes": list(token.encode())}

    message = {"role": "assistant", "content": sample.text, "refusal": None}
    content = [entry(chosen) | {"top_logprobs": [entry(e) for e in top]} for chosen, top in _logprobs(sample, num_top)]
    return {"message": message, "logprobs": None if num_top is None else {"content": content}}


def _completion_choice(sample: CompletionOutput, num_top: int | None) -> dict[str, Any]:
    if num_top is None:
        return {"text": sample.text, "logprobs": None}
    rows, offsets, offset = _logprobs(sample, num_top), [], 0
    for chosen, _ in rows:
        offsets.append(offset)
        offset += len(chosen.decoded_token or "")
    logprobs = {
        "tokens": [chosen.decoded_token for chosen, _ in rows],
        "token_logprobs": [chosen.logprob for chosen, _ in rows],
        # The least likely first: of tokens that look alike (pieces of a character), the most likely one stays.
        "top_logprobs": [{entry.decoded_token: entry.logprob for entry in reversed(top)} for _, top in rows],
        "text_offset": offsets,
    }
    return {"text": sample.text, "logprobs": logprobs}


def _logprobs(sample: CompletionOutput, num_top: int | None) -> list[tuple[Logprob, list[Logprob]]]:
    """For each token: it, and the most likely ones at its position."""
    rows = zip(sample.token_ids, sample.logprobs or [], strict=sample.logprobs is not None)
    return [(entries[token], sorted(entries.values(), key=lambda e: e.rank)[: num_top or 0]) for token, entries in rows]
