"""Our solutions of the exercises of chapter 6."""

from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import SequenceStatus
from nanovllm.outputs import RequestMetrics


def ttft_and_tpot(metrics: RequestMetrics) -> tuple[float | None, float | None]:
    first, last = metrics.first_token_time, metrics.last_token_time
    ttft_s = None if first is None else first - metrics.arrival_time
    # n tokens have n - 1 gaps between them; the time before the first one is the TTFT's business.
    if first is None or last is None or metrics.num_output_tokens < 2:
        return ttft_s, None
    return ttft_s, (last - first) / (metrics.num_output_tokens - 1)


def pack(chunks: list[ScheduledChunk]) -> tuple[list[int], list[int], list[int]]:
    cu_seqlens_q, seqlens_k, logits_rows = [0], [], []
    for chunk in chunks:
        end_row = cu_seqlens_q[-1] + chunk.end - chunk.start
        cu_seqlens_q.append(end_row)
        seqlens_k.append(chunk.end)  # not only this chunk's keys: the earlier ones lie in the cache
        if chunk.samples:
            logits_rows.append(end_row - 1)
    return cu_seqlens_q, seqlens_k, logits_rows


def schedule_chunks(scheduler: Scheduler) -> SchedulerOutput:
    chunks: list[ScheduledChunk] = []
    manager, budget = scheduler.block_manager, scheduler.max_num_batched_tokens

    # Decodes have one token left, and the one unfinished prompt, if there is one, is the last of running: so the order
    # of running is the order that we want, and one rule serves both.
    for seq in scheduler.running:
        if budget == 0:
            break
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
        manager.append_slots(seq, num_tokens)
        chunks.append(scheduler._chunk(seq, num_tokens))
        budget -= num_tokens

    # A prompt that the budget cuts leaves no budget for another one: there is never a second unfinished prompt.
    while budget > 0 and scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs:
        seq = scheduler.waiting[0]
        if not manager.allocate_with_prefix(seq):
            break
        scheduler.running.append(scheduler.waiting.popleft())
        seq.status = SequenceStatus.PREFILL
        num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
        chunks.append(scheduler._chunk(seq, num_tokens))
        budget -= num_tokens

    return SchedulerOutput(chunks, [], scheduler.max_num_batched_tokens - budget)
