"""Crowds: clients that come and go as they please. Afterwards nothing is held, nothing waits, memory is as it was."""

import asyncio
import json
import random
import resource
import time

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.serving.http.options import ServeOptions
from tests.checkpoints import SMALL
from tests.servers import raw_post, serving

ENGINE = SMALL | dict(num_gpu_blocks_override=120, max_num_seqs=16)


async def client(port: int, rng: random.Random, expected: dict, counts: dict) -> None:
    """One request, and one of the things that clients do."""
    prompt = rng.choice(list(expected))
    kind = rng.choice("finish finish finish whole leave leave slow early half bad".split())
    counts[kind] = counts.get(kind, 0) + 1
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": kind != "whole"}
    body |= {"n": rng.choice([1, 1, 2])} | ({"temperature": "x"} if kind == "bad" else {})
    raw = raw_post("/v1/completions", body, "1.0")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw[: len(raw) - 20] if kind == "half" else raw)
        await writer.drain()
        if kind in ("half", "early"):
            await asyncio.sleep(rng.random() * 0.02)
            return
        answer = b""
        while part := await reader.read(rng.choice([1, 100, 65536])):
            answer += part
            if kind == "leave" and rng.random() < 0.2:
                return
            if kind == "slow":
                await asyncio.sleep(0.005)
        head, _, content = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if kind == "bad":
            assert status in (400, 429)  # whether there is room is asked first
        elif status == 200:
            counts["answered"] = counts.get("answered", 0) + 1
            if kind == "whole":
                texts = [choice["text"] for choice in json.loads(content)["choices"]]
            else:
                texts = [""] * body["n"]
                for line in content.split(b"\n"):
                    for choice in json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ():
                        texts[choice["index"]] += choice["text"]
            assert texts == [expected[prompt]] * body["n"]
        else:
            assert status == 429, answer
    finally:
        writer.close()


async def crowd(port: int, num_clients: int, seconds: float, expected: dict) -> dict:
    """So many clients at any time; each that is done is followed by another, until the time is over."""
    counts: dict[str, int] = {}
    ends = time.monotonic() + seconds

    async def seat(number: int) -> None:
        rng = random.Random(number)
        while True:
            await client(port, rng, expected, counts)
            if time.monotonic() > ends:
                return

    await asyncio.gather(*(seat(number) for number in range(num_clients)))
    return counts


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    "num_clients, seconds", [(24, 0.0), pytest.param(200, 240.0, marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_a_crowd_leaves_nothing(checkpoint, num_clients, seconds):
    """Everybody who waits for the end gets the greedy text of LLM.generate, whatever the others do."""
    llm = LLM(str(checkpoint()), **ENGINE)
    rng = random.Random(0)
    shared = "the quick brown fox "
    prompts = [shared * rng.randrange(3) + "dog gull fog red"[i:] for i in range(12)]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = {prompt: out.outputs[0].text for prompt, out in zip(prompts, llm.generate(prompts, greedy), strict=True)}
    with serving(checkpoint(), ServeOptions(max_waiting=150), **ENGINE) as server:
        asyncio.run(crowd(server.port, num_clients, seconds / 4, expected))
        server.assert_at_rest()
        before = memory_bytes()
        counts = asyncio.run(crowd(server.port, num_clients, seconds, expected))
        server.assert_at_rest()
        grown = memory_bytes() - before
        print(
            f"{counts}; {server.engine.scheduler.num_preemptions} preemptions; memory {before:,} bytes and {grown:+,}"
        )
        assert counts["answered"] > num_clients / 4 and grown < 50e6
        assert server.send("/metrics")[0] == 200 and len(server.llm.thread.readers) == 0
