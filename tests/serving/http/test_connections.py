"""Clients that do not do their part, refusals that must be read, and a log that repeats itself."""

import json
import logging
import socket
from contextlib import ExitStack, suppress
from http.client import HTTPConnection

import pytest

from nanovllm.serving.http import connections, log
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.serve import name_of
from nanovllm.serving.openai.answer import COMPLETIONS
from tests.servers import PATIENCE_S, Running, raw_post, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
KEY = b"Authorization: Bearer key\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
EVENTS = b"GET /inside/events HTTP/1.1\r\nHost: localhost\r\n" + KEY + b"\r\n"


@pytest.fixture(scope="module")
def running(checkpoint):
    options = ServeOptions(max_body_bytes=10_000, api_key=("key",), max_waiting=8)
    with serving(checkpoint(), options) as running:
        yield running


@pytest.fixture
def server(running):
    yield running
    running.until(lambda: not running.connections.open)


def connect(server: Running, num_bytes: int = 0) -> socket.socket:
    """num_bytes: of what the client's system takes for it."""
    connection = socket.socket()
    if num_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", server.port))
    return connection


def post(body: dict) -> bytes:
    return raw_post(COMPLETIONS, body).replace(b"\r\n", b"\r\n" + KEY, 1)


def let_time_pass(server: Running) -> None:
    """The timers of all connections that wait run out."""
    timers = list(server.connections.waiting.values())
    server.llm.thread.loop.call_soon_threadsafe(lambda: [timer._run() for timer in timers])


@pytest.fixture
def num_received(monkeypatch):
    """Bytes that have come to the server, a number for each time."""
    sizes: list[int] = []
    receive = connections.Connection.data_received

    def received(self, data: bytes) -> None:
        receive(self, data)
        sizes.append(len(data))

    monkeypatch.setattr(connections.Connection, "data_received", received)
    return sizes


HALF = {
    "half a head": HEAD,
    "no body": HEAD + KEY + b"Content-Length: 100\r\n\r\n",
    "half a body": HEAD + KEY + b'Content-Length: 100\r\n\r\n{"prompt":',
    "half a chunk": HEAD + KEY + b'Transfer-Encoding: chunked\r\n\r\n20\r\n{"prompt":',
    "half a chunk's size": HEAD + KEY + b"Transfer-Encoding: chunked\r\n\r\n2",
}


@pytest.mark.parametrize("raw", HALF.values(), ids=list(HALF))
def test_half_a_request(server, num_received, raw):
    """408, and the end; a byte now and then gains no time."""
    with connect(server) as connection:
        connection.sendall(raw)
        server.until(lambda: sum(num_received) == len(raw))
        [timer] = server.connections.waiting.values()
        for number in range(1, 4):
            connection.sendall(b"1")
            server.until(lambda number=number: sum(num_received) == len(raw) + number)
        assert list(server.connections.waiting.values()) == [timer]
        let_time_pass(server)
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b"\r\nConnection: close\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "the request has not come within 30 s"


def test_a_request_has_all_its_time(server, num_received):
    """On a connection that was idle for long, too."""
    with connect(server) as connection:
        connection.sendall(GET + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        server.until(lambda: server.connections.waiting)
        [idle] = server.connections.waiting.values()
        connection.sendall(HEAD)
        server.until(lambda: len(num_received) == 2)
        [begun] = server.connections.waiting.values()
        assert begun is not idle and idle.cancelled()
        connection.sendall(b"X")
        server.until(lambda: len(num_received) == 3)
        assert list(server.connections.waiting.values()) == [begun]


def test_nothing_at_all(server, monkeypatch):
    monkeypatch.setattr(connections, "WAIT_LIMIT_S", 0.01)
    with connect(server) as connection:
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 408 ")


AFTER = {  # what is sent, the status that it gets, and whether the connection's end may be announced
    "a body that nobody reads": (GET + b"Content-Length: 100\r\n\r\nx", 200, False),
    "half a body of what is refused": (HEAD + b"Content-Length: 100\r\n\r\nx", 401, False),
    "half of the next request": (GET + b"\r\nGET /health HT", 200, True),
    "nothing": (GET + b"\r\n", 200, True),
}


@pytest.mark.parametrize("raw, status, is_told", AFTER.values(), ids=list(AFTER))
def test_half_a_request_that_has_been_answered(server, raw, status, is_told):
    with connect(server) as connection:
        connection.sendall(raw)
        file = connection.makefile("rb")
        assert file.readline().split()[1] == str(status).encode()
        server.until(lambda: server.connections.waiting)
        let_time_pass(server)
        assert (b"HTTP/1.1 408" in file.read()) <= is_told


def test_a_client_is_the_first_to_give_up_an_idle_connection(server):
    """Else a request that is sent just then is lost; httpx keeps one for 5 seconds, aiohttp for 15."""
    with connect(server) as connection:
        connection.sendall(GET + b"\r\n")
        assert connection.makefile("rb").readline().split()[1] == b"200"
        server.until(lambda: server.connections.waiting)
        [idle] = server.connections.open
        assert 15 < idle.timeout_keep_alive < connections.WAIT_LIMIT_S


def test_who_takes_nothing_is_dropped(server, monkeypatch):
    """In mid-stream, with full buffers: the request ends with its connection."""
    made = connections.Connection.connection_made

    def with_small_buffer(self, transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(connections.Connection, "connection_made", with_small_buffer)
    body = {"prompt": "x", "stream": True, "logprobs": 20, "max_tokens": 250, "ignore_eos": True, "n": 8}
    with connect(server, num_bytes=2048) as connection:
        connection.sendall(post(body))
        server.until(lambda: server.engine.requests)
        server.until(lambda: server.connections.waiting)
        let_time_pass(server)
        server.until(lambda: not server.connections.open)
        server.assert_at_rest()
        with suppress(ConnectionError):
            assert b"[DONE]" not in connection.makefile("rb").read()


def test_a_connection_that_is_worked_for_has_no_deadline(server):
    server.llm.thread.set_pace(0)
    with connect(server) as connection:
        connection.sendall(post({"prompt": "x", "max_tokens": 2}))
        server.until(lambda: server.engine.requests)
        assert len(server.connections.open) == 1 and not server.connections.waiting
        server.llm.thread.set_pace()
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_the_longest_waiting_goes_first(server, monkeypatch):
    """Beyond the limit each newcomer costs the connection that has done nothing for longest; busy ones stay."""
    monkeypatch.setattr(server.connections, "most", connections.SPARE + 4)
    with ExitStack() as ends:

        def events() -> bytes:
            connection = ends.enter_context(connect(server))
            connection.sendall(EVENTS)
            return connection.recv(12)

        busy = [events() for _ in range(4)]
        assert busy == [b"HTTP/1.1 200"] * 4
        assert events() == b"HTTP/1.1 429", "the rest is for those who are answered at once"
        held = [ends.enter_context(connect(server)) for _ in range(connections.SPARE + 10)]
        for connection in held[:10]:
            assert connection.recv(1) == b"", "closed"
        assert server.send("/health")[0] == 200
        server.until(lambda: len(server.connections.open) <= server.connections.most)
        held[-1].sendall(GET + b"\r\n")
        assert held[-1].recv(15) == b"HTTP/1.1 200 OK"
        server.until(lambda: len(server.connections.open) - len(server.connections.waiting) == 4)


REFUSED = [
    (COMPLETIONS, {}, 413),
    (COMPLETIONS, {"Transfer-Encoding": "chunked"}, 413),
    (COMPLETIONS, {"Connection": "close"}, 413),
    (COMPLETIONS, {"Authorization": "Bearer x"}, 401),
    (COMPLETIONS, {"Host": "evil.example"}, 403),
    (COMPLETIONS, {"Content-Type": "text/plain"}, 415),
    ("/nothing", {}, 404),
    ("/health", {}, 405),
]


@pytest.mark.parametrize("path, headers, status", REFUSED, ids=[f"{status} {h}" for _, h, status in REFUSED])
def test_a_refusal_is_read_by_a_client_that_sends_first(server, path, headers, status):
    """However much it sends: nothing is reset, and the same connection can be used again."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    sent = {"Content-Type": "application/json", "Authorization": "Bearer key"} | headers
    parts = (b"x" * 100_000 for _ in range(200))
    is_chunked = "Transfer-Encoding" in headers
    connection.request("POST", path, parts if is_chunked else b"".join(parts), sent, encode_chunked=is_chunked)
    answer = connection.getresponse()
    assert answer.status == status and json.loads(answer.read())["error"]["message"]
    port = connection.sock and connection.sock.getsockname()
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    assert "Connection" in headers or connection.sock.getsockname() == port
    connection.close()


def test_a_refusal_does_not_wait_for_a_body_that_waits_for_it(server):
    """Expect: 100-continue. The client sends nothing until it is asked to, and is refused."""
    with connect(server) as connection:
        connection.sendall(HEAD + KEY + b"Expect: 100-continue\r\nContent-Length: 20000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_line_that_repeats_is_written_once(monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now)
    logger = logging.getLogger("test_a_line_that_repeats")
    logger.addFilter(log.Repeated())
    for number in range(1000):
        logger.warning("number %d", number)
        logger.warning(f"accept failed\nsocket {number}")
    assert caplog.messages == ["number 0", "accept failed\nsocket 0"]
    for error in (OSError("a"), ValueError("b"), OSError("c")):
        logger.error("a step has failed", exc_info=error)
    assert [record.exc_info[0] for record in caplog.records[2:]] == [OSError, ValueError]
    now = 60.0
    logger.warning("number %d", 7)
    assert caplog.messages[-1] == "number 7 (and 999 more like it)"
    for number in range(5000):
        logger.warning(f"line {number}")
    assert len(logger.filters[0]._seen) <= log.MAX_LINES


def test_where_a_checkpoint_is_is_not_its_name(tmp_path, monkeypatch):
    (folder := tmp_path / "tiny").mkdir()
    monkeypatch.chdir(folder)
    assert {name_of(model) for model in (str(folder), ".", "../tiny/")} == {"tiny"}
    assert name_of("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
