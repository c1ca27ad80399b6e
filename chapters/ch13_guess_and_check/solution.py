"""Our solutions of the exercises of chapter 13."""

from typing import Any

from nanovllm.core.scheduler import ScheduledChunk, Scheduler
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus


def guess(memory: dict[Any, Any], tokens: list[int], num_draft_tokens: int, longest: int, shortest: int) -> list[int]:
    """See exercise.py."""
    if len(tokens) < memory.get("num_tokens", 0):
        memory.clear()
    followers = memory.setdefault("followers", {})  # n-gram -> the place after it, the newest
    for place in range(memory.get("num_tokens", 0), len(tokens)):
        for n in range(shortest, min(longest, place) + 1):
            followers[tuple(tokens[place - n : place])] = place
    memory["num_tokens"] = len(tokens)
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        place = followers.get(tuple(tokens[-n:]))
        if place is not None:
            period = len(tokens) - place
            return [tokens[place + i % period] for i in range(num_draft_tokens)]
    return []


def accept_tokens(scheduler: Scheduler, chunk: ScheduledChunk, token_ids: list[int]) -> None:
    """See exercise.py."""
    seq = chunk.seq
    seq.status = SequenceStatus.DECODE
    for row, token_id in enumerate(token_ids):
        if token_id != NO_TOKEN:
            seq.append(token_id)
        reason, stop_reason = scheduler.check_stop(seq, token_id)
        if reason is not None:
            break
        if row == len(chunk.draft_token_ids) or token_id != chunk.draft_token_ids[row]:
            break
    if chunk.draft_token_ids:
        seq.num_computed_tokens = len(seq.tokens) - 1  # all but the token sampled last
        scheduler.block_manager.register_prefix(seq)
    if reason is not None:
        scheduler.finish(seq, reason, stop_reason)


def share_guesses(acceptances: list[float], limits: list[int], step_s: list[float], draft_s: float = 0.0) -> list[int]:
    """See exercise.py."""
    chances = [(a**j, i, j) for i, a in enumerate(acceptances) for j in range(1, limits[i] + 1)]
    chances.sort(reverse=True)  # those of one sequence stay in order: each is at most the one before
    best_rate, chosen = len(acceptances) / step_s[0], list[int]()
    # The draft model's steps are as many as the longest draft has tokens: decide on that number, then on the rest.
    for depth in range(1, max(limits, default=0) + 1):
        num_tokens = float(len(acceptances))
        allowed = [(chance, i) for chance, i, j in chances if j <= depth]
        for num, (chance, _) in enumerate(allowed[: len(step_s) - 1], 1):
            num_tokens += chance
            rate = num_tokens / (step_s[num] + depth * draft_s)
            if rate > best_rate or (rate == best_rate and num < len(chosen)):
                best_rate, chosen = rate, [i for _, i in allowed[:num]]
    return [chosen.count(i) for i in range(len(acceptances))]


def resume(seq: Sequence) -> Sequence:
    """See exercise.py."""
    there = Sequence(
        seq.tokens[: seq.num_prompt_tokens],
        seq.sampling_params,
        cache_salt=seq.cache_salt,
        lora_id=seq.lora_id,
        mm_spans=seq.mm_spans,
    )
    for token_id in seq.generated_token_ids:  # after the prompt: positions in the output stay what they were
        there.append(token_id)
    there.seed, there.sample_index = seq.seed, seq.sample_index
    return there
