"""The server's process, from the socket to the last answer."""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from nanovllm.checks import sandbox
from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.features.lora.cli_modules import read_modules
from nanovllm.files.demo_model import is_demo_model
from nanovllm.request import Request as EngineRequest
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.engine_thread import EngineDied
from nanovllm.serving.http.access import Access
from nanovllm.serving.http.adapters import AdapterUpdates
from nanovllm.serving.http.api import Api
from nanovllm.serving.http.connections import ACCEPTED_AT_ONCE, KEEP_ALIVE_S, MAX_CONNECTIONS, Connection, Connections
from nanovllm.serving.http.live_view import Inside
from nanovllm.serving.http.log import sum_up, write_lines, write_repeated_lines_once
from nanovllm.serving.http.metrics import Metrics
from nanovllm.serving.http.operate import Operation
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.pooling_api import PoolingApi
from nanovllm.serving.http.requests import (
    ERRORS,
    LOOPBACK,
    BoundedBodies,
    Guard,
    ReadToTheEnd,
    Refused,
    answer_error,
    answer_nobody,
    json_response,
)
from nanovllm.serving.http.responses_api import ResponsesApi
from nanovllm.tools.screen import Screen

PAGE = Path(__file__).parent / "page"
MAX_BODIES_BYTES = 1_000_000_000  # of all requests that are being answered
TO_SAY_SO_S = 1.0  # beyond --shutdown-timeout: requests that it cuts off are answered by an error
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'"


def serve(config: EngineConfig, options: ServeOptions) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit code: 0, or 1 if the engine has died.

    Raises ValueError, FileNotFoundError or OSError for what cannot work, before the model is loaded.
    """
    names = options.served_model_name or (name_of(config.model),)
    config, adapters = read_modules(options.lora_modules, config, names)
    with bind(options.host, options.port) as listener:
        with Screen(stderr=True).working(f"loading {config.model}"):
            llm = AsyncLLM(**vars(config), max_waiting=options.max_waiting)
        for adapter in adapters:
            llm.engine.known_adapters.check(adapter)
        with llm:
            write_repeated_lines_once()
            log = write_lines(options)
            gc.freeze()  # what the load has made stays; looking for garbage in it would hold up everybody
            server = Server(llm, options, names, listener)
            server.run(sockets=[listener])
            log.flush()
            return 1 if llm.thread.error is not None else 0


def name_of(model: str) -> str:
    """Under which a model is served. Of a checkpoint on this machine nobody is told where it is."""
    return Path(os.path.abspath(model)).name if Path(model).exists() else model


def make_app(
    llm: AsyncLLM,
    options: ServeOptions,
    names: tuple[str, ...],
    closing: Callable[[], bool] = lambda: False,
    is_full: Callable[[], bool] = lambda: False,
) -> Starlette:
    """The ASGI application; any ASGI server can run it. From now on, what this process is asked is not trusted.

    closing: is that server about to end? is_full: has it no connection left for what may take long?
    """
    sandbox.guard()
    metrics = Metrics(llm.engine, names[0])
    if options.max_body_bytes == 0:
        sees_images = llm.engine.model_config.images is not None
        options = replace(options, max_body_bytes=50_000_000 if sees_images else 2_000_000)
    if options.chat_template is not None:
        llm.engine.tokenizer.chat_template = options.chat_template
    inside = Inside(llm, options.classroom, closing)
    api, operation = Api(llm, names, options), Operation(llm, names, options, metrics)
    updates = AdapterUpdates(llm, names, options)

    def on_step(output: SchedulerOutput, progressed: list[EngineRequest]) -> None:
        metrics.on_step(output, progressed)
        inside.drawing.on_step(output)

    llm.engine.on_step, llm.thread.on_end = on_step, metrics.on_end

    async def health(request: Request) -> Response:
        await llm.check_health()
        return json_response({"status": "ok"})

    scrape: asyncio.Task[str] | None = None

    async def scraped() -> str:
        return metrics.text(await llm.stats())

    async def show_metrics(request: Request) -> Response:
        """Those who ask at the same time get one answer: the engine counts its blocks for each, and makes no step."""
        nonlocal scrape
        if scrape is None or scrape.done():
            scrape = asyncio.create_task(scraped())
        return Response(await asyncio.shield(scrape), media_type="text/plain; version=0.0.4; charset=utf-8")

    html = (PAGE / "index.html").read_text("utf-8")
    if is_demo_model(llm.engine.config.model):  # the field is on the page, and can be emptied
        html = html.replace('<input id="temperature"', '<input id="temperature" value="0"')

    async def page(request: Request) -> Response:
        return HTMLResponse(html, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})

    pages = [
        Route("/health", health),
        Route("/metrics", show_metrics),
        Route("/", page),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    is_local = options.host in LOOPBACK
    middleware = [Middleware(Guard, keys=list(options.api_key), local=is_local, origins=options.allowed_origins)]
    if options.allowed_origins:  # outside: a page must be able to read an error, and preflights have no key
        cors: dict[str, Any] = dict(allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=list(options.allowed_origins), **cors))
    bounded = Middleware(BoundedBodies, max_bytes=max(MAX_BODIES_BYTES, options.max_body_bytes))
    middleware = [Middleware(Access, metrics=metrics), Middleware(ReadToTheEnd), bounded, *middleware]
    app = Starlette(
        routes=[
            *updates.routes(),
            *api.routes(),
            *ResponsesApi(api).routes(),
            *PoolingApi(llm, names, options).routes(),
            *operation.routes(),
            *inside.routes(),
            *pages,
        ],
        middleware=middleware,
        exception_handlers={
            **dict.fromkeys((*ERRORS, Refused, HTTPException, Exception), answer_error),
            ClientDisconnect: answer_nobody,
        },
    )
    app.state.inside, app.state.is_full = inside, is_full
    return app


class Server(uvicorn.Server):
    """uvicorn's, which closes its sockets at the first signal, lets requests finish, and then ends."""

    def __init__(self, llm: AsyncLLM, options: ServeOptions, names: tuple[str, ...], listener: socket.socket) -> None:
        self.llm, self.names, self.listener = llm, names, listener
        self.connections = Connections()
        app = make_app(llm, options, names, lambda: self.should_exit, self.connections.is_full)
        given: dict[str, Any] = {"http": partial(Connection, self.connections), "ws": "none", "loop": "asyncio"}
        self.shutdown_timeout = options.shutdown_timeout
        given["timeout_graceful_shutdown"] = options.shutdown_timeout + TO_SAY_SO_S  # uvicorn's annotation says int
        given["timeout_keep_alive"] = KEEP_ALIVE_S
        given["backlog"] = ACCEPTED_AT_ONCE
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="off", **given))
        llm.thread.on_death = self.end

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn raises the signals that it got once more when it is done: here that must not end the process.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.end())
        super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.llm.stats()  # the engine's thread begins
        await super().startup(sockets)
        self.summing = asyncio.create_task(sum_up(self.llm))
        self.listener.listen(MAX_CONNECTIONS)  # may wait to be accepted; asyncio has made it as few as above
        host, port = self.listener.getsockname()[:2]
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"serving {self.names[0]}: the page is {where}/, the API {where}/v1 (Ctrl-C ends it)", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.llm.thread.set_pace()  # a paused engine would let nobody finish
        ending = asyncio.get_running_loop().call_later(self.shutdown_timeout, self._end_readers)
        await super().shutdown(sockets)
        ending.cancel()
        self.summing.cancel()

    def _end_readers(self) -> None:
        """Those that are still being answered hear why they are not answered to the end."""
        for reader in list(self.llm.readers):
            reader.fail(EngineDied("the server ends, and --shutdown-timeout has passed"))

    def end(self) -> None:
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens nowhere yet: clients are refused until the model is loaded."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Where localhost is ::1, too, clients may call it 127.0.0.1.
        family, kind, _, _, address = min(places, key=lambda place: place[0] != socket.AF_INET)
        listener = socket.socket(family, kind)
        if sys.platform != "win32":  # there it would let two servers have one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        what = f"cannot listen at {host}:{port}: {error.strerror or error}"
        raise ValueError(f"{what}; try another --host or --port") from error
    return listener
