"""/metrics: what the engine does, for Prometheus, under names of its own and under vLLM's, so that its boards show it.

vLLM's boards: examples/observability in its repository. They ask by model_name, and some by engine, which is "0" here.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm.features.callers.metrics import cache_counters
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.http.metrics import Metrics

# name -> (what it says, where in LLM.stats)
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
CACHE_COUNTERS = {  # without those of sequences that were preempted before
    "prefix_cache_queries": "tokens looked for",
    "prefix_cache_hits": "tokens found in the KV pool",
    "external_prefix_cache_queries": "tokens looked for below the pool",
    "external_prefix_cache_hits": "tokens found there",
}
BLOCK_TIMES = "of a cached block; a sample of them is measured"
OUR_NAMES = {
    "time_to_first_token_seconds": "nanovllm_time_to_first_token_seconds",
    "inter_token_latency_seconds": "nanovllm_inter_token_seconds",
    "e2e_request_latency_seconds": "nanovllm_request_seconds",
}
REASONS = ("stop", "length", "abort", "error")


class Exposition(Collector):
    """metrics, and counters and gauges that are read when somebody asks. model_name: of the label."""

    def __init__(self, llm: AsyncLLM, metrics: Metrics, model_name: str) -> None:
        self.llm, self.metrics, self.labels = llm, metrics, {"model_name": model_name, "engine": "0"}
        self.registry = CollectorRegistry()
        self._snapshot: dict[str, Any] = {}
        self._reading: asyncio.Task[None] | None = None
        self.registry.register(self)

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
                yield family(f"nanovllm_{name}", text, value=self._stat(*path))
        yield self._family(
            CounterMetricFamily, "http_requests", "answers", ("method", "handler", "status"), self.metrics.answers
        )
        for name, histogram in self.metrics.histograms.items():
            [found] = histogram.collect()
            if name in OUR_NAMES:
                yield _renamed(found, OUR_NAMES[name], {})
            yield _renamed(found, f"vllm:{name}", self.labels)
        found = self._stat("prefix_cache", "hit_tokens")
        by_medium = {(medium, which): n for medium, tokens in found.items() for which, n in tokens.items()}
        yield self._family(
            CounterMetricFamily,
            "nanovllm_prefix_cache_hit_tokens",
            "tokens found, by where and by whether their sequence was preempted before",
            ("medium", "admission"),
            by_medium,
        )
        yield from self._as_in_vllm()

    def _as_in_vllm(self) -> Iterator[Metric]:
        pool, stat = self._snapshot["kv_pool"], self._stat
        block_size, num_waiting = pool["block_size"], stat("num_waiting")
        gauges = {
            "num_requests_running": ("sequences that run", stat("num_running")),
            "num_requests_waiting": ("sequences that wait", num_waiting),
            "kv_cache_usage_perc": ("share of the KV pool's blocks that sequences hold; 1 is all", pool["usage"]),
        }
        counters = {
            **{name: (CACHE_COUNTERS[name], value) for name, value in cache_counters(self._snapshot).items()},
            "prompt_tokens": ("tokens of prompts, computed or found in the cache", self.metrics.prompt_tokens["in"]),
            "prompt_tokens_cached": ("of these, found in the cache", self.metrics.prompt_tokens["cached"]),
            "generation_tokens": ("tokens that were sampled", stat("num_output_tokens")),
            "num_preemptions": ("sequences that gave their blocks back and began again", stat("num_preemptions")),
        }
        for table, family in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for name, (text, value) in table.items():
                yield self._family(family, f"vllm:{name}", text, (), {(): value})
        for name, times in self._snapshot.get("block_times", {}).items():
            histogram = HistogramMetricFamily(f"vllm:{name}", BLOCK_TIMES, labels=tuple(self.labels))
            histogram.add_metric([*self.labels.values()], [*times["buckets"].items()], times["sum"])
            yield histogram
        by_reason = "vllm:num_requests_waiting_by_reason", "sequences that wait", ("reason",)
        yield self._family(GaugeMetricFamily, *by_reason, {("capacity",): num_waiting, ("deferred",): 0})
        success = "vllm:request_success", "samples that have ended", ("finished_reason",)
        yield self._family(
            CounterMetricFamily, *success, {(reason,): self.metrics.reasons[reason] for reason in REASONS}
        )
        num_tokens, longest = pool["num_blocks"] * block_size, self.llm.engine.scheduler.max_model_len
        config = {
            "block_size": block_size,
            "num_gpu_blocks": pool["num_blocks"],
            "kv_cache_size_tokens": num_tokens,
            "kv_cache_max_concurrency": f"{num_tokens / longest:.2f}",
            "enable_prefix_caching": self.llm.engine.config.enable_prefix_caching,
        }
        info = "vllm:cache_config_info", "the KV pool", tuple(config)
        yield self._family(GaugeMetricFamily, *info, {tuple(map(str, config.values())): 1})

    def _stat(self, *path: str) -> Any:
        value: Any = self._snapshot
        for key in path:
            value = value[key]
        return value or 0

    def _family(
        self, family: Any, name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]
    ) -> Metric:
        """A metric of one value, or of one for each of its labels' values."""
        ours = self.labels if name.startswith("vllm:") else {}
        metric = family(name, text, labels=(*ours, *labels))
        for key, value in values.items():
            metric.add_metric([*ours.values(), *key], value)
        return metric


def _renamed(metric: Metric, name: str, labels: dict[str, str]) -> Metric:
    """A histogram under another name, with more labels."""
    renamed = HistogramMetricFamily(name, metric.documentation)
    for sample in metric.samples:
        renamed.add_sample(name + sample.name.removeprefix(metric.name), labels | sample.labels, sample.value)
    return renamed
