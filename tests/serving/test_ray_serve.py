"""Two engines behind Ray Serve: who gets a request, who leaves, who dies. Without Ray: test_routing.py."""

import asyncio
import json
import os
import random
import signal
import socket
import time
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from nanovllm.serving.http.load_generator import run_load, stream
from tests.checkpoints import SMALL, make_checkpoint

NEEDED = ("ray", "grpc", "fastapi")  # of ray[serve]
pytestmark = pytest.mark.skipif(None in map(find_spec, NEEDED), reason='no Ray Serve: pip install -e ".[ray-serve]"')
SCRIPT = Path(__file__).parents[2] / "examples" / "ray_serve.py"
SIZE, PATIENCE_S = SMALL["block_size"], 120
LONG = 3000  # tokens of an answer that nobody reads to its end


def conversations(num: int) -> list[list[int]]:
    rng = random.Random(1)
    beginnings = [rng.choices(range(10, 300), k=10 * SIZE) for _ in range(2)]
    return [beginnings[number % 2] + rng.choices(range(10, 300), k=2 * SIZE) for number in range(num)]


@pytest.mark.nightly
def test_two_engines(tmp_path, processes):
    model = make_checkpoint(tmp_path, "llama", max_position_embeddings=4096)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"port": port, "block-size": SIZE, "kv-cache-memory-bytes": 8_000_000, "model": model}
    process = processes.start(str(SCRIPT), "--serve", *(f"--{name}={value}" for name, value in options.items()))
    while not (line := process.stdout.readline()).startswith("serving at "):
        assert line, process.communicate()[1]
    url = line.split()[2].removesuffix("/v1")

    def state() -> dict:
        with urlopen(f"{url}/engines", timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def until(condition) -> dict:
        ends = time.monotonic() + PATIENCE_S
        while not condition(found := state()):
            assert time.monotonic() < ends, found
            time.sleep(0.05)
        return found

    def ask(texts: list[list[int]], rate: float = float("inf")) -> list[int]:
        """How many tokens of each prompt were found."""
        bodies = [{"prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True} for text in texts]
        timings = asyncio.run(run_load(url, bodies, rate))
        assert not [timing.error for timing in timings if timing.error]
        return [timing.num_cached_tokens for timing in timings]

    # At once: the second beginning goes where the first one is not being computed. Then each turn finds the one before.
    texts = conversations(6)
    assert ask(texts[:2]) == [0, 0]
    until(lambda now: [of["num_blocks"] for of in now["router"].values()] == [12, 12])
    for text in texts[2:]:
        assert ask([text]) == [10 * SIZE]
    for text in texts:
        text += [7] * 3 * SIZE
        assert ask([text]) == [12 * SIZE]

    chat = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ 7 * 7 }}"}
    for path, body in (
        ("/v1/completions", {"prompt": [-1] * 2 * SIZE}),
        ("/v1/completions", {"prompt": [1 << 70] * 2 * SIZE}),
        ("/v1/completions", {"prompt": "x" * 2_000_001}),
        ("/v1/chat/completions", chat),
    ):
        request = Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with pytest.raises(HTTPError) as refused:
            urlopen(request, timeout=PATIENCE_S)
        assert refused.value.code == (413 if len(request.data) > 2_000_000 else 400)

    async def leave() -> None:
        body = {"prompt": texts[0], "max_tokens": LONG, "ignore_eos": True, "stream": True}
        async with aclosing(stream(url, "/v1/completions", body)) as chunks:
            await anext(chunks)

    asyncio.run(leave())
    idle = until(lambda now: not any(engine["num_running"] for engine in now["engines"]))
    assert sum(engine["num_output_tokens"] for engine in idle["engines"]) < LONG
    until(lambda now: not any(of["load"] for of in now["router"].values()))

    killed, left = idle["engines"]
    os.kill(killed["pid"], signal.SIGKILL)
    assert 0 in [ask([text])[0] for text in texts], "what only the dead one had is computed anew"
    assert [ask([text])[0] for text in texts] == [len(text) - 1 for text in texts]
    now = until(lambda now: killed["engine"] not in now["router"])
    assert left["engine"] in now["router"]

    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
