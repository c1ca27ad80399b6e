"""Wrong solutions of chapter 11."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
summarize
    ttft_since_the_start: this counts from the first arrival of all
        ~ mean(ttfts) => mean(t.token_times_s[0] - min(t.arrival_s for t in timings) for t in served)
    ttft_is_a_median: this is the median
        ~ import mean => import median as mean
    ttft_zero_for_the_given_up: not even as a 0
        ~ mean(ttfts) => sum(ttfts) / len(timings)
    tpot_by_tokens: n tokens have n - 1 gaps
        ~ / (len(times) - 1) => / len(times)
    tpot_with_the_prompt: belongs to TTFT
        ~ (times[-1] - times[0]) / (len(times) - 1) => (times[-1] - timing.arrival_s) / len(times)
    tpot_zero_for_one_token: left out of the mean, not counted as 0
        ~ for t in served if len(t.token_times_s) > 1] => for t in served]
    tpot_over_all_gaps: first a TPOT for each request
        - mean(tpots) if tpots else 0.0
        + sum(t.token_times_s[-1] - t.token_times_s[0] for t in served)
        + / max(sum(len(t.token_times_s) - 1 for t in served), 1)
    latency_is_a_mean: this is the mean; latency_s is that of the slowest
        ~ latency_s=max => latency_s=mean
    latency_of_everything: this is how long everything took
        ~ max(t.token_times_s[-1] - t.arrival_s for t in served) => seconds
    adds_rates: rates of single requests don't add up
        - sum(len(t.token_times_s) for t in served) / seconds
        + sum(len(t.token_times_s) / (t.token_times_s[-1] - t.arrival_s) for t in served)
    adds_latencies: requests overlap
        ~ for t in served) / seconds => for t in served) / sum(t.token_times_s[-1] - t.arrival_s for t in served)
    clock_from_zero: the clock does not start at 0
        ~  - min(t.arrival_s for t in timings) =>
    forgets_who_came_first: given up or not
        ~ t.arrival_s for t in timings => t.arrival_s for t in served
    percentile_one_too_far: one too far
        ~ ranked[-(-percent * len(ranked) // 100) - 1] => ranked[min(percent * len(ranked) // 100, len(ranked) - 1)]
    percentile_interpolated: this lies between two values
        ~ _percentile(ranked, 50) => (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
    percentile_of_a_list_in_disorder: sort the TTFTs first
        ~ sorted(ttfts) => ttfts
    percentile_of_survivors: each counts as math.inf
        ~  + [math.inf] * (len(timings) - len(served)) =>
    sorts_in_place: sorted() makes a new one
        + timings.sort(key=lambda t: t.token_times_s[:1])
        = served = [t for t in timings if t.token_times_s]
    goodput_of_one_limit: a good request keeps both
        ~  and _tpot_s(t) <= tpot_limit_s =>
    goodput_is_a_share: this is the share of good ones
        ~ num_good / seconds => num_good / len(timings)
    goodput_below_the_limit: exactly at the limit is good
        ~ ttft_s <= ttft_limit_s => ttft_s < ttft_limit_s
    goodput_wants_two_tokens: with a single token no TPOT is too long
        ~ _tpot_s(t) <= tpot_limit_s => len(t.token_times_s) > 1 and _tpot_s(t) <= tpot_limit_s
audit
    three_reports_only: one entry for each report
        ~ "d": {"ttft_is_latency": 6.1 - 199 * 0.024, "survivors": (640 * 4.0 + 360 * 30) / 1_000}, =>
    a_of_unknown_key: is not a key of the list
        ~ {"prefix_cache": 4_096 / 6.31} => {"caching": 649.1}
    a_without_a_number: needs a number that proves it
        ~ {"prefix_cache": 4_096 / 6.31} => {"prefix_cache": None}
    a_is_warm_up: both were warmed up before pass 1
        ~ {"prefix_cache": 4_096 / 6.31} => {"warm_up": 4_096 / 3.22}
    a_of_finch: the winner's own number was asked for
        ~ 6.31 => 6.09
    b_is_survivors: 64 of 64 are answered
        ~ {"output_lengths": (4_212 / 12.31) / (8_192 / 20.48)} => {"survivors": 12.3}
    b_upside_down: upside down
        ~ {"output_lengths": (4_212 / 12.31) / (8_192 / 20.48)} => {"output_lengths": (8_192 / 20.48) / (4_212 / 12.31)}
    c_half: 1 of 2 found: read the times at the left of Pike's log
        ~ , "warm_up": 16_384 / (16.02 - 4.61) =>
    c_adds_the_compiling: 16.02 s include the compiling already
        ~ 16.02 - 4.61 => 16.02 + 4.61
    c_nothing: nothing found
        ~ {"input_tokens": 16_384 / 15.0, "warm_up": 16_384 / (16.02 - 4.61)} => {}
    d_200_gaps: 199 gaps
        ~ 199 * 0.024 => 200 * 0.024
    d_is_closed_loop: whether or not earlier ones are answered
        ~ / 1_000} => / 1_000, "closed_loop": 20.0}
serve
    all_at_once: before it is due
        ~ while to_come and started + to_come[0].due_s <= clock(): => while to_come:
    clock_starts_at_zero: due_s counts from the start of the call
        ~ clock(), deque(arrivals) => 0.0, deque(arrivals)
    counts_from_the_hand_over: its metrics count from when it was handed in
        ~ request.metrics.arrival_time = started + arrival.due_s =>
    one_a_step: is handed in too late
        ~ while to_come and => if to_come and
    sleeps_a_second: longer than until the next request is due
        ~ sleep(started + to_come[0].due_s - clock()) => sleep(1.0)
    in_the_order_of_their_end: in another order than the arrivals
        ~ [done[request_id] for request_id in ids] => list(done.values())
    ends_when_the_engine_is_idle: was never handed in
        ~ while to_come or engine.has_unfinished_requests(): => while not ids or engine.has_unfinished_requests():
    sleeps_before_each_request: they stand still meanwhile
        ~ if engine.has_unfinished_requests(): => if not to_come:
    waits_by_looking: only step() and sleep() make it pass
        ~ sleep(started + to_come[0].due_s - clock()) => pass
    steps_all_the_time: although there are no unfinished requests
        ~ if engine.has_unfinished_requests(): => if True:
""")
