"""A request for an answer, from its body to its requests in the engine, and how its answer is shown."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from nanovllm.checks.values import check_switch, shorten
from nanovllm.outputs import RequestOutput
from nanovllm.request import Request as EngineRequest
from nanovllm.serving.async_llm import AsyncLLM, OpensImages
from nanovllm.serving.http.access import take_ids
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.requests import event
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
        options: ServeOptions,
        *,
        own_id: str,
        given_id: str,
        is_wanted: Callable[[], bool],
    ) -> None:
        """In a thread beside the event loop. Raises ValueError.

        own_id: nobody else's. given_id: the client's, which may come twice.
        """
        body, unknown = without_unknown(form.body)
        self.answer_id, self._unique_id = take_ids(body, given_id, own_id)
        self.stream = check_switch("stream", body.pop("stream", False))
        self.stream_options = _stream_options(body.pop("stream_options", {}), self.stream)
        if self.stream and body.get("prompt_logprobs") not in (None, 0):  # vLLM takes 0, and shows none, either
            raise ValueError("prompt_logprobs are not available in a stream; leave out stream, or ask with echo")
        refuse_template(body)
        _add_tenant(body, tenant)
        self._asked = translate(
            llm.llm,
            form.url,
            body,
            names,
            max_samples=min(MAX_SAMPLES, llm.max_waiting or MAX_SAMPLES),
            max_logprobs=options.max_logprobs,
            parsers=options.parsers,
        )
        self.shown = Shown.of(
            llm.llm.get_tokenizer(),
            form.url,
            body,
            self._asked.params,
            ids_as_tokens=options.return_tokens_as_token_ids,
            has_nulls=True,
            reading=self._asked.reading,
            by_text=form.by_text,
        )
        self.headers = warning_headers(warning_of([*form.unknown, *unknown, *self._asked.reading.left_out]))
        self.form = form
        self.model = self._asked.model
        self.prompts = self._asked.prompts
        self.requests: list[EngineRequest] = []
        self._llm = llm
        self._priority = body.get("priority")
        self._is_wanted = is_wanted

    def make_requests(self) -> list[EngineRequest]:
        """Open their images, check and tokenize the prompts. As the constructor.

        ClientDisconnect when it is not wanted any more.
        """
        self.requests = [self._make_request(place, prompt) for place, prompt in enumerate(self.prompts)]
        self.shown.check_size(self.requests)
        self.form.made(self)
        return self.requests

    def _make_request(self, place: int, prompt: Any) -> EngineRequest:
        if not self._is_wanted():
            raise ClientDisconnect
        return self._llm.engine.make_request(
            prompt,
            self._asked.params,
            self._asked.adapter,
            self._priority,
            request_id=f"{self._unique_id}-{place}",  # the page knows its card by it
            stream=self.stream,
            compile_grammar=False,
        )


def _stream_options(given: Any, is_stream: bool) -> dict[str, bool]:
    """Raises ValueError."""
    if not isinstance(given, dict) or not all(isinstance(value, bool) for value in given.values()):
        raise ValueError(f"stream_options must be an object of true and false, found {shorten(given)}")
    if given and not is_stream:
        raise ValueError("stream_options needs stream: true")
    return given


def _add_tenant(body: dict[str, Any], tenant: str) -> None:
    """Before the client's own salt. What is wrong with that is said later."""
    salt = body.get("cache_salt")
    if tenant and (salt is None or (salt and isinstance(salt, str))):
        body["cache_salt"] = tenant + (salt or "")  # a tenant's part has a fixed length: no two pairs look alike


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
        own_id, given_id = request.state.request_id, request.headers.get("x-request-id", "")

        def make() -> list[EngineRequest] | OpensImages[list[EngineRequest]]:
            self.job = Job(
                llm,
                make_form(),
                names,
                tenant,
                options,
                own_id=own_id,
                given_id=given_id,
                is_wanted=lambda: self.is_wanted,
            )
            return OpensImages.if_any(self.job.prompts, finish)

        def finish() -> list[EngineRequest]:
            requests = self.job.make_requests()
            request.state.request_id, request.state.requests = self.job.answer_id, requests
            loop.call_soon_threadsafe(self.is_made.set)
            return requests

        self.steps = llm.run(make, options.request_timeout)
