"""Wrong solutions of chapter 11."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
summarize
    tpot_by_tokens: n tokens have n - 1 gaps
        ~ / (len(times) - 1) => / len(times)
    tpot_over_all_gaps: first a TPOT for each request
        - mean(tpots) if tpots else 0.0
        + sum(t.token_times_s[-1] - t.token_times_s[0] for t in served)
        + / max(sum(len(t.token_times_s) - 1 for t in served), 1)
    adds_rates: rates of single requests don't add up
        - sum(len(t.token_times_s) for t in served) / seconds
        + sum(len(t.token_times_s) / (t.token_times_s[-1] - t.arrival_s) for t in served)
    clock_from_zero: the clock does not start at 0
        ~  - min(t.arrival_s for t in timings) =>
    percentile_one_too_far: one too far
        ~ ranked[-(-percent * len(ranked) // 100) - 1] => ranked[min(percent * len(ranked) // 100, len(ranked) - 1)]
    percentile_of_survivors: each counts as math.inf
        ~  + [math.inf] * (len(timings) - len(served)) =>
    sorts_in_place: sorted() makes a new one
        + timings.sort(key=lambda t: t.token_times_s[:1])
        = served = [t for t in timings if t.token_times_s]
    goodput_below_the_limit: exactly at the limit is good
        ~ ttft_s <= ttft_limit_s => ttft_s < ttft_limit_s
audit
    a_of_unknown_key: is not a key of the list
        ~ {"prefix_cache": 4_096 / 6.31} => {"caching": 649.1}
    a_of_finch: the winner's own number was asked for
        ~ 6.31 => 6.09
    b_is_survivors: 64 of 64 are answered
        ~ {"output_lengths": (4_212 / 12.31) / (8_192 / 20.48)} => {"survivors": 12.3}
    b_upside_down: upside down
        ~ {"output_lengths": (4_212 / 12.31) / (8_192 / 20.48)} => {"output_lengths": (8_192 / 20.48) / (4_212 / 12.31)}
    c_half: 1 of 2 found: read the times at the left of Pike's log
        ~ , "warm_up": 16_384 / (16.02 - 4.61) =>
    d_200_gaps: 199 gaps
        ~ 199 * 0.024 => 200 * 0.024
serve
    clock_starts_at_zero: due_s counts from the start of the call
        ~ clock(), deque(arrivals) => 0.0, deque(arrivals)
    counts_from_the_hand_over: its metrics count from when it was handed in
        ~ request.metrics.arrival_time = started + arrival.due_s =>
    one_a_step: is handed in too late
        ~ while to_come and => if to_come and
    in_the_order_of_their_end: in a different order from the arrivals
        ~ [done[request_id] for request_id in ids] => list(done.values())
    ends_when_the_engine_is_idle: was never handed in
        ~ while to_come or engine.has_unfinished_requests(): => while not ids or engine.has_unfinished_requests():
""")
