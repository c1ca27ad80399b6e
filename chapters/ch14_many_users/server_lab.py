"""The first part of the lab of chapter 14: `nanovllm serve` in a process of its own, under load."""

import asyncio
import re
import time
from collections.abc import Coroutine
from statistics import mean
from typing import Any
from urllib.request import urlopen

from chapters.ch14_many_users.fleet import percentile
from chapters.draw import make_table
from chapters.story import Story
from nanovllm.serving.http.load_generator import Timing, run_load, stream

SEATS, PLACES = 4, 16
LOADS = (0.5, 0.8, 1.2)
NUM_REQUESTS, ANSWER_TOKENS = 14, 8
OPTIONS = ["--dtype", "bfloat16", "--max-model-len", "512", "--num-gpu-blocks-override", "400", "--block-size", "16"]
OPTIONS += ["--max-num-seqs", str(SEATS), "--max-waiting", str(PLACES)]


def bodies(number: int, num_requests: int, num_tokens: int = ANSWER_TOKENS) -> list[dict[str, Any]]:
    """Prompts that begin like no other, so that nothing is found in the cache."""
    about = "Write about the sea, the weather on that day, and what the people on the pier said to each other."
    prompts = [f"{number} {i} is the number of this letter. {about}" for i in range(num_requests)]
    return [{"prompt": p, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True} for p in prompts]


def gauges(url: str) -> dict[str, float]:
    with urlopen(f"{url}/metrics") as answer:
        found = re.findall(r"^vllm:(\w+)\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


async def watch(url: str, work: Coroutine[Any, Any, list[Timing]]) -> tuple[list[Timing], float]:
    """Do it, and look every few milliseconds how many are in the engine. Returns their mean over time, too."""
    task, started = asyncio.ensure_future(work), time.perf_counter()
    now, total = started, 0.0
    while not task.done():
        found, before = await asyncio.to_thread(gauges, url), now
        now = time.perf_counter()
        total += (found["num_requests_running"] + found["num_requests_waiting"]) * (now - before)
        await asyncio.wait([task], timeout=0.01)
    return task.result(), total / (now - started)


def tell_rates(story: Story, url: str, capacity: float) -> None:
    story.say(
        f"Then {NUM_REQUESTS} requests that arrive at random, at a fraction of this rate. TTFT and latency are in ms. "
        "The last columns check Little's law: requests a second times mean latency, and how many the server's own "
        "gauges showed, running and waiting, on average over the same time."
    )
    names = "load", "requests/s", "TTFT p50", "worst", "latency", "rate x latency", "counted", ""
    table = make_table(*names, width=8)
    for number, load in enumerate(LOADS, 2):
        work = run_load(url, bodies(number, NUM_REQUESTS), load * capacity, seed=number)
        timings, counted = asyncio.run(watch(url, work))
        ttfts = [1e3 * (timing.ttft_s or 0.0) for timing in timings]
        latencies = [timing.latency_s or 0.0 for timing in timings]
        seconds = max(timing.arrival_s + latency for timing, latency in zip(timings, latencies, strict=True))
        rate = len(timings) / seconds
        times = f"{percentile(ttfts, 50):.0f}", f"{max(ttfts):.0f}", f"{1e3 * mean(latencies):.0f}"
        little = f"{rate * mean(latencies):.1f}", f"{counted:.1f}"
        table.add_row(f"{load:.0%}", f"{rate:.1f}", *times, *little, "(measured)")
    story.show(table)


async def tell_clients_that_leave(story: Story, url: str) -> None:
    [body] = bodies(10, 1, 400)
    body["prompt"] *= 3
    num_tokens, started = 0, time.perf_counter()
    async for _ in (answer := stream(url, "/v1/completions", body | {"stream": True})):
        num_tokens += 1
        if num_tokens == 5:
            before = await asyncio.to_thread(gauges, url)
            break
    left = time.perf_counter()
    await answer.aclose()  # the connection is closed: this is all that a server hears of it
    while (after := await asyncio.to_thread(gauges, url))["num_requests_running"]:
        await asyncio.sleep(0.002)
    noticed = time.perf_counter()
    story.say(
        f"A client asks for 400 tokens, reads for {left - started:.1f} s, and closes its connection. Before: "
        f"{before['num_requests_running']:.0f} running, {before['kv_cache_usage_perc']:.1%} of the pool held. "
        f"{1e3 * (noticed - left):.0f} ms after: 0 running, {after['kv_cache_usage_perc']:.1%} held.",
        measured=True,
    )
    [again] = await run_load(url, [body | {"max_tokens": 1}], float("inf"))
    story.say(
        f"Another client sends the same prompt: {again.num_cached_tokens} of its {again.num_prompt_tokens} tokens are "
        "in the cache. What the first one left behind is findable, and belongs to nobody."
    )


def tell_full(story: Story, url: str) -> None:
    num_requests = 3 * (SEATS + PLACES)
    timings = asyncio.run(run_load(url, bodies(11, num_requests, 2), float("inf")))
    refused = [timing for timing in timings if "status 429" in (timing.error or "")]
    failed = sum(timing.error is not None for timing in timings) - len(refused)
    latency = max(timing.latency_s or 0.0 for timing in timings)
    story.say(
        f"{num_requests} requests of 2 tokens at once: {num_requests - len(refused) - failed} were answered, the last "
        f"after {latency:.1f} s; {len(refused)} were refused at once, with status 429.",
        measured=True,
    )
