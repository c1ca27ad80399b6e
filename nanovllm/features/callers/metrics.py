"""What is counted, under vLLM's names: LLM.get_metrics(), and Prometheus' text format for the server's /metrics."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanovllm.features.callers.snapshot import snapshot

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine


@dataclass
class Metric:
    """name begins with "vllm:" if vLLM has it, too. help: what it says."""

    name: str
    labels: dict[str, str]
    help: str = field(default="", kw_only=True)


@dataclass
class Counter(Metric):
    """It only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """It goes up and down."""

    value: float


@dataclass
class Vector(Metric):
    """Counters in a row. vLLM has one: accepted draft tokens by their place in the draft."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """buckets: upper limit, as text -> how many were at most that. The server has more of them (/metrics)."""

    count: int
    sum: float
    buckets: dict[str, int]


class Distribution:
    """Numbers that were observed, as a Histogram shows them. bounds: upper ones of its buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, number: float) -> None:
        self._counts[bisect_left(self.bounds, number)] += 1
        self.sum += number

    def as_dict(self) -> dict[str, Any]:
        """A Histogram's count, sum and buckets."""
        buckets = {}
        count = 0
        for bound, num in zip([*self.bounds, float("inf")], self._counts, strict=True):
            count += num
            buckets["+Inf" if bound == float("inf") else str(float(bound))] = count
        return {"count": count, "sum": self.sum, "buckets": buckets}


def metrics_of(engine: "LLMEngine") -> list[Metric]:
    """Now."""
    return engine_metrics(snapshot(engine), {})


def engine_metrics(stats: dict[str, Any], labels: dict[str, str]) -> list[Metric]:
    """stats: of snapshot(). Counters of the prefix cache are tokens of sequences that were admitted for the first time;
    "external" is what lies below the pool, which is asked for what the pool has not."""
    cache, pool = stats["prefix_cache"], stats["kv_pool"]
    hits = {medium: found["first"] for medium, found in cache["hit_tokens"].items()}
    queries = (cache["queries"] - cache["preempted_queries"]) * pool["block_size"]

    def gauge(name: str, value: float, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", labels, value, help=text)

    def counter(name: str, value: int, text: str) -> Counter:
        return Counter(f"vllm:{name}", labels, value, help=text)

    found: list[Metric] = [
        gauge("num_requests_running", stats["num_running"], "sequences that run"),
        gauge("num_requests_waiting", stats["num_waiting"], "sequences that wait"),
        gauge("kv_cache_usage_perc", pool["usage"], "share of the KV pool's blocks that sequences hold; 1 is all"),
        counter("prefix_cache_queries", queries, "tokens looked for"),
        counter("prefix_cache_hits", hits["pool"], "tokens found in the KV pool"),
        counter("generation_tokens", stats["num_output_tokens"], "tokens that were sampled"),
        counter("num_preemptions", stats["num_preemptions"], "sequences that gave their blocks back and began again"),
        counter("spec_decode_num_draft_tokens", stats["num_draft_tokens"], "draft tokens that were computed"),
        counter("spec_decode_num_accepted_tokens", stats["num_accepted_tokens"], "of these, accepted"),
    ]
    if "tiers" in stats:
        below = sum(hits.values()) - hits["pool"]
        found.append(
            counter("external_prefix_cache_queries", queries - hits["pool"], "tokens looked for below the pool")
        )
        found.append(counter("external_prefix_cache_hits", below, "tokens found there"))
    for name, times in stats.get("block_times", {}).items():
        found.append(Histogram(f"vllm:{name}", labels, **times, help="of a cached block; a sample of them is measured"))
    return found


def exposition(metrics: Iterable[Metric]) -> str:
    """Prometheus' text format, version 0.0.4. Metrics of one name stand beside each other.

    https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    lines: list[str] = []
    described = ""
    for metric in metrics:
        name = f"{metric.name}_total" if isinstance(metric, Counter) else metric.name
        if name != described:
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {type(metric).__name__.lower()}"]
            described = name
        if isinstance(metric, Histogram):
            lines += [_sample(f"{name}_bucket", metric.labels | {"le": le}, n) for le, n in metric.buckets.items()]
            lines.append(_sample(f"{name}_count", metric.labels, metric.count))
            lines.append(_sample(f"{name}_sum", metric.labels, metric.sum))
        elif isinstance(metric, Counter | Gauge):
            lines.append(_sample(name, metric.labels, metric.value))
    return "".join(f"{line}\n" for line in lines)


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    escaped = {key: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for key, text in labels.items()}
    pairs = ",".join(f'{key}="{text}"' for key, text in escaped.items())
    return f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}"
