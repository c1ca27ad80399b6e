"""Which of several engines should get a request? Four routers under the same load, in virtual time (chapter 14).

    python examples/bench_routing.py [--num-engines 4 16 64] [--delay-ms 50] [--size 1.0] [--seed 0]
    python examples/bench_routing.py --parts changes --num-engines 16

Each engine is the real Scheduler with the real BlockManager, and the router is the class that examples/ray_serve.py
uses (nanovllm/serving/routing.py). There is no model and nobody waits: a step takes 20 ms, and 0.4 ms for each of its
tokens. What engines announce reaches the router --delay-ms after the step, and so does the end of a request. The pools
of all engines together hold a quarter of the workload's different blocks, except in the workload that says otherwise.

1. routers: in turn; least busy, by tokens still to be computed; consistent hashing of the first 768 tokens; and the
   router that follows KV events. Every router gets the same requests at the same times.
2. delay: the router that follows KV events, when they reach it late, or never.
3. changes: an engine joins, leaves or dies in the middle. An engine that leaves finishes its requests. The
   clients of one that dies get an error, and ask again.

It takes two minutes. A second run with the same options prints the same tables.
"""

import argparse
import hashlib
import heapq
import random
import sys
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, count
from pathlib import Path
from statistics import mean
from typing import Any

from measuring import above_zero, add_some_of, arguments, console, positive, progress, table
from rich.table import Table

from nanovllm.core.block_manager import BlockManager
from nanovllm.features.cache_reports.events import KVEventBatch
from nanovllm.features.cache_reports.kv_events import KVEvents
from nanovllm.serving.routing import Announced, Engine, InTurn, Traffic, soonest

sys.path.insert(0, str(Path(__file__).parents[1]))  # chapters/ is not installed
from chapters.ch14_many_users.fleet import TOKEN, Cost, Job, Replica, percentile

BLOCK_SIZE = 64
COST = Cost(step_s=0.020, token_s=0.0004)
HASHED_BLOCKS = 12  # consistent hashing goes by them: 768 tokens
POINTS = 100  # of each engine on the ring of consistent hashing
NUM_OUTPUT_TOKENS = 16
NEVER_S = float("inf")


def main() -> None:
    parser = arguments(__doc__, model=None)
    parts = {"routers": compare_routers, "delay": compare_delays, "changes": compare_changes}
    add_some_of(parser, "--parts", parts)
    parser.add_argument("--num-engines", nargs="+", type=positive, default=[4, 16, 64])
    parser.add_argument("--delay-ms", type=float, default=50.0, help="from the end of a step to the router")
    parser.add_argument("--size", type=above_zero, default=1.0, help="0.5: half as many requests, in half the time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.num_engines) < 2 or args.delay_ms < 0:
        parser.error("there must be two engines at least, and --delay-ms must not be below 0")
    for name in args.parts:
        console().print(parts[name](args))


# -- who gets a request: the arguments are those of nanovllm.serving.routing.soonest -----------------------------------


def least_busy(block_hashes: Items[bytes], loads: Mapping[Engine, int], announced: Announced) -> Engine:
    return min(loads, key=loads.__getitem__)


class ConsistentHashing:
    """Engines have many points each on a ring; a prompt goes to the engine of the next point after its own.

    If an engine joins or leaves, only the prompts between its points and those before them move.
    """

    def __init__(self) -> None:
        self.points: dict[Any, list[int]] = {}

    def __call__(self, block_hashes: Items[bytes], loads: Mapping[Engine, int], announced: Announced) -> Engine:
        ring = sorted((point, engine) for engine in loads for point in self.points_of(engine))
        beginning = block_hashes[:HASHED_BLOCKS]
        place = hash_of(beginning[-1] if beginning else b"")
        index = bisect([point for point, _ in ring], place)
        return ring[index % len(ring)][1]

    def points_of(self, engine: Any) -> list[int]:
        if engine not in self.points:
            self.points[engine] = [hash_of(f"{engine} {number}".encode()) for number in range(POINTS)]
        return self.points[engine]


def hash_of(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


ROUTERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "in turn": InTurn,
    "least busy": lambda: least_busy,
    "consistent hashing": ConsistentHashing,
    "by KV events": lambda: soonest,
}


# -- workloads: who asks what, and when --------------------------------------------------------------------------------


@dataclass
class Request:
    """What a client asks for, until it has the whole answer. jobs: one for each time that it has asked."""

    asked_s: float
    prompt: list[int]
    num_output_tokens: int = NUM_OUTPUT_TOKENS
    jobs: list[Job] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.jobs[-1].token_times[0] - self.asked_s


class Texts:
    """Texts that have no block in common."""

    def __init__(self) -> None:
        self.numbers = count(1)

    def new(self, num_tokens: int) -> list[int]:
        return [10**6 + next(self.numbers), *range(1, num_tokens)]  # a block's hash depends on all that comes before it


def some(number: float) -> int:
    """Rounded, and one at least."""
    return max(1, round(number))


def conversations(num_engines: int, size: float, rng: random.Random) -> list[Request]:
    """12 for each engine, of 8 turns. A turn repeats all before it, answers included, and adds 256 tokens."""
    texts, requests = Texts(), []
    system_prompts = [texts.new(512) for _ in range(4)]
    for _ in range(some(12 * size * num_engines)):
        now = rng.uniform(0, 90 * size)
        prompt = rng.choice(system_prompts)
        for _ in range(8):
            prompt = prompt + texts.new(256)
            requests.append(Request(now, prompt))
            prompt = prompt + [TOKEN] * NUM_OUTPUT_TOKENS
            now += rng.uniform(2, 6)
    return requests


def documents(num_engines: int, size: float, rng: random.Random) -> list[Request]:
    """9 for each engine, of 4,096 tokens. 6 questions of 80 tokens are asked about each, within half a minute or so."""
    texts, requests = Texts(), []
    for _ in range(some(9 * size * num_engines)):
        now = rng.uniform(0, 117 * size)
        document = texts.new(4096)
        for _ in range(6):
            requests.append(Request(now, document + texts.new(80)))
            now += rng.expovariate(1 / 5)
    return requests


def nothing_shared(num_engines: int, size: float, rng: random.Random) -> list[Request]:
    """64 prompts for each engine, of 256 to 2,048 tokens."""
    texts = Texts()
    num_requests = some(64 * size * num_engines)
    return [Request(rng.uniform(0, 64 * size), texts.new(rng.randint(256, 2048))) for _ in range(num_requests)]


def few_beginnings(num_engines: int, size: float, rng: random.Random) -> list[Request]:
    """48 prompts for each engine: one of 8 beginnings of 768 tokens, and 96 tokens of its own."""
    texts = Texts()
    beginnings = [texts.new(768) for _ in range(8)]
    num_requests = some(48 * size * num_engines)
    return [Request(rng.uniform(0, 24 * size), rng.choice(beginnings) + texts.new(96)) for _ in range(num_requests)]


@dataclass(frozen=True)
class Workload:
    """requests: of a number of engines and a size. fits: every pool holds all its blocks, not a part of a quarter."""

    name: str
    requests: Callable[[int, float, random.Random], list[Request]]
    fits: bool = False

    def make(self, num_engines: int, size: float, seed: int) -> list[Request]:
        """In the order in which they are asked."""
        requests = self.requests(num_engines, size, random.Random(seed))
        return sorted(requests, key=lambda request: request.asked_s)

    @cache  # noqa: B019  # there are four workloads
    def blocks_of_a_pool(self, num_engines: int, size: float, seed: int) -> int:
        """An equal part of a quarter of the workload's blocks, but room for two of its longest requests."""
        requests = self.make(num_engines, size, seed)
        announced = Announced(BLOCK_SIZE)
        num_blocks = len(set(chain.from_iterable(announced.block_hashes_of(request.prompt) for request in requests)))
        longest = max(len(request.prompt) + request.num_output_tokens for request in requests)
        part = num_blocks if self.fits else num_blocks // (4 * num_engines)
        return max(part, 2 * -(-longest // BLOCK_SIZE))


CONVERSATIONS = Workload("conversations of many turns", conversations)
DOCUMENTS = Workload("long documents", documents)
WORKLOADS = (
    CONVERSATIONS,
    DOCUMENTS,
    Workload("nothing shared", nothing_shared),
    Workload("few beginnings, room for all", few_beginnings, fits=True),
)


# -- engines and a router in virtual time ------------------------------------------------------------------------------


class Fleet:
    """Engines, the router before them, and clients that ask again if they get an error.

    engines   those that live, by name
    listed    the names of those that the router may choose
    news      what is on its way to the router: (when it arrives, a number, what to do then)
    agenda    requests and changes that are still to come, likewise
    lost      {"its own", "others'"}: blocks that were known of before an engine left or died, and not afterwards
    """

    def __init__(
        self, num_engines: int, num_blocks: int, route: Callable[..., Any], delay_s: float, events_delay_s: float
    ) -> None:
        self.num_blocks = num_blocks
        self.delay_s = delay_s
        self.events_delay_s = events_delay_s
        self.traffic = Traffic(BLOCK_SIZE)
        self.traffic.use(route)
        self.engines: dict[str, Replica] = {}
        self.all_engines: list[Replica] = []
        self.listed: list[str] = []
        self.news: list[tuple[float, int, Callable[[], Any]]] = []
        self.agenda: list[tuple[float, int, Callable[[float], Any]]] = []
        self.numbers = count()
        self.requests: dict[int, Request] = {}  # by the seq_id of the job that is under way
        self.lost = {"its own": 0, "others'": 0}
        for _ in range(num_engines):
            self.join(0.0)

    # -- time -----------------------------------------------------------------------------------------------------

    def run(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.at(request.asked_s, partial(self.send, request))
        while self.agenda:
            now, _, action = heapq.heappop(self.agenda)
            self.advance(now)
            action(now)
        self.advance(NEVER_S)

    def at(self, time_s: float, action: Callable[[float], Any]) -> None:
        heapq.heappush(self.agenda, (time_s, next(self.numbers), action))

    def tell(self, time_s: float, news: Callable[[], Any]) -> None:
        """The router hears of something at this time."""
        heapq.heappush(self.news, (time_s, next(self.numbers), news))

    def advance(self, until_s: float) -> None:
        for engine in self.engines.values():
            jobs = list(engine.jobs.values())
            engine.advance(until_s)
            for job in jobs:
                if job.is_complete:
                    del self.requests[job.seq.seq_id]
                    self.tell(job.token_times[-1] + self.delay_s, partial(self.traffic.ended, str(job.seq.seq_id)))
        while self.news and self.news[0][0] <= until_s:
            _, _, news = heapq.heappop(self.news)
            news()

    def send(self, request: Request, now: float) -> None:
        job = Job(now, request.prompt, request.num_output_tokens)
        request.jobs.append(job)
        self.requests[job.seq.seq_id] = request
        name = self.choose(job)
        while name not in self.engines:  # it has died, which the router learns now
            self.forget(name)
            name = self.choose(job)
        self.engines[name].add(job)

    def choose(self, job: Job) -> str:
        return self.traffic.choose(str(job.seq.seq_id), job.prompt, None, self.listed)

    # -- engines come and go --------------------------------------------------------------------------------------

    def join(self, now: float) -> None:
        name = f"engine {len(self.all_engines)}"
        engine = Replica(self.num_blocks, block_size=BLOCK_SIZE, cost=COST)
        events = KVEvents(engine.manager)

        def on_batch(batch: KVEventBatch) -> None:
            self.tell(engine.now + self.events_delay_s, partial(self.traffic.take, name, batch.events))

        events.on_batch = on_batch
        engine.manager.on_event = events.on_event
        self.engines[name] = engine
        self.all_engines.append(engine)
        self.listed.append(name)

    def busiest(self) -> str:
        return max(self.listed, key=lambda name: len(self.engines[name].jobs))

    def leave(self, now: float) -> None:
        """The engine with most requests gets no more of them, and finishes those that it has."""
        self.forget(self.busiest())

    def die(self, now: float) -> None:
        """The engine with most requests is gone, its pool with it. Its clients get an error, and ask again."""
        name = self.busiest()
        engine = self.engines.pop(name)
        self.tell(now + self.delay_s, partial(self.forget, name))
        for seq_id in engine.jobs:
            request = self.requests.pop(seq_id)
            self.at(now + self.delay_s, partial(self.send, request))

    def replace(self, now: float) -> None:
        """An engine dies, and another one joins, with an empty pool."""
        self.die(now)
        self.join(now)

    def forget(self, name: str) -> None:
        """The router hears that an engine has died or leaves."""
        if name not in self.listed:
            return
        before = {engine: set(block_hashes) for engine, block_hashes in self.traffic.announced.block_hashes.items()}
        self.listed.remove(name)
        self.traffic.forget(name)
        after = self.traffic.announced.block_hashes
        for engine, block_hashes in before.items():
            whose = "its own" if engine == name else "others'"
            self.lost[whose] += len(block_hashes - after.get(engine, set()))

    # -- what has come out ----------------------------------------------------------------------------------------

    @property
    def managers(self) -> list[BlockManager]:
        return [engine.manager for engine in self.all_engines]


def simulate(
    workload: Workload,
    num_engines: int,
    route: Callable[..., Any],
    args: argparse.Namespace,
    *,
    events_delay_s: float | None = None,
    change: Callable[[Fleet, float], Any] | None = None,
) -> tuple[Fleet, list[Request]]:
    """events_delay_s: of KV events, if not --delay-ms. change: happens when half of the requests have been asked."""
    requests = workload.make(num_engines, args.size, args.seed)
    num_blocks = workload.blocks_of_a_pool(num_engines, args.size, args.seed)
    delay_s = args.delay_ms / 1000
    fleet = Fleet(num_engines, num_blocks, route, delay_s, delay_s if events_delay_s is None else events_delay_s)
    if change is not None:
        fleet.at(requests[len(requests) // 2].asked_s, partial(change, fleet))
    fleet.run(requests)
    return fleet, requests


RESULTS = ("tokens computed", "found", "TTFT mean", "p50", "p99", "busiest")


def results(fleet: Fleet, requests: list[Request]) -> list[str]:
    computed = [engine.num_computed_tokens for engine in fleet.all_engines]
    hits = sum(manager.stats.hits for manager in fleet.managers)
    queries = sum(manager.stats.queries for manager in fleet.managers)
    ttfts_ms = [1000 * request.ttft_s for request in requests]
    return [
        f"{sum(computed):,}",
        f"{hits / max(1, queries):.0%}",
        f"{mean(ttfts_ms):,.0f}",
        f"{percentile(ttfts_ms, 50):,.0f}",
        f"{percentile(ttfts_ms, 99):,.0f}",
        f"{max(computed) * len(computed) / sum(computed):.1f}",
    ]


# -- the parts ---------------------------------------------------------------------------------------------------------


def compare_routers(args: argparse.Namespace) -> Table:
    title = "1. Routers. TTFT in ms; busiest: its tokens, as a multiple of the mean"
    rows = table(title, "router", "engines", *RESULTS)
    runs = [
        (workload, num_engines, name) for workload in WORKLOADS for num_engines in args.num_engines for name in ROUTERS
    ]
    for workload, num_engines, name in progress(runs, "routers"):
        if name == next(iter(ROUTERS)):
            if num_engines == args.num_engines[0]:
                rows.add_section()
                rows.add_row(f"[bold]{workload.name}")
            rows.add_section()
        fleet, requests = simulate(workload, num_engines, ROUTERS[name](), args)
        rows.add_row(name, str(num_engines), *results(fleet, requests))
    return rows


def compare_delays(args: argparse.Namespace) -> Table:
    num_engines = args.num_engines[0]
    delays_s = {"at once": 0.0, "50 ms": 0.05, "500 ms": 0.5, "5 s": 5.0, "never": NEVER_S}
    title = f"2. Delay of KV events: {DOCUMENTS.name}, {num_engines} engines, TTFT in ms"
    rows = table(title, "the router hears of a block", *RESULTS)
    for name, events_delay_s in progress(delays_s.items(), "delay"):
        fleet, requests = simulate(DOCUMENTS, num_engines, soonest, args, events_delay_s=events_delay_s)
        rows.add_row(name, *results(fleet, requests))
    fleet, requests = simulate(DOCUMENTS, num_engines, InTurn(), args)
    rows.add_row("(in turn)", *results(fleet, requests))
    return rows


def compare_changes(args: argparse.Namespace) -> Table:
    num_engines = args.num_engines[0]
    changes = {
        "none": None,
        "one joins": Fleet.join,
        "one leaves": Fleet.leave,
        "one dies": Fleet.die,
        "one dies, one joins": Fleet.replace,
    }
    title = f"3. An engine joins, leaves or dies: {CONVERSATIONS.name}, {num_engines} engines, TTFT in ms"
    columns = ("not answered", "asked again", "its blocks lost", "others' lost", *RESULTS[:-1])
    rows = table(title, "change", *columns)
    for name, change in progress(changes.items(), "changes"):
        fleet, requests = simulate(CONVERSATIONS, num_engines, soonest, args, change=change)
        num_open = sum(not request.jobs[-1].is_complete for request in requests)
        num_again = sum(len(request.jobs) > 1 for request in requests)
        lost = [f"{number:,}" for number in fleet.lost.values()]
        rows.add_row(name, f"{num_open:,}", f"{num_again:,}", *lost, *results(fleet, requests)[:-1])
    return rows


if __name__ == "__main__":
    main()
