"""Typical wrong solutions of chapter 11's exercises, and the hint with which each must be caught."""

import math
from dataclasses import replace
from statistics import mean, median

from chapters.ch11_benchmarks import solution

# -- summarize --------------------------------------------------------------------------------------------------------


def _served(timings):
    return [t for t in timings if t.token_times_s]


def _seconds(timings):
    return max(t.token_times_s[-1] for t in _served(timings)) - min(t.arrival_s for t in timings)


def _with(timings, ttft_limit_s, tpot_limit_s, **wrong):
    """The right Summary but for some fields."""
    return replace(solution.summarize(timings, ttft_limit_s, tpot_limit_s), **wrong)


def ttft_since_the_start(timings, ttft_limit_s, tpot_limit_s):
    begin_s = min(t.arrival_s for t in timings)
    ttft_s = mean(t.token_times_s[0] - begin_s for t in _served(timings))
    return _with(timings, ttft_limit_s, tpot_limit_s, ttft_s=ttft_s)


def ttft_is_a_median(timings, ttft_limit_s, tpot_limit_s):
    ttft_s = median(t.token_times_s[0] - t.arrival_s for t in _served(timings))
    return _with(timings, ttft_limit_s, tpot_limit_s, ttft_s=ttft_s)


def ttft_zero_for_the_given_up(timings, ttft_limit_s, tpot_limit_s):
    ttft_s = sum(t.token_times_s[0] - t.arrival_s for t in _served(timings)) / len(timings)
    return _with(timings, ttft_limit_s, tpot_limit_s, ttft_s=ttft_s)


def tpot_by_tokens(timings, ttft_limit_s, tpot_limit_s):
    several = [t.token_times_s for t in timings if len(t.token_times_s) > 1]
    tpot_s = mean([(times[-1] - times[0]) / len(times) for times in several] or [0.0])
    return _with(timings, ttft_limit_s, tpot_limit_s, tpot_s=tpot_s)


def tpot_with_the_prompt(timings, ttft_limit_s, tpot_limit_s):
    several = [t for t in timings if len(t.token_times_s) > 1]
    tpots = [(t.token_times_s[-1] - t.arrival_s) / len(t.token_times_s) for t in several]
    return _with(timings, ttft_limit_s, tpot_limit_s, tpot_s=mean(tpots or [0.0]))


def tpot_zero_for_one_token(timings, ttft_limit_s, tpot_limit_s):
    tpots = [(t[-1] - t[0]) / max(len(t) - 1, 1) for t in (t.token_times_s for t in _served(timings))]
    return _with(timings, ttft_limit_s, tpot_limit_s, tpot_s=mean(tpots))


def tpot_over_all_gaps(timings, ttft_limit_s, tpot_limit_s):
    times = [t.token_times_s for t in _served(timings)]
    tpot_s = sum(t[-1] - t[0] for t in times) / max(sum(len(t) - 1 for t in times), 1)
    return _with(timings, ttft_limit_s, tpot_limit_s, tpot_s=tpot_s)


def divides_by_no_gaps(timings, ttft_limit_s, tpot_limit_s):
    tpot_s = mean((t[-1] - t[0]) / (len(t) - 1) for t in (t.token_times_s for t in _served(timings)))
    return _with(timings, ttft_limit_s, tpot_limit_s, tpot_s=tpot_s)


def latency_is_a_mean(timings, ttft_limit_s, tpot_limit_s):
    latency_s = mean(t.token_times_s[-1] - t.arrival_s for t in _served(timings))
    return _with(timings, ttft_limit_s, tpot_limit_s, latency_s=latency_s)


def latency_of_everything(timings, ttft_limit_s, tpot_limit_s):
    return _with(timings, ttft_limit_s, tpot_limit_s, latency_s=_seconds(timings))


def adds_rates(timings, ttft_limit_s, tpot_limit_s):
    rate = sum(len(t.token_times_s) / (t.token_times_s[-1] - t.arrival_s) for t in _served(timings))
    return _with(timings, ttft_limit_s, tpot_limit_s, output_tokens_per_s=rate)


def adds_latencies(timings, ttft_limit_s, tpot_limit_s):
    served = _served(timings)
    rate = sum(len(t.token_times_s) for t in served) / sum(t.token_times_s[-1] - t.arrival_s for t in served)
    return _with(timings, ttft_limit_s, tpot_limit_s, output_tokens_per_s=rate)


def clock_from_zero(timings, ttft_limit_s, tpot_limit_s):
    served = _served(timings)
    rate = sum(len(t.token_times_s) for t in served) / max(t.token_times_s[-1] for t in served)
    return _with(timings, ttft_limit_s, tpot_limit_s, output_tokens_per_s=rate)


def forgets_who_came_first(timings, ttft_limit_s, tpot_limit_s):
    served = _served(timings)
    rate = sum(len(t.token_times_s) for t in served) / _seconds(served)
    return _with(timings, ttft_limit_s, tpot_limit_s, output_tokens_per_s=rate)


def _ttfts(timings):
    return [t.token_times_s[0] - t.arrival_s if t.token_times_s else math.inf for t in timings]


def percentile_one_too_far(timings, ttft_limit_s, tpot_limit_s):
    values = sorted(_ttfts(timings))
    p50, p99 = (values[min(int(len(values) * p), len(values) - 1)] for p in (0.5, 0.99))
    return _with(timings, ttft_limit_s, tpot_limit_s, ttft_p50_s=p50, ttft_p99_s=p99)


def percentile_interpolated(timings, ttft_limit_s, tpot_limit_s):
    return _with(timings, ttft_limit_s, tpot_limit_s, ttft_p50_s=median(_ttfts(timings)))


def percentile_of_a_list_in_disorder(timings, ttft_limit_s, tpot_limit_s):
    values = _ttfts(timings)
    p50, p99 = (values[-(-len(values) * p // 100) - 1] for p in (50, 99))
    return _with(timings, ttft_limit_s, tpot_limit_s, ttft_p50_s=p50, ttft_p99_s=p99)


def percentile_of_survivors(timings, ttft_limit_s, tpot_limit_s):
    ours = solution.summarize(_served(timings), ttft_limit_s, tpot_limit_s)
    return _with(timings, ttft_limit_s, tpot_limit_s, ttft_p50_s=ours.ttft_p50_s, ttft_p99_s=ours.ttft_p99_s)


def sorts_in_place(timings, ttft_limit_s, tpot_limit_s):
    timings.sort(key=lambda t: t.token_times_s[:1])
    return solution.summarize(timings, ttft_limit_s, tpot_limit_s)


def goodput_of_one_limit(timings, ttft_limit_s, tpot_limit_s):
    ours = solution.summarize(timings, ttft_limit_s, math.inf)
    return _with(timings, ttft_limit_s, tpot_limit_s, goodput=ours.goodput)


def goodput_is_a_share(timings, ttft_limit_s, tpot_limit_s):
    ours = solution.summarize(timings, ttft_limit_s, tpot_limit_s)
    return replace(ours, goodput=ours.goodput * _seconds(timings) / len(timings))


def goodput_below_the_limit(timings, ttft_limit_s, tpot_limit_s):
    ours = solution.summarize(timings, ttft_limit_s - 1e-9, tpot_limit_s)
    return _with(timings, ttft_limit_s, tpot_limit_s, goodput=ours.goodput)


def goodput_wants_two_tokens(timings, ttft_limit_s, tpot_limit_s):
    several = [t for t in timings if len(t.token_times_s) > 1]
    num = sum(
        t.token_times_s[0] - t.arrival_s <= ttft_limit_s
        and (t.token_times_s[-1] - t.token_times_s[0]) / (len(t.token_times_s) - 1) <= tpot_limit_s
        for t in several
    )
    return _with(timings, ttft_limit_s, tpot_limit_s, goodput=num / _seconds(timings))


# -- audit ------------------------------------------------------------------------------------------------------------


def _audit(report, faults):
    """Ours, but for one report."""

    def audit():
        return solution.audit() | {report: faults}

    return audit


def _named(name, function):
    function.__name__ = name
    return function


C, D = solution.audit()["c"], solution.audit()["d"]
AUDITS = [
    ("a_of_unknown_key", "a", {"caching": 649.1}, "is not a key of the list"),
    ("a_without_a_number", "a", {"prefix_cache": None}, "needs a number that proves it"),
    ("a_is_warm_up", "a", {"warm_up": 4096 / 3.22}, "both were warmed up before pass 1"),
    ("a_and_one_too_many", "a", {"prefix_cache": 4096 / 6.31, "drift": 2.0}, "Finch's three passes are within 1 %"),
    ("a_of_the_cached_pass", "a", {"prefix_cache": 4096 / 3.22}, "which pass computed all 32,768"),
    ("a_of_finch", "a", {"prefix_cache": 4096 / 6.09}, "the winner's own number was asked for"),
    ("b_is_survivors", "b", {"survivors": 12.3}, "64 of 64 are answered"),
    ("b_is_batch_size", "b", {"batch_size": 1.0}, "--max-num-seqs 64 in both commands"),
    ("b_upside_down", "b", {"output_lengths": 400 / (4212 / 12.31)}, "upside down"),
    ("b_of_tokens", "b", {"output_lengths": 4212 / 8192}, "divide each by its seconds first"),
    ("b_of_requests", "b", {"output_lengths": 5.20 / 3.13}, "requests per second. Count tokens"),
    ("c_half", "c", {"input_tokens": C["input_tokens"]}, "1 of 2 found: read the times at the left of Pike's log"),
    ("c_other_half", "c", {"warm_up": C["warm_up"]}, "which of them give 9,830.4"),
    ("c_adds_the_compiling", "c", C | {"warm_up": 16384 / 20.63}, "16.02 s include the compiling already"),
    ("c_counts_prompts", "c", C | {"input_tokens": 131072 / 15}, "those are the prompt tokens"),
    ("c_nothing", "c", {}, "nothing found"),
    ("d_half", "d", {"survivors": 13.36}, "compare Otter's TTFT with its latency"),
    ("d_200_gaps", "d", D | {"ttft_is_latency": 6.1 - 4.8}, "199 gaps"),
    ("d_zero_for_the_lost", "d", D | {"survivors": 2.56}, "not with 0"),
    ("d_two_halves", "d", D | {"survivors": 17.0}, "different sizes"),
    ("d_is_closed_loop", "d", D | {"closed_loop": 20.0}, "whether or not earlier ones are answered"),
]


def three_reports_only():
    return {report: faults for report, faults in solution.audit().items() if report != "d"}


# -- serve ------------------------------------------------------------------------------------------------------------


def _hand_in(engine, arrival, due_s=None):
    request = engine.make_request(arrival.prompt_token_ids, arrival.params)
    request.metrics.arrival_time = request.metrics.arrival_time if due_s is None else due_s
    return engine.enqueue([request])[0]


def _serve(engine, arrivals, clock, sleep, *, hand_in=None, at_most=99, closed=False, pause=None, by_end=False):
    """The right loop, with room for mistakes."""
    started, to_come, ids, done = clock(), list(arrivals), [], {}
    while to_come or engine.has_unfinished_requests():
        num = 0
        while to_come and started + to_come[0].due_s <= clock() and num < at_most:
            if closed and engine.has_unfinished_requests():
                break
            arrival, num = to_come.pop(0), num + 1
            due_s = started + arrival.due_s
            ids.append(hand_in(engine, arrival) if hand_in else _hand_in(engine, arrival, due_s))
        if engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step()}
        else:
            sleep(pause or started + to_come[0].due_s - clock())
    return list(done.values()) if by_end else [done[i] for i in ids]


def all_at_once(engine, arrivals, clock, sleep):
    ids, done = [_hand_in(engine, arrival) for arrival in arrivals], {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    return [done[i] for i in ids]


def clock_starts_at_zero(engine, arrivals, clock, sleep):
    to_come, ids, done = list(arrivals), [], {}
    while to_come or engine.has_unfinished_requests():
        while to_come and to_come[0].due_s <= clock():
            ids.append(_hand_in(engine, to_come[0], to_come.pop(0).due_s))
        done |= {output.request_id: output for output in engine.step()}
    return [done[i] for i in ids]


def counts_from_the_hand_over(engine, arrivals, clock, sleep):
    return _serve(engine, arrivals, clock, sleep, hand_in=lambda e, a: e.add_request(a.prompt_token_ids, a.params))


def one_a_step(engine, arrivals, clock, sleep):
    return _serve(engine, arrivals, clock, sleep, at_most=1)


def one_after_another(engine, arrivals, clock, sleep):
    return _serve(engine, arrivals, clock, sleep, closed=True)


def sleeps_a_second(engine, arrivals, clock, sleep):
    return _serve(engine, arrivals, clock, sleep, pause=1.0)


def in_the_order_of_their_end(engine, arrivals, clock, sleep):
    return _serve(engine, arrivals, clock, sleep, by_end=True)


def ends_when_the_engine_is_idle(engine, arrivals, clock, sleep):
    started, to_come, ids, done = clock(), list(arrivals), [], {}
    while True:
        while to_come and started + to_come[0].due_s <= clock():
            due_s = started + to_come[0].due_s
            ids.append(_hand_in(engine, to_come.pop(0), due_s))
        if not engine.has_unfinished_requests() and ids:
            return [done[i] for i in ids]
        if not engine.has_unfinished_requests():
            sleep(started + to_come[0].due_s - clock())
            continue
        done |= {output.request_id: output for output in engine.step()}


def sleeps_before_each_request(engine, arrivals, clock, sleep):
    started, ids, done = clock(), [], {}
    for arrival in arrivals:
        sleep(max(started + arrival.due_s - clock(), 0.0))
        ids.append(_hand_in(engine, arrival, started + arrival.due_s))
        done |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    return [done[i] for i in ids]


def waits_by_looking(engine, arrivals, clock, sleep):
    started, ids, done = clock(), [], {}
    for arrival in arrivals:
        while clock() < started + arrival.due_s:
            if engine.has_unfinished_requests():
                done |= {output.request_id: output for output in engine.step()}
        ids.append(_hand_in(engine, arrival, started + arrival.due_s))
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    return [done[i] for i in ids]


def steps_all_the_time(engine, arrivals, clock, sleep):
    started, to_come, ids, done = clock(), list(arrivals), [], {}
    while to_come or engine.has_unfinished_requests():
        while to_come and started + to_come[0].due_s <= clock():
            due_s = started + to_come[0].due_s
            ids.append(_hand_in(engine, to_come.pop(0), due_s))
        done |= {output.request_id: output for output in engine.step()}
    return [done[i] for i in ids]


WRONG = {
    "summarize": [
        (ttft_since_the_start, "this counts from the first arrival of all"),
        (ttft_is_a_median, "this is the median"),
        (ttft_zero_for_the_given_up, "not even as a 0"),
        (tpot_by_tokens, "n tokens have n - 1 gaps"),
        (tpot_with_the_prompt, "belongs to TTFT"),
        (tpot_zero_for_one_token, "left out of the mean, not counted as 0"),
        (tpot_over_all_gaps, "first a TPOT for each request"),
        (divides_by_no_gaps, "ZeroDivisionError"),
        (latency_is_a_mean, "this is the mean; latency_s is that of the slowest"),
        (latency_of_everything, "this is how long everything took"),
        (adds_rates, "rates of single requests don't add up"),
        (adds_latencies, "requests overlap"),
        (clock_from_zero, "the clock does not start at 0"),
        (forgets_who_came_first, "given up or not"),
        (percentile_one_too_far, "one too far"),
        (percentile_interpolated, "this lies between two values"),
        (percentile_of_a_list_in_disorder, "sort the TTFTs first"),
        (percentile_of_survivors, "each counts as math.inf"),
        (sorts_in_place, "sorted() makes a new one"),
        (goodput_of_one_limit, "a good request keeps both"),
        (goodput_is_a_share, "this is the share of good ones"),
        (goodput_below_the_limit, "exactly at the limit is good"),
        (goodput_wants_two_tokens, "with a single token no TPOT is too long"),
    ],
    "audit": [
        (three_reports_only, "one entry for each report"),
        *[(_named(name, _audit(report, faults)), hint) for name, report, faults, hint in AUDITS],
    ],
    "serve": [
        (all_at_once, "before it is due"),
        (clock_starts_at_zero, "due_s counts from the start of the call"),
        (counts_from_the_hand_over, "its metrics count from when it was handed in"),
        (one_a_step, "is handed in too late"),
        (one_after_another, "is handed in too late"),
        (sleeps_a_second, "longer than until the next request is due"),
        (in_the_order_of_their_end, "in another order than the arrivals"),
        (ends_when_the_engine_is_idle, "was never handed in"),
        (sleeps_before_each_request, "they stand still meanwhile"),
        (waits_by_looking, "only step() and sleep() make it pass"),
        (steps_all_the_time, "although there are no unfinished requests"),
    ],
}
