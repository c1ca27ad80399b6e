"""Grading of the exercises of chapter 11. No check depends on how fast anything is: its clock is one of ours."""

import hashlib
import io
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from statistics import mean, median
from typing import Any

import nanovllm.engine
from chapters.ch11_benchmarks.timing import Arrival, Summary, Timing, timing_of
from chapters.expect import cases, differs, expect, read_again, unchanged
from chapters.grading import Bench, Check, Task, Wrong
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput


class FakeTime:
    """A clock that moves when it is told to. It stands in for `time` in the engine and in its benchmark."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s, self._num_looks = now_s, 0

    def perf_counter(self) -> float:
        self._num_looks += 1
        if self._num_looks > 100_000:
            raise Wrong(
                "you looked at the clock 100,000 times and no time passed: only step() and sleep() make it pass"
            )
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds
        self._num_looks = 0


@contextmanager
def fake_time(llm: LLM, step_s: float, token_s: float = 0.0) -> Iterator[FakeTime]:
    """The engine computes as always; by its clock a step takes step_s, and token_s more for each token in it."""
    from nanovllm.tools import bench as bench_tool  # it draws with rich, which no browser has

    clock, runner = FakeTime(), llm.engine.model_runner
    ours = runner.run_packed

    def run_packed(batch: Any, *others: Any) -> Any:
        clock.pass_by(step_s + token_s * len(batch.input_ids))
        return ours(batch, *others)

    with (
        replaced(runner, "run_packed", run_packed),
        replaced(nanovllm.engine, "time", clock),
        replaced(bench_tool, "time", clock),
    ):
        yield clock


# -- summarize --------------------------------------------------------------------------------------------------------

Summarize = Callable[[list[Timing], float, float], Summary]


def usual_mistakes(timings: list[Timing], ttft_limit_s: float, tpot_limit_s: float) -> dict[str, list]:
    """field -> (the number that a mistake gives, its hint)."""
    served = [t for t in timings if t.token_times_s]
    arrivals = [t.arrival_s for t in served]
    firsts, lasts = [t.token_times_s[0] for t in served], [t.token_times_s[-1] for t in served]
    nums, num_lost = [len(t.token_times_s) for t in served], len(timings) - len(served)
    ttfts, latencies = ([b - a for a, b in zip(arrivals, ends, strict=True)] for ends in (firsts, lasts))
    gaps = [last - first for first, last in zip(firsts, lasts, strict=True)]
    tpots = [gap / (num - 1) if num > 1 else 0.0 for gap, num in zip(gaps, nums, strict=True)]
    several = [i for i, num in enumerate(nums) if num > 1] or [0]
    begin_s = min(t.arrival_s for t in timings)
    seconds = max(lasts) - begin_s
    both = [(a <= ttft_limit_s, b <= tpot_limit_s) for a, b in zip(ttfts, tpots, strict=True)]
    good = [i for i, keeps in enumerate(both) if all(keeps)]
    below = [i for i in good if ttfts[i] < ttft_limit_s and tpots[i] < tpot_limit_s]

    def a_second(total: float, divisor: float, hint: str) -> tuple[float, str]:
        return total / (divisor or math.nan), hint

    one_wait = "the wait for the first token belongs to TTFT: count from the first token"
    rates = (num / (latency or math.nan) for num, latency in zip(nums, latencies, strict=True))
    mistakes = {
        "ttft_s": [
            (mean(firsts), "a point on the clock is not a duration: subtract the request's own arrival_s"),
            (mean(firsts) - begin_s, "this counts from the first arrival of all: subtract the request's own arrival_s"),
            (sum(ttfts) / len(timings), "a request without a token does not belong in the mean, not even as a 0"),
            (median(ttfts), "this is the median; the mean was asked for"),
        ],
        "tpot_s": [
            (mean(gaps[i] / nums[i] for i in several), "n tokens have n - 1 gaps between them"),
            (
                sum(tpots) / len(served),
                "with one token there is no gap: leave it out of the mean, do not count it as 0",
            ),
            a_second(sum(gaps), sum(nums) - len(nums), "this is the mean over all gaps: first a TPOT for each request"),
            *((mean(latencies[i] / max(nums[i] - offset, 1) for i in several), one_wait) for offset in (0, 1)),
        ],
        "latency_s": [
            (mean(latencies), "this is the mean; latency_s is that of the slowest request"),
            (seconds, "this is how long everything took; the longest wait of one request was asked for"),
            (max(gaps), "this counts from the first token; a request waits from its arrival on"),
        ],
        "output_tokens_per_s": [
            a_second(sum(nums), sum(latencies), "requests overlap: seconds that they share count once"),
            a_second(sum(nums), max(latencies), "this divides by the wait of one request"),
            a_second(sum(nums), max(lasts) - min(firsts), "seconds begins with the first arrival, not the first token"),
            a_second(sum(nums), max(lasts) - min(arrivals), "the first arrival of any request counts, given up or not"),
            a_second(sum(nums), max(lasts), "the clock does not start at 0: seconds is a difference on it"),
            a_second(len(served), seconds, "these are requests per second; count their tokens"),
            (sum(rates), "rates of single requests don't add up: the requests run at different times"),
        ],
        "goodput": [
            *(
                (sum(kept) / seconds, "these kept one limit; a good request keeps both")
                for kept in zip(*both, strict=True)
            ),
            ((len(good) + num_lost) / seconds, "a request that was given up is not good"),
            (sum(nums[i] > 1 for i in good) / seconds, "with a single token no TPOT is too long"),
            (len(below) / seconds, "exactly at the limit is good"),
            (len(good), "this is how many were good; divide by seconds"),
            (len(good) / len(timings), "this is the share of good ones; requests per second were asked for"),
        ],
    }
    in_order = [t.token_times_s[0] - t.arrival_s if t.token_times_s else math.inf for t in timings]
    for percent in (50, 99):
        n, ranked = len(in_order), sorted(in_order)
        rank, place = -(-percent * n // 100) - 1, (n - 1) * percent / 100
        low, high = ranked[math.floor(place)], ranked[math.ceil(place)]
        one = f"nearest rank: with {n} values it is number {rank + 1}, counted from 1"
        mistakes[f"ttft_p{percent}_s"] = [
            (ranked[min(rank + 1, n - 1)], f"one too far; {one}, so its index is {rank}"),
            (ranked[max(rank - 1, 0)], f"one too early; {one}, so its index is {rank}"),
            (low + (high - low) * (place % 1) if high < math.inf else high, f"this lies between two values; {one}"),
            (
                sorted(ttfts)[-(-percent * len(ttfts) // 100) - 1],
                "those that were given up are missing: each counts as math.inf",
            ),
            (in_order[rank], "sort the TTFTs first"),
        ]
    return mistakes


def is_close(a: Any, b: Any) -> bool:
    return isinstance(a, int | float) and not differs(b, a, 1e-9, 1e-6)


def compare(function: Summarize, what: str, timings: list[Timing], wanted: Summary, *limits: float) -> None:
    """Raises Wrong for the first field that differs."""
    limits = limits or (math.inf, math.inf)
    with unchanged("the list that you were given has been changed; sorted() makes a new one", timings):
        got = function(timings, *limits)
    if not isinstance(got, Summary):
        raise Wrong("return a Summary", got=repr(got))
    for name, expected in vars(wanted).items():
        answer = getattr(got, name)
        if not is_close(answer, expected):
            hints = dict.fromkeys(h for number, h in usual_mistakes(timings, *limits)[name] if is_close(answer, number))
            hint = " Or: ".join(hints) or "read its line in the docstring again"
            raise Wrong(f"{name} of {what}: {hint}", expected=expected, got=answer)


def check_alone(function: Summarize, bench: Bench) -> None:
    """One request alone, arriving at second 100"""
    one = [Timing(100.0, (102.0, 102.5, 103.0, 103.5, 104.0))]
    what = "a request that arrives at 100.0, with tokens at 102.0, 102.5, 103.0, 103.5 and 104.0"
    wanted = Summary(
        ttft_s=2.0, tpot_s=0.5, latency_s=4.0, output_tokens_per_s=1.25, ttft_p50_s=2.0, ttft_p99_s=2.0, goodput=0.25
    )
    compare(function, what, one, wanted)


def check_two(function: Summarize, bench: Bench) -> None:
    """Two that overlap: the example of the docstring"""
    two = [Timing(10.0, (10.5, 10.6, 10.7)), Timing(10.2, (10.5,))]
    wanted = Summary(
        ttft_s=0.4,
        tpot_s=0.1,
        latency_s=0.7,
        output_tokens_per_s=4 / 0.7,
        ttft_p50_s=0.3,
        ttft_p99_s=0.5,
        goodput=1 / 0.7,
    )
    compare(function, "the example of the docstring", two, wanted, 0.4, 0.2)


def check_lengths(function: Summarize, bench: Bench) -> None:
    """Answers of different lengths, one after another and at the same time"""
    timings = [Timing(9.0, (9.5, 9.75, 10.0)), Timing(5.0, tuple(6.0 + i for i in range(9))), Timing(5.5, (6.0,))]
    what = "three requests with 3, 9 and 1 tokens; TPOTs 0.25, 1.0 and none"
    wanted = Summary(
        ttft_s=2 / 3,
        tpot_s=0.625,
        latency_s=9.0,
        output_tokens_per_s=13 / 9,
        ttft_p50_s=0.5,
        ttft_p99_s=1.0,
        goodput=3 / 9,
    )
    compare(function, what, timings, wanted)


def check_single_tokens(function: Summarize, bench: Bench) -> None:
    """Nobody has a second token"""
    wanted = Summary(
        ttft_s=0.75, tpot_s=0.0, latency_s=1.0, output_tokens_per_s=2.0, ttft_p50_s=0.5, ttft_p99_s=1.0, goodput=2.0
    )
    compare(function, "two requests with one token each", [Timing(1.0, (2.0,)), Timing(1.5, (2.0,))], wanted)


@read_again("What a mean hides")
def check_percentiles(function: Summarize, bench: Bench) -> None:
    """Percentiles of 1, 2, 10, 100 and 250 requests"""
    # The waits are 0.1, 0.4, 0.9, ... s in another order; a second token follows a second after the first.
    for n, mean_s, p50_s, p99_s, seconds in (
        (1, 0.1, 0.1, 0.1, 1.1),
        (2, 0.25, 0.1, 0.4, 2.1),
        (10, 3.85, 2.5, 10.0, 20.0),
        (100, 338.35, 250.0, 980.1, 1078.1),
        (250, 2095.85, 1562.5, 6150.4, 6391.0),
    ):
        waits = [0.1 * (i + 1) ** 2 for i in range(n)]
        random.Random(n).shuffle(waits)
        timings = [Timing(50.0 + i, (50.0 + i + wait, 51.0 + i + wait)) for i, wait in enumerate(waits)]
        wanted = Summary(
            ttft_s=mean_s,
            tpot_s=1.0,
            latency_s=max(waits) + 1,
            output_tokens_per_s=2 * n / seconds,
            ttft_p50_s=p50_s,
            ttft_p99_s=p99_s,
            goodput=n / seconds,
        )
        compare(function, f"{n} requests, none given up", timings, wanted)


def check_given_up(function: Summarize, bench: Bench) -> None:
    """Requests that were given up"""
    timings = [Timing(7.0)] + [Timing(8.0 + i, (8.5 + i, 8.75 + i)) for i in range(8)] + [Timing(12.0)]
    what = "ten requests, two of them given up before their first token (one of these came first)"
    wanted = Summary(
        ttft_s=0.5,
        tpot_s=0.25,
        latency_s=0.75,
        output_tokens_per_s=16 / 8.75,
        ttft_p50_s=0.5,
        ttft_p99_s=math.inf,
        goodput=8 / 8.75,
    )
    compare(function, what, timings, wanted)


@read_again("What a mean hides")
def check_goodput(function: Summarize, bench: Bench) -> None:
    """Goodput: both limits, and exactly at a limit"""
    timings = [
        Timing(4.0, (4.5, 4.75)),  # both exactly at the limit
        Timing(4.0, (4.25, 5.25)),  # begins soon, then slow
        Timing(4.0, (5.5, 5.625)),  # begins late, then fast
        Timing(5.0, (5.25,)),  # a single token
        Timing(5.0, (7.0,)),  # a single token, late
        Timing(6.5, (6.75,)),
        Timing(5.5, (5.75, 5.875, 6.0)),
    ]
    timings += [Timing(5.0)] * 3  # given up
    what = "eight requests and three that were given up, with limits of 0.5 s and 0.25 s"
    wanted = Summary(
        ttft_s=5 / 7,
        tpot_s=0.375,
        latency_s=2.0,
        output_tokens_per_s=4.0,
        ttft_p50_s=0.5,
        ttft_p99_s=math.inf,
        goodput=4 / 3,
    )
    compare(function, what, timings, wanted, 0.5, 0.25)


def check_bench(function: Summarize, bench: Bench) -> None:
    """`nanovllm bench` on the real engine draws the same table with your numbers"""
    ours = table_of_bench(bench)
    from nanovllm.tools import bench as bench_tool

    our_measure = bench_tool.measure

    def measure(llm: LLM, batch_size: int, *sizes: int, **options: int) -> bench_tool.Measurement:
        outputs: list[RequestOutput] = []
        generate = llm.generate

        def watched(*args: Any, **named: Any) -> list[RequestOutput]:
            outputs.extend(generate(*args, **named))
            return outputs

        with replaced(llm, "generate", watched):
            our_measure(llm, batch_size, *sizes, **options)
        got = function([timing_of(output) for output in outputs], math.inf, math.inf)
        return bench_tool.Measurement(batch_size, got.ttft_s, got.tpot_s, got.latency_s, got.output_tokens_per_s)

    with replaced(bench_tool, "measure", measure):
        yours = table_of_bench(bench)
    for expected, got in zip(ours, yours, strict=True):
        expect(expected, got, "a row of its table")


def table_of_bench(bench: Bench) -> list[str]:
    bench.llm.reset_prefix_cache()
    from nanovllm.tools.bench import run_bench

    out = io.StringIO()
    # Small steps, so that the requests of a batch don't all get their first token in the same one.
    with (
        fake_time(bench.llm, step_s=0.125, token_s=2**-6),
        replaced(bench.llm.engine.scheduler, "max_num_batched_tokens", 16),
        redirect_stdout(out),
        redirect_stderr(io.StringIO()),
    ):
        run_bench(bench.llm, [1, 2, 5], 10, 6)
    return out.getvalue().splitlines()


# -- audit ------------------------------------------------------------------------------------------------------------

Audit = Callable[[], dict[str, dict[str, float]]]
FAULTS = (
    "prefix_cache output_lengths warm_up input_tokens batch_size dtype drift ttft_is_latency survivors closed_loop"
).split()
# Why a fault is not there: what the report says against it.
NOT_THERE = {
    "a": {
        "output_lengths": "each pass generated 4,096 tokens, on both engines, and EOS is ignored",
        "warm_up": "both were warmed up before pass 1, and Finch's pass 1 is as fast as its others. Look at what "
        "Kestrel's passes 2 and 3 had to compute",
        "input_tokens": "1,272.0 is 4,096 / 3.22: output tokens only",
        "batch_size": "all 32 are submitted at once, and both run 32 at a time",
        "dtype": "both run in bfloat16: see the commands",
        "drift": "the engines took turns, and Finch's three passes are within 1 %",
        "ttft_is_latency": "there is no TTFT in this report",
        "survivors": "every pass has all 4,096 = 32 x 128 output tokens: nobody is missing",
        "closed_loop": "all requests are submitted at once, for both engines",
    },
    "b": {
        "prefix_cache": "prefix caching is off, and both computed all 9,344 prompt tokens",
        "warm_up": "two batches of different conversations came first, for both",
        "input_tokens": "the report counts requests, and lists tokens separately",
        "batch_size": "--max-num-seqs 64 in both commands, and all 64 are there from the start",
        "dtype": "--dtype float16 in both commands",
        "drift": "the engines took turns, and the runs differ by less than 2 %; the claim is 66 %",
        "ttft_is_latency": "there is no TTFT in this report",
        "survivors": "64 of 64 are answered, for both. Answered, but how?",
        "closed_loop": "all 64 are submitted at once, for both",
    },
    "c": {
        "prefix_cache": "the prompts are random and prefix caching is off",
        "output_lengths": "16,384 generated tokens on both sides: 128 x 128",
        "batch_size": "both run all 128 at a time",
        "dtype": "bfloat16 for both",
        "drift": "they took turns, and the three runs of each engine are within 1 %",
        "ttft_is_latency": "there is no TTFT in this report",
        "survivors": "both generated 16,384 tokens: nobody is missing",
        "closed_loop": "all requests are submitted at once, for both",
    },
    "d": {
        "prefix_cache": "the prompts are random and prefix caching is off",
        "output_lengths": "200 output tokens per answer, on both sides",
        "warm_up": "100 requests came first, for both",
        "input_tokens": "there are no tokens per second in this report",
        "batch_size": "both may have up to 128 sequences at a time",
        "dtype": "bfloat16 for both",
        "drift": "they took turns, and an engine's three runs are within 3 %",
        "closed_loop": "the client sends each request at its moment, whether or not earlier ones are answered",
    },
}
# What to look at, for a student who does not see a fault that is there.
LOOK_AT = {
    ("a", "prefix_cache"): "compare the passes of one engine with each other, column by column",
    ("b", "output_lengths"): "the two commands are not the same; what follows from that in the table?",
    ("c", "input_tokens"): "work out throughput from Heron's other lines: which of them give 9,830.4?",
    ("c", "warm_up"): "read the times at the left of Pike's log",
    ("d", "ttft_is_latency"): "compare Otter's TTFT with its latency, and see how its client knows the first token",
    ("d", "survivors"): "how many requests is each mean latency a mean of?",
}
# The faults that are there, each with a digest of its number: the answers themselves are not to be read here.
FOUND = {
    "a": {"prefix_cache": "269312d7cb9c82e8"},
    "b": {"output_lengths": "ffa24bbcb71e1e7c"},
    "c": {"input_tokens": "db8202247e343220", "warm_up": "6072ae2beac13589"},
    "d": {"ttft_is_latency": "3a8cdd3c03b3ca4c", "survivors": "37a34903642d70f3"},
}
STEP = 0.001  # numbers are told apart by so much of their size
# Typical numbers for the right fault that prove something else.
WRONG_NUMBERS = {
    ("a", "prefix_cache"): (
        (4096 / 6.09, "that is Finch, which had nothing in its cache: the winner's own number was asked for"),
        (3 * 4096 / (6.31 + 3.22 + 3.19), "the mean over all passes still has the cached ones in it"),
        (4096 / 3.22, "that is the pass with the cache; which pass computed all 32,768 prompt tokens?"),
        ((32768 + 4096) / 6.31, "output tokens per second: the prompts don't count"),
    ),
    ("b", "output_lengths"): (
        ((8192 / 20.48) / (4212 / 12.31), "upside down: it should be the winner's divided by the other's"),
        (4212 / 8192, "that is the ratio of the tokens; divide each by its seconds first"),
        (4212 / 12.31, "that is the winner's output tokens/s alone; divide it by the other's"),
        (20.48 / 12.31, "that is the claim: requests per second. Count tokens"),
        (5.20 / 3.13, "that is the claim: requests per second. Count tokens"),
    ),
    ("c", "input_tokens"): (
        (131072 / 15.0, "those are the prompt tokens; the generated ones were asked for"),
        (16384 / 16.02, "that is Pike; it is Heron whose prompts were counted"),
    ),
    ("c", "warm_up"): (
        (16384 / 16.02, "that includes the compiling; take its time out"),
        (16384 / 4.61, "4.61 s is the time of the compiling; divide by what is left without it"),
        (16384 / (15.0 - 4.61), "15.00 s is Heron's time"),
        (16384 / (16.02 + 4.61), "the 16.02 s already include the compiling; take it out"),
    ),
    ("d", "ttft_is_latency"): (
        (6.1 - 200 * 0.024, "200 tokens have 199 gaps between them"),
        (6.1 - 199 * 0.0106, "0.0106 s is Stork's TPOT"),
        (4.0 - 199 * 0.0106, "that is Stork, whose client streams; which engine's TTFT equals its latency?"),
        (199 * 0.024, "that is from the first token to the last; TTFT is what is left of the 6.1 s before it"),
        (1.9, "that is Stork's TTFT"),
    ),
    ("d", "survivors"): (
        (640 * 4.0 / 1000, "the 360 count with 30 s each, not with 0"),
        ((640 * 4.0 + 360 * 4.0) / 1000, "the 360 count with 30 s each"),
        ((4.0 + 30) / 2, "the two groups have different sizes: 640 and 360"),
        (6.1, "that is Otter, which answered everybody"),
    ),
}


def check_form(function: Audit, bench: Bench) -> None:
    """Four reports, keys of the list, numbers"""
    got = function()
    if not isinstance(got, dict) or not all(isinstance(faults, dict) for faults in got.values()):
        raise Wrong('return {"a": {key: number}, "b": ..., "c": ..., "d": ...}', got=repr(got))
    if set(got) != set(NOT_THERE):
        raise Wrong("one entry for each report", expected=sorted(NOT_THERE), got=sorted(map(str, got)))
    for report, faults in got.items():
        for key, number in faults.items():
            if key not in FAULTS:
                raise Wrong(f"report {report}: {key!r} is not a key of the list", expected=" ".join(FAULTS))
            if not isinstance(number, int | float) or isinstance(number, bool) or not math.isfinite(number):
                raise Wrong(f"report {report}: {key} needs a number that proves it", got=repr(number))


def step_of(number: float) -> int | None:
    """Of a scale whose steps are equal shares; None: the number is not on it."""
    return round(math.log(number) / STEP) if number > 0 else None


def digest(report: str, key: str, step: int) -> str:
    return hashlib.sha256(f"{report} {key} {step}".encode()).hexdigest()[:16]


def is_found(report: str, key: str, number: float) -> bool:
    """Is it the number that proves this fault, or not farther from it than half a percent?"""
    step = step_of(number)
    return step is not None and any(digest(report, key, step + by) == FOUND[report][key] for by in range(-5, 6))


def check_report(function: Audit, report: str) -> None:
    ours, got = FOUND[report], function()[report]
    for key in got:
        if key not in ours:
            raise Wrong(f"report {report}: {key} is not there. The report says: {NOT_THERE[report][key]}")
    for key in ours:
        if key not in got:
            found = f"{len(got)} of {len(ours)} found" if got else "nothing found"
            raise Wrong(f"report {report}, {found}: {LOOK_AT[report, key]}")
        if not is_found(report, key, got[key]):
            usual = WRONG_NUMBERS[report, key]
            close = (hint for value, hint in usual if not differs(value, got[key], 0.0, 0.005))
            hint = next(close, "read in the docstring which number goes with it, and of which engine")
            raise Wrong(f"report {report}: {key} is right, but its number is not. {hint}", got=got[key])


# -- serve ------------------------------------------------------------------------------------------------------------

Serve = Callable[..., list[RequestOutput]]
STEP_S = 0.5


class Referee:
    """Drives the real engine with a function, on a clock of its own, and notes what happens when."""

    def __init__(self, bench: Bench, dues: list[float], num_outputs: list[int]) -> None:
        self.llm, self.engine = bench.llm, bench.llm.engine
        vocab_size = self.engine.model_config.vocab_size
        rng = random.Random(len(dues))
        self.arrivals = [
            # The first token is the request's number: nothing is shared, and each request can be recognized.
            Arrival(due_s, [i + 5, *rng.choices(range(5, min(vocab_size, 300)), k=4)], greedy(num))
            for i, (due_s, num) in enumerate(zip(dues, num_outputs, strict=True))
        ]
        self.handed: dict[int, float] = {}
        self.steps: list[float] = []
        self.newcomers: list[list[int]] = []  # the requests that were handed in between each step and the one before

    def run(self, function: Serve) -> list[RequestOutput]:
        our_step, our_enqueue = self.engine.step, self.engine.enqueue
        with fake_time(self.llm, STEP_S) as clock:
            self.started = clock.now_s

            def step() -> list[RequestOutput]:
                if not self.engine.has_unfinished_requests():
                    raise Wrong("step() although there are no unfinished requests: sleep until the next one is due")
                known = sum(map(len, self.newcomers))
                self.newcomers.append(list(self.handed)[known:])
                self.steps.append(clock.now_s)
                return our_step()

            def enqueue(requests: list) -> list[str]:
                for request in requests:
                    number = request.prompt_token_ids[0] - 5
                    if number in self.handed:
                        raise Wrong(f"request {number} is handed in twice")
                    self.handed[number] = clock.now_s
                    early_s = self.due(number) - clock.now_s
                    if early_s > 1e-9:
                        raise Wrong(f"request {number} is handed in {early_s:.3g} s before it is due: {self}")
                return our_enqueue(requests)

            def sleep(seconds: float) -> None:
                if seconds < 0:
                    raise Wrong("sleep() for less than no time", got=seconds)
                if self.engine.has_unfinished_requests():
                    raise Wrong("sleep() while there are unfinished requests: they stand still in the meantime")
                next_s = min((self.due(i) for i in range(len(self.arrivals)) if i not in self.handed), default=math.inf)
                if clock.now_s + seconds > next_s + 1e-9:
                    late_s = clock.now_s + seconds - next_s
                    raise Wrong(f"sleep() lasts {late_s:.3g} s longer than until the next request is due: {self}")
                clock.pass_by(seconds)

            with replaced(self.engine, "step", step), replaced(self.engine, "enqueue", enqueue):
                return function(self.engine, list(self.arrivals), clock.perf_counter, sleep)

    def run_again(self) -> list[RequestOutput]:
        """The same steps, and before each the same newcomers, by their numbers. It decides nothing: it has a record."""
        numbers: dict[str, int] = {}
        outputs: dict[int, RequestOutput] = {}
        self.llm.reset_prefix_cache()
        with fake_time(self.llm, STEP_S) as clock:
            for at_s, newcomers in zip(self.steps, self.newcomers, strict=True):
                clock.pass_by(at_s - clock.now_s)
                for number in sorted(newcomers):
                    arrival = self.arrivals[number]
                    numbers[self.engine.add_request(None, arrival.prompt_token_ids, arrival.params)] = number
                outputs |= {numbers[output.request_id]: output for output in self.engine.step()}
        return [outputs[number] for number in range(len(self.arrivals))]

    def due(self, number: int) -> float:
        return self.started + self.arrivals[number].due_s

    def __str__(self) -> str:
        dues = ", ".join(f"{arrival.due_s:.4g}" for arrival in self.arrivals[:8])
        return f"due at {dues}{', ...' if len(self.arrivals) > 8 else ''} s after the start; a step takes {STEP_S} s"

    def judge(self, outputs: Any) -> None:
        """Raises Wrong."""
        for i in range(len(self.arrivals)):
            if i not in self.handed:
                raise Wrong(f"request {i} was never handed in: {self}")
            next_step = next((at for at in self.steps if at >= self.due(i) - 1e-9), math.inf)
            if self.handed[i] > next_step + 1e-9:
                raise Wrong(
                    f"request {i} is handed in too late: it was due at {self.due(i) - self.started:.4g}, and a step "
                    f"began at {next_step - self.started:.4g} without it. {self}"
                )
        if not isinstance(outputs, list) or len(outputs) != len(self.arrivals):
            raise Wrong("return the outputs of all requests", expected=len(self.arrivals), got=repr(outputs)[:80])
        numbers = [output.prompt_token_ids[0] - 5 for output in outputs]
        hint = "the outputs are in a different order from the arrivals: the first to finish need not have come first"
        expect(sorted(numbers), numbers, hint)
        for i, output in enumerate(outputs):
            arrival_s, due_s = output.metrics.arrival_time, self.arrivals[i].due_s
            if abs(arrival_s - self.due(i)) > 1e-9:
                why = "its metrics count from a different moment"
                if abs(arrival_s - self.handed[i]) < 1e-9:
                    why = "its metrics count from when it was handed in: the wait before that is forgotten"
                elif abs(arrival_s - due_s) < 1e-9:
                    why = f"due_s counts from the start of the call, where the clock stood at {self.started:g}"
                hint = f"request {i} was due at {due_s:.4g}, and {why} ({self})"
                raise Wrong(hint, expected=due_s, got=arrival_s - self.started)


def greedy(num_outputs: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)


def play(
    function: Serve, bench: Bench, dues: list[float], num_outputs: list[int]
) -> tuple[Referee, list[RequestOutput]]:
    bench.llm.reset_prefix_cache()
    referee = Referee(bench, dues, num_outputs)
    outputs = referee.run(function)
    referee.judge(outputs)
    return referee, outputs


def playing(title: str, dues: list[float], num_outputs: list[int]) -> Check:
    def check(function: Serve, bench: Bench) -> None:
        play(function, bench, dues, num_outputs)

    check.__doc__ = title
    return check


def check_schedules(function: Serve, bench: Bench) -> None:
    """20 random schedules: the same times and the same tokens as ours"""
    for seed in range(20):
        rng, due_s, dues = random.Random(seed), 0.0, []
        for _ in range(rng.randint(2, 10)):
            dues.append(round(1024 * due_s) / 1024)  # so that no due time is missed by a rounding of the clock
            due_s += rng.choice((0.0, rng.expovariate(1.0), rng.expovariate(0.2)))
        nums = [rng.randint(1, 6) for _ in dues]
        referee, got = play(function, bench, dues, nums)
        for i, (a, b) in enumerate(zip(referee.run_again(), got, strict=True)):
            first_s = a.metrics.first_token_time or math.inf
            ours, theirs = round(first_s - referee.due(i), 6), round(b.metrics.ttft_s or 0.0, 6)
            expect(ours, theirs, f"TTFT of request {i}, schedule {seed}")
            expect(a.outputs[0].token_ids, b.outputs[0].token_ids, f"tokens of request {i}, schedule {seed}")


AUDIT_CHECKS = (
    check_form,
    *cases(
        check_report,
        {
            "Report A: Kestrel and Finch": [("a",)],
            "Report B: Minnow and Carp": [("b",)],
            "Report C: Heron and Pike": [("c",)],
            "Report D: Stork and Otter": [("d",)],
        },
    ),
)
SERVE_CHECKS = (
    playing("One request, due at once", [0.0], [3]),
    playing("A pause between two requests", [0.25, 10.0], [2, 2]),
    playing("Requests that are due while a step runs", [0.0, 0.2, 0.7], [6, 6, 6]),
    playing("Four at the same moment, and two more in one step", [0.0, 0.0, 0.0, 0.0, 0.6, 0.9], [4, 4, 4, 4, 4, 4]),
    playing("A long answer first, short ones after it", [0.0, 1.0, 1.1], [12, 2, 1]),
    check_schedules,
)

TASKS = [
    Task(
        "summarize",
        "Four numbers",
        nullcontext,
        (
            check_alone,
            check_two,
            check_lengths,
            check_single_tokens,
            check_percentiles,
            check_given_up,
            check_goodput,
            check_bench,
        ),
    ),
    Task("audit", "Six lies", nullcontext, AUDIT_CHECKS),
    Task("serve", "Requests come when they like", nullcontext, SERVE_CHECKS),
]
