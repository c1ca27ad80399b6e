"""Exercises of chapter 5. Write the three functions, then run: python -m chapters check 5

Each is put into the real Scheduler in place of the method it replaces. Write them in this order; the last is a whole
scheduling step. Nothing here needs torch: a scheduler handles token ids and counts.

The chapter shows most of what each has to do, and leaves out the lines that decide. The engine also does what the
chapter does not show: requests have priorities, prompts may be cut for another reason than the budget, and texts may
end at a string.
"""

from collections.abc import Mapping

from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput  # noqa: F401 (you will need them)
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus  # noqa: F401


def finish_reason(scheduler: Scheduler, seq: Sequence, token_id: int) -> tuple[str | None, int | str | None]:
    """Has `seq` ended with the token that was sampled for it, and why? (Replaces Scheduler.check_stop.)

    It is called once for each token, after seq.append(token_id): seq.tokens[-1] == token_id, and the counts below
    include this token. (Where the sampler has found no token, token_id is NO_TOKEN, and nothing was appended.)

    Return (finish_reason, stop_reason). `params` is seq.sampling_params. Six things can happen:

    - ("error", None): token_id is NO_TOKEN, so the sequence cannot go on;
    - ("stop", None): the token is in scheduler.eos_token_ids. Not if params.ignore_eos;
    - ("stop", token_id): the token is in params.stop_token_ids (a list, possibly empty);
    - ("stop", text): the token completes a stop string. If seq.stop_checker is not None, the request has stop strings,
      and seq.stop_checker.append([token_id]) adds the token to the request's text. It returns the stop string that the
      text now ends with, or None;
    - ("length", None): seq.num_generated_tokens has reached params.max_tokens (an int, or None for no limit), or
      seq.tokens, prompt and output together, has reached scheduler.max_model_len tokens;
    - (None, None): the sequence goes on.

    Several can be true of one token. Decide which one is reported, and who hears of the token, by these principles:

    - "stop" says that the text ended by itself, "length" that it was cut off. A text that has ended by itself was not
      cut off;
    - an EOS that is not ignored is the model's own end. It is reported as that, whatever else it is;
    - EOS and stop tokens cannot end the sequence among its first params.min_tokens generated tokens. A length can. The
      stop checker knows min_tokens, and counts the tokens itself;
    - the stop checker gets each token of the text exactly once, in order. The EOS or the stop token that ends a
      sequence is no part of the text. Every other token is.

    Change nothing else. (A grammar can also end an answer, see chapter 8. Here there is none.)

    Example: eos_token_ids {2}, max_tokens 8. Given token 7 as its third token: (None, None); given token 2: ("stop",
    None); given token 7 as its eighth: ("length", None).
    """
    raise NotImplementedError


def preempt_last(scheduler: Scheduler) -> Sequence:
    """Take a running sequence off its seat, and return it. (Replaces Scheduler.preempt_last.)

    Requests have priorities: seq.priority is an int, and the lowest number comes first. (Where nobody sets priorities,
    all are 0.) Both collections are sorted by this number:

        scheduler.running   a list. Of one priority, in the order of admission
        scheduler.waiting   a deque, its head on the left. Of one priority, preempted sequences come first, in the order
                            in which they were admitted, and then the others in the order in which they arrived

    The sequence that gives way is the one that was admitted last among the least important that run. (running is not
    empty when this is called.) Decide where it must wait so that both orders stay right. Afterwards it

    - is no longer in running, and is in waiting;
    - has status SequenceStatus.WAITING;
    - holds no blocks: scheduler.block_manager.free(seq) takes them back and empties seq.block_table;
    - has num_computed_tokens == 0 and num_cached_tokens == 0: its K/V may be gone when it comes back;
    - still has all its tokens, prompt and generated: it will be recomputed from them.

    scheduler.num_preemptions has grown by one. Nothing else has changed.

    Example: all have priority 0, running [A, B], waiting [C]. It returns B; then running is [A], and waiting is [B, C].
    """
    raise NotImplementedError


def schedule(scheduler: Scheduler, drafts: Mapping[int, list[int]] = {}) -> SchedulerOutput:
    """Choose what the next step computes, in two loops. (Replaces Scheduler.schedule.)

    The first loop is for the sequences in scheduler.running, in their order. Each gets all its tokens that are not yet
    computed, len(seq.tokens) - seq.num_computed_tokens of them (1 for a decode), within two limits:

        scheduler.max_num_batched_tokens          the budget: tokens of the whole step. With no budget left, no sequence
                                                  gets a chunk, not even an empty one
        scheduler.long_prefill_token_threshold    tokens of one chunk, at most, so that a long prompt leaves budget for
                                                  others. (max_model_len unless somebody sets it: then it cuts nothing)

    Before a sequence gets its chunk, it must have blocks:

        scheduler.block_manager.append_slots(seq, num_tokens) -> bool

    gives it the blocks for num_tokens more, or returns False and changes nothing. If it is False, call

        scheduler.preempt_last() -> Sequence

    which takes the last sequence out of scheduler.running, frees its blocks, puts it back into scheduler.waiting and
    returns it; then try `seq` again. If the sequence that was taken is `seq` itself, the loop is over. Note that
    scheduler.running gets shorter while you go through it. A sequence that already has its chunk in this step is never
    the last of running at that moment (why?).

    The second loop is for admissions, unless this step has preempted somebody: sequences from the head of
    scheduler.waiting (a deque), while there is budget left and len(scheduler.running) is below scheduler.max_num_seqs:

        scheduler.block_manager.allocate_with_prefix(seq) -> bool

    reserves blocks for all of seq.tokens and sets seq.num_computed_tokens (above 0 if a prefix was found in the cache),
    or returns False and changes nothing. Stop at the first False: nobody overtakes. A sequence that is admitted leaves
    waiting, goes into running, and gets status SequenceStatus.PREFILL and a chunk by the same rules as above.

    Requests have priorities: seq.priority is an int, and the lowest number comes first. waiting is sorted by it
    already. Put the newcomer where running stays sorted, too: by priority, and within one in the order of admission. A
    newcomer that is more important than some who run must not be the next to give way.

    Chunks are made by

        scheduler.make_chunk(seq, num_tokens) -> ScheduledChunk

    which also raises seq.num_computed_tokens by num_tokens, and registers the blocks that it fills. Call it once for
    each chunk, when the sequence has its blocks. (drafts belong to chapter 13. Here there are none; leave them alone.
    num_new_tokens, make_room and admit of the scheduler do parts of this task: write them yourself.)

    Return SchedulerOutput(chunks, preempted, num_tokens): the chunks in the order in which they were made, the
    preempted sequences in the order in which they were taken, and the sum of the chunks' tokens.

    Example: budget 8. A and B decode, C waits with 17 tokens, there are enough blocks and seats. Chunks: A 1 token,
    B 1 token, C 6 tokens; num_tokens is 8. In the next step C gets 6 again, and nobody who waits is admitted. With a
    threshold of 4, C gets 4 tokens in each of these steps, and of a prompt that waits behind it 2 are computed.
    """
    raise NotImplementedError
