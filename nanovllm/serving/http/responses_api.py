"""OpenAI's responses API: /v1/responses. Its answers are a chat's, translated (serving/openai/responses), and kept."""

import asyncio
import logging
import uuid
from collections import defaultdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.serving.http.api import Api
from nanovllm.serving.http.job import Call, Form, Job
from nanovllm.serving.http.responses import Refused, error_of, event, json_response, read_body
from nanovllm.serving.openai.json_lines import parse_json
from nanovllm.serving.openai.responses.events import Event, GrowingResponse
from nanovllm.serving.openai.responses.items import add_items
from nanovllm.serving.openai.responses.request import Kept, translate
from nanovllm.serving.openai.responses.store import ResponseStore, Stored
from nanovllm.serving.openai.shown import CHAT

logger = logging.getLogger("nanovllm")

RESPONSES = "/v1/responses"
ABORT_AGAIN_S = 0.05  # who is not in the engine's queue yet is not aborted


class ResponseForm(Form):
    """A body of the responses API as one of a chat, and the chat's answer as a response, which is kept if it may be."""

    response: GrowingResponse

    def __init__(self, body: dict[str, Any], store: ResponseStore) -> None:
        """Raises ValueError, and Refused for an answer that is not kept."""
        self.store = store
        self.asked = translate(body, Kept(self._conversation, store.item))
        self.usage: dict[str, Any] = {}
        super().__init__(CHAT, self.asked.chat, self.asked.unknown)

    def _conversation(self, response_id: str) -> list[dict[str, Any]]:
        """Up to an answer that is kept, and with it."""
        stored = self.store.get(response_id)
        if stored is None or stored.conversation is None:
            what = "not found" if stored is None else "not complete"
            raise Refused(400, f"Previous response with id {response_id!r:.80} {what}.", "previous_response_not_found")
        messages: list[dict[str, Any]] = parse_json(stored.conversation.encode())["messages"]
        return messages

    def made(self, job: Job) -> None:
        params = job.requests[0].params
        echoed = self.asked.echoed | {"temperature": params.temperature, "top_p": params.top_p}
        self.response = GrowingResponse(uuid.uuid4().hex, job.model, echoed)
        if self.asked.background:
            self.keep("queued")

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.response.add(answer["choices"][0])
        self.response.end(answer["usage"])
        self.keep()
        return self.response.body

    def begin(self) -> str:
        return _written(self.response.begin())

    def chunk(self, chunk: dict[str, Any]) -> str:
        self.usage = chunk.get("usage") or self.usage
        return "".join(_written(self.response.add(choice)) for choice in chunk["choices"])

    def end(self) -> str:
        events = self.response.end(self.usage)
        self.keep()  # before its reader can ask for it
        return _written(events)

    def failed(self, error: dict[str, Any]) -> str:
        code = "server_error" if error["type"] == "server_error" else "invalid_prompt"
        events = self.response.fail(code, error["message"])
        self.keep()
        return _written(events)

    def keep(self, status: str = "") -> None:
        """status: of an answer that has only begun."""
        if self.asked.store:
            self.response.body["status"] = status or self.response.body["status"]
            output = self.response.body["output"]
            self.store.put(self.response.body, None if status else add_items(self.asked.messages, output))


class ResponsesApi:
    """Answers are kept by tenant: none finds another's."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.stores: defaultdict[str, ResponseStore] = defaultdict(ResponseStore)
        self.working: dict[str, tuple[asyncio.Task[None], Call]] = {}  # in the background, by the response's id

    def routes(self) -> list[Route]:
        one = f"{RESPONSES}/{{response_id}}"
        return [
            Route(RESPONSES, self.create, methods=["POST"]),
            Route(one, self.show, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        raw, store = await read_body(request, self.api.options.max_body_bytes), self._store(request)
        form = await self.api.llm.prepare(lambda: ResponseForm(parse_json(raw), store))
        if form.asked.background:
            return await self._begin(request, form)
        return await self.api.answer(request, lambda: form)

    async def _begin(self, request: Request, form: ResponseForm) -> Response:
        """In the background. What is wrong with the request is known before its job is made: it has a status then."""
        call = self.api.call(request, lambda: form)
        work, made = asyncio.create_task(self._work(call, form)), asyncio.create_task(call.is_made.wait())
        await asyncio.wait({work, made}, return_when=asyncio.FIRST_COMPLETED)
        made.cancel()
        if not call.is_made.is_set():
            work.result()  # raises
        response_id = form.response.body["id"]
        self.working[response_id] = work, call
        work.add_done_callback(lambda _: self.working.pop(response_id))
        return _plain(self._find(request, response_id), call.job.headers)

    async def _work(self, call: Call, form: ResponseForm) -> None:
        try:
            first = await anext(call.steps)
            form.keep("in_progress")
            await self.api.whole(call, first)
        except Exception as error:
            if not call.is_made.is_set():
                raise
            status, body = error_of(error)
            if status == 500:
                logger.exception("an answer in the background has failed")
            form.failed(body["error"])

    async def show(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise Refused(400, "a stream's events are not kept; ask for the response without stream")
        return _plain(self._find(request))

    async def delete(self, request: Request) -> Response:
        self._find(request)
        response_id = request.path_params["response_id"]
        await self._stop(response_id)
        self._store(request).delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """What works in the background. What has ended there stays as it is."""
        if not parse_json(self._find(request).response.encode())["background"]:
            raise Refused(400, "Cannot cancel a synchronous response.")
        await self._stop(request.path_params["response_id"])
        return _plain(self._find(request))

    async def _stop(self, response_id: str) -> None:
        while response_id in self.working:
            work, call = self.working[response_id]
            for made in call.job.requests:
                await self.api.llm.abort(made.request_id)
            await asyncio.wait({work}, timeout=ABORT_AGAIN_S)

    def _store(self, request: Request) -> ResponseStore:
        return self.stores[getattr(request.state, "tenant", "")]

    def _find(self, request: Request, response_id: str = "") -> Stored:
        response_id = response_id or request.path_params["response_id"]
        if (stored := self._store(request).get(response_id)) is None:
            raise Refused(404, f"Response with id {response_id!r:.80} not found.")
        return stored


def _plain(stored: Stored, headers: dict[str, str] | None = None) -> Response:
    return Response(stored.response, headers=headers, media_type="application/json")


def _written(events: list[Event]) -> str:
    """As server-sent events, each with its name."""
    return "".join(f"event: {value['type']}\n{event(value)}" for value in events)
