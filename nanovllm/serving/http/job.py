"""A request for an answer, from its body to its requests in the engine, and how its answer is shown."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from nanovllm.checks.values import shorten
from nanovllm.outputs import RequestOutput
from nanovllm.request import Request as EngineRequest
from nanovllm.serving.async_llm import AsyncLLM, OpensImages
from nanovllm.serving.http.access import check_request_id
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.responses import event
from nanovllm.serving.openai.answer import response_body
from nanovllm.serving.openai.fields import warning_headers, warning_of, without_unknown
from nanovllm.serving.openai.openai_request import MAX_SAMPLES, refuse_template, translate
from nanovllm.serving.openai.shown import Shown

Steps = AsyncGenerator[list[RequestOutput], None]


class Form:
    """What an endpoint makes of a body, and of the answer: here both stay as they are.

    unknown: fields that were left out, as a warning names them. by_text: whose logprobs a chunk has (Shown).
    """

    by_text = False

    def __init__(self, url: str, body: dict[str, Any], unknown: Iterable[str] = ()) -> None:
        self.url, self.body, self.unknown = url, body, unknown

    def made(self, job: "Job") -> None:
        """The job is made; called, as whole(), in a thread beside the event loop."""

    def whole(self, job: "Job", outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer as one body. outputs: the last of each request."""
        return response_body(job.answer_id, self.url, job.model, job.shown, outputs)

    def begin(self) -> str:
        """What a stream begins with."""
        return ""

    def chunk(self, chunk: dict[str, Any]) -> str:
        return event(chunk)

    def end(self) -> str:
        return "data: [DONE]\n\n"

    def failed(self, error: dict[str, Any]) -> str:
        """The end of a stream that has failed."""
        return event({"error": error}) + self.end()


class Job:
    """One call: its body, checked and translated; then its requests in the engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        form: Form,
        names: tuple[str, ...],
        tenant: str,
        is_wanted: Callable[[], bool] = lambda: True,
        options: ServeOptions = ServeOptions(),
        own_id: str = "",
        given_id: str = "",
    ) -> None:
        """In a thread beside the event loop. Raises ValueError, and ClientDisconnect when it is not wanted any more.

        own_id: nobody else's. given_id: the client's, which may come twice.
        """
        url, (body, unknown) = form.url, without_unknown(form.body)
        given_id = given_id or check_request_id(body.pop("request_id", ""))
        self.answer_id = given_id or own_id
        unique_id = f"{given_id}-{uuid.uuid4().hex[:8]}" if given_id else own_id
        self.stream, given = body.pop("stream", False), body.pop("stream_options", {})
        if not isinstance(self.stream, bool):
            raise ValueError(f"stream must be true or false, found {shorten(self.stream)}")
        if not isinstance(given, dict) or not all(isinstance(value, bool) for value in given.values()):
            raise ValueError(f"stream_options must be an object of true and false, found {shorten(given)}")
        if given and not self.stream:
            raise ValueError("stream_options needs stream: true")
        self.stream_options = given
        unknown = [*form.unknown, *unknown]
        if self.stream and body.get("prompt_logprobs") is not None:
            raise ValueError("prompt_logprobs are not available in a stream; leave out stream, or ask with echo")
        refuse_template(body)
        salt = body.get("cache_salt")
        if tenant and (salt is None or (salt and isinstance(salt, str))):
            body["cache_salt"] = tenant + (salt or "")  # a tenant's part has a fixed length: no two pairs look alike
        most = min(MAX_SAMPLES, llm.max_waiting or MAX_SAMPLES), options.max_logprobs
        translated = translate(llm.llm, url, body, names, *most, options.parsers)
        self.prompts, params, self.model, adapter, reading = translated
        self.headers = warning_headers(warning_of([*unknown, *reading.left_out]))
        how: dict[str, Any] = dict(
            ids_as_tokens=options.return_tokens_as_token_ids, has_nulls=True, reading=reading, by_text=form.by_text
        )
        self.form, self.shown = form, Shown.of(llm.llm.get_tokenizer(), url, body, params, **how)
        self.requests: list[EngineRequest] = []

        def make_request(place: int, prompt: Any) -> EngineRequest:
            if not is_wanted():
                raise ClientDisconnect
            # The page knows its card by the id.
            made: dict[str, Any] = dict(request_id=f"{unique_id}-{place}", stream=self.stream, compile_grammar=False)
            return llm.engine.make_request(prompt, params, adapter, body.get("priority"), **made)

        self._make_request = make_request

    def make_requests(self) -> list[EngineRequest]:
        """Open their images, check and tokenize the prompts. As the constructor."""
        self.requests = [self._make_request(place, prompt) for place, prompt in enumerate(self.prompts)]
        self.shown.check_size(self.requests)
        self.form.made(self)
        return self.requests


class Call:
    """A request for an answer, on its way: its job is made in the first of its steps."""

    job: Job

    def __init__(
        self,
        llm: AsyncLLM,
        names: tuple[str, ...],
        options: ServeOptions,
        request: Request,
        make_form: Callable[[], Form],
    ) -> None:
        self.is_wanted, self.is_made = True, asyncio.Event()
        loop, tenant = asyncio.get_running_loop(), getattr(request.state, "tenant", "")
        ids = request.state.request_id, request.headers.get("x-request-id", "")

        def make() -> list[EngineRequest] | OpensImages[list[EngineRequest]]:
            self.job = Job(llm, make_form(), names, tenant, lambda: self.is_wanted, options, *ids)
            return OpensImages.if_any(self.job.prompts, finish)

        def finish() -> list[EngineRequest]:
            requests = self.job.make_requests()
            request.state.request_id, request.state.requests = self.job.answer_id, requests
            loop.call_soon_threadsafe(self.is_made.set)
            return requests

        self.steps = llm.run(make, options.request_timeout)
