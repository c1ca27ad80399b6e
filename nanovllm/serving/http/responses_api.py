"""OpenAI's responses API: /v1/responses. Its answers are a chat's, translated (serving/openai/responses), and kept."""

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.outputs import RequestOutput
from nanovllm.serving.http.api import Api
from nanovllm.serving.http.job import Call, Form, Job
from nanovllm.serving.http.requests import Events, Put, Refused, error_of, event, json_response, read_body, unless_gone
from nanovllm.serving.openai.answer import Chunks
from nanovllm.serving.openai.json_lines import parse_json
from nanovllm.serving.openai.responses.events import Event, GrowingResponse
from nanovllm.serving.openai.responses.items import add_answer, input_items, page
from nanovllm.serving.openai.responses.responses_request import Kept, translate
from nanovllm.serving.openai.responses.store import ResponseStore, Stored
from nanovllm.serving.openai.shown import CHAT

logger = logging.getLogger("nanovllm")

RESPONSES = "/v1/responses"
CODES = {"server_error": "server_error", "rate_limit_error": "rate_limit_exceeded"}  # type of an error -> a response's
ABORT_AGAIN_S = 0.05  # a request that is not in the engine's queue yet is not aborted


class Recording:
    """A stream's events, kept while they come: whoever asks follows them from where he likes, as often as he likes.

    events: each as it travels, with its blank line. An event's number is its place."""

    def __init__(self, events: Iterable[str] = (), has_ended: bool = False) -> None:
        self.events, self.has_ended = list(events), has_ended
        self._changed = asyncio.Condition()

    async def put(self, text: str) -> None:
        """One event or several."""
        self.events += [f"{part}\n\n" for part in text.split("\n\n") if part]
        async with self._changed:
            self._changed.notify_all()

    async def end(self) -> None:
        self.has_ended = True
        await self.put("")

    async def follow(self, start: int, put: Put) -> None:
        """Events from this number on, those to come included."""
        while True:
            async with self._changed:
                while start >= len(self.events) and not self.has_ended:
                    await self._changed.wait()
            if start >= len(self.events):
                return
            text = "".join(self.events[start:])
            start = len(self.events)
            await put(text)


Working = tuple[asyncio.Task[None], Call, Recording]


class ResponseForm(Form):
    """A body of the responses API as one of a chat, and the chat's answer as a response, which is kept if it may be."""

    response: GrowingResponse
    by_text = True

    def __init__(self, body: dict[str, Any], store: ResponseStore) -> None:
        """Raises ValueError, and Refused for an answer that is not kept."""
        self.store = store
        self.asked = translate(body, Kept(self._conversation, store.items))
        self.usage: dict[str, Any] = {}
        super().__init__(CHAT, self.asked.chat, self.asked.unknown)

    def _conversation(self, response_id: str) -> list[dict[str, Any]]:
        """Up to an answer that is kept, and with it."""
        stored = self.store.get(response_id)
        if stored is None or stored.conversation is None:
            what = "not found"
            if stored is not None:
                what = "not complete" if stored.is_working else "too long to go on with"
            raise Refused(400, f"Previous response with id {response_id!r:.80} {what}.", "previous_response_not_found")
        messages: list[dict[str, Any]] = parse_json(stored.conversation.encode())["messages"]
        return messages

    def made(self, job: Job) -> None:
        params = job.requests[0].params
        echoed = self.asked.echoed | {"temperature": params.temperature, "top_p": params.top_p}
        self.response = GrowingResponse(uuid.uuid4().hex, job.model, echoed)
        if self.asked.background:
            self.keep("queued")

    def whole(self, job: Job, outputs: list[RequestOutput]) -> dict[str, Any]:
        """What a stream of one piece adds up to."""
        chunks = Chunks(job.answer_id, CHAT, job.model, job.shown, include_usage=True)
        for chunk in (*chunks.of(0, outputs[0]), *chunks.last()):
            self.chunk(chunk)
        self.end()
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
        events = self.response.fail(CODES.get(error["type"], "invalid_prompt"), error["message"])
        self.keep()
        return _written(events)

    def keep(self, status: str = "", events: Iterable[str] = ()) -> None:
        """status: of an answer that has only begun."""
        if self.asked.store:
            body, items = self.response.body, input_items(self.asked.items, self.response.unique)
            body["status"] = status or body["status"]
            conversation = None if status else add_answer(self.asked.messages, body["output"], self.asked.goes_on)
            self.store.put(body, conversation, items, events)


class ResponsesApi:
    """Answers are kept by tenant: none finds another's."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.stores: defaultdict[str, ResponseStore] = defaultdict(ResponseStore)
        self.working: dict[str, Working] = {}  # in the background, by the response's id

    def routes(self) -> list[Route]:
        one = f"{RESPONSES}/{{response_id}}"
        return [
            Route(RESPONSES, self.create, methods=["POST"]),
            Route(one, self.show, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.list_input, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        raw, store = await read_body(request, self.api.options.max_body_bytes), self._store(request)
        reading = self.api.llm.prepare(lambda: ResponseForm(parse_json(raw), store))
        form = await unless_gone(request.receive, reading)
        if form.asked.background:
            return await self._begin(request, form)
        return await self.api.answer(request, lambda: form)

    async def _begin(self, request: Request, form: ResponseForm) -> Response:
        """In the background. What is wrong with the request is known before its job is made: it has a status then.

        A grammar is compiled later, which may take seconds: with one that cannot be, the answer fails.
        """
        call, recording = self.api.call(request, lambda: form), Recording()
        work, made = asyncio.create_task(self._work(call, form, recording)), asyncio.create_task(call.is_made.wait())
        await asyncio.wait({work, made}, return_when=asyncio.FIRST_COMPLETED)
        made.cancel()
        request.state.work = work
        if not call.is_made.is_set():
            work.result()  # raises
        response_id = form.response.body["id"]
        self.working[response_id] = work, call, recording
        work.add_done_callback(lambda _: self.working.pop(response_id))
        if call.job.stream:
            return Events(lambda put: recording.follow(0, put), call.job.headers)
        return _plain(self._find(request, response_id), call.job.headers)

    async def _work(self, call: Call, form: ResponseForm, recording: Recording) -> None:
        try:
            first = await anext(call.steps)
            form.keep("in_progress")
            if call.job.stream:
                await self.api.stream(call, first, recording.put)
                await self.api.llm.prepare(lambda: form.keep(events=recording.events))
            else:
                await self.api.whole(call, first)
        except Exception as error:
            if not call.is_made.is_set():
                raise
            status, body = error_of(error)
            if status == 500:
                logger.exception("an answer in the background has failed")
            await recording.put(form.begin() + form.failed(body["error"]))
            form.keep(events=recording.events if call.job.stream else ())
        finally:
            await recording.end()

    async def show(self, request: Request) -> Response:
        """?stream=true&starting_after=N: the events of a stream in the background, those after number N."""
        stored, asked = self._find(request), request.query_params
        if asked.get("stream") != "true":
            return self._shown(stored, request.path_params["response_id"])
        number = asked.get("starting_after", "-1")
        if number != "-1" and not (number.isascii() and number.isdigit() and len(number) < 10):
            raise Refused(400, f"starting_after must be the number of an event, found {number!r:.80}")
        _, call, recording = self.working.get(
            request.path_params["response_id"], (None, None, Recording(stored.events, True))
        )
        if not (call.job.stream if call else stored.events):
            reason = "it was made without stream or background, or is too long to be kept whole; leave out stream"
            raise Refused(400, f"no events are kept of this answer: {reason}")
        return Events(lambda put: recording.follow(int(number) + 1, put))

    def _shown(self, stored: Stored, response_id: str) -> Response:
        """As it is now: of an answer that is not streamed, the engine alone knows when it has begun."""
        if not stored.is_working or response_id not in self.working:
            return _plain(stored)
        _, call, _ = self.working[response_id]
        if call.job.requests[0].metrics.first_scheduled_time is None:
            return _plain(stored)
        return json_response(parse_json(stored.response.encode()) | {"status": "in_progress"})

    async def list_input(self, request: Request) -> Response:
        """What an answer was made from, without what it has from previous_response_id."""
        stored, query = self._find(request), request.query_params
        return await self.api.llm.prepare(
            lambda: json_response(page(parse_json(stored.inputs.encode())["items"], query))
        )

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
            work, call, _ = self.working[response_id]
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
