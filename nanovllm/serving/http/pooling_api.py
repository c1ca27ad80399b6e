"""Endpoints of a server with --runner pooling: /v1/embeddings, /rerank, /score, /pooling. Bodies: openai/pooling.py."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.checks.names import neutral_options
from nanovllm.request import Request as EngineRequest
from nanovllm.serving.async_llm import AsyncLLM, Overloaded
from nanovllm.serving.http.access import take_ids
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.requests import json_response, read_body, unless_gone
from nanovllm.serving.openai.fields import INSIDE_OF_PAIRS, warning_headers, warning_of, without_unknown
from nanovllm.serving.openai.json_lines import parse_json
from nanovllm.serving.openai.openai_request import check_answers
from nanovllm.serving.openai.pooling import BODY, KNOWN_BY_URL, MAX_TEXTS, URLS, PoolingJob, translate

RETRY_S = 0.05  # until a portion that found no room tries again


class PoolingApi:
    """llm, and the names under which its model is served.

    A body may have more texts than may wait: they enter a portion at a time. The first is refused where the queue is
    full, as any request is; the others wait for their turn.
    """

    def __init__(self, llm: AsyncLLM, names: tuple[str, ...], options: ServeOptions) -> None:
        self.llm, self.names, self.options = llm, names, options

    def routes(self) -> list[Route]:
        is_pooling = self.llm.engine.model_config.pooling is not None
        return [Route(url, self.answer, methods=["POST"]) for url in URLS] if is_pooling else []

    async def answer(self, request: Request) -> Response:
        raw, call = await read_body(request, self.options.max_body_bytes), _Call(self, request)
        outputs = await unless_gone(request.receive, call.outputs(raw))
        check_answers(list(call.job.requests))

        def respond() -> Response:
            answer = call.job.respond(request.state.request_id, outputs)
            return json_response(answer, headers=warning_headers(warning_of(call.unknown)))

        return await self.llm.prepare(respond)


class _Call:
    job: PoolingJob

    def __init__(self, api: PoolingApi, request: Request) -> None:
        self.api, self.request, self.llm = api, request, api.llm
        self.unknown: list[str] = []  # fields that were left out
        self.found: dict[str, Any] = {}  # request id -> its output
        limit, self.loop = api.options.request_timeout, asyncio.get_running_loop()
        self.end = None if limit is None else self.loop.time() + limit

    async def outputs(self, raw: bytes) -> list[Any]:
        """The outputs of all the body's texts, in order."""
        portions: list[list[EngineRequest]] = []

        def begin() -> list[EngineRequest]:
            self.translate(raw)
            most = max(1, (self.llm.max_waiting or MAX_TEXTS) // 4)
            requests = list[EngineRequest](self.job.requests)
            portions.extend(requests[start : start + most] for start in range(0, len(requests), most))
            return portions[0]

        await self.run(begin)
        for portion in portions[1:]:
            while not await self.has_run(portion):
                await asyncio.sleep(RETRY_S)
        return [self.found[made.request_id] for made in self.job.requests]

    async def has_run(self, portion: list[EngineRequest]) -> bool:
        try:
            await self.run(lambda: portion)
        except Overloaded:
            return False
        return True

    async def run(self, make: Callable[[], list[EngineRequest]]) -> None:
        left = None if self.end is None else self.end - self.loop.time()
        try:
            if left is not None and left <= 0:  # a portion has waited for room until now
                raise TimeoutError
            async with aclosing(self.llm.run(make, left)) as steps:
                async for outputs in steps:
                    self.found.update((output.request_id, output) for output in outputs)
        except TimeoutError:
            raise TimeoutError(f"the request was not done after {self.api.options.request_timeout:g} s") from None

    def translate(self, raw: bytes) -> None:
        """In a thread beside the event loop. Raises ValueError."""
        state, url = self.request.state, self.request.scope["path"]
        known = {"request_id", *KNOWN_BY_URL[url], *neutral_options(BODY)}
        body, self.unknown = without_unknown(parse_json(raw), known, INSIDE_OF_PAIRS)
        header_id = self.request.headers.get("x-request-id", "")
        state.request_id, unique_id = take_ids(body, header_id, state.request_id)
        self.job = translate(
            self.llm.llm,
            url,
            body,
            self.api.names,
            salt=getattr(state, "tenant", ""),
            request_id=unique_id,
            chat_template=self.api.options.chat_template,
        )
        state.requests = self.job.requests
