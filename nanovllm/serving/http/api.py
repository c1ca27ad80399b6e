"""OpenAI's API: /v1/models, /v1/chat/completions, /v1/completions. What a body asks for: serving/openai/request.py."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.checks.values import shorten
from nanovllm.outputs import RequestOutput
from nanovllm.request import Request as EngineRequest
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.http.access import check_request_id
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.responses import Events, Put, error_of, event, json_response, read_body, unless_gone
from nanovllm.serving.openai.answer import CHAT, COMPLETIONS, Chunks, response_body
from nanovllm.serving.openai.fields import STREAM_OPTIONS, warning_headers, warning_of, without_unknown
from nanovllm.serving.openai.json_lines import parse_json
from nanovllm.serving.openai.request import MAX_SAMPLES, UnknownModel, check_answers, translate
from nanovllm.serving.openai.shown import Shown

logger = logging.getLogger("nanovllm")

Steps = AsyncGenerator[list[RequestOutput], None]


class Job:
    """One call: its body, checked and translated; then its requests in the engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        url: str,
        raw: bytes,
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
        body, unknown = without_unknown(parse_json(raw))
        given_id = given_id or check_request_id(body.pop("request_id", ""))
        self.answer_id = given_id or own_id
        unique_id = f"{given_id}-{uuid.uuid4().hex[:8]}" if given_id else own_id
        self.stream, given = body.pop("stream", False), body.pop("stream_options", {})
        if not isinstance(self.stream, bool):
            raise ValueError(f"stream must be true or false, found {shorten(self.stream)}")
        if not isinstance(given, dict) or not all(isinstance(value, bool | None) for value in given.values()):
            raise ValueError(f"stream_options must be an object of true and false, found {shorten(given)}")
        if given and not self.stream:
            raise ValueError("stream_options needs stream: true")
        self.stream_options, more = without_unknown(given, STREAM_OPTIONS)
        self.headers = warning_headers(warning_of([*unknown, *(f"stream_options: {name}" for name in more)]))
        if self.stream and body.get("prompt_logprobs") is not None:
            raise ValueError("prompt_logprobs are not available in a stream; leave out stream, or ask with echo")
        if "chat_template" in body:
            raise ValueError("chat_template is a program, and a request may not bring one; leave it out")
        salt = body.get("cache_salt")
        if tenant and (salt is None or (salt and isinstance(salt, str))):
            body["cache_salt"] = tenant + (salt or "")  # a tenant's part has a fixed length: no two pairs look alike
        most = min(MAX_SAMPLES, llm.max_waiting or MAX_SAMPLES), options.max_logprobs
        translated = translate(llm.llm, url, body, names, *most, options.parsers)
        prompts, params, self.model, adapter, reading = translated
        how: dict[str, Any] = dict(ids_as_tokens=options.return_tokens_as_token_ids, has_nulls=True, reading=reading)
        self.url, self.shown = url, Shown.of(llm.llm.get_tokenizer(), url, body, params, **how)
        self.requests = []
        for place, prompt in enumerate(prompts):  # the page knows its card by the id
            if not is_wanted():
                raise ClientDisconnect
            made: dict[str, Any] = dict(request_id=f"{unique_id}-{place}", stream=self.stream, compile_grammar=False)
            self.requests.append(llm.engine.make_request(prompt, params, adapter, **made))
        self.shown.check_size(self.requests)


class Api:
    """llm, and the names under which its model is served."""

    def __init__(self, llm: AsyncLLM, names: tuple[str, ...], options: ServeOptions) -> None:
        self.llm, self.names, self.options = llm, names, options
        self.created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.show_model),
            Route(CHAT, self.complete, methods=["POST"]),
            Route(COMPLETIONS, self.complete, methods=["POST"]),
        ]

    async def list_models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": list(map(self._model, self._all_names))})

    async def show_model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) not in self._all_names:
            raise UnknownModel(f"there is no model {name!r:.80} here; there is {', '.join(self._all_names)}")
        return json_response(self._model(name))

    @property
    def _all_names(self) -> tuple[str, ...]:
        return self.names + self.llm.engine.features.known_adapters.names

    def _model(self, name: str) -> dict[str, Any]:
        is_adapter, length = name not in self.names, self.llm.engine.scheduler.max_model_len
        of = {"root": name if is_adapter else self.names[0], "parent": self.names[0] if is_adapter else None}
        about = {"object": "model", "created": self.created, "owned_by": "nanovllm", "max_model_len": length}
        return {"id": name} | about | of

    async def complete(self, request: Request) -> Response:
        """A chat completion or a text completion, whole or as a stream of events."""
        raw, tenant = await read_body(request, self.options.max_body_bytes), getattr(request.state, "tenant", "")
        ids = request.state.request_id, request.headers.get("x-request-id", "")
        job: Job | None = None
        is_wanted = True

        def make() -> list[EngineRequest]:
            nonlocal job
            body = request.scope["path"], raw, self.names, tenant
            job = Job(self.llm, *body, lambda: is_wanted, self.options, *ids)
            request.state.request_id, request.state.requests = job.answer_id, job.requests
            return job.requests

        steps = self.llm.run(make, self.options.request_timeout)
        # What is wrong with a request, or with the engine, is known before the first output: it has a status then.
        try:
            first = await unless_gone(request.receive, anext(steps))
        finally:
            is_wanted = False  # if it is not made by now, the client has gone, or has been told that it took too long
        assert job is not None
        if job.stream:
            return Events(lambda put: self._stream(job, first, steps, put), job.headers)
        outputs = await unless_gone(request.receive, _finished(first, steps))
        check_answers(job.requests)
        ordered = [outputs[made.request_id] for made in job.requests]
        body = job.answer_id, job.url, job.model, job.shown, ordered
        # Logprobs can be many.
        return await self.llm.prepare(lambda: json_response(response_body(*body), headers=job.headers))

    async def _stream(self, job: Job, first: list[RequestOutput], steps: Steps, put: Put) -> None:
        """Chunks as the tokens come. An error that comes so late is an event, too: the status has been sent."""
        always, asked = self.options.enable_force_include_usage, job.stream_options
        usage = (always or bool(asked.get(name)) for name in ("include_usage", "continuous_usage_stats"))
        chunks = Chunks(job.answer_id, job.url, job.model, job.shown, *usage)
        places = {made.request_id: place for place, made in enumerate(job.requests)}
        try:
            async for outputs in _from(first, steps):
                new = (chunk for output in outputs for chunk in chunks.of(places[output.request_id], output))
                if text := "".join(map(event, new)):
                    await put(text)
            check_answers(job.requests)
            end = "".join(map(event, chunks.last()))
        except Exception as error:
            status, body = error_of(error)
            if status == 500:
                logger.exception("a stream has failed")
            end = event(body)
        await put(end + "data: [DONE]\n\n")


async def _from(first: list[RequestOutput], steps: Steps) -> Steps:
    async with aclosing(steps):
        yield first
        async for outputs in steps:
            yield outputs


async def _finished(first: list[RequestOutput], steps: Steps) -> dict[str, RequestOutput]:
    """The last output of each request."""
    return {output.request_id: output async for outputs in _from(first, steps) for output in outputs}
