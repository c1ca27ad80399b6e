"""What every endpoint needs: who may ask, how much may be sent, errors in OpenAI's shape, and clients that go away."""

import asyncio
import difflib
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.checks.values import shorten
from nanovllm.files.prompt_length import PromptTooLong
from nanovllm.serving.async_llm import Overloaded
from nanovllm.serving.engine_thread import EngineDied, StepFailed
from nanovllm.serving.openai.json_lines import MAX_MESSAGE_CHARS, to_json
from nanovllm.serving.openai.openai_request import SampleFailed, UnknownModel
from nanovllm.serving.openai.pooling import URLS as POOLING_URLS

Result = TypeVar("Result")
Put = Callable[[str], Awaitable[None]]
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Paths that need a key, where there are keys; the others tell numbers only.
GUARDED = (
    "/v1/",
    "/v2/",
    "/inside/",
    "/score",
    "/rerank",
    "/pooling",
    "/tokenize",
    "/detokenize",
    "/reset_prefix_cache",
)

NEEDED_FLAGS = {  # paths that only some servers have -> how these were started
    **dict.fromkeys(POOLING_URLS, "--runner pooling"),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "--allow-runtime-lora-updating"),
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
}

# How paths begin that OpenAI's client asks for and that no server here has -> what would work.
INSTEAD = {
    "/v1/responses/input_tokens": "/tokenize counts the tokens of messages",
    "/v1/responses/compact": "leave out of the input what is no longer needed",
    "/v1/conversations": "previous_response_id, in /v1/responses, goes on with an answer that is kept",
    "/v1/chat/completions/": "chats are not kept; the answers of /v1/responses are",
    **dict.fromkeys(("/v1/assistants", "/v1/threads"), "/v1/responses goes on with kept answers"),
    **dict.fromkeys(("/v1/batches", "/v1/files", "/v1/uploads"), "nanovllm run-batch answers a file of requests"),
    **dict.fromkeys(("/v1/vector_stores", "/v1/containers"), "send what the model has to read in messages"),
    **dict.fromkeys(
        ("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"),
        "this server writes text, and reads text and, if its model does, images",
    ),
    "/v1/moderations": "a classifier, served with --runner pooling, judges texts in /pooling",
    "/v1/fine_tuning": "adapters that were trained elsewhere are served by --lora-modules",
}

# What is raised -> status, type and code of the error.
ERRORS: dict[type[BaseException], tuple[int, str, str | None]] = {
    UnknownModel: (404, "invalid_request_error", "model_not_found"),
    Overloaded: (429, "rate_limit_error", "rate_limit_exceeded"),
    TimeoutError: (504, "server_error", "deadline_exceeded"),
    EngineDied: (503, "server_error", "engine_died"),
    StepFailed: (500, "server_error", "step_failed"),
    SampleFailed: (500, "server_error", "sample_failed"),
    PromptTooLong: (400, "invalid_request_error", "context_length_exceeded"),
    ValueError: (400, "invalid_request_error", None),
}


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


def error_of(error: BaseException) -> tuple[int, dict[str, Any]]:
    """(status, body) in OpenAI's shape. What is not one of ERRORS is our mistake, and its text is not shown."""
    status, kind, code, message = 500, "server_error", None, "internal error; the server's log has it"
    if isinstance(error, Refused):
        status, kind, code, message = error.status, "invalid_request_error", error.code, str(error)
    elif isinstance(error, HTTPException):
        status, kind, message = error.status_code, "invalid_request_error", error.detail
    elif (known := next((entry for cls, entry in ERRORS.items() if isinstance(error, cls)), None)) is not None:
        (status, kind, code), message = known, str(error)
    return status, {"error": {"message": message[:MAX_MESSAGE_CHARS], "type": kind, "param": None, "code": code}}


async def answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and (error.status_code == 404 or _instead(request)):
        error = HTTPException(404, _no_path(request))
    elif isinstance(error, HTTPException) and error.status_code == 405:
        error = _other_method(request) or error
    status, body = error_of(error)
    headers = dict(getattr(error, "headers", None) or {})
    if status == 429:
        headers["Retry-After"] = "1"
    return json_response(body, status, headers)


def _instead(request: Request) -> str:
    return next((what for start, what in INSTEAD.items() if request.scope["path"].startswith(start)), "")


def _no_path(request: Request) -> str:
    path = request.scope["path"]
    if instead := _instead(request):
        return f"there is no {shorten(path)} here; {instead}"
    if flag := NEEDED_FLAGS.get(path):
        return f"there is no {path} here; a server that was started with {flag} has it"
    paths = [route.path for route in request.app.routes if isinstance(route, Route)]
    near = difflib.get_close_matches(path[:80], paths, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"there is no {shorten(path)} here{hint} nanovllm/serving/README.md says which paths there are"


def _other_method(request: Request) -> HTTPException | None:
    """Names the methods of all routes that have this path: each knows only its own. None for the page's files."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route for route in routes if route.path_regex.match(request.scope["path"])]
    if not found:
        return None
    methods = ", ".join(sorted(set().union(*(route.methods or () for route in found))))
    what = f"{found[0].path} takes {methods}, not {shorten(request.method)}"
    return HTTPException(405, what, {"Allow": methods})


async def answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has gone


def json_response(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, media_type="application/json")


class ReadToTheEnd:
    """ASGI middleware: an answer ends when its request has come whole, even if nobody wants the rest of it.

    A connection that is closed while the client still sends is reset, and the client never reads why it was refused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = scope["type"] != "http"

        async def get() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)  # or the client has gone
            return message

        async def put(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last and not is_whole:
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b""}
                while not is_whole:
                    await get()
            await send(message)

        await self.app(scope, get, put)


class BoundedBodies:
    """ASGI middleware: the bodies of all requests that are being answered take at most so many bytes together.

    They stay in memory while their requests wait, and one with images takes as much as many texts. Whoever reads a
    body with which they would take more gets Overloaded. An endpoint that answers before its work is done leaves that
    task in request.state.work.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own_bytes = 0

        async def get() -> Message:
            nonlocal own_bytes
            message = await receive()
            size = len(message.get("body", b""))
            if self.num_bytes + size > self.max_bytes:
                raise Overloaded(f"other requests take {self.num_bytes - own_bytes:,} bytes already; try again later")
            self.num_bytes += size
            own_bytes += size
            return message

        def give_back(task: Any = None) -> None:
            self.num_bytes -= own_bytes

        try:
            await self.app(scope, get, send)
        finally:
            work = scope.get("state", {}).get("work")
            if work is None:
                give_back()
            else:
                work.add_done_callback(give_back)


READING = ("GET", "HEAD", "OPTIONS")


class Guard:
    """ASGI middleware: hosts, pages of other origins, and keys.

    keys: without any, everybody may ask. local: the server listens on this machine only, and then answers only to its
    names: a web page elsewhere cannot reach it by a name of its own that leads here (DNS rebinding). origins: of pages
    elsewhere that may change something; others cannot, even where they may not read the answer (CSRF).
    """

    def __init__(self, app: ASGIApp, keys: list[str], local: bool, origins: tuple[str, ...] = ()) -> None:
        self.app, self.local, self.origins = app, local, origins
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except Refused as error:
                return await (await answer_error(Request(scope), error))(scope, receive, send)
        await self.app(scope, receive, send)

    def _check(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if self.local and re.sub(r":\d*$", "", host).strip("[]").lower() not in LOOPBACK:
            found = f"not to {host!r:.80}" if host else "not without a Host header"
            what = f"this server answers to {', '.join(LOOPBACK)}, {found}"
            raise Refused(403, f"{what}; start it with --host 0.0.0.0 and an --api-key, and it answers to all names")
        if request.method not in READING and self._is_of_a_page_elsewhere(request.headers):
            origin = request.headers["origin"]
            raise Refused(403, f"pages of {origin!r:.80} may not use this server; --allowed-origins would let them")
        # Not request.url: a Host header can make it look like another path than the one that is routed.
        if not self.digests or not request.scope["path"].startswith(GUARDED):
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        if scheme.lower() != "bearer" or not [d for d in self.digests if hmac.compare_digest(d, given)]:
            what = "this key is not known" if key else "a key is needed: Authorization: Bearer KEY"
            raise Refused(401, what, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        request.state.tenant = hashlib.sha256(b"nanovllm tenant" + given).hexdigest()

    def _is_of_a_page_elsewhere(self, headers: Headers) -> bool:
        """Browsers name the origin of what changes something, and say whether it is this one, whatever a proxy does."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is None or origin in self.origins or "*" in self.origins:
            return False
        if site is not None:
            return site not in ("same-origin", "none")
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request in JSON. Raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form of any web page could send the others
        raise Refused(415, f"the body must be application/json, found {kind!r:.80}")
    too_long = Refused(413, f"the body is longer than {max_bytes} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
        raise too_long
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > max_bytes:
            raise too_long
    check_room(request)
    return bytes(raw)


def check_room(request: Request) -> None:
    """Before what may take long. Raises Overloaded."""
    if request.app.state.is_full():
        raise Overloaded("so many requests are being answered that there is no connection left; try again later")


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """What `work` returns. If the client goes away first, `work` is cancelled: ClientDisconnect."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() or working.cancelled():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """Server-sent events. write: an async function that is given `put`, which sends some text on. more: headers."""

    def __init__(self, write: Callable[[Put], Awaitable[None]], more: Mapping[str, str] | None = None) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(more or {})}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self.write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def put(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        with suppress(ClientDisconnect):
            await unless_gone(receive, self.write(put))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(value: Any) -> str:
    return f"data: {to_json(value)}\n\n"
