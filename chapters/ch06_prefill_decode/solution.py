"""Our solutions of the exercises of chapter 6."""

from chapters.ch06_prefill_decode.roofline import Machine, StepCost
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import ScheduledChunk, Scheduler


def step_cost(config: ModelConfig, itemsize: int, chunks: list[ScheduledChunk]) -> StepCost:
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (q_size + 2 * kv_size) + q_size * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    body = config.num_hidden_layers * (attention + mlp)
    head = config.hidden_size * config.vocab_size

    num_rows = sum(chunk.end - chunk.start for chunk in chunks)
    num_sampled = sum(chunk.reaches_end for chunk in chunks)
    pairs = sum(position + 1 for chunk in chunks for position in range(chunk.start, chunk.end))
    num_keys = sum(chunk.end for chunk in chunks)
    weights = body + head if num_sampled else body
    return StepCost(
        linear_flops=2 * (body * num_rows + head * num_sampled),
        attention_flops=4 * pairs * q_size * config.num_hidden_layers,
        weight_bytes=weights * itemsize,
        kv_bytes=num_keys * 2 * kv_size * config.num_hidden_layers * itemsize,
    )


def pack(chunks: list[ScheduledChunk]) -> tuple[list[int], list[int], list[int]]:
    cu_seqlens_q, seqlens_k, logits_rows = [0], [], []
    for chunk in chunks:
        end_row = cu_seqlens_q[-1] + chunk.end - chunk.start
        cu_seqlens_q.append(end_row)
        seqlens_k.append(chunk.end)  # not only this chunk's keys: the earlier ones are in the cache
        if chunk.reaches_end:
            logits_rows.append(end_row - 1)
    return cu_seqlens_q, seqlens_k, logits_rows


def token_budget(scheduler: Scheduler, machine: Machine, limit_s: float) -> int:
    # Reading and computing overlap, so a step fits if each of the two does.
    fits = 0
    if machine.weight_bytes / machine.bytes_per_s <= limit_s:
        fits = int(limit_s * machine.flops_per_s / machine.flops_per_token)
    num_decodes = sum(len(seq.tokens) - seq.num_computed_tokens == 1 for seq in scheduler.running)
    return min(max(fits, num_decodes + 1), scheduler.max_num_batched_tokens)
