"""Exercises of chapter 6. Edit this file, then:  python -m chapters check 6

Each function works in the real engine while it is checked: pack tells the attention kernels where each sequence's rows
lie, chunked_prefill chooses the chunks of every step, token_budget says how many tokens a step may have.
"""

from chapters.ch06_prefill_decode.lab import Machine
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import SequenceStatus  # noqa: F401 (you will need it)


def pack(chunks: list[ScheduledChunk]) -> tuple[list[int], list[int], list[int]]:
    """Where each sequence's rows lie in the packed batch of a step: (cu_seqlens_q, seqlens_k, logits_rows).

    The step's tokens lie one after another, chunk after chunk in the order given, without padding: chunk b has
    chunk.end - chunk.start rows, for the positions chunk.start to chunk.end - 1 of its sequence. With B chunks:

        cu_seqlens_q    B + 1 numbers: chunk b's rows are cu_seqlens_q[b] up to, not including, cu_seqlens_q[b + 1].
        seqlens_k       B numbers: how many tokens the last row of chunk b attends to: every token of the sequence so
                        far, itself included, whichever step computed them.
        logits_rows     the last row of each chunk that samples (chunk.samples), in order. A chunk that ends in the
                        middle of its prompt has none.

    Return three lists of ints; the caller makes tensors of them. Don't change the chunks.

    Example: a decode at position 7 (start 7, end 8), then the first 3 of 10 prompt tokens (start 0, end 3)
    -> ([0, 1, 4], [8, 3], [0]).
    """
    raise NotImplementedError


def chunked_prefill(scheduler: Scheduler) -> SchedulerOutput:
    """Choose the next step's chunks: decodes and a piece of a prompt, in one budget. (Replaces Scheduler.schedule.)

    This is stall-free batching as in Sarathi-Serve (arXiv:2403.02310). You may know the frame from chapter 5, where
    `schedule` had to live with a pool that runs out. Here the pool is large enough for all that run: nothing is ever
    preempted, no call below is refused, and what matters is only how decodes and chunks of prompts share the budget.

    budget = scheduler.max_num_batched_tokens is the most tokens that the step may compute, over all sequences. Each
    chunk that you make takes its tokens out of it. When it is spent, nobody else gets a chunk, not an empty one either;
    it may be smaller than the number of sequences that decode. Serve them in this order:

    1. The sequences in scheduler.running (a list, oldest first) that decode: exactly one token is not computed yet,
       len(seq.tokens) - seq.num_computed_tokens == 1. One token each, oldest first.
    2. The sequence in the middle of its prompt, if there is one. There is never more than one, and it is the last of
       running. It gets the rest of its prompt, or what is left of the budget if that is less.
    3. New ones, from the head of scheduler.waiting (a deque), while budget is left and len(scheduler.running) is below
       scheduler.max_num_seqs. Who is admitted leaves waiting, goes to the end of running, and gets its blocks, status
       SequenceStatus.PREFILL, and a chunk: the rest of its prompt behind the cached prefix, or what is left of the
       budget if that is less. So the next prompt begins in the step in which the one before ends, and not earlier.

    A sequence must have blocks before its chunk is made. For a sequence in running:

        scheduler.block_manager.append_slots(seq, num_tokens) -> bool

    gives it the blocks that it lacks for num_tokens more tokens (often none). For a new one:

        scheduler.block_manager.allocate_with_prefix(seq) -> bool

    gives it blocks for its whole prompt, and sets seq.num_computed_tokens: 0, or the length of the prefix that was
    found in the cache, but never the whole prompt. Both return True here, always. Chunks are made by

        scheduler.make_chunk(seq, num_tokens) -> ScheduledChunk

    for the next num_tokens tokens of the sequence, from seq.num_computed_tokens on. It also raises
    seq.num_computed_tokens by num_tokens. Call it exactly once for each chunk. Nothing else changes; above all, the
    step's tokens are not sampled here, and statuses of sequences that were running already stay as they are.

    Return SchedulerOutput(chunks, preempted, num_tokens): the chunks in the order above, an empty list, and the sum of
    the chunks' tokens.

    Example: budget 8. A and B decode, C waits with a prompt of 9 tokens, D with one of 5; none is in the cache. This
    step: A 1 token, B 1, C 6, and D still waits. The next: A 1, B 1, C the last 3, D the first 3. num_tokens is 8 in
    both.
    """
    raise NotImplementedError


def token_budget(scheduler: Scheduler, machine: Machine, limit_s: float) -> int:
    """The token budget of the next step, such that nobody waits longer than limit_s seconds for it.

    While this is checked, the engine calls it before each step, and schedules that step as if
    scheduler.max_num_batched_tokens were what it returns.

    How long a step of T tokens takes is predicted by the roofline of the weights, without attention. Bytes are read
    while FLOPs are done, so the slower of the two decides:

        machine.weight_bytes        bytes that a step reads, whatever T is
        machine.bytes_per_s         bytes that the machine reads in a second
        machine.flops_per_token     FLOPs for one token
        machine.flops_per_s         FLOPs that the machine does in a second

    Return the largest whole T whose predicted time is at most limit_s, with two corrections, in this order:

    1. At least one more than the number of sequences that are decoding: every decode gets its token in every step, and
       a prompt always moves on, if only by one token. A sequence is decoding if it is in scheduler.running and has
       exactly one token to compute: len(seq.tokens) - seq.num_computed_tokens. This also holds if no T fits.
    2. At most scheduler.max_num_batched_tokens.

    Change nothing. Floating point: no check comes so close to a whole T that rounding matters.

    Example: 4e9 bytes, 1e11 bytes/s, 4e9 FLOPs a token, 2e13 FLOPs/s. Reading takes 0.04 s, a token's FLOPs 0.0002 s.
    With limit_s 0.0501 -> 250 (or max_num_batched_tokens, if that is smaller). With limit_s 0.03 and 6 sequences
    decoding no T fits -> 7.
    """
    raise NotImplementedError
