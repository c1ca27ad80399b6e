"""Exercises of chapter 6. Edit this file, then:  python -m chapters check 6

Each function replaces the engine's own while it is checked: with ttft_and_tpot the engine reports its latencies, pack
tells the attention kernels where each sequence's rows lie, schedule_chunks decides every step.
"""

from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
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


def schedule_chunks(scheduler: Scheduler) -> SchedulerOutput:
    """Choose the chunks of the next step under a token budget: chunked prefill. Replaces Scheduler.schedule.

    The block pool never runs out here, so nobody is ever preempted.

    A step computes at most scheduler.max_num_batched_tokens tokens, over all its chunks. That is the budget. Give it
    away in this order, and stop when it is used up:

    1. scheduler.running, from the front. These are the decodes (one token each is left to compute) and, as the last
       one, perhaps a sequence in the middle of its prompt. Each gets all its tokens that are not computed yet, or what
       is left of the budget if that is less:
           scheduler.block_manager.append_slots(seq, num_tokens)    room for their K and V; always True here
           scheduler._chunk(seq, num_tokens)                        makes the ScheduledChunk, and advances
                                                                    seq.num_computed_tokens
    2. Admissions from the head of scheduler.waiting (a deque), while there is budget left and fewer than
       scheduler.max_num_seqs sequences are running. For each:
           scheduler.block_manager.allocate_with_prefix(seq)        blocks for the whole prompt; what is found in the
                                                                    prefix cache is counted in num_computed_tokens
                                                                    at once. False: no room yet, stop admitting
           move it from waiting to the end of scheduler.running, and set seq.status = SequenceStatus.PREFILL
           scheduler._chunk(seq, num_tokens)                        num_tokens as above

    Every chunk has at least one token. Tokens that a sequence still needs: len(seq.tokens) - seq.num_computed_tokens.
    At most one running sequence may be left in the middle of its prompt, and it must be the last one of running.

    Return SchedulerOutput(chunks, preempted, num_tokens): the chunks in the order in which you made them, an empty
    list, the sum of the chunks' tokens.

    Example: budget 8, two sequences decoding, a prompt of 10 tokens waiting -> chunks of 1, 1 and 6 tokens,
    num_tokens 8. In the next step: 1, 1 and 4.
    """
    raise NotImplementedError
