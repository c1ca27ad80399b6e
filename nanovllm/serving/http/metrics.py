"""/metrics: what the engine does, for Prometheus."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm.request import Request
from nanovllm.serving.async_llm import AsyncLLM

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
GAUGES = {
    "num_requests_running": ("sequences that run", ("num_running",)),
    "num_requests_waiting": ("sequences that wait", ("num_waiting",)),
    "kv_cache_usage": ("share of the KV pool's blocks that sequences hold", ("kv_pool", "usage")),
    "kv_cache_cached": ("share of the blocks that have a name and can be found", ("prefix_cache", "utilization")),
    "prefix_cache_recent_hit_rate": ("block hits per probe, last 1,000 requests", ("prefix_cache", "recent_hit_rate")),
}
COUNTERS = {
    "steps": ("steps of the engine", ("num_steps",)),
    "prefill_tokens": ("prompt tokens that were computed", ("num_prefill_tokens",)),
    "output_tokens": ("tokens that were sampled", ("num_output_tokens",)),
    "finished_requests": ("requests that came to their end", ("num_finished_requests",)),
    "preemptions": ("sequences that gave their blocks back and began again", ("num_preemptions",)),
    "prefix_cache_queries": ("blocks looked for in the prefix cache", ("prefix_cache", "queries")),
    "prefix_cache_hits": ("blocks found there", ("prefix_cache", "hits")),
    "prefix_cache_evictions": ("cached blocks that were overwritten", ("prefix_cache", "evictions")),
}


class Metrics(Collector):
    """Histograms grow with every step, in the engine's thread; counters and gauges are read when somebody asks."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"buckets": SECONDS, "registry": self.registry}
        self.ttft = Histogram("nanovllm_time_to_first_token_seconds", "from arrival to the first token", **options)
        self.inter_token = Histogram("nanovllm_inter_token_seconds", "between two steps with tokens for it", **options)
        self.latency = Histogram("nanovllm_request_seconds", "from arrival to the last token", **options)
        self._last: dict[str, float] = {}  # request id -> time of its newest token
        self._snapshot: dict[str, Any] = {}
        self._reading: asyncio.Task[None] | None = None
        self.registry.register(self)

    def on_step(self, progressed: list[Request]) -> None:
        for request in progressed:
            arrival, newest = request.metrics.arrival_time, request.metrics.last_token_time
            before = self._last.get(request.request_id)
            if newest is not None and newest != before:  # else the step was for another sample than the first
                self._last[request.request_id] = newest
                if before is None:
                    self.ttft.observe(newest - arrival)
                else:
                    self.inter_token.observe(newest - before)
            if request.finished:
                self.latency.observe(time.perf_counter() - arrival)
        requests = self.llm.engine.requests
        if len(self._last) > 2 * len(requests) + 100:  # the ended ones
            self._last = {request_id: t for request_id, t in self._last.items() if request_id in requests}

    async def text(self) -> bytes:
        if self._reading is None:  # who asks while it is read shares it
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)
        return generate_latest(self.registry)

    async def _read(self) -> None:
        try:
            self._snapshot = await self.llm.stats()
        finally:
            self._reading = None

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for table, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, (text, path) in table.items():
                value: Any = self._snapshot
                for key in path:
                    value = value[key]
                yield family(f"nanovllm_{name}", text, value=value or 0)
