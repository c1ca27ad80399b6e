"""Our solutions of chapter 5. Try your own first: python -m chapters check 5"""

from collections.abc import Mapping

from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence, SequenceStatus


def finish_reason(scheduler: Scheduler, seq: Sequence, token_id: int) -> tuple[str | None, int | str | None]:
    params = seq.sampling_params
    if seq.num_generated_tokens > params.min_tokens:
        if token_id in scheduler.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token_id in params.stop_token_ids:
            return "stop", token_id
    # After the stops: an EOS that is also the last token allowed ended the text by itself.
    if seq.num_generated_tokens == params.max_tokens or len(seq.tokens) >= scheduler.max_model_len:
        return "length", None
    return None, None


def preempt_last(scheduler: Scheduler) -> Sequence:
    seq = scheduler.running.pop()
    scheduler.block_manager.free(seq)
    seq.num_computed_tokens = seq.num_cached_tokens = 0
    seq.status = SequenceStatus.WAITING
    # At the head: of two that are preempted, the older one is preempted later, and so stands in front again.
    scheduler.waiting.appendleft(seq)
    scheduler.num_preemptions += 1
    return seq


def schedule(scheduler: Scheduler, drafts: Mapping[int, list[int]] = {}) -> SchedulerOutput:
    manager = scheduler.block_manager
    budget = scheduler.max_num_batched_tokens
    chunks: list[ScheduledChunk] = []
    preempted: list[Sequence] = []

    for seq in tuple(scheduler.running):  # a copy: running shrinks from its end while we walk
        if budget == 0 or seq in preempted:
            break
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
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
        scheduler.running.append(seq)
        seq.status = SequenceStatus.PREFILL
        # Only now: allocation has set num_computed_tokens to what it found in the cache.
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens

    return SchedulerOutput(chunks, preempted, scheduler.max_num_batched_tokens - budget)
