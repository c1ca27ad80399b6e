"""A server in this process, in a thread of its own, and what a test asks of it."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from openai import OpenAI

from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.serve import Server, bind
from tests.checkpoints import SMALL

PATIENCE_S = 60  # for what must come; no machine is so busy that it takes as long


class Running:
    """url, the AsyncLLM behind it, and clients."""

    def __init__(self, server: Server, port: int) -> None:
        self.llm, self.engine, self.port = server.llm, server.llm.engine, port
        self.app: Any = server.config.app
        self.inside, self.connections = self.app.state.inside, server.connections
        self.url = f"http://127.0.0.1:{port}"

    def client(self, api_key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S)

    def call(self, function: Callable[[], Any]) -> Any:
        """function() in the engine's thread, between two steps."""
        return asyncio.run_coroutine_threadsafe(self.llm.call(function), self.llm.thread.loop).result(PATIENCE_S)

    def until(self, condition: Callable[[], Any]) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not self.call(condition):
            assert time.monotonic() < ends, "it has not come true"
            time.sleep(0.005)

    def send(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, method: str = ""
    ) -> tuple[int, bytes]:
        """(status, body) of one plain request; JSON unless the headers say otherwise."""
        return self.exchange(path, body, headers, method)[:2]

    def exchange(
        self,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        method: str = "",
        begun: Callable[[], None] = lambda: None,
    ) -> tuple[int, bytes, dict[str, str]]:
        """(status, body, headers), their names in small letters. begun: called when the answer has begun to come."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json"} | (headers or {})
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
        answer = connection.getresponse()
        begun()
        result = answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        connection.close()
        return result

    def assert_at_rest(self) -> None:
        """Nothing runs or waits, nobody reads, no block is held, and the engine is sane."""
        self.until(lambda: not self.engine.requests)

        def check() -> None:
            self.engine.scheduler.check_integrity()
            assert not self.engine.scheduler.seqs and not self.llm.thread.readers
            assert len(self.engine.block_manager.free_blocks) == len(self.engine.block_manager.blocks)

        self.call(check)
        assert self.llm._num_entering == 0


def raw_post(path: str, body: dict[str, Any], version: str = "1.1") -> bytes:
    """A request as it travels, for tests that hold the connection themselves."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@contextmanager
def serving(
    model: Path, options: ServeOptions = ServeOptions(), *, names: tuple[str, ...] = ("tiny", "small"), **engine: Any
) -> Iterator[Running]:
    """A server whose model is called tiny; its engine is SMALL but for these options."""
    listener = bind("127.0.0.1", 0)
    with listener, AsyncLLM(str(model), max_waiting=options.max_waiting, **SMALL | engine) as llm:
        server = Server(llm, options, names, listener)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server has not started"
            time.sleep(0.01)
        running = Running(server, listener.getsockname()[1])
        yield running
        if llm.thread.error is None:
            llm.thread.set_pace()
            running.assert_at_rest()
        server.end()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server has not ended"
