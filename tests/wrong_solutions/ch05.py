"""Plausible mistakes in the exercises of chapter 5, and a piece of the hint that must catch each."""

from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.sequence import SequenceStatus

# -- finish_reason ----------------------------------------------------------------------------------------------------


def reason(scheduler, seq, token_id, *, eos_reason=None, min_tokens=None, slack=0, generated=None):
    """The right answer, with room for mistakes."""
    params = seq.sampling_params
    if seq.num_generated_tokens >= (params.min_tokens if min_tokens is None else min_tokens):
        if token_id in scheduler.eos_token_ids and not params.ignore_eos:
            return "stop", eos_reason
        if token_id in params.stop_token_ids:
            return "stop", token_id
    if (seq.num_generated_tokens if generated is None else generated) == params.max_tokens:
        return "length", None
    if len(seq.tokens) >= scheduler.max_model_len + slack:
        return "length", None
    return None, None


def names_eos(scheduler, seq, token_id):
    return reason(scheduler, seq, token_id, eos_reason=token_id)


def no_min_tokens(scheduler, seq, token_id):
    return reason(scheduler, seq, token_id, min_tokens=0)


def min_tokens_one_too_many(scheduler, seq, token_id):
    return reason(scheduler, seq, token_id, min_tokens=seq.sampling_params.min_tokens + 1)


def one_token_too_many(scheduler, seq, token_id):
    return reason(scheduler, seq, token_id, generated=seq.num_generated_tokens - 1)


def counts_the_prompt(scheduler, seq, token_id):
    return reason(scheduler, seq, token_id, generated=len(seq.tokens))


def beyond_the_model(scheduler, seq, token_id):
    return reason(scheduler, seq, token_id, slack=1)


def length_first(scheduler, seq, token_id):
    if seq.num_generated_tokens == seq.sampling_params.max_tokens:
        return "length", None
    return reason(scheduler, seq, token_id)


def min_tokens_before_everything(scheduler, seq, token_id):
    if seq.num_generated_tokens < seq.sampling_params.min_tokens:
        return None, None
    return reason(scheduler, seq, token_id)


def ignore_eos_ignores_all(scheduler, seq, token_id):
    if seq.sampling_params.ignore_eos and seq.num_generated_tokens != seq.sampling_params.max_tokens:
        return None, None
    return reason(scheduler, seq, token_id)


def appends_it_again(scheduler, seq, token_id):
    seq.append(token_id)
    return reason(scheduler, seq, token_id)


# -- preempt_last -----------------------------------------------------------------------------------------------------


def preempt(scheduler, *, which=-1, tail=False, free=True, counts=True, status=True, num_preempted=1):
    seq = scheduler.running.pop(which)
    if free:
        scheduler.block_manager.free(seq)
    if counts:
        seq.num_computed_tokens = seq.num_cached_tokens = 0
    if status:
        seq.status = SequenceStatus.WAITING
    (scheduler.waiting.append if tail else scheduler.waiting.appendleft)(seq)
    scheduler.num_preemptions += num_preempted
    return seq


def oldest(scheduler):
    return preempt(scheduler, which=0)


def returns_nothing(scheduler):
    preempt(scheduler)


def tail_of_the_queue(scheduler):
    return preempt(scheduler, tail=True)


def keeps_blocks(scheduler):
    return preempt(scheduler, free=False)


def only_empties_the_table(scheduler):
    seq = preempt(scheduler, free=False)
    seq.block_table = []
    return seq


def keeps_num_computed(scheduler):
    return preempt(scheduler, counts=False)


def forgets_num_cached(scheduler):
    num_cached = scheduler.running[-1].num_cached_tokens
    seq = preempt(scheduler)
    seq.num_cached_tokens = num_cached
    return seq


def keeps_status(scheduler):
    return preempt(scheduler, status=False)


def drops_what_it_generated(scheduler):
    seq = preempt(scheduler)
    seq.tokens = seq.tokens[: seq.num_prompt_tokens]
    return seq


def aborts_it(scheduler):
    seq = scheduler.running[-1]
    scheduler.finish(seq, "abort")
    return seq


def does_not_count(scheduler):
    return preempt(scheduler, num_preempted=0)


# -- schedule ---------------------------------------------------------------------------------------------------------


def step(
    scheduler,
    *,
    preempted_matters=True,
    seats=True,
    skip=False,
    free_decodes=False,
    victim=None,
    status=True,
    sees_hits=True,
):
    """The right step, with room for mistakes."""
    chunks, preempted, budget, used = [], [], scheduler.max_num_batched_tokens, 0
    while len(chunks) < len(scheduler.running) and budget > 0:
        seq = scheduler.running[len(chunks)]
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
        if not scheduler.block_manager.append_slots(seq, num_tokens):
            preempted.append(victim(scheduler) if victim else scheduler.preempt_last())
            continue
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= 0 if free_decodes else num_tokens
        used += num_tokens
    at = 0
    while at < len(scheduler.waiting) and budget > 0 and not (preempted_matters and preempted):
        if seats and len(scheduler.running) >= scheduler.max_num_seqs:
            break
        seq = scheduler.waiting[at]
        if not scheduler.block_manager.allocate_with_prefix(seq):
            if not skip:
                break
            at += 1
            continue
        scheduler.waiting.remove(seq)
        scheduler.running.append(seq)
        if status:
            seq.status = SequenceStatus.PREFILL
        num_tokens = min(len(seq.tokens) - (seq.num_computed_tokens if sees_hits else 0), budget)
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens
        used += num_tokens
    return SchedulerOutput(chunks, preempted, used)


def whole_prompt_after_a_hit(scheduler):
    return step(scheduler, sees_hits=False)


def admits_although_preempted(scheduler):
    return step(scheduler, preempted_matters=False)


def ignores_max_num_seqs(scheduler):
    return step(scheduler, seats=False)


def overtakes(scheduler):
    return step(scheduler, skip=True)


def budget_for_prompts_only(scheduler):
    return step(scheduler, free_decodes=True)


def preempts_the_oldest(scheduler):
    return step(scheduler, victim=oldest)


def forgets_the_state(scheduler):
    return step(scheduler, status=False)


def schedules_the_preempted(scheduler):
    """Chooses first, asks for blocks later, and never looks at its choice again."""
    chosen, chunks, preempted, budget = list(scheduler.running), [], [], scheduler.max_num_batched_tokens
    for seq in chosen:
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
        while scheduler.running and not scheduler.block_manager.append_slots(seq, num_tokens):
            preempted.append(scheduler.preempt_last())
        if num_tokens:
            chunks.append(scheduler.make_chunk(seq, num_tokens))
            budget -= num_tokens
    rest = SchedulerOutput([], [], 0) if preempted or not budget else admit(scheduler, budget)
    used = scheduler.max_num_batched_tokens - budget + rest.num_tokens
    return SchedulerOutput(chunks + rest.chunks, preempted, used)


def admit(scheduler, budget):
    running, scheduler.running = scheduler.running, []
    limits = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = budget, limits[1] - len(running)
    try:
        return step(scheduler)
    finally:
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = limits
        scheduler.running = running + scheduler.running


def prefill_only_steps(scheduler):
    """As in an engine without chunked prefill: a newcomer's step is for newcomers."""
    admitted = admit(scheduler, scheduler.max_num_batched_tokens)
    return admitted if admitted.chunks else step(scheduler)


def counts_chunks_as_tokens(scheduler):
    output = step(scheduler)
    return SchedulerOutput(output.chunks, output.preempted, len(output.chunks))


def returns_chunks(scheduler):
    return step(scheduler).chunks


WRONG = {
    "finish_reason": [
        (names_eos, "is no stop_reason"),
        (no_min_tokens, "fewer than min_tokens are generated"),
        (min_tokens_one_too_many, "with exactly min_tokens generated"),
        (one_token_too_many, "max_tokens counts generated tokens"),
        (counts_the_prompt, "max_tokens counts generated tokens"),
        (beyond_the_model, "max_model_len counts prompt and output"),
        (length_first, "a stop comes before a length"),
        (min_tokens_before_everything, "never a length"),
        (ignore_eos_ignores_all, "ignore_eos is about EOS only"),
        (appends_it_again, "finish_reason only answers"),
    ],
    "preempt_last": [
        (oldest, "the last of running is the youngest"),
        (returns_nothing, "return the sequence that you preempted"),
        (tail_of_the_queue, "head of waiting"),
        (keeps_blocks, "must go back to the pool"),
        (only_empties_the_table, "must go back to the pool"),
        (keeps_num_computed, "must be 0"),
        (forgets_num_cached, "must be 0"),
        (keeps_status, "its status must say that it waits"),
        (drops_what_it_generated, "the generated ones too, must be kept"),
        (aborts_it, "head of waiting"),
        (does_not_count, "num_preemptions counts"),
    ],
    "schedule": [
        (whole_prompt_after_a_hit, "found in the cache is computed already"),
        (admits_although_preempted, "a step that preempted admits nobody"),
        (overtakes, "nobody overtakes"),
        (preempts_the_oldest, "the last of running is preempted"),
        (ignores_max_num_seqs, "two may run"),
        (budget_for_prompts_only, "the decodes of A and B included"),
        (schedules_the_preempted, "whoever was preempted in this step has none"),
        (forgets_the_state, "gets status PREFILL"),
        (prefill_only_steps, "newcomers in the same step"),
        (counts_chunks_as_tokens, "num_tokens must be the number of tokens"),
        (returns_chunks, "must answer with a SchedulerOutput"),
    ],
}
