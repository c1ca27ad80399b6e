"""Load for any server with OpenAI's API: requests that arrive by chance, and what each of them waited.

Requests arrive as a Poisson process: the times between two arrivals are exponential, whether the server keeps up or
not, as with users who do not know of each other. examples/bench_serve.py and chapter 14 measure with it.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Timing:
    """One request: times in seconds, arrival from the beginning of the run, the others from the arrival."""

    arrival_s: float
    ttft_s: float | None = None
    latency_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first."""
        if self.ttft_s is None or self.latency_s is None or self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)


async def run_load(url: str, bodies: list[dict[str, Any]], rate: float, *, seed: int = 0) -> list[Timing]:
    """Send each body to /v1/completions when its time has come, `rate` a second on average, and stream the answers.

    url: http://host:port. rate: requests a second; float("inf") sends all at once. A refusal or a broken connection is
    in its Timing's error.
    """
    rng, started = random.Random(seed), time.perf_counter()
    tasks, arrival = [], 0.0
    for body in bodies:
        tasks.append(asyncio.create_task(_send(url, body, started, arrival)))
        arrival += rng.expovariate(rate) if rate < float("inf") else 0.0
    return list(await asyncio.gather(*tasks))


async def _send(url: str, body: dict[str, Any], started: float, arrival_s: float) -> Timing:
    await asyncio.sleep(started + arrival_s - time.perf_counter())
    timing, began = Timing(arrival_s), time.perf_counter()
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async for chunk in stream(url, "/v1/completions", asked):
            if "error" in chunk:
                raise ConnectionError(chunk["error"]["message"])
            if chunk["choices"]:
                now = time.perf_counter() - began
                timing.ttft_s = timing.ttft_s or now
                timing.latency_s = now
            if usage := chunk.get("usage"):
                timing.num_prompt_tokens, timing.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                timing.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    return timing


async def stream(url: str, path: str, body: dict[str, Any] | None) -> Any:
    """The events of one answer, parsed. Raises ConnectionError, with the status, for an answer that is no stream."""
    parts, content = urlsplit(url), b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
    try:
        # HTTP/1.0: the answer comes as it is, not in chunks.
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.0\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status = (await reader.readline()).split(None, 2)[1:2]
        while (await reader.readline()).strip():
            pass
        if status != [b"200"]:
            reason = (await reader.read(1000)).decode(errors="replace")
            raise ConnectionError(f"status {b''.join(status).decode()}: {reason}")
        async for line in reader:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"data: [DONE]"):
                return
        raise ConnectionError("the stream broke off")
    finally:
        writer.close()


@contextmanager
def running_server(model: str, *arguments: str, limit_s: float = 300.0) -> Iterator[str]:
    """`nanovllm serve` in a process of its own, ended by SIGTERM. Gives its address, http://host:port.

    Raises RuntimeError if it does not start.
    """
    command = [sys.executable, "-m", "nanovllm.tools.cli", "serve", model, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # it comes when the server is ready, or is empty when it has ended
            if not line.startswith("serving"):
                raise RuntimeError(f"the server did not start, exit code {process.wait()}")
            yield line.split("the page is ")[1].split("/,")[0]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
