"""Lines of OpenAI's batch format: what a line asks for, and the object that answers it.

answer_lines() is the whole of a batch job apart from files: lines in, answers out, as they finish. `nanovllm run-batch`
runs it over a file, examples/ray_data_batch.py in the actors of a cluster.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from numbers import Integral
from typing import Any

import xxhash

from nanovllm import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from nanovllm.request import Request
from nanovllm.validation import check_number

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LINE_FIELDS = {"custom_id", "method", "url", "body"}
# Parameters handed on under their own names, and what else a body may hold. "user" asks nothing of the engine.
PASSED_ON = {f.name for f in fields(SamplingParams)} - {"logprobs"}
KNOWN = PASSED_ON | {"model", "user", "cache_salt", "logprobs"}
KNOWN_BY_URL = {
    CHAT: KNOWN | {"messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt"},
    COMPLETIONS: KNOWN | {"prompt"},
}
# Parameters that we don't have are fine at the value that means "no". None always does.
MEANS_NO: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "best_of": 1,
    "suffix": "",
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "use_beam_search": False,
    "length_penalty": 1.0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
MAX_SAMPLES = 1024  # of one line; one line must not eat the memory of all
MAX_LOGPROBS = 20  # OpenAI's and vLLM's limit
WINDOW_LINES, WINDOW_BYTES = 1024, 8_000_000


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


@dataclass(slots=True)
class _Line:
    """A line in the engine: a request for each of its prompts."""

    number: int
    custom_id: str
    url: str
    model: str
    num_logprobs: int | None
    requests: list[Request]
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def has_started(self) -> bool:
        return any(request.metrics.first_scheduled_time is not None for request in self.requests)


def answer_lines(
    llm: LLM,
    lines: Iterable[tuple[int, bytes]],
    served_names: tuple[str, ...] = (),
    *,
    claim_id: Callable[[str, int], None] = lambda custom_id, line_number: None,
    num_signals: Callable[[], int] = lambda: 0,
) -> Iterator[list[Answer]]:
    """Answer numbered lines; yields, after every step of the engine, the answers that it finished (perhaps none).

    Lines enter the engine a window at a time, as soon as the one before is nearly used up, so that memory stays
    bounded and the batch full. A window is admitted in prefix order (LLMEngine.enqueue). A line that cannot be run
    is answered by an error. A sample without a seed gets one from its line's custom_id, so that it depends neither on
    the lines beside it nor on where a job was interrupted.

    claim_id raises ValueError for a custom_id that an earlier line has. num_signals: 1 asks to finish what has started
    and leave the rest, 2 to drop all.
    """
    engine, source, more = llm.engine, iter(lines), True
    in_flight: dict[str, _Line] = {}
    try:
        while more or in_flight:
            if num_signals() > 1:
                return
            if num_signals():
                more = False
                for line in [line for line in in_flight.values() if not line.has_started()]:
                    _drop(llm, line, in_flight)
            answers: list[Answer] = []
            if more and len(engine.scheduler.waiting) < engine.config.max_num_seqs:
                # Read one by one: ids are claimed in the order of the lines.
                window = [_read_line(llm, *numbered, served_names, claim_id) for numbered in _window(source)]
                more = bool(window)
                answers = [line for line in window if isinstance(line, Answer)]
                owner = [(request, line) for line in window if isinstance(line, _Line) for request in line.requests]
                engine.enqueue([request for request, _ in owner])
                in_flight.update({request.request_id: line for request, line in owner})
            for output in engine.step():
                line = in_flight.pop(output.request_id)
                line.outputs[output.request_id] = output
                if len(line.outputs) == len(line.requests):
                    answers.append(Answer(line.number, line.custom_id, _response(line)))
            yield answers
    finally:
        for line in list(in_flight.values()):
            _drop(llm, line, in_flight)


def _drop(llm: LLM, line: _Line, in_flight: dict[str, _Line]) -> None:
    for request in line.requests:
        llm.engine.abort_request(request.request_id)
        in_flight.pop(request.request_id, None)


def _window(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    num_bytes = 0
    for number, raw in islice(lines, WINDOW_LINES):
        yield number, raw
        num_bytes += len(raw)
        if num_bytes > WINDOW_BYTES:
            return


# -- a line in --------------------------------------------------------------------------------------------------------


def _read_line(
    llm: LLM, number: int, raw: bytes, served_names: tuple[str, ...], claim_id: Callable[[str, int], None]
) -> _Line | Answer:
    """The line's requests, checked and not yet queued; or the error that answers it."""
    custom_id = None
    try:
        line = parse_json(raw)
        custom_id = read_custom_id(line)
        claim_id(custom_id, number)
        for name, wanted in (("method", ("POST",)), ("url", tuple(KNOWN_BY_URL))):
            if line.get(name) not in wanted:
                raise ValueError(f"{name} must be {' or '.join(wanted)}, found {line.get(name)!r:.80}")
        if unknown := line.keys() - LINE_FIELDS:
            raise ValueError(f"a line has custom_id, method, url and body, found also {', '.join(sorted(unknown))}")
        url, body = line["url"], line.get("body")
        if not isinstance(body, dict):
            raise ValueError(f"body must be an object, found {type(body).__name__}")
        prompts, params, model = _read_body(llm, url, body, served_names)
        if params.seed is None:
            noise = xxhash.xxh3_64_intdigest(custom_id.encode("utf-8", "surrogatepass"))
            params = replace(params, seed=llm.engine.config.seed * 1_000_003 + noise)
        requests = [llm.engine.make_request(prompt, params) for prompt in prompts]
        return _Line(number, custom_id, url, model, params.logprobs, requests)
    except ValueError as error:
        return Answer(number, custom_id, None, f"line {number}: {error}")


def parse_json(raw: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"a line must be a JSON object, found {type(value).__name__}")
    return value


def read_custom_id(line: dict[str, Any]) -> str:
    """Raises ValueError."""
    if not isinstance(custom_id := line.get("custom_id"), str):
        raise ValueError(f"custom_id must be a string, found {custom_id!r:.80}")
    return custom_id


def _read_body(
    llm: LLM, url: str, body: dict[str, Any], served_names: tuple[str, ...]
) -> tuple[list[Any], SamplingParams, str]:
    """(prompts, sampling parameters, the model's name in the answer). ValueError for what we cannot honour."""
    body = {k: v for k, v in body.items() if v is not None and not (k in MEANS_NO and v == MEANS_NO[k])}
    if unknown := body.keys() - KNOWN_BY_URL[url]:
        raise ValueError(
            f"this engine cannot honour {', '.join(sorted(unknown))}; "
            f"for {url} it takes: {', '.join(sorted(KNOWN_BY_URL[url]))}"
        )
    model = body.get("model", served_names[0] if served_names else "")
    if served_names and model not in served_names:
        raise ValueError(
            f"body.model is {model!r:.80}, and this job runs {served_names[0]}: leave body.model out, or let "
            "--served-model-name say that they are the same"
        )
    given = {name: body[name] for name in PASSED_ON & body.keys()}
    logprobs = body.get("logprobs")
    if url == CHAT:
        # A chat answer ends where the model ends it, if nobody says otherwise.
        limit = llm.engine.model_config.generation.get("max_tokens")
        given["max_tokens"] = body.get("max_completion_tokens", body.get("max_tokens", limit))
        if logprobs not in (None, True, False):
            raise ValueError(f"logprobs of a chat must be true or false, found {logprobs!r:.80}")
        if "top_logprobs" in body and not logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        logprobs = body.get("top_logprobs", 0) if logprobs else None
        if (add_generation_prompt := body.get("add_generation_prompt", True)) not in (True, False):
            raise ValueError(f"add_generation_prompt must be true or false, found {add_generation_prompt!r:.80}")
        messages = _plain_messages(body.get("messages"))
        prompts = [llm.chat_prompt(messages, add_generation_prompt, body.get("cache_salt"))]
    else:
        prompts = _prompts(body)
    if logprobs is not None:
        check_number("the number of logprobs", logprobs, Integral, 0, MAX_LOGPROBS)
    params = replace(llm.default_sampling_params(), **given, logprobs=logprobs)
    check_number("the number of samples (prompts times n)", params.n * len(prompts), Integral, 1, MAX_SAMPLES)
    return prompts, params, model


def _plain_messages(messages: Any) -> Any:
    """Content may be a list of parts; text is all we take. Whatever else is wrong, render_chat() says."""
    plain = []
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and isinstance(content := message.get("content"), list):
            if not all(
                isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content
            ):
                raise ValueError(f"message content may have parts of type text only, found {content!r:.80}")
            message = message | {"content": "\n".join(part["text"] for part in content)}
        plain.append(message)
    return plain or messages


def _prompts(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A string or a list of token ids is one prompt, a list of those is several."""
    if (prompt := body.get("prompt")) is None:
        raise ValueError("body has no prompt")
    several = isinstance(prompt, list) and bool(prompt) and all(isinstance(p, str | list) for p in prompt)
    salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
    names = {True: "prompt_token_ids", False: "prompt"}
    return [{names[isinstance(p, list)]: p} | salt for p in (prompt if several else [prompt])]


# -- an answer out ----------------------------------------------------------------------------------------------------


def _response(line: _Line) -> dict[str, Any]:
    """A chat completion or a text completion, as OpenAI's API gives it, with vLLM's stop_reason."""
    outputs = [line.outputs[request.request_id] for request in line.requests]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    make_choice = _chat_choice if line.url == CHAT else _completion_choice
    samples = [sample for output in outputs for sample in output.outputs]
    return {
        "id": f"{'chatcmpl' if line.url == CHAT else 'cmpl'}-{line.custom_id}",
        "object": "chat.completion" if line.url == CHAT else "text_completion",
        "created": int(time.time()),
        "model": line.model,
        "choices": [
            {"index": index, **make_choice(sample, line.num_logprobs)}
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
        token = logprob.decoded_token
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
        offset += len(chosen.decoded_token)
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
