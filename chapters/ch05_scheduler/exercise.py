"""Exercises of chapter 5. Write the three functions, then run: python -m chapters check 5

Each is put into the real Scheduler in place of the method it replaces. Write them in this order; the last is a whole
scheduling step. Nothing here needs torch: a scheduler handles token ids and counts.
"""

from collections.abc import Mapping

from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput  # noqa: F401 (you will need them)
from nanovllm.core.sequence import Sequence, SequenceStatus  # noqa: F401


def finish_reason(scheduler: Scheduler, seq: Sequence, token_id: int) -> tuple[str | None, int | str | None]:
    """Has `seq` ended with the token that it has just been given, and why? (Replaces Scheduler.check_stop.)

    It is called after seq.append(token_id), so seq.tokens[-1] == token_id, and the counts below include this token.
    Change nothing; return (finish_reason, stop_reason) by the first rule that applies:

    - ("stop", None) when token_id is in scheduler.eos_token_ids, unless params.ignore_eos;
    - ("stop", token_id) when token_id is in params.stop_token_ids (a list, possibly empty);
    - ("length", None) when seq.num_generated_tokens has reached params.max_tokens (an int, or None for no limit), or
      when seq.tokens, prompt and output together, has reached scheduler.max_model_len tokens;
    - (None, None) when the sequence goes on.

    The two "stop" rules do not apply to the first params.min_tokens generated tokens: only a later token can stop the
    sequence. The "length" rule always applies. `params` is seq.sampling_params. (A grammar can also end an answer, see
    chapter 8, and seq.stop_checker finds stop strings. Here there is neither.)

    Example: eos_token_ids {2}, max_tokens 8. Given token 7 as its third token: (None, None); given token 2: ("stop",
    None); given token 7 as its eighth: ("length", None); given token 2 as its eighth: ("stop", None).
    """
    raise NotImplementedError


def preempt_last(scheduler: Scheduler) -> Sequence:
    """Take the youngest running sequence off its seat, and return it. (Replaces Scheduler.preempt_last.)

    scheduler.running is a list in the order of admission, the youngest last; it is not empty when this is called.
    scheduler.waiting is a deque, its head on the left. Afterwards the sequence

    - is no longer in running, and stands at the head of waiting, before everybody else;
    - has status SequenceStatus.WAITING;
    - holds no blocks: scheduler.block_manager.free(seq) takes them back and empties seq.block_table;
    - has num_computed_tokens == 0 and num_cached_tokens == 0: its K/V may be gone when it comes back;
    - still has all its tokens, prompt and generated: it will be recomputed from them.

    scheduler.num_preemptions has grown by one. Nothing else has changed.

    Example: running [A, B], waiting [C]. It returns B; then running is [A], and waiting is [B, C].
    """
    raise NotImplementedError


def schedule(scheduler: Scheduler, drafts: Mapping[int, list[int]] = {}) -> SchedulerOutput:
    """Choose what the next step computes, in two loops. (Replaces Scheduler.schedule.)

    The first loop is for the sequences in scheduler.running, the oldest first. Each gets all its tokens that are not
    yet computed, len(seq.tokens) - seq.num_computed_tokens of them (1 for a decode), but no more than what is left of
    the budget, scheduler.max_num_batched_tokens for the whole step. With no budget left, no sequence gets a chunk, not
    even an empty one. Before a sequence gets its chunk, it must have blocks:

        scheduler.block_manager.append_slots(seq, num_tokens) -> bool

    gives it the blocks for num_tokens more, or returns False and changes nothing. If it is False, call

        scheduler.preempt_last() -> Sequence

    which takes the last sequence out of scheduler.running, frees its blocks, puts it at the head of scheduler.waiting
    and returns it; then try `seq` again. If the sequence that was taken is `seq` itself, the loop is over. Note that
    scheduler.running gets shorter while you go through it. A sequence that already has its chunk in this step is never
    the last of running at that moment (why?).

    The second loop is for admissions, unless this step has preempted somebody: sequences from the head of
    scheduler.waiting (a deque), while there is budget left and len(scheduler.running) is below scheduler.max_num_seqs:

        scheduler.block_manager.allocate_with_prefix(seq) -> bool

    reserves blocks for all of seq.tokens and sets seq.num_computed_tokens (above 0 if a prefix was found in the cache),
    or returns False and changes nothing. Stop at the first False: nobody overtakes. A sequence that is admitted leaves
    waiting, goes to the end of running, and gets status SequenceStatus.PREFILL and a chunk by the same rule as above.

    Chunks are made by

        scheduler.make_chunk(seq, num_tokens) -> ScheduledChunk

    which also raises seq.num_computed_tokens by num_tokens, and registers the blocks that it fills. Call it once for
    each chunk, when the sequence has its blocks. (drafts belong to chapter 13. Here there are none; leave them alone.)

    Return SchedulerOutput(chunks, preempted, num_tokens): the chunks in the order above, the preempted sequences in the
    order in which they were taken, and the sum of the chunks' tokens.

    Example: budget 8. A and B decode, C waits with 17 tokens, there are enough blocks and seats. Chunks: A 1 token,
    B 1 token, C 6 tokens; num_tokens is 8. In the next step C gets 6 again, and nobody who waits is admitted.
    """
    raise NotImplementedError
