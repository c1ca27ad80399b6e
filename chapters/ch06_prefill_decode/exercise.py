"""Exercises of chapter 6. Edit this file, then:  python -m chapters check 6

Each function replaces the engine's own while it is checked: with ttft_and_tpot the engine reports its latencies, pack
tells the attention kernels where each sequence's rows lie, token_budget limits every step of the scheduler.
"""

from chapters.ch06_prefill_decode.lab import Machine
from nanovllm.core.scheduler import ScheduledChunk, Scheduler
from nanovllm.outputs import RequestMetrics


def ttft_and_tpot(metrics: RequestMetrics) -> tuple[float | None, float | None]:
    """The two latencies of a request, in seconds: (time to first token, time per output token).

    metrics has these points in time, in seconds of one clock, and one count (nanovllm/outputs.py):

        arrival_time            when the request came in
        first_scheduled_time    when the first step that worked on it began, or None
        first_token_time        when its first output token was there, or None
        last_token_time         when its latest output token was there, or None
        num_output_tokens       how many output tokens there are so far

    Time to first token: what the user waits before anything appears, from the arrival on, time in the queue included.
    None while there is no first token.

    Time per output token: the mean time between one output token and the next. The wait for the first token has no
    part in it. None while there are fewer than two tokens.

    Example: arrival at 10.0, scheduled at 10.5, three tokens at 11.0, 11.2 and 11.6 -> (1.0, 0.3).
    """
    raise NotImplementedError


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
