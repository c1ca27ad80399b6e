"""`nanovllm serve` as a process: how it starts, how it ends, and what its clients hear of that."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from http.client import HTTPConnection

import openai
import pytest

from tests.processes import LIMIT_S
from tests.servers import raw_post

ENGINE = ("--block-size", "4", "--num-gpu-blocks-override", "160", "--max-model-len", "256")
SERVE = ("-m", "nanovllm.tools.cli", "serve")
LONG = dict(model="tiny", prompt="two gulls", temperature=0, max_tokens=200, extra_body={"ignore_eos": True})


@pytest.fixture
def start(processes, checkpoint):
    """start(*arguments) -> the process, when it is ready, and its url. name: None takes the checkpoint's own."""

    def get(*arguments: str, name: str | None = "tiny", command: tuple[str, ...] = SERVE):
        options = ("--port", "0", *(("--served-model-name", name) if name else ()), *ENGINE, *arguments)
        process = processes.start(*command, str(checkpoint()), *options)
        line = process.stdout.readline()
        assert line.startswith(f"serving {name or checkpoint().name}:"), line + process.communicate(timeout=LIMIT_S)[1]
        return process, re.search(r"http://[^/ ]+", line)[0]

    return get


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


def end_of(process: subprocess.Popen) -> tuple[int, str]:
    _, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, err


@pytest.mark.compiler
def test_sigterm_lets_requests_finish_and_takes_no_new_ones(start):
    process, url = start()
    stream = iter(client_of(url).completions.create(**LONG, stream=True))
    next(stream)
    process.send_signal(signal.SIGTERM)
    ended = LIMIT_S + time.monotonic()
    while time.monotonic() < ended:
        try:
            socket.create_connection(url.removeprefix("http://").split(":")).close()
        except OSError:
            break
    else:
        pytest.fail("it still takes new connections")
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, "")
    line = r"[\d-]{10} [\d:]{8} POST /v1/completions 200: 2 tokens in \(0 cached\), 200 out, [\d.]+ s, id \w{32}\n"
    assert re.fullmatch(line, out), out


LIMITED = """import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from nanovllm.tools.cli import main
sys.exit(main(sys.argv[1:]))"""
HALF = [
    b"",
    b"POST /v1/completions HTTP/1.1\r\nHost: local",
    raw_post("/v1/completions", {"prompt": "x" * 100})[:-1],
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /inside/events HTTP/1.1\r\nHost: localhost\r\n\r\n",
    raw_post("/v1/completions", {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}),
]


@pytest.mark.nightly
def test_more_connections_than_descriptors(start):
    """Clients that send half a request, none, or take nothing, 400 of each: the others are answered, no log is filled.

    The model is asked for by its folder's name, and nobody is told where that is.
    """
    process, url = start(name=None, command=("-c", LIMITED, "serve"))
    host = url.removeprefix("http://").split(":")
    for raw in HALF:
        with ExitStack() as ends:
            for _ in range(400):
                connection = ends.enter_context(socket.create_connection(host, timeout=LIMIT_S))
                with suppress(ConnectionError):  # it may have been closed again
                    connection.sendall(raw)
            for path in ("/health", "/metrics", "/page/chat.js", "/v1/models"):
                answer = HTTPConnection(*host, timeout=LIMIT_S)
                answer.request("GET", path)
                assert answer.getresponse().status == 200
                answer.close()
    client = client_of(url)
    [model] = client.models.list().data
    with pytest.raises(openai.NotFoundError, match=f"this is {model.id}: leave") as error:
        client.completions.create(model="x", prompt="x")
    assert "/" not in model.id + error.value.message
    process.send_signal(signal.SIGTERM)
    code, err = end_of(process)
    assert code == 0 and len(err) < 5000


@pytest.mark.nightly
def test_ctrl_c_does_not_wait_for_ever(start):
    """Not for a request that takes longer than --shutdown-timeout, nor for one that reads nothing, nor for a page."""
    process, url = start("--shutdown-timeout", "0.2", "--classroom", "--disable-log-requests")
    host = url.removeprefix("http://").split(":")
    page = socket.create_connection(host)
    page.sendall(b"GET /inside/events HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert page.recv(15) == b"HTTP/1.1 200 OK"
    slow = socket.create_connection(host)
    body = {"prompt": "two gulls", "stream": True, "max_tokens": 250, "ignore_eos": True}
    slow.sendall(raw_post("/v1/completions", body, "1.0"))
    assert slow.recv(15) == b"HTTP/1.1 200 OK"
    control = socket.create_connection(host)
    control.sendall(raw_post("/inside/pace", {"steps_left": None, "delay_s": 5}, "1.0"))
    control.recv(100)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and " 200: " not in out


@pytest.mark.nightly
def test_a_lost_rank_ends_the_server(start):
    """Its clients are told; the exit code is not 0, so that whoever watches starts it again."""
    process, url = start("-tp", "2", "--classroom")
    children = ["pgrep", "-P", str(process.pid), "-f", "ranks import serve"]
    ranks = subprocess.run(children, capture_output=True, text=True).stdout.split()
    assert len(ranks) == 2
    client, heard = client_of(url), []
    client.post(f"{url}/inside/pace", body={"delay_s": 0.1}, cast_to=object)  # it must die in mid-answer

    def ask() -> None:
        try:
            for _ in client.completions.create(**LONG, stream=True):
                heard.append("token")
        except openai.APIError as error:
            heard.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while not heard:
        time.sleep(0.01)
    os.kill(int(ranks[1]), signal.SIGKILL)
    thread.join(LIMIT_S)
    assert "rank 1 died" in heard[-1]
    code, err = end_of(process)
    assert code == 1 and "the engine has died" in err


BAD = [
    (("--port", "70000"), "port must be a whole number between 0 and 65535"),
    (("--max-waiting", "0"), "max_waiting must be a whole number from 1"),
    (("--request-timeout", "-1"), "request_timeout must be a number"),
    (("--api-key", "two words"), "an --api-key travels in a header"),
    (("--api-key", ""), "--api-key is empty"),
    (("--host", "no.such.host.invalid"), "cannot listen at no.such.host.invalid:8000"),
    (("--max-num-seqs", "0"), "max_num_seqs"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[message for _, message in BAD])
def test_bad_options_are_refused_before_the_model_is_loaded(arguments, message, tmp_path, capsys):
    from nanovllm.tools.cli import main

    assert main(["serve", str(tmp_path / "no model"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_found_before_the_model_is_loaded(tmp_path, capsys):
    from nanovllm.tools.cli import main

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(tmp_path / "no model"), "--port", str(port)]) == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_without_its_packages_it_says_so():
    code = "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None\n"
    code += "from nanovllm.tools.cli import main; sys.exit(main(['serve', '/no model']))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 2 and 'pip install "nanovllm[serve]"' in found.stderr
