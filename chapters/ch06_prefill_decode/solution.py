"""Our solutions of the exercises of chapter 6."""

from chapters.ch06_prefill_decode.lab import Machine
from nanovllm.core.scheduler import ScheduledChunk, Scheduler
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


def token_budget(scheduler: Scheduler, machine: Machine, limit_s: float) -> int:
    # The two floors overlap, so neither takes time from the other: the step fits if each of them does.
    fits = 0
    if machine.weight_bytes / machine.bytes_per_s <= limit_s:
        fits = int(limit_s * machine.flops_per_s / machine.flops_per_token)
    num_decodes = sum(len(seq.tokens) - seq.num_computed_tokens == 1 for seq in scheduler.running)
    return min(max(fits, num_decodes + 1), scheduler.max_num_batched_tokens)
