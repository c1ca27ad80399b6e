"""Crowds: clients that come and go as they please. Afterwards nothing is held, nothing waits, memory is as it was."""

import asyncio
import gc
import json
import random
import resource
from typing import NamedTuple

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.serving.http.options import ServeOptions
from nanovllm.worker.cpu.memory import give_freed_memory_back
from tests.checkpoints import SMALL
from tests.servers import raw_post, serving

SCHEMA = {"type": "object", "properties": {"bird": {"enum": ["gull", "crow"]}}, "required": ["bird"]}
COUNT = {"name": "count", "parameters": SCHEMA}
CALL = {"tool_choice": "required", "parallel_tool_calls": False}
ENGINE = SMALL | dict(num_gpu_blocks_override=120, max_num_seqs=16)


class Expected(NamedTuple):
    """Of a prompt: what follows it, the answer to it in a chat, and its tokens with their log probabilities."""

    text: str
    chat: str
    token_ids: list[int]
    logprobs: list[float]


def expectations(llm: LLM, prompts: list[str]) -> dict[str, Expected]:
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=0)
    outs = llm.generate(prompts, greedy)
    chats = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], greedy)
    found = {}
    for prompt, out, chat in zip(prompts, outs, chats, strict=True):
        ids = out.prompt_token_ids
        logprobs = [row[token].logprob for token, row in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
        found[prompt] = Expected(out.outputs[0].text, chat.outputs[0].text, ids, logprobs)
    return found


def check_answer(what: str, content: bytes, n: int, expected: Expected) -> None:
    """A body, or a stream of events."""
    if what == "tokenize":
        assert json.loads(content)["tokens"] == expected.token_ids
        return
    events = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: {")] or [content]
    if "call" in what:
        check_call(list(map(json.loads, events)))
        return
    if what == "response":
        [message] = json.loads(events[-1]).get("response", json.loads(events[-1]))["output"]
        assert message["content"][0]["text"] == expected.chat
        return
    texts, logprobs = [""] * n, []
    for event in events:
        for choice in json.loads(event)["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            texts[choice["index"]] += said.get("content") or ""
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
    assert len(texts) == n
    if what == "score":
        assert logprobs[1:] == pytest.approx(expected.logprobs, abs=0.1)  # bfloat16
    else:
        assert texts == [expected.chat if what == "chat" else expected.text] * n


def check_call(events: list[dict]) -> None:
    """Of a chat, or of a response, whole or the events of one: one call, and it fits its schema."""
    if "object" in events[0] and events[0]["object"].startswith("chat"):
        said = [choice.get("delta") or choice.get("message") or {} for e in events for choice in e["choices"]]
        calls = [call["function"] for part in said for call in part.get("tool_calls") or []]
        name, arguments = ("".join(call.get(key) or "" for call in calls) for key in ("name", "arguments"))
    else:
        [item] = events[-1].get("response", events[-1])["output"]
        name, arguments = item["name"], item["arguments"]
    assert name == "count" and json.loads(arguments)["bird"] in ("gull", "crow")


async def client(port: int, rng: random.Random, expected: dict[str, Expected], counts: dict) -> None:
    """One request, and one of the things that clients do."""
    prompt, what = (
        rng.choice(list(expected)),
        rng.choice("text text text chat chat_call response response_call score tokenize".split()),
    )
    kind = rng.choice("finish finish finish whole leave leave slow early half bad".split())
    counts[kind] = counts.get(kind, 0) + 1
    n = rng.choice([1, 1, 2]) if what in ("text", "chat") else 1
    body: dict = {"temperature": 0, "ignore_eos": True, "stream": kind != "whole", "n": n}
    if what.startswith("chat"):
        path, body = "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
        more = CALL | {"tools": [{"type": "function", "function": COUNT}], "max_tokens": 120, "ignore_eos": False}
        body |= more if what == "chat_call" else {"max_tokens": 40}
    elif what.startswith("response"):
        del body["n"]
        path, body = "/v1/responses", body | {"input": prompt}
        more = CALL | {"tools": [{"type": "function"} | COUNT], "max_output_tokens": 120, "ignore_eos": False}
        body |= more if what == "response_call" else {"max_output_tokens": 40}
    elif what == "score":
        path, body = "/v1/completions", body | {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    elif what == "tokenize":
        path, body = "/tokenize", {"prompt": prompt}
    else:
        path, body = "/v1/completions", body | {"prompt": prompt, "max_tokens": 40}
    raw = raw_post(path, body | {f"unknown_{rng.random()}": 1} | ({"model": 1} if kind == "bad" else {}), "1.0")
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
            assert status in (400, 404, 429)  # whether there is room is asked first
        elif status == 200:
            counts["answered"] = counts.get("answered", 0) + 1
            check_answer(what, content, n, expected[prompt])
        else:
            assert status == 429, answer
    finally:
        writer.close()


async def crowd(port: int, num_clients: int, num_requests: int, expected: dict[str, Expected]) -> dict[str, int]:
    """So many clients at any time; each that is done is followed by another, until there were so many requests."""
    counts: dict[str, int] = {}
    numbers = iter(range(num_requests))

    async def seat() -> None:
        for number in numbers:
            await client(port, random.Random(number), expected, counts)

    await asyncio.gather(*(seat() for _ in range(num_clients)))
    return counts


def held(server) -> tuple[int, int]:
    """Bytes of memory that is in use, and objects that Python knows, when nothing runs."""
    server.assert_at_rest()
    gc.collect()
    give_freed_memory_back()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize(), len(gc.get_objects())


@pytest.mark.compiler  # everybody's text is compared, whatever company it was computed in
@pytest.mark.parametrize(
    "num_clients, num_requests", [(24, 48), pytest.param(200, 20_000, marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_a_crowd_leaves_nothing(checkpoint, num_clients, num_requests):
    """Everybody who waits for the end gets what LLM gives, whatever the others do."""
    rng = random.Random(0)
    shared = "the quick brown fox "
    prompts = [shared * rng.randrange(3) + "dog gull fog red"[i:] for i in range(12)]
    expected = expectations(LLM(str(checkpoint()), **ENGINE), prompts)
    pytest.importorskip("llguidance")
    with serving(checkpoint(), ServeOptions(max_waiting=150), **ENGINE) as server:
        tokenizer = server.engine.tokenizer
        names = "{{ tools | map(attribute='function.name') | join }}"  # shown, and briefly
        tokenizer.chat_template += f"{{% if tools %}}{names}{{% endif %}}"
        asyncio.run(crowd(server.port, num_clients, num_requests // 2, expected))
        memory, num_objects = held(server)
        counts = asyncio.run(crowd(server.port, num_clients, num_requests, expected))
        memory_then, num_objects_then = held(server)
        print(
            f"{counts}; {server.engine.scheduler.num_preemptions} preemptions; memory {memory:,} bytes and "
            f"{memory_then - memory:+,}; objects {num_objects:,} and {num_objects_then - num_objects:+,}"
        )
        assert counts["answered"] > num_requests / 8
        assert memory_then - memory < 20e6 and num_objects_then - num_objects < 1000
        assert server.send("/metrics")[0] == 200 and len(server.llm.thread.readers) == 0
