"""Typical wrong solutions of chapter 6's exercises, and the hint with which each must be caught."""


def tpot_divided_by_n(metrics):
    if metrics.first_token_time is None:
        return None, None
    ttft = metrics.first_token_time - metrics.arrival_time
    if metrics.num_output_tokens < 2:
        return ttft, None
    return ttft, (metrics.last_token_time - metrics.first_token_time) / metrics.num_output_tokens


def tpot_with_ttft_in_it(metrics):
    if metrics.first_token_time is None:
        return None, None
    ttft = metrics.first_token_time - metrics.arrival_time
    if metrics.num_output_tokens < 2:
        return ttft, None
    return ttft, (metrics.last_token_time - metrics.arrival_time) / metrics.num_output_tokens


def ttft_without_the_queue(metrics):
    if metrics.first_token_time is None:
        return None, None
    return metrics.first_token_time - metrics.first_scheduled_time, None


def zero_instead_of_none(metrics):
    if metrics.first_token_time is None:
        return None, None
    gaps = max(metrics.num_output_tokens - 1, 1)
    ttft = metrics.first_token_time - metrics.arrival_time
    return ttft, (metrics.last_token_time - metrics.first_token_time) / gaps


def clock_at_zero_is_none(metrics):
    if not metrics.first_token_time:
        return None, None
    ttft = metrics.first_token_time - metrics.arrival_time
    if metrics.num_output_tokens < 2:
        return ttft, None
    return ttft, (metrics.last_token_time - metrics.first_token_time) / (metrics.num_output_tokens - 1)


def no_leading_zero(chunks):
    cu, ends, rows, total = [], [], [], 0
    for chunk in chunks:
        total += chunk.end - chunk.start
        cu.append(total)
        ends.append(chunk.end)
        if chunk.samples:
            rows.append(total - 1)
    return cu, ends, rows


def lengths_instead_of_sums(chunks):
    lens = [chunk.end - chunk.start for chunk in chunks]
    return [0, *lens], [chunk.end for chunk in chunks], [sum(lens) - 1]


def keys_of_this_chunk_only(chunks):
    cu, rows = [0], []
    for chunk in chunks:
        cu.append(cu[-1] + chunk.end - chunk.start)
        if chunk.samples:
            rows.append(cu[-1] - 1)
    return cu, [chunk.end - chunk.start for chunk in chunks], rows


def keys_of_the_whole_prompt(chunks):
    cu, rows = [0], []
    for chunk in chunks:
        cu.append(cu[-1] + chunk.end - chunk.start)
        if chunk.samples:
            rows.append(cu[-1] - 1)
    return cu, [len(chunk.seq.tokens) for chunk in chunks], rows


def samples_in_the_middle_of_a_prompt(chunks):
    cu = [0]
    for chunk in chunks:
        cu.append(cu[-1] + chunk.end - chunk.start)
    return cu, [chunk.end for chunk in chunks], [row - 1 for row in cu[1:]]


def row_behind_the_last(chunks):
    cu, rows = [0], []
    for chunk in chunks:
        cu.append(cu[-1] + chunk.end - chunk.start)
        if chunk.samples:
            rows.append(cu[-1])
    return cu, [chunk.end for chunk in chunks], rows


def _decoding(scheduler):
    return sum(len(seq.tokens) - seq.num_computed_tokens == 1 for seq in scheduler.running)


def _fits(machine, limit_s):
    reading_s = machine.weight_bytes / machine.bytes_per_s
    return int(limit_s * machine.flops_per_s / machine.flops_per_token) if reading_s <= limit_s else 0


def one_token_too_many(scheduler, machine, limit_s):
    tokens = scheduler.max_num_batched_tokens
    for tokens in range(1, scheduler.max_num_batched_tokens + 1):
        if max(0.04, tokens * machine.flops_per_token / machine.flops_per_s) > limit_s:
            break
    return max(tokens, _decoding(scheduler) + 1)


def reading_and_computing_in_turn(scheduler, machine, limit_s):
    left_s = limit_s - machine.weight_bytes / machine.bytes_per_s
    tokens = int(max(left_s, 0) * machine.flops_per_s / machine.flops_per_token)
    return min(max(tokens, _decoding(scheduler) + 1), scheduler.max_num_batched_tokens)


def forgets_the_reading(scheduler, machine, limit_s):
    tokens = int(limit_s * machine.flops_per_s / machine.flops_per_token)
    return min(max(tokens, _decoding(scheduler) + 1), scheduler.max_num_batched_tokens)


def zero_when_nothing_fits(scheduler, machine, limit_s):
    return min(_fits(machine, limit_s), scheduler.max_num_batched_tokens)


def prompts_stand_still(scheduler, machine, limit_s):
    return min(max(_fits(machine, limit_s), _decoding(scheduler), 1), scheduler.max_num_batched_tokens)


def counts_everybody_who_runs(scheduler, machine, limit_s):
    return min(max(_fits(machine, limit_s), len(scheduler.running) + 1), scheduler.max_num_batched_tokens)


def counts_who_waits(scheduler, machine, limit_s):
    everybody = [*scheduler.running, *scheduler.waiting]
    decoding = sum(len(seq.tokens) - seq.num_computed_tokens == 1 for seq in everybody)
    return min(max(_fits(machine, limit_s), decoding + 1), scheduler.max_num_batched_tokens)


def over_the_engines_limit(scheduler, machine, limit_s):
    return max(min(_fits(machine, limit_s), scheduler.max_num_batched_tokens), _decoding(scheduler) + 1)


def budget_for_the_prompt_alone(scheduler, machine, limit_s):
    tokens = max(_fits(machine, limit_s) + _decoding(scheduler), _decoding(scheduler) + 1)
    return min(tokens, scheduler.max_num_batched_tokens)


WRONG = {
    "ttft_and_tpot": [
        (tpot_divided_by_n, "divide by n - 1"),
        (tpot_with_ttft_in_it, "the wait for the first token is the TTFT's"),
        (ttft_without_the_queue, "time in the queue is waiting, too"),
        (zero_instead_of_none, "one token has no gap behind it"),
        (clock_at_zero_is_none, "a clock may read 0.0"),
    ],
    "pack": [
        (no_leading_zero, "it lacks the leading 0"),
        (lengths_instead_of_sums, "running sum, from 0 on"),
        (keys_of_this_chunk_only, "also to those of earlier steps"),
        (keys_of_the_whole_prompt, "tokens behind the chunk are not there yet"),
        (samples_in_the_middle_of_a_prompt, "does not sample"),
        (row_behind_the_last, "that row is the next chunk's first"),
    ],
    "token_budget": [
        (one_token_too_many, "with that many it takes longer"),
        (reading_and_computing_in_turn, "both happen at the same time"),
        (forgets_the_reading, "no number of tokens fits"),
        (zero_when_nothing_fits, "the engine stands still"),
        (prompts_stand_still, "or the prompt stands still"),
        (counts_everybody_who_runs, "in the middle of its prompt does not decode"),
        (counts_who_waits, "5 with prompts of one token are waiting"),
        (over_the_engines_limit, "it has the last word"),
        (budget_for_the_prompt_alone, "until its first token"),
    ],
}
