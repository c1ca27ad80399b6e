"""OpenAI's API: /v1/models, /v1/chat/completions, /v1/completions. What a body asks for: openai_request.py."""

import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.outputs import RequestOutput
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.http.job import Call, Form, Steps
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.requests import Events, Put, error_of, json_response, read_body, unless_gone
from nanovllm.serving.openai.answer import CHAT, COMPLETIONS, Chunks
from nanovllm.serving.openai.json_lines import parse_json
from nanovllm.serving.openai.openai_request import UnknownModel, check_answers

logger = logging.getLogger("nanovllm")


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
        return self.names + self.llm.engine.known_adapters.names

    def _model(self, name: str) -> dict[str, Any]:
        is_adapter, length = name not in self.names, self.llm.engine.scheduler.max_model_len
        of = {"root": name if is_adapter else self.names[0], "parent": self.names[0] if is_adapter else None}
        about = {"object": "model", "created": self.created, "owned_by": "nanovllm", "max_model_len": length}
        return {"id": name} | about | of

    async def complete(self, request: Request) -> Response:
        """A chat completion or a text completion, whole or as a stream of events."""
        raw = await read_body(request, self.options.max_body_bytes)
        return await self.answer(request, lambda: Form(request.scope["path"], parse_json(raw)))

    async def answer(self, request: Request, make_form: Callable[[], Form]) -> Response:
        """What a request for an answer gets. make_form: called in a thread beside the event loop."""
        call = self.call(request, make_form)
        # What is wrong with a request, or with the engine, is known before the first output: it has a status then.
        try:
            first = await unless_gone(request.receive, anext(call.steps))
        finally:
            call.is_wanted = False  # if it is not made by now, the client has gone, or has been told that it is late
        if call.job.stream:
            return Events(lambda put: self.stream(call, first, put), call.job.headers)
        return await unless_gone(request.receive, self.whole(call, first))

    def call(self, request: Request, make_form: Callable[[], Form]) -> Call:
        return Call(self.llm, self.names, self.options, request, make_form)

    async def whole(self, call: Call, first: list[RequestOutput]) -> Response:
        """The answer when it is complete."""
        job, outputs = call.job, await _finished(first, call.steps)
        check_answers(job.requests)
        ordered = [outputs[made.request_id] for made in job.requests]

        def respond() -> Response:
            return json_response(job.form.whole(job, ordered), headers=job.headers)

        return await self.llm.prepare(respond)  # logprobs can be many

    async def stream(self, call: Call, first: list[RequestOutput], put: Put) -> None:
        """Chunks as the tokens come. An error that comes so late is an event, too: the status has been sent."""
        job = call.job
        always, asked, form = self.options.enable_force_include_usage, job.stream_options, job.form
        chunks = Chunks(
            job.answer_id,
            form.url,
            job.model,
            job.shown,
            include_usage=always or asked.get("include_usage", False),
            continuous_usage=always or asked.get("continuous_usage_stats", False),
        )
        places = {made.request_id: place for place, made in enumerate(job.requests)}
        begin = form.begin()
        try:
            async for outputs in _from(first, call.steps):
                new = (chunk for output in outputs for chunk in chunks.of(places[output.request_id], output))
                if text := begin + "".join(map(form.chunk, new)):
                    await put(text)
                begin = ""
            check_answers(job.requests)
            end = "".join(map(form.chunk, chunks.last())) + form.end()
        except Exception as error:
            status, body = error_of(error)
            if status == 500:
                logger.exception("a stream has failed")
            end = begin + form.failed(body["error"])
        await put(end)


async def _from(first: list[RequestOutput], steps: Steps) -> Steps:
    async with aclosing(steps):
        yield first
        async for outputs in steps:
            yield outputs


async def _finished(first: list[RequestOutput], steps: Steps) -> dict[str, RequestOutput]:
    """The last output of each request."""
    return {output.request_id: output async for outputs in _from(first, steps) for output in outputs}
