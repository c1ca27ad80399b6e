"""/metrics, for Prometheus: what the engine and the server count, under vLLM's names, so that its boards show it.

vLLM's boards: examples/observability in its repository. They ask by model_name, and some by engine, which is "0" here.
"""

import time
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.engine import LLMEngine
from nanovllm.features.callers.metrics import (
    Counter,
    Distribution,
    Gauge,
    Histogram,
    Metric,
    engine_metrics,
    exposition,
)
from nanovllm.outputs import RequestMetrics
from nanovllm.request import Request
from nanovllm.serving.openai.pooling import URLS as POOLING

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
FEW = (1, 2, 5, 10, 20)
# name -> (what it says, buckets)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("from arrival to the first token", SECONDS),
    "inter_token_latency_seconds": ("between two steps with tokens for it", SECONDS),
    "e2e_request_latency_seconds": ("from arrival to the last token", SECONDS),
    "request_queue_time_seconds": ("from arrival to the first step for it", SECONDS),
    "request_prefill_time_seconds": ("from its first step to the first token", SECONDS),
    "request_decode_time_seconds": ("from the first token to the last", SECONDS),
    "request_inference_time_seconds": ("from its first step to the last token", SECONDS),
    "request_time_per_output_token_seconds": ("of each token after the first, of a request", SECONDS),
    "request_prompt_tokens": ("of a request", TOKENS),
    "request_prefill_kv_computed_tokens": ("of its prompt, not found in the cache", TOKENS),
    "request_generation_tokens": ("of a sample", TOKENS),
    "request_max_num_generation_tokens": ("of the longest of its samples", TOKENS),
    "request_params_max_tokens": ("that it asked for", TOKENS),
    "request_params_n": ("samples that it asked for", FEW),
    "request_num_preemptions": ("of a request", FEW),
    "iteration_tokens_total": ("prompts that were computed in a step, and tokens that it generated", TOKENS),
}
REASONS = ("stop", "length", "abort", "error")
# Paths whose requests are the server's load.
ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", *POOLING)
PATHS = (*ANSWERING, "/v1/models", "/tokenize", "/detokenize")  # that are named in http_requests


class Metrics:
    """Distributions and counts grow with every step, in the engine's thread. model_name: of the label."""

    def __init__(self, engine: LLMEngine, model_name: str) -> None:
        self.engine = engine
        self.labels = {"model_name": model_name, "engine": "0"}
        self.distributions = {name: Distribution(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.num_answering = 0  # requests of ANSWERING
        self.answers: Counts[tuple[str, str, str]] = Counts()  # (method, path, "2xx")
        self.reasons: Counts[str] = Counts()  # finish_reason -> samples
        self.num_prompt_tokens = 0  # of requests that have a token
        self.num_cached_tokens = 0  # of these
        self._last: dict[str, float] = {}  # request id -> time of its newest token
        self._preemptions: Counts[str] = Counts()  # by request id

    def text(self, stats: dict[str, Any]) -> str:
        """What /metrics answers. stats: of LLM.stats()."""
        return exposition([*engine_metrics(stats, self.labels), *self._of_requests(stats), *_of_ours(stats)])

    def _of_requests(self, stats: dict[str, Any]) -> Iterator[Metric]:
        labels = self.labels
        for name, distribution in self.distributions.items():
            yield Histogram(f"vllm:{name}", labels, **distribution.as_dict(), help=HISTOGRAMS[name][0])
        text = "tokens of prompts, computed or found in the cache"
        yield Counter("vllm:prompt_tokens", labels, self.num_prompt_tokens, help=text)
        yield Counter("vllm:prompt_tokens_cached", labels, self.num_cached_tokens, help="of these, found in the cache")
        for reason, num in (("capacity", stats["num_waiting"]), ("deferred", 0)):
            by_reason = labels | {"reason": reason}
            yield Gauge("vllm:num_requests_waiting_by_reason", by_reason, num, help="sequences that wait")
        for reason in REASONS:
            ended = labels | {"finished_reason": reason}
            yield Counter("vllm:request_success", ended, self.reasons[reason], help="samples that have ended")
        pool, longest = stats["kv_pool"], self.engine.scheduler.max_model_len
        num_tokens = pool["num_blocks"] * pool["block_size"]
        config = {
            "block_size": str(pool["block_size"]),
            "num_gpu_blocks": str(pool["num_blocks"]),
            "kv_cache_size_tokens": str(num_tokens),
            "kv_cache_max_concurrency": f"{num_tokens / longest:.2f}",
            "enable_prefix_caching": str(self.engine.config.enable_prefix_caching),
        }
        yield Gauge("vllm:cache_config_info", labels | config, 1, help="the KV pool")
        for (method, handler, status), num in self.answers.copy().items():
            answer = {"method": method, "handler": handler, "status": status}
            yield Counter("http_requests", answer, num, help="answers")

    @contextmanager
    def answering(self, path: str) -> Iterator[None]:
        """While a request is answered."""
        self.num_answering += path in ANSWERING
        try:
            yield
        finally:
            self.num_answering -= path in ANSWERING

    def count_answer(self, method: str, path: str, status: int) -> None:
        self.answers[method, path if path in PATHS else "none", f"{status // 100}xx"] += 1

    def on_step(self, output: SchedulerOutput, progressed: list[Request]) -> None:
        """In the engine's thread, as on_end."""
        see = self.distributions
        num_tokens = sum(
            len(chunk.seq.tokens) - chunk.known_end for chunk in output.chunks if chunk.reaches_end
        )  # with stops, fewer than were sampled
        requests = self.engine.requests
        for seq in output.preempted:
            self._preemptions[seq.request_id] += 1
        for request in progressed:
            arrival, newest = request.metrics.arrival_time, request.metrics.last_token_time
            before = self._last.get(request.request_id)
            if newest is not None and newest != before:  # else the step was for another sample than the first
                self._last[request.request_id] = newest
                if before is None:
                    see["time_to_first_token_seconds"].observe(newest - arrival)
                    num_tokens += self._count_prompt(request)
                else:
                    see["inter_token_latency_seconds"].observe(newest - before)
            elif newest is None and request.finished:  # its prompt was scored, and nothing else was asked for
                num_tokens += self._count_prompt(request)
            if request.finished:
                self._observe_end(request)
        see["iteration_tokens_total"].observe(num_tokens)
        if max(len(self._last), len(self._preemptions)) > 2 * len(requests) + 100:  # the ended ones
            self._last = {request_id: t for request_id, t in self._last.items() if request_id in requests}
            self._preemptions = Counts({i: n for i, n in self._preemptions.items() if i in requests})

    def _count_prompt(self, request: Request) -> int:
        self.num_prompt_tokens += len(request.prompt_token_ids)
        self.num_cached_tokens += request.num_cached_tokens or 0
        return len(request.prompt_token_ids)

    def on_end(self, requests: list[Request], reason: str) -> None:
        """Requests that have not come to their own end."""
        self.reasons[reason] += sum(len(request.samples) for request in requests)

    def _observe_end(self, request: Request) -> None:
        see, of, num_prompt = self.distributions, request.metrics, len(request.prompt_token_ids)
        see["e2e_request_latency_seconds"].observe(time.perf_counter() - of.arrival_time)
        for name, seconds in _phases(of).items():
            see[name].observe(seconds)
        lengths = [sample.seq.num_generated_tokens for sample in request.samples]
        for length, sample in zip(lengths, request.samples, strict=True):
            see["request_generation_tokens"].observe(length)
            self.reasons[sample.seq.finish_reason or "error"] += 1
        see["request_max_num_generation_tokens"].observe(max(lengths))
        see["request_prompt_tokens"].observe(num_prompt)
        see["request_prefill_kv_computed_tokens"].observe(num_prompt - (request.num_cached_tokens or 0))
        see["request_params_n"].observe(request.params.n)
        see["request_num_preemptions"].observe(self._preemptions.pop(request.request_id, 0))
        if request.params.max_tokens is not None:
            see["request_params_max_tokens"].observe(request.params.max_tokens)


def _of_ours(stats: dict[str, Any]) -> Iterator[Metric]:
    """What vLLM has no name for."""
    cache = stats["prefix_cache"]
    for name, text, value in (
        ("kv_cache_cached", "share of the blocks that are cached and can be found", cache["utilization"]),
        ("prefix_cache_recent_hit_rate", "block hits per probe, last 1,000 admissions", cache["recent_hit_rate"] or 0),
    ):
        yield Gauge(f"nanovllm_{name}", {}, value, help=text)
    for name, text, number in (
        ("steps", "steps of the engine", stats["num_steps"]),
        ("prefill_tokens", "prompt tokens that were computed", stats["num_prefill_tokens"]),
        ("finished_requests", "requests that came to their end", stats["num_finished_requests"]),
        ("prefix_cache_evictions", "cached blocks that were overwritten", cache["evictions"]),
    ):
        yield Counter(f"nanovllm_{name}", {}, number, help=text)
    text = "tokens found, by where and by whether their sequence was preempted before"
    for medium, tokens in cache["hit_tokens"].items():
        for which, num in tokens.items():
            labels = {"medium": medium, "admission": which}
            yield Counter("nanovllm_prefix_cache_hit_tokens", labels, num, help=text)


def _phases(of: RequestMetrics) -> dict[str, float]:
    """The seconds of a request's life, as far as it came."""
    first, last, begun = of.first_token_time, of.last_token_time, of.first_scheduled_time
    if first is None or last is None or begun is None:
        return {}
    phases = {
        "request_queue_time_seconds": begun - of.arrival_time,
        "request_prefill_time_seconds": first - begun,
        "request_decode_time_seconds": last - first,
        "request_inference_time_seconds": last - begun,
    }
    return phases if of.tpot_s is None else phases | {"request_time_per_output_token_seconds": of.tpot_s}
