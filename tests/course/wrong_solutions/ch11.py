"""Wrong solutions of chapter 11."""

from tests.course.wrong_solutions import Edit

LOOP = """
    while to_come or engine.has_unfinished_requests():
        while to_come and started + to_come[0].due_s <= clock():
            arrival = to_come.popleft()
            request = engine.make_request(arrival.prompt_token_ids, arrival.params)
            # It was due while a step ran. That it could not be handed in then is the engine's doing.
            request.metrics.arrival_time = started + arrival.due_s
            ids += engine.enqueue([request])
        if engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step()}
        else:
            sleep(started + to_come[0].due_s - clock())
"""
A = '{"prefix_cache": 4_096 / 6.31}'
B = '{"output_lengths": (4_212 / 12.31) / (8_192 / 20.48)}'

WRONG = {
    "summarize": [
        Edit(
            "ttft_since_the_start",
            "mean(ttfts)",
            "mean(t.token_times_s[0] - min(t.arrival_s for t in timings) for t in served)",
            "this counts from the first arrival of all",
        ),
        Edit("ttft_is_a_median", "import mean", "import median as mean", "this is the median"),
        Edit("ttft_zero_for_the_given_up", "mean(ttfts)", "sum(ttfts) / len(timings)", "not even as a 0"),
        Edit("tpot_by_tokens", "/ (len(times) - 1)", "/ len(times)", "n tokens have n - 1 gaps"),
        Edit(
            "tpot_with_the_prompt",
            "(times[-1] - times[0]) / (len(times) - 1)",
            "(times[-1] - timing.arrival_s) / len(times)",
            "belongs to TTFT",
        ),
        Edit(
            "tpot_zero_for_one_token",
            "for t in served if len(t.token_times_s) > 1]",
            "for t in served]",
            "left out of the mean, not counted as 0",
        ),
        Edit(
            "tpot_over_all_gaps",
            "mean(tpots) if tpots else 0.0",
            """
            sum(t.token_times_s[-1] - t.token_times_s[0] for t in served)
            / max(sum(len(t.token_times_s) - 1 for t in served), 1)
            """,
            "first a TPOT for each request",
        ),
        Edit("divides_by_no_gaps", " if len(times) > 1 else 0.0", "", "ZeroDivisionError"),
        Edit(
            "latency_is_a_mean", "latency_s=max", "latency_s=mean", "this is the mean; latency_s is that of the slowest"
        ),
        Edit(
            "latency_of_everything",
            "max(t.token_times_s[-1] - t.arrival_s for t in served)",
            "seconds",
            "this is how long everything took",
        ),
        Edit(
            "adds_rates",
            "sum(len(t.token_times_s) for t in served) / seconds",
            "sum(len(t.token_times_s) / (t.token_times_s[-1] - t.arrival_s) for t in served)",
            "rates of single requests don't add up",
        ),
        Edit(
            "adds_latencies",
            "for t in served) / seconds",
            "for t in served) / sum(t.token_times_s[-1] - t.arrival_s for t in served)",
            "requests overlap",
        ),
        Edit("clock_from_zero", " - min(t.arrival_s for t in timings)", "", "the clock does not start at 0"),
        Edit(
            "forgets_who_came_first", "t.arrival_s for t in timings", "t.arrival_s for t in served", "given up or not"
        ),
        Edit(
            "percentile_one_too_far",
            "ranked[-(-percent * len(ranked) // 100) - 1]",
            "ranked[min(percent * len(ranked) // 100, len(ranked) - 1)]",
            "one too far",
        ),
        Edit(
            "percentile_interpolated",
            "_percentile(ranked, 50)",
            "(ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2",
            "this lies between two values",
        ),
        Edit("percentile_of_a_list_in_disorder", "sorted(ttfts)", "ttfts", "sort the TTFTs first"),
        Edit("percentile_of_survivors", " + [math.inf] * (len(timings) - len(served))", "", "each counts as math.inf"),
        Edit(
            "sorts_in_place",
            "served = [t for t in timings if t.token_times_s]",
            """
            timings.sort(key=lambda t: t.token_times_s[:1])
            served = [t for t in timings if t.token_times_s]
            """,
            "sorted() makes a new one",
        ),
        Edit("goodput_of_one_limit", " and _tpot_s(t) <= tpot_limit_s", "", "a good request keeps both"),
        Edit("goodput_is_a_share", "num_good / seconds", "num_good / len(timings)", "this is the share of good ones"),
        Edit(
            "goodput_below_the_limit", "ttft_s <= ttft_limit_s", "ttft_s < ttft_limit_s", "exactly at the limit is good"
        ),
        Edit(
            "goodput_wants_two_tokens",
            "_tpot_s(t) <= tpot_limit_s",
            "len(t.token_times_s) > 1 and _tpot_s(t) <= tpot_limit_s",
            "with a single token no TPOT is too long",
        ),
    ],
    "audit": [
        Edit(
            "three_reports_only",
            '"d": {"ttft_is_latency": 6.1 - 199 * 0.024, "survivors": (640 * 4.0 + 360 * 30) / 1_000},',
            "",
            "one entry for each report",
        ),
        Edit("a_of_unknown_key", A, '{"caching": 649.1}', "is not a key of the list"),
        Edit("a_without_a_number", A, '{"prefix_cache": None}', "needs a number that proves it"),
        Edit("a_is_warm_up", A, '{"warm_up": 4_096 / 3.22}', "both were warmed up before pass 1"),
        Edit("a_and_one_too_many", "6.31}", '6.31, "drift": 2.0}', "Finch's three passes are within 1 %"),
        Edit("a_of_the_cached_pass", "6.31", "3.22", "which pass computed all 32,768"),
        Edit("a_of_finch", "6.31", "6.09", "the winner's own number was asked for"),
        Edit("b_is_survivors", B, '{"survivors": 12.3}', "64 of 64 are answered"),
        Edit("b_is_batch_size", B, '{"batch_size": 1.0}', "--max-num-seqs 64 in both commands"),
        Edit("b_upside_down", B, '{"output_lengths": (8_192 / 20.48) / (4_212 / 12.31)}', "upside down"),
        Edit("b_of_tokens", B, '{"output_lengths": 4_212 / 8_192}', "divide each by its seconds first"),
        Edit("b_of_requests", B, '{"output_lengths": 5.20 / 3.13}', "requests per second. Count tokens"),
        Edit(
            "c_half",
            ', "warm_up": 16_384 / (16.02 - 4.61)',
            "",
            "1 of 2 found: read the times at the left of Pike's log",
        ),
        Edit("c_other_half", '"input_tokens": 16_384 / 15.0, ', "", "which of them give 9,830.4"),
        Edit("c_adds_the_compiling", "16.02 - 4.61", "16.02 + 4.61", "16.02 s include the compiling already"),
        Edit("c_counts_prompts", "16_384 / 15.0", "131_072 / 15.0", "those are the prompt tokens"),
        Edit("c_nothing", '{"input_tokens": 16_384 / 15.0, "warm_up": 16_384 / (16.02 - 4.61)}', "{}", "nothing found"),
        Edit("d_half", '"ttft_is_latency": 6.1 - 199 * 0.024, ', "", "compare Otter's TTFT with its latency"),
        Edit("d_200_gaps", "199 * 0.024", "200 * 0.024", "199 gaps"),
        Edit("d_zero_for_the_lost", "(640 * 4.0 + 360 * 30)", "640 * 4.0", "not with 0"),
        Edit("d_two_halves", "(640 * 4.0 + 360 * 30) / 1_000", "(4.0 + 30) / 2", "different sizes"),
        Edit(
            "d_is_closed_loop", "/ 1_000}", '/ 1_000, "closed_loop": 20.0}', "whether or not earlier ones are answered"
        ),
    ],
    "serve": [
        Edit(
            "all_at_once",
            "while to_come and started + to_come[0].due_s <= clock():",
            "while to_come:",
            "before it is due",
        ),
        Edit(
            "clock_starts_at_zero",
            "clock(), deque(arrivals)",
            "0.0, deque(arrivals)",
            "due_s counts from the start of the call",
        ),
        Edit(
            "counts_from_the_hand_over",
            "request.metrics.arrival_time = started + arrival.due_s",
            "",
            "its metrics count from when it was handed in",
        ),
        Edit("one_a_step", "while to_come and", "if to_come and", "is handed in too late"),
        Edit(
            "one_after_another",
            "while to_come and",
            "while to_come and not engine.has_unfinished_requests() and",
            "is handed in too late",
        ),
        Edit(
            "sleeps_a_second",
            "sleep(started + to_come[0].due_s - clock())",
            "sleep(1.0)",
            "longer than until the next request is due",
        ),
        Edit(
            "in_the_order_of_their_end",
            "[done[request_id] for request_id in ids]",
            "list(done.values())",
            "in another order than the arrivals",
        ),
        Edit(
            "ends_when_the_engine_is_idle",
            "while to_come or engine.has_unfinished_requests():",
            "while not ids or engine.has_unfinished_requests():",
            "was never handed in",
        ),
        Edit(
            "sleeps_before_each_request",
            LOOP,
            """
            for arrival in arrivals:
                sleep(max(started + arrival.due_s - clock(), 0.0))
                request = engine.make_request(arrival.prompt_token_ids, arrival.params)
                request.metrics.arrival_time = started + arrival.due_s
                ids += engine.enqueue([request])
                done |= {output.request_id: output for output in engine.step()}
            while engine.has_unfinished_requests():
                done |= {output.request_id: output for output in engine.step()}
            """,
            "they stand still meanwhile",
        ),
        Edit(
            "waits_by_looking",
            "sleep(started + to_come[0].due_s - clock())",
            "pass",
            "only step() and sleep() make it pass",
        ),
        Edit(
            "steps_all_the_time",
            """
            if engine.has_unfinished_requests():
                done |= {output.request_id: output for output in engine.step()}
            else:
                sleep(started + to_come[0].due_s - clock())
            """,
            "done |= {output.request_id: output for output in engine.step()}",
            "although there are no unfinished requests",
        ),
    ],
}
