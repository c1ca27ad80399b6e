"""What the lab, the exercises and their checks of chapter 11 share: timings, what is made of them, and clocks."""

import time
from dataclasses import dataclass

from nanovllm import SamplingParams
from nanovllm.outputs import RequestOutput


@dataclass(frozen=True)
class Timing:
    """One request as somebody with a stopwatch saw it: when it arrived, and when each output token came (seconds)."""

    arrival_s: float
    token_times_s: tuple[float, ...] = ()  # empty: it was given up before its first token


def timing_of(output: RequestOutput) -> Timing:
    """The engine keeps the first and the last token's time; those between are spread evenly."""
    metrics = output.metrics
    first_s, num_gaps = metrics.first_token_time or 0.0, metrics.num_output_tokens - 1
    return Timing(metrics.arrival_time, tuple(first_s + i * (metrics.tpot_s or 0.0) for i in range(num_gaps + 1)))


@dataclass(frozen=True)
class Summary:
    """The four numbers, and what they hide."""

    ttft_s: float  # mean
    tpot_s: float  # mean
    latency_s: float  # of the slowest
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput: float  # requests a second that kept both limits


@dataclass(frozen=True)
class Arrival:
    """A request that is due `due_s` seconds after the start of a benchmark, whatever the engine does then."""

    due_s: float
    prompt_token_ids: list[int]
    params: SamplingParams


class SkippingClock:
    """The real clock, but sleep() takes no time: it puts the clock forward.

    With it in place of `time` in the engine, a benchmark in which an engine waits for arrivals is over sooner, and no
    step is measured differently.
    """

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self._skipped_s

    def sleep(self, seconds: float) -> None:
        self._skipped_s += seconds
