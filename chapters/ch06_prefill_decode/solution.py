"""Our solutions of the exercises of chapter 6."""

from chapters.ch06_prefill_decode.lab import Machine
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import SequenceStatus


def pack(chunks: list[ScheduledChunk]) -> tuple[list[int], list[int], list[int]]:
    cu_seqlens_q, seqlens_k, logits_rows = [0], [], []
    for chunk in chunks:
        end_row = cu_seqlens_q[-1] + chunk.end - chunk.start
        cu_seqlens_q.append(end_row)
        seqlens_k.append(chunk.end)  # not only this chunk's keys: the earlier ones lie in the cache
        if chunk.samples:
            logits_rows.append(end_row - 1)
    return cu_seqlens_q, seqlens_k, logits_rows


def chunked_prefill(scheduler: Scheduler) -> SchedulerOutput:
    manager, budget = scheduler.block_manager, scheduler.max_num_batched_tokens
    chunks: list[ScheduledChunk] = []

    # Decodes first and the unfinished prompt behind them: that is the order of running, nothing has to be sorted.
    for seq in scheduler.running:
        if budget == 0:
            break
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
        manager.append_slots(seq, num_tokens)
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens

    # If that prompt was cut, it took all that was left, and nobody comes in.
    while scheduler.waiting and budget > 0 and len(scheduler.running) < scheduler.max_num_seqs:
        seq = scheduler.waiting.popleft()
        scheduler.running.append(seq)
        seq.status = SequenceStatus.PREFILL
        manager.allocate_with_prefix(seq)  # before counting: a cached prefix is computed already
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
        chunks.append(scheduler.make_chunk(seq, num_tokens))
        budget -= num_tokens

    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)


def token_budget(scheduler: Scheduler, machine: Machine, limit_s: float) -> int:
    # The two floors overlap, so neither takes time from the other: the step fits if each of them does.
    fits = 0
    if machine.weight_bytes / machine.bytes_per_s <= limit_s:
        fits = int(limit_s * machine.flops_per_s / machine.flops_per_token)
    num_decodes = sum(len(seq.tokens) - seq.num_computed_tokens == 1 for seq in scheduler.running)
    return min(max(fits, num_decodes + 1), scheduler.max_num_batched_tokens)
