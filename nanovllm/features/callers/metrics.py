"""An engine's counters under vLLM's names: LLM.get_metrics(). The server's own are in serving/http/metrics.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """buckets: upper limit, as text -> how many were at most that. Only the server keeps some (/metrics)."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(engine: "LLMEngine") -> list[Metric]:
    """Now."""
    stats = snapshot(engine)
    block_size, cache = stats["kv_pool"]["block_size"], stats["prefix_cache"]
    gauges = {
        "num_requests_running": stats["num_running"],
        "num_requests_waiting": stats["num_waiting"],
        "kv_cache_usage_perc": stats["kv_pool"]["usage"],
    }
    counters = {
        "prefix_cache_queries": cache["queries"] * block_size,  # tokens, as in vLLM
        "prefix_cache_hits": cache["hits"] * block_size,
        "generation_tokens": stats["num_output_tokens"],
        "num_preemptions": stats["num_preemptions"],
        "spec_decode_num_draft_tokens": stats["num_guessed_tokens"],
        "spec_decode_num_accepted_tokens": stats["num_accepted_tokens"],
    }
    found: list[Metric] = [Gauge(f"vllm:{name}", {}, value) for name, value in gauges.items()]
    return found + [Counter(f"vllm:{name}", {}, value) for name, value in counters.items()]
