"""Typical wrong solutions of chapter 6's exercises, and the hint with which each must be caught."""

from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.sequence import SequenceStatus


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


def _remaining(seq):
    return len(seq.tokens) - seq.num_computed_tokens


def _run(scheduler, chunks, budget):
    for seq in scheduler.running:
        num_tokens = min(_remaining(seq), budget)
        if num_tokens > 0:
            scheduler.block_manager.append_slots(seq, num_tokens)
            chunks.append(scheduler._chunk(seq, num_tokens))
            budget -= num_tokens
    return budget


def _admit(scheduler, chunks, budget, *, max_num_seqs=None):
    limit = scheduler.max_num_seqs if max_num_seqs is None else max_num_seqs
    while budget > 0 and scheduler.waiting and len(scheduler.running) < limit:
        seq = scheduler.waiting[0]
        if not scheduler.block_manager.allocate_with_prefix(seq):
            break
        scheduler.running.append(scheduler.waiting.popleft())
        seq.status = SequenceStatus.PREFILL
        num_tokens = min(_remaining(seq), budget)
        chunks.append(scheduler._chunk(seq, num_tokens))
        budget -= num_tokens
    return budget


def budget_exceeded_by_one(scheduler):
    chunks = []
    budget = _admit(scheduler, chunks, _run(scheduler, chunks, scheduler.max_num_batched_tokens + 1))
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens + 1 - budget)


def decodes_do_not_count(scheduler):
    chunks = []
    _run(scheduler, chunks, scheduler.max_num_batched_tokens)
    _admit(scheduler, chunks, scheduler.max_num_batched_tokens)
    return SchedulerOutput(chunks, [], sum(chunk.end - chunk.start for chunk in chunks))


def prompts_before_decodes(scheduler):
    chunks, running = [], list(scheduler.running)
    budget = _admit(scheduler, chunks, scheduler.max_num_batched_tokens)
    for seq in running:
        num_tokens = min(_remaining(seq), budget)
        if num_tokens > 0:
            scheduler.block_manager.append_slots(seq, num_tokens)
            chunks.append(scheduler._chunk(seq, num_tokens))
            budget -= num_tokens
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def newcomer_before_the_unfinished_prompt(scheduler):
    chunks, budget = [], scheduler.max_num_batched_tokens
    unfinished = [seq for seq in scheduler.running if _remaining(seq) > 1]
    for seq in [seq for seq in scheduler.running if _remaining(seq) == 1][:budget]:
        scheduler.block_manager.append_slots(seq, 1)
        chunks.append(scheduler._chunk(seq, 1))
        budget -= 1
    budget = _admit(scheduler, chunks, budget)
    for seq in unfinished:
        num_tokens = min(_remaining(seq), budget)
        if num_tokens:
            scheduler.block_manager.append_slots(seq, num_tokens)
            chunks.append(scheduler._chunk(seq, num_tokens))
            budget -= num_tokens
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def whole_prompts_or_nothing(scheduler):
    chunks = []
    budget = _run(scheduler, chunks, scheduler.max_num_batched_tokens)
    while scheduler.waiting and len(scheduler.waiting[0].tokens) <= budget:
        before = budget
        budget = _admit(scheduler, chunks, budget)
        if budget == before:
            break
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def empty_chunks(scheduler):
    chunks, budget = [], scheduler.max_num_batched_tokens
    for seq in scheduler.running:
        num_tokens = min(_remaining(seq), budget)
        scheduler.block_manager.append_slots(seq, num_tokens)
        chunks.append(scheduler._chunk(seq, num_tokens))
        budget -= num_tokens
    budget = _admit(scheduler, chunks, budget)
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def one_sequence_too_many(scheduler):
    chunks = []
    budget = _run(scheduler, chunks, scheduler.max_num_batched_tokens)
    budget = _admit(scheduler, chunks, budget, max_num_seqs=scheduler.max_num_seqs + 1)
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def prompt_length_instead_of_what_is_left(scheduler):
    chunks = []
    budget = _run(scheduler, chunks, scheduler.max_num_batched_tokens)
    while budget > 0 and scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs:
        seq = scheduler.waiting[0]
        num_tokens = min(len(seq.tokens), budget)  # before the prefix cache was asked
        if not scheduler.block_manager.allocate_with_prefix(seq):
            break
        scheduler.running.append(scheduler.waiting.popleft())
        seq.status = SequenceStatus.PREFILL
        chunks.append(scheduler._chunk(seq, min(num_tokens, _remaining(seq))))
        budget -= num_tokens
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def no_room_for_the_next_token(scheduler):
    chunks, budget = [], scheduler.max_num_batched_tokens
    for seq in scheduler.running[:budget]:
        num_tokens = min(_remaining(seq), budget)
        if num_tokens:
            chunks.append(scheduler._chunk(seq, num_tokens))
            budget -= num_tokens
    budget = _admit(scheduler, chunks, budget)
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def status_forgotten(scheduler):
    chunks = []
    budget = _run(scheduler, chunks, scheduler.max_num_batched_tokens)
    while budget > 0 and scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs:
        seq = scheduler.waiting[0]
        if not scheduler.block_manager.allocate_with_prefix(seq):
            break
        scheduler.running.append(scheduler.waiting.popleft())
        num_tokens = min(_remaining(seq), budget)
        chunks.append(scheduler._chunk(seq, num_tokens))
        budget -= num_tokens
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


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
    "schedule_chunks": [
        (budget_exceeded_by_one, "exceeds its budget of 8"),
        (decodes_do_not_count, "exceeds its budget of 8"),
        (prompts_before_decodes, "the running ones come first"),
        (newcomer_before_the_unfinished_prompt, "B's last 3 tokens come first"),
        (whole_prompts_or_nothing, "a prompt of 20 tokens alone, budget 8"),
        (empty_chunks, "stop when the budget is used up"),
        (one_sequence_too_many, "more than max_num_seqs"),
        (prompt_length_instead_of_what_is_left, "num_tokens is the sum of the chunks' tokens"),
        (status_forgotten, "not sane any more"),
        (no_room_for_the_next_token, "append_slots comes first"),
    ],
}
