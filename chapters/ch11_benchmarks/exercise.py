"""Exercises of chapter 11. Edit this file, then:  python -m chapters check 11

While summarize is checked, it computes the numbers of `nanovllm bench`. audit is about four reports in the folder
reports/. serve, which is optional, drives the real engine with requests that arrive over time.
"""

from collections.abc import Callable

from chapters.ch11_benchmarks.timing import Arrival, Summary, Timing
from nanovllm.engine import LLMEngine
from nanovllm.outputs import RequestOutput


def summarize(timings: list[Timing], ttft_limit_s: float, tpot_limit_s: float) -> Summary:
    """The four numbers of a benchmark, two percentiles and the goodput, from the times of its requests.

    A Timing has arrival_s (when the request arrived) and token_times_s (when each of its output tokens came, in
    order). All are points on one clock, in seconds; the clock does not start at 0. The list is in no particular order.
    If a request was given up before its first token, its token_times_s is empty; at least one request has a token.

    Return Summary(...) with:

        ttft_s               mean of (first token - arrival), over the requests that have a token
        tpot_s               mean of (last token - first token) / (number of tokens - 1), over the requests that have at
                             least two tokens: first a TPOT for each request, then their mean. 0.0 if there are none
        latency_s            (last token - arrival) of the slowest request that has a token
        output_tokens_per_s  all output tokens / seconds. seconds is from the first arrival of any request, given up or
                             not, to the last token of any request
        ttft_p50_s,          the 50th and the 99th percentile of the TTFT over ALL requests. Here one that was given up
        ttft_p99_s           has a TTFT of math.inf. Percentile p of n values is the smallest of them such that at least
                             p percent of the n values are not larger ("nearest rank": no interpolation)
        goodput              number of good requests / the same seconds. Good: it has a token, its TTFT is at most
                             ttft_limit_s, and its TPOT is at most tpot_limit_s. With a single token there is no TPOT
                             that could be too long

    Example: Timing(10.0, (10.5, 10.6, 10.7)) and Timing(10.2, (10.5,)), limits 0.4 and 0.2. TTFTs 0.5 and 0.3, mean
    0.4; the only TPOT is 0.1; latency 0.7 (the first); 4 tokens in 0.7 s; p50 0.3, p99 0.5; one good request in 0.7 s.
    """
    raise NotImplementedError


def audit() -> dict[str, dict[str, float]]:
    """What is wrong in the four reports chapters/ch11_benchmarks/reports/a.md to d.md.

    Reports a and b have one fault each, c and d two each: something that makes the conclusion wrong, and that the
    report's own figures prove. What a report says about its setup is true. Return, for each report, its faults by
    their keys, each with the number that proves it:

        {"a": {"some_key": 1.23}, "b": {"some_key": 1.23}, "c": {"one_key": 1.23, "other_key": 1.23}, "d": {...}}

    These are the keys, and the number that goes with each. Compute the number from the figures in the report, to 0.5 %
    or better (write the formula: Python can divide). "The winner" is the engine that the report recommends.

        "prefix_cache"     prompts were in the winner's prefix cache and not in the other engine's.
                           -> the winner's output tokens/s in a pass that computed every prompt token
        "output_lengths"   the answers of one engine are shorter, so that it had less to do.
                           -> the winner's output tokens/s divided by the other's
        "warm_up"          the time of one engine includes starting, compiling or warming up; the other's does not.
                           -> output tokens/s of the engine that suffers, without that time
        "input_tokens"     the tokens/s of one engine count the prompts, those of the other do not.
                           -> output tokens/s of the engine whose prompts were counted
        "batch_size"       the engines run with different batch sizes.
                           -> the winner's output tokens/s divided by the other's, at equal batch size
        "dtype"            the engines compute in different types, so that one reads more bytes.
                           -> bytes a weight in the winner divided by bytes a weight in the other
        "drift"            the machine changed between the two engines, and the difference may be that.
                           -> slowest time of the winner divided by its fastest, over its runs
        "ttft_is_latency"  what the report calls one engine's first token is the end of its answer.
                           -> that engine's true mean TTFT in seconds: work back from the end of a mean answer
        "survivors"        the mean leaves out requests that were not answered.
                           -> the mean latency in seconds of that engine's requests, if each that was given up counts
                              with the time after which its client gave up
        "closed_loop"      clients wait for an answer before they send again, so that a slow engine gets less to do.
                           -> requests per second that were sent to the winner
    """
    raise NotImplementedError


def serve(
    engine: LLMEngine, arrivals: list[Arrival], clock: Callable[[], float], sleep: Callable[[float], None]
) -> list[RequestOutput]:
    """Drive the engine with requests that arrive over time, as an open loop. (Optional.)

    arrivals are in the order of due_s; several may be due at the same moment. Each has due_s (seconds after the start
    of this call), prompt_token_ids and params. The engine has no unfinished requests when this is called.

    clock() -> seconds is the engine's clock, too (time.perf_counter, or one made for the checks). sleep(seconds) waits.
    Nothing but engine.step() and sleep() makes time pass.

    - A request is handed to the engine when it is due: not earlier, and before the next step that begins at or after
      that moment. While a step runs nothing can be handed in; then the request is late, and that is fine.
    - Its metrics must count from the moment when it was due, not from when it was handed in. Two calls make room for
      that:  request = engine.make_request(prompt_token_ids, params)  checks it and starts its clock
      (request.metrics.arrival_time);  [request_id] = engine.enqueue([request])  queues it.
    - engine.step() returns the outputs of the requests that finished in it, each with its request_id. Step while there
      are unfinished requests (engine.has_unfinished_requests()), and only then.
    - When the engine has nothing to do, sleep until the next request is due, and no longer. Never sleep while there are
      unfinished requests.

    Return the outputs, in the order of arrivals.

    Example: due at 0.0 and 0.2 s, steps of 0.5 s. The second is handed in after the first step, at 0.5, and if its
    first token comes with the second step, its TTFT is 0.8.
    """
    raise NotImplementedError
