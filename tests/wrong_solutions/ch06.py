"""Typical wrong solutions of chapter 6's exercises, and the hint with which each must be caught."""

from collections import deque

from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.sequence import SequenceStatus


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


def _run(scheduler, seq, num_tokens):
    scheduler.block_manager.append_slots(seq, num_tokens)
    return scheduler.make_chunk(seq, num_tokens)


def _admit(scheduler, status=SequenceStatus.PREFILL):
    seq = scheduler.waiting.popleft()
    scheduler.running.append(seq)
    seq.status = status
    scheduler.block_manager.allocate_with_prefix(seq)
    return seq


def _rest(seq):
    return len(seq.tokens) - seq.num_computed_tokens


def _step(scheduler, *, extra=0, price=None, status=SequenceStatus.PREFILL, seats=0, order=list):
    """The right step, with room for mistakes: a budget too large, decodes at another price, a different order, ..."""
    chunks, budget = [], scheduler.max_num_batched_tokens + extra
    for seq in order(scheduler.running):
        if budget <= 0:
            break
        num_tokens = min(_rest(seq), budget)
        chunks.append(_run(scheduler, seq, num_tokens))
        budget -= num_tokens if price is None or num_tokens > 1 else price
    while scheduler.waiting and budget > 0 and len(scheduler.running) < scheduler.max_num_seqs + seats:
        seq = _admit(scheduler, status)
        num_tokens = min(_rest(seq), budget)
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens
    return SchedulerOutput(chunks, [], sum(chunk.end - chunk.start for chunk in chunks))


def budget_exceeded_by_one(scheduler):
    return _step(scheduler, extra=1)


def decodes_are_free(scheduler):
    return _step(scheduler, price=0)


def prompt_before_the_decodes(scheduler):
    return _step(scheduler, order=lambda running: sorted(running, key=lambda seq: _rest(seq) == 1))


def new_ones_before_the_decodes(scheduler):
    """A step for prompts as long as there are any: what continuous batching did before chunked prefill."""
    budget, chunks, running = scheduler.max_num_batched_tokens, [], list(scheduler.running)
    while scheduler.waiting and budget > 0 and len(scheduler.running) < scheduler.max_num_seqs:
        seq = _admit(scheduler)
        num_tokens = min(_rest(seq), budget)
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens
    for seq in running:
        if budget > 0:
            num_tokens = min(_rest(seq), budget)
            chunks.append(_run(scheduler, seq, num_tokens))
            budget -= num_tokens
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def whole_prompts(scheduler):
    """Takes a prompt whole if any budget is left: no chunks."""
    chunks, budget = [], scheduler.max_num_batched_tokens
    for seq in scheduler.running:
        if budget > 0:
            chunks.append(_run(scheduler, seq, 1))
            budget -= 1
    while scheduler.waiting and budget > 0 and len(scheduler.running) < scheduler.max_num_seqs:
        seq = _admit(scheduler)
        budget -= _rest(seq)
        chunks.append(scheduler.make_chunk(seq, _rest(seq)))
    return SchedulerOutput(chunks, [], sum(chunk.end - chunk.start for chunk in chunks))


def waits_until_a_prompt_fits(scheduler):
    chunks, budget = [], scheduler.max_num_batched_tokens
    for seq in scheduler.running:
        if budget > 0:
            chunks.append(_run(scheduler, seq, min(_rest(seq), budget)))
            budget -= 1
    while scheduler.waiting and budget >= len(scheduler.waiting[0].tokens):
        seq = _admit(scheduler)
        budget -= _rest(seq)
        chunks.append(scheduler.make_chunk(seq, _rest(seq)))
    return SchedulerOutput(chunks, [], sum(chunk.end - chunk.start for chunk in chunks))


def second_prompt_beside_an_unfinished_one(scheduler):
    """Decodes, then new prompts, and the unfinished one gets what they leave."""
    unfinished = [seq for seq in scheduler.running if _rest(seq) > 1]
    chunks, budget = [], scheduler.max_num_batched_tokens
    for seq in [seq for seq in scheduler.running if _rest(seq) == 1][:budget]:
        chunks.append(_run(scheduler, seq, 1))
        budget -= 1
    while (unfinished or scheduler.waiting) and budget > 0:
        new = scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs
        if not new and not unfinished:
            break
        seq = _admit(scheduler) if new else unfinished.pop()
        chunks.append(_run(scheduler, seq, min(_rest(seq), budget)))
        budget -= chunks[-1].end - chunks[-1].start
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def no_admission_while_a_prompt_ends(scheduler):
    if any(_rest(seq) > 1 for seq in scheduler.running):
        waiting, scheduler.waiting = scheduler.waiting, deque()
        output = _step(scheduler)
        scheduler.waiting = waiting
        return output
    return _step(scheduler)


def counts_before_the_prefix_hit(scheduler):
    chunks, budget = [], scheduler.max_num_batched_tokens
    for seq in scheduler.running:
        if budget > 0:
            num_tokens = min(_rest(seq), budget)
            chunks.append(_run(scheduler, seq, num_tokens))
            budget -= num_tokens
    while scheduler.waiting and budget > 0 and len(scheduler.running) < scheduler.max_num_seqs:
        num_tokens = min(len(scheduler.waiting[0].tokens), budget)
        chunks.append(scheduler.make_chunk(_admit(scheduler), num_tokens))
        budget -= num_tokens
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def pays_for_the_cached_prefix(scheduler):
    chunks, budget = [], scheduler.max_num_batched_tokens
    for seq in scheduler.running:
        if budget > 0:
            num_tokens = min(_rest(seq), budget)
            chunks.append(_run(scheduler, seq, num_tokens))
            budget -= num_tokens
    while scheduler.waiting and budget > 0 and len(scheduler.running) < scheduler.max_num_seqs:
        seq = _admit(scheduler)
        num_tokens = min(_rest(seq), budget)
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens + seq.num_cached_tokens
    return SchedulerOutput(chunks, [], sum(chunk.end - chunk.start for chunk in chunks))


def num_tokens_is_the_budget(scheduler):
    return SchedulerOutput(_step(scheduler).chunks, [], scheduler.max_num_batched_tokens)


def num_tokens_is_what_is_left(scheduler):
    output = _step(scheduler)
    return SchedulerOutput(output.chunks, [], scheduler.max_num_batched_tokens - output.num_tokens)


def status_stays_waiting(scheduler):
    return _step(scheduler, status=SequenceStatus.WAITING)


def empty_chunks_when_the_budget_is_spent(scheduler):
    chunks, budget = [], scheduler.max_num_batched_tokens
    for seq in scheduler.running:
        num_tokens = min(_rest(seq), budget)
        chunks.append(_run(scheduler, seq, num_tokens))
        budget -= num_tokens
    while scheduler.waiting and budget > 0 and len(scheduler.running) < scheduler.max_num_seqs:
        seq = _admit(scheduler)
        num_tokens = min(_rest(seq), budget)
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def forgets_append_slots(scheduler):
    chunks, budget = [], scheduler.max_num_batched_tokens
    for seq in scheduler.running:
        chunks.append(scheduler.make_chunk(seq, min(_rest(seq), budget)))
        budget -= chunks[-1].end - chunks[-1].start
    while scheduler.waiting and budget > 0:
        seq = _admit(scheduler)
        chunks.append(scheduler.make_chunk(seq, min(_rest(seq), budget)))
        budget -= chunks[-1].end - chunks[-1].start
    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def one_seat_too_many(scheduler):
    return _step(scheduler, seats=1)


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
    "pack": [
        (no_leading_zero, "it lacks the leading 0"),
        (lengths_instead_of_sums, "running sum, from 0 on"),
        (keys_of_this_chunk_only, "also to those of earlier steps"),
        (keys_of_the_whole_prompt, "tokens behind the chunk are not there yet"),
        (samples_in_the_middle_of_a_prompt, "does not sample"),
        (row_behind_the_last, "that row is the next chunk's first"),
    ],
    "chunked_prefill": [
        (budget_exceeded_by_one, "your chunks have 9 tokens, the budget is 8"),
        (decodes_are_free, "they come first and take 2 of the 8 tokens"),
        (prompt_before_the_decodes, "A and B decode: they come first"),
        (new_ones_before_the_decodes, "A and B decode: they come first"),
        (whole_prompts, "your chunks have 20 tokens, the budget is 8"),
        (waits_until_a_prompt_fits, "chunks of 8, 8 and 4"),
        (second_prompt_beside_an_unfinished_one, "A's prompt goes on first"),
        (no_admission_while_a_prompt_ends, "it ends and leaves 3 of 8 tokens"),
        (counts_before_the_prefix_hit, "allocate_with_prefix found them in the cache"),
        (pays_for_the_cached_prefix, "only those 4 cost budget"),
        (num_tokens_is_the_budget, "num_tokens is the sum of the chunks' tokens"),
        (num_tokens_is_what_is_left, "num_tokens is the sum of the chunks' tokens"),
        (status_stays_waiting, "who is admitted gets PREFILL"),
        (empty_chunks_when_the_budget_is_spent, "that is an empty chunk"),
        (forgets_append_slots, "append_slots or allocate_with_prefix comes before make_chunk"),
        (one_seat_too_many, "max_num_seqs is 2"),
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
