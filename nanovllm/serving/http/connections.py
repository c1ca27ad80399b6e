"""The server's connections: none waits for its client for ever, and together they leave descriptors for the rest.

A connection waits while its client has to act: to send the rest of a request, the next one, or to take what it is sent.
It may do so for WAIT_LIMIT_S; a request's first byte begins them anew, and no other byte. When too many are open, the
one that has waited longest is closed. So whoever holds many loses their own, and a newcomer that sends a whole request
is answered.
"""

import asyncio
import os
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.serving.http.requests import Refused, error_of
from nanovllm.serving.openai.json_lines import to_json

WAIT_LIMIT_S = 30.0
KEEP_ALIVE_S = 20  # nothing has been asked since: longer than clients keep a connection (httpx 5 s, aiohttp 15 s)
MAX_CONNECTIONS = 2048  # however many descriptors there are: each may hold a body that has not come whole
RESERVED = 64  # descriptors that are no connections: files, adapters, pipes; and connections that are not counted yet
ACCEPTED_AT_ONCE = 8  # by asyncio; three times as many may be open before the first of them is counted
READ_BYTES = 16 << 10  # at a time: they may be thousands of chunks of one byte, which take long to parse
SPARE = 16  # connections for requests that are answered at once, such as /health


class Connections:
    """All that are open, and those among them that wait, the one that has waited longest first."""

    def __init__(self) -> None:
        self.most = min(max(free_descriptors() - RESERVED, 2 * SPARE), MAX_CONNECTIONS)
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, asyncio.TimerHandle] = {}

    def is_full(self) -> bool:
        """Is no connection left for a request that may take long?"""
        return len(self.open) - len(self.waiting) > self.most - SPARE

    def add(self, connection: "Connection") -> None:
        self.open.add(connection)
        connection.note()
        if len(self.open) > self.most:
            next(iter(self.waiting)).drop()  # there is one: the newcomer

    def discard(self, connection: "Connection") -> None:
        self.open.discard(connection)
        if connection in self.waiting:
            self.waiting.pop(connection).cancel()


def free_descriptors() -> int:
    if sys.platform != "win32":  # where a socket is no descriptor
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY:
            return limit - len(os.listdir("/dev/fd"))
    return RESERVED + MAX_CONNECTIONS


class Connection(H11Protocol):
    """uvicorn's, which speaks HTTP, with a deadline for the client. uvicorn's own ends with the first byte it gets."""

    def __init__(self, table: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.table, self.is_refused = table, False
        self.has_begun = False  # the request that is answered now, or comes next

    def note(self) -> None:
        """Whose turn is it now, the client's or the server's?"""
        has_request = self.cycle is not None and not self.cycle.response_complete
        waits = not has_request or self.conn.their_state is h11.SEND_BODY or self.flow.write_paused
        if waits and self in self.table.open and self not in self.table.waiting:
            self.table.waiting[self] = self.loop.call_later(WAIT_LIMIT_S, self._give_up)
        elif not waits and self in self.table.waiting:
            self.table.waiting.pop(self).cancel()

    def drop(self) -> None:
        self.table.waiting.pop(self).cancel()
        self.transport.abort()

    def _give_up(self) -> None:
        if self.transport.is_closing() or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return self.drop()  # an answer has begun
        if self.cycle is not None:
            self.cycle.disconnected = True  # nothing else is sent
        self._refuse(408, f"the request has not come within {WAIT_LIMIT_S:g} s")

    def _refuse(self, status: int, why: str) -> None:
        """Answer, and read on for a second: closed with something unread, a connection is reset, the answer unread."""
        text = to_json(error_of(Refused(status, why))[1])
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Connection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        self.transport.write_eof()
        self.is_refused = True
        self.loop.call_later(1.0, self.transport.abort)

    # -- what asyncio and uvicorn say -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.max_size = READ_BYTES  # pyrefly: ignore[missing-attribute]  # asyncio's 256 KiB hold up everybody
        super().connection_made(transport)
        self.table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.table.discard(self)

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        if not self.has_begun and self in self.table.waiting:
            self.table.waiting.pop(self).cancel()  # note() begins anew: a request has all its time
        self.has_begun = True
        super().data_received(data)
        self.note()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.has_begun = self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0] != b""  # the next one
        self.note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.note()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.note()
