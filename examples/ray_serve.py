"""Several engines behind one address, on Ray Serve: a request goes where its first token comes soonest (chapter 14).

    pip install -e ".[ray-serve]"
    python examples/ray_serve.py                   this router beside one that asks the engines in turn: three minutes
    python examples/ray_serve.py --serve           OpenAI's API at http://127.0.0.1:8000/v1, until Ctrl-C
    RAY_ADDRESS=auto python examples/ray_serve.py --serve --num-engines 16 --model /shared/checkpoint

    client -> Serve's proxy -> Front: token ids -> Router: which engine? -> Engine: nanovllm's server, without a socket
                                                     |                        |
                                                   Traffic  <-  KV events  ---+

The comparison has conversations of several turns, each about a document of its own, and pools that hold a quarter of
them together. examples/bench_routing.py compares more routers, with up to 64 engines, in virtual time.

What an engine has in its cache is known from its KV events. A replica that dies gets no more requests, and what it
had announced is forgotten; clients waiting for its answer get an error. When a client leaves, its request ends. There
are no keys, and no TLS. Ray's usage reports are turned off.
"""

import argparse
import asyncio
import contextvars
import math
import os
import random
import signal
import statistics
import threading
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from measuring import above_zero, arguments, needs, positive
from rich.console import Console
from rich.table import Table

parser = arguments(__doc__, model=None)
parser.add_argument("--model", help="directory or hub id (default: the demo checkpoint)")
parser.add_argument("--serve", action="store_true", help="serve until Ctrl-C instead of comparing")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--num-engines", type=positive, default=2)
parser.add_argument("--block-size", type=positive, default=16, help="the same for all engines, and for the router")
parser.add_argument(
    "--kv-cache-memory-bytes",
    type=positive,
    default=1 << 28,
    help="with --serve: KV cache of each engine (default: 256 MiB)",
)
parser.add_argument("--max-model-len", type=positive)
parser.add_argument("--rate", type=above_zero, default=0.75, help="the comparison's requests a second, for each engine")
if __name__ == "__main__":  # --help needs no Ray
    args = parser.parse_args()

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
with needs('-e ".[ray-serve]"'):
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import HTTPOptions, RequestRouterConfig
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    from nanovllm import AsyncLLM
    from nanovllm.files.hub import resolve_checkpoint
    from nanovllm.files.tokenizer import load_tokenizer
    from nanovllm.serving.http.load_generator import Timing, run_load
    from nanovllm.serving.http.options import ServeOptions
    from nanovllm.serving.http.serve import make_app, name_of
    from nanovllm.serving.openai.json_lines import parse_json
    from nanovllm.serving.routing import InTurn, Traffic, soonest
    from nanovllm.tools.demo_model import model_or_demo
    from nanovllm.tools.workload import parse_requests

NAME = "nanovllm"
# What each engine says of itself, and those of the server's paths whose answers need nothing that one engine keeps.
ENGINES, *PATHS = "/engines", "/v1/models", "/v1/completions", "/v1/chat/completions"
KEPT = ("type", "asgi", "http_version", "method", "scheme", "path", "query_string", "headers")
MOST_AT_ONCE = 1000  # requests of one replica: an engine has a queue of its own, which is better than Serve's
LONGEST_BODY = 2_000_000  # bytes; a longer one is refused by the engine, or has images (--max-body-bytes of the server)
QUIET = {"enable_access_log": False, "log_level": "WARNING"}
# Of a Ray that is started here: 100 MiB for objects, of which there are few; otherwise it takes a part of all memory.
LOCAL: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 100 << 20}
# Of the comparison: each conversation begins with a document of its own.
CONVERSATIONS_PER_ENGINE = 9
AT_A_TIME_PER_ENGINE = 2
NUM_TURNS = 5
DOCUMENT_TOKENS = 1024
TURN_TOKENS = 64
NUM_OUTPUT_TOKENS = 8


def tell(method: Any, *arguments: Any) -> Any:
    """Call an actor's method in nobody's name.

    When a request is cancelled, Ray takes back the calls that were made in its name, and an actor waits for a call that
    is missing before it does the next one.
    """
    return contextvars.Context().run(method.remote, *arguments)


class Router(RequestRouter):
    """Serve's own seam: it runs beside Front, and knows which replicas live."""

    def initialize_state(self, **kwargs: Any) -> None:
        self.traffic = ray.get_actor(kwargs["traffic"], NAME)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        *_, prompt = pending_request.args
        return [[replicas[await tell(self.traffic.choose, *prompt, list(replicas))]]]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        gone = self.curr_replicas.keys() - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            tell(self.traffic.forget, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        tell(self.traffic.forget, replica_id.unique_id)


class Front:
    """Token ids of each request, for the router, and the answer of the engine that it has chosen."""

    def __init__(self, engines: Any, traffic: str, model: str) -> None:
        self.engines, self.traffic = engines.options(stream=True), ray.get_actor(traffic, NAME)
        self.tokenizer = load_tokenizer(resolve_checkpoint(model, load_format="dummy"))

    async def __call__(self, request: Request) -> Response:
        if (path := request.url.path) not in (ENGINES, *PATHS):
            return failed(404, f"there is no {path:.80} here: there are {ENGINES}, {', '.join(PATHS)}")
        if path == ENGINES:
            engines = await self.engines.broadcast("stats").results_async(return_exceptions=True)
            living = [stats for stats in engines if isinstance(stats, dict)]
            return JSONResponse({"engines": living, "router": await tell(self.traffic.known)})
        body, scope = await request.body(), {name: request.scope[name] for name in KEPT}
        prompt = uuid.uuid4().hex, *await asyncio.to_thread(self.read, body)
        messages = self.answer(scope, body, prompt)
        try:
            start = await anext(messages)
        except RayError:
            return failed(503, "the engine that had this request has died; try again")
        content = (message["body"] async for message in messages)
        answer = StreamingResponse(content, start["status"])
        answer.raw_headers = start["headers"]
        return answer

    def read(self, body: bytes) -> tuple[list[int], str | None]:
        """Token ids and salt. Something that is not a prompt has no ids; the engine will say what is wrong with it.

        Nor has a longer body than engines take, unless it has images.
        """
        if len(body) > LONGEST_BODY:
            return [], None
        try:
            return parse_requests(parse_json(body), self.tokenizer, is_trusted=False)[0]
        except ValueError:
            return [], None

    async def answer(self, scope: dict[str, Any], body: bytes, prompt: Any) -> AsyncGenerator[dict[str, Any], None]:
        messages = self.engines.answer.remote(scope, body, prompt)
        try:
            async for message in messages:
                yield message
        finally:
            messages.cancel()
            tell(self.traffic.ended, prompt[0])


def failed(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "server_error", "param": None, "code": None}}, status)


class Engine:
    """A replica: an AsyncLLM, and the ASGI application of `nanovllm serve`."""

    def __init__(self, traffic: str, model: str, host: str, options: dict[str, Any]) -> None:
        events = {"enable_kv_cache_events": True, "publisher": "null"}
        self.llm = AsyncLLM(model, kv_events_config=events, **options)
        self.app = make_app(self.llm, ServeOptions(host=host), (name_of(model),))
        self.name = serve.get_replica_context().replica_id.unique_id
        take = ray.get_actor(traffic, NAME).take
        self.llm.engine.on_kv_events = lambda batch: tell(take, self.name, batch.events)

    async def answer(self, scope: dict[str, Any], body: bytes, prompt: Any) -> AsyncGenerator[dict[str, Any], None]:
        """ASGI messages. To the application, leaving this generator means that the client has left."""
        sent: asyncio.Queue[Any] = asyncio.Queue()
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": body, "more_body": False})
        task = asyncio.create_task(self.app(scope, received.get, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            received.put_nowait({"type": "http.disconnect"})

    async def check_health(self) -> None:
        """Serve starts another replica instead of one whose engine has died."""
        await self.llm.check_health()

    async def stats(self) -> dict[str, Any]:
        return {"engine": self.name, "pid": os.getpid()} | await self.llm.stats()

    async def reset_prefix_cache(self) -> bool:
        return await self.llm.reset_prefix_cache()


@contextmanager
def running(args: argparse.Namespace) -> Iterator[Any]:
    """The application, while this lasts. Gives the actor that has the traffic."""
    model, name = model_or_demo(args.model), f"traffic-{uuid.uuid4().hex}"
    options = {name: getattr(args, name) for name in ("block_size", "kv_cache_memory_bytes", "max_model_len")}
    if not args.serve:
        options["num_gpu_blocks_override"] = blocks_of_a_pool(args.block_size)
    keeper: Any = ray.remote(Traffic).options(name=name, namespace=NAME, num_cpus=0, max_restarts=-1)
    traffic = keeper.remote(args.block_size)
    # What the engines leave of the CPUs is for the others. A GPU for each, if there are GPUs.
    resources = ray.cluster_resources()
    share = max(resources["CPU"] - 1, 0.5) / args.num_engines
    router: dict[str, Any] = {"request_router_class": Router, "request_router_kwargs": {"traffic": name}}
    engines = serve.deployment(
        num_replicas=args.num_engines,
        ray_actor_options={"num_cpus": math.floor(share) or share, "num_gpus": 1 if "GPU" in resources else 0},
        max_ongoing_requests=MOST_AT_ONCE,
        request_router_config=RequestRouterConfig(**router),
        health_check_period_s=1,
        logging_config=QUIET,
    )(Engine).bind(name, model, args.host, options)
    front = serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=MOST_AT_ONCE, logging_config=QUIET)
    try:
        serve.run(front(Front).bind(engines, name, model), name=NAME)
        yield traffic
    finally:
        serve.delete(NAME)
        ray.kill(traffic)


def random_text(rng: random.Random, num_tokens: int) -> list[int]:
    """What the tokens mean does not change what is computed."""
    return rng.choices(range(4, 300), k=num_tokens)


def conversations(num_engines: int) -> list[list[int]]:
    """Prompts in the order in which they are asked. A turn repeats all before it.

    Conversations begin one after another, so that AT_A_TIME_PER_ENGINE are under way for each engine. With 2 under way,
    of two turns each, those numbered 1, 2, ... ask in this order:

        1   1 2   2 3   3 4   4 5 ...
    """
    rng = random.Random(0)
    prompts = []
    for number in range(CONVERSATIONS_PER_ENGINE * num_engines):
        begins = number / (AT_A_TIME_PER_ENGINE * num_engines)
        prompt = random_text(rng, DOCUMENT_TOKENS)
        for turn in range(NUM_TURNS):
            prompt = prompt + random_text(rng, TURN_TOKENS)
            asked = begins + (turn + rng.random() / 2) / NUM_TURNS
            prompts.append((asked, prompt))
    return [prompt for _, prompt in sorted(prompts)]


def blocks_of_a_pool(block_size: int) -> int:
    """All pools together hold a quarter of the conversations."""
    num_tokens = CONVERSATIONS_PER_ENGINE * (DOCUMENT_TOKENS + NUM_TURNS * TURN_TOKENS)
    return num_tokens // (4 * block_size)


def ask(url: str, prompts: list[list[int]], rate: float) -> list[Timing]:
    body = {"max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    timings = asyncio.run(run_load(url, [body | {"prompt": prompt} for prompt in prompts], rate))
    if errors := {timing.error for timing in timings if timing.error}:
        raise RuntimeError(f"not all were answered: {', '.join(errors)}")
    return timings


def compare(url: str, args: argparse.Namespace, traffic: Any) -> Table:
    """The same requests with each router, to empty caches."""
    table = Table("router", "tokens found", "computed", "TTFT p50, ms", "mean", "longest")
    engines = serve.get_deployment_handle("Engine", NAME)
    prompts = conversations(args.num_engines)
    rate = args.rate * args.num_engines
    rng = random.Random(1)
    ask(url, [random_text(rng, DOCUMENT_TOKENS) for _ in range(2 * args.num_engines)], float("inf"))  # to warm up
    routers = {"in turn": InTurn(), "by KV events": soonest}
    for name, route in routers.items():
        print(f"{name}: {len(prompts)} requests, about {len(prompts) / rate:.0f} s", flush=True)
        ray.get(traffic.use.remote(route))
        assert all(engines.broadcast("reset_prefix_cache").results()), "nobody uses them"
        timings = ask(url, prompts, rate)
        num_found = sum(timing.num_cached_tokens for timing in timings)
        num_tokens = sum(timing.num_prompt_tokens for timing in timings)
        ttfts = [1e3 * timing.ttft_s for timing in timings if timing.ttft_s is not None]
        table.add_row(
            name,
            f"{num_found / num_tokens:.0%}",
            f"{num_tokens - num_found:,}",
            f"{statistics.median(ttfts):,.0f}",
            f"{statistics.mean(ttfts):,.0f}",
            f"{max(ttfts):,.0f}",
        )
    return table


def main() -> None:
    ray.init(log_to_driver=False, **({} if "RAY_ADDRESS" in os.environ else LOCAL))
    serve.start(http_options=HTTPOptions(host=args.host, port=args.port), logging_config=QUIET)
    url = f"http://{args.host}:{args.port}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), running(args) as traffic:
        if not args.serve:
            Console(width=80).print(compare(url, args, traffic))
            return
        print(f"serving at {url}/v1 (Ctrl-C ends it)", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
