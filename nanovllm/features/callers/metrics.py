"""An engine's counters under vLLM's names: LLM.get_metrics(). The server's own are in serving/http/metrics.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.features.callers.snapshot import snapshot

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine


@dataclass
class Metric:
    """name begins with "vllm:". labels: none here, where one process has one engine."""

    name: str
    labels: dict[str, str]


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
    """Counters in a row. vLLM has one, of guesses that held by their place in a row of guesses."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """buckets: upper limit, as text -> how many were at most that. The server has more of them (/metrics)."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(engine: "LLMEngine") -> list[Metric]:
    """Now."""
    stats = snapshot(engine)
    gauges = {
        "num_requests_running": stats["num_running"],
        "num_requests_waiting": stats["num_waiting"],
        "kv_cache_usage_perc": stats["kv_pool"]["usage"],
    }
    counters = {
        **cache_counters(stats),
        "generation_tokens": stats["num_output_tokens"],
        "num_preemptions": stats["num_preemptions"],
        "spec_decode_num_draft_tokens": stats["num_draft_tokens"],
        "spec_decode_num_accepted_tokens": stats["num_accepted_tokens"],
    }
    found: list[Metric] = [Gauge(f"vllm:{name}", {}, value) for name, value in gauges.items()]
    found += [Counter(f"vllm:{name}", {}, value) for name, value in counters.items()]
    return found + [Histogram(f"vllm:{name}", {}, **times) for name, times in stats.get("block_times", {}).items()]


def cache_counters(stats: dict[str, Any]) -> dict[str, int]:
    """vLLM's counters of the prefix cache: tokens, of sequences that were admitted for the first time.

    stats: of snapshot(). "external" is what lies below the pool. It is asked for what the pool has not.
    """
    cache = stats["prefix_cache"]
    hits = {medium: found["first"] for medium, found in cache["hit_tokens"].items()}
    queries = (cache["queries"] - cache["preempted_queries"]) * stats["kv_pool"]["block_size"]
    counters = {"prefix_cache_queries": queries, "prefix_cache_hits": hits["pool"]}
    if "tiers" in stats:
        counters["external_prefix_cache_queries"] = queries - hits["pool"]
        counters["external_prefix_cache_hits"] = sum(hits.values()) - hits["pool"]
    return counters
