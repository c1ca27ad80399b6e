"""Each request's id, its line in the log, and how many are being answered.

A client that sends X-Request-Id finds it in the answer's header, in the answer's id and in the log; others get one.
"""

import logging
import time
import uuid
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.checks.values import shorten
from nanovllm.request import Request as EngineRequest
from nanovllm.serving.http.metrics import Metrics
from nanovllm.serving.http.requests import Refused, answer_error

logger = logging.getLogger("nanovllm.access")

MAX_ID_CHARS, MAX_PATH_CHARS = 128, 200
PROBES = ("/health", "/ping", "/metrics", "/load")  # asked every few seconds: a line only if something is wrong
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # a client may send any word as its method
GONE = 499  # the client has, before its answer was complete


def check_request_id(value: Any) -> str:
    """Raises ValueError for what must not stand in a header, or in a line of the log."""
    if not isinstance(value, str) or len(value) > MAX_ID_CHARS or not (value.isascii() and value.isprintable()):
        raise ValueError(f"a request id has at most {MAX_ID_CHARS} printable ASCII characters, found {shorten(value)}")
    return value


def take_ids(body: dict[str, Any], header_id: str, own_id: str) -> tuple[str, str]:
    """(the answer's id, what the ids of its requests begin with): a client's id may come twice, these must not.

    header_id: the client's, if it named one there; the body's request_id is taken out of it. own_id: nobody else's.
    Raises ValueError.
    """
    in_body = body.pop("request_id", "")
    given = header_id or check_request_id(in_body)
    return given or own_id, f"{given}-{uuid.uuid4().hex[:8]}" if given else own_id


class Access:
    """ASGI middleware, outside of all others.

    An endpoint finds the id in request.state.request_id, and leaves its engine requests in request.state.requests.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status, is_complete = time.perf_counter(), 0, False
        state = scope.setdefault("state", {})
        state["request_id"] = uuid.uuid4().hex

        async def put(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(raw=message["headers"])["X-Request-Id"] = state["request_id"]
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def answer() -> None:
            try:
                given = check_request_id(Headers(scope=scope).get("x-request-id", ""))
                state["request_id"] = given or state["request_id"]
            except ValueError as error:
                raise Refused(400, f"X-Request-Id: {error}") from None
            await self.app(scope, receive, put)

        try:
            with self.metrics.answering(scope["path"]):
                await answer()
        except Exception as error:
            if not status:
                await (await answer_error(Request(scope), error))(scope, receive, put)
            if not isinstance(error, Refused):
                raise  # uvicorn writes its traceback into the log
        finally:
            self._note(scope, status if is_complete else GONE, began)

    def _note(self, scope: Scope, status: int, began: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.metrics.count_answer(method, scope["path"], status)
        if (work := scope["state"].get("work")) is None:  # else it goes on in the background
            self._log(scope, method, status, began)
        else:
            work.add_done_callback(lambda _: self._log(scope, method, status, began))

    def _log(self, scope: Scope, method: str, status: int, began: float) -> None:
        requests: list[EngineRequest] = scope["state"].get("requests", [])
        if scope["path"] in PROBES and status < 400:
            return
        tokens = ""
        if requests:
            num_in = sum(len(made.prompt_token_ids) for made in requests)
            num_cached = sum(made.num_cached_tokens or 0 for made in requests)
            num_out = sum(sample.seq.num_generated_tokens for made in requests for sample in made.samples)
            tokens = f" {num_in} tokens in ({num_cached} cached), {num_out} out,"
        what = f"{method} {quote(scope['path'][:MAX_PATH_CHARS])} {status}:"
        seconds = time.perf_counter() - began
        logger.info("%s%s %.3f s, id %s", what, tokens, seconds, scope["state"]["request_id"])
