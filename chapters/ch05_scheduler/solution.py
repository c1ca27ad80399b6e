"""Our solutions of chapter 5. Try your own first: python -m chapters check 5"""

from bisect import insort_left, insort_right
from collections.abc import Mapping

from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput, by_priority
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus


def finish_reason(scheduler: Scheduler, seq: Sequence, token_id: int) -> tuple[str | None, int | str | None]:
    params = seq.sampling_params
    if token_id == NO_TOKEN:
        return "error", None
    if seq.num_generated_tokens > params.min_tokens:
        if token_id in scheduler.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token_id in params.stop_token_ids:
            return "stop", token_id
    # Whatever is left belongs to the text, an EOS among the first min_tokens, too.
    if seq.stop_checker is not None:
        stop_string = seq.stop_checker.append([token_id])
        if stop_string is not None:
            return "stop", stop_string
    # After the stops: a stop that is also the last token allowed ended the text by itself.
    if seq.num_generated_tokens == params.max_tokens or len(seq.tokens) >= scheduler.max_model_len:
        return "length", None
    return None, None


def preempt_last(scheduler: Scheduler) -> Sequence:
    seq = scheduler.running.pop()
    scheduler.block_manager.free(seq)
    seq.num_computed_tokens = seq.num_cached_tokens = 0
    seq.status = SequenceStatus.WAITING
    # Before all others of its priority: of two that are preempted, the older one is preempted later, and so stands in
    # front again.
    insort_left(scheduler.waiting, seq, key=by_priority)
    scheduler.num_preemptions += 1
    return seq


def schedule(scheduler: Scheduler, drafts: Mapping[int, list[int]] = {}) -> SchedulerOutput:
    manager = scheduler.block_manager
    budget = scheduler.max_num_batched_tokens
    threshold = scheduler.long_prefill_token_threshold
    chunks: list[ScheduledChunk] = []
    preempted: list[Sequence] = []

    for seq in tuple(scheduler.running):  # a copy: running shrinks from its end while we walk
        if budget == 0 or seq in preempted:
            break
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, threshold, budget)
        while seq not in preempted and not manager.append_slots(seq, num_tokens):
            preempted.append(scheduler.preempt_last())
        if seq in preempted:
            break
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens

    while scheduler.waiting and budget > 0 and not preempted and len(scheduler.running) < scheduler.max_num_seqs:
        seq = scheduler.waiting[0]
        if not manager.allocate_with_prefix(seq):
            break
        scheduler.waiting.popleft()
        insort_right(scheduler.running, seq, key=by_priority)  # after all of its priority: it comes last of them
        seq.status = SequenceStatus.PREFILL
        # Only now: allocation has set num_computed_tokens to what it found in the cache.
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, threshold, budget)
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens

    return SchedulerOutput(chunks, preempted, scheduler.max_num_batched_tokens - budget)
