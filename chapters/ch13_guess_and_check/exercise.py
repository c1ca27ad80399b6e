"""Exercises of chapter 13. Edit this file, then:  python -m chapters check 13

Four functions with which the real engine then drafts, checks and starts over. The tasks are independent of each other.
"""

from typing import Any

from nanovllm.core.scheduler import ScheduledChunk, Scheduler
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus  # noqa: F401 (you will need them)


def guess(memory: dict[Any, Any], tokens: list[int], num_draft_tokens: int, longest: int, shortest: int) -> list[int]:
    """What may follow these tokens: what followed their last few tokens the last time these occurred together.

        memory            this sequence's own dict, empty at first. What you put into it is there at the next call
        tokens            prompt and output so far. Each call has a few more than the last one, or fewer if a step has
                          failed: then forget everything and start over
        num_draft_tokens  exactly how many tokens to return, if there is anything to go by
        longest           the largest number of tokens in an n-gram
        shortest          the smallest

    Look for the last `longest` tokens at an earlier place. If there is none, look for the last longest - 1, and so on
    down to `shortest`; if there is none either, return []. Of several places the newest counts. The n-gram at the end
    of the text is not an earlier place: nothing follows it. An earlier place may overlap it.

    Return the tokens that followed. If the text ends before there are num_draft_tokens of them, it repeats itself: the
    tokens between the two places come again, from the first, as often as needed.

    A call may read the tokens that are new since the last call, and a few more at the end of the text and at the place
    found. It must not go through the whole text again: keep in `memory` what followed each n-gram.

    Examples, longest 3, shortest 1:  [1, 2, 3, 9, 1, 2] and 2 draft tokens -> [3, 9].  [5, 7, 8, 7, 8] and 5 -> [7, 8,
    7, 8, 7], because 7, 8 occurred two places before.
    """
    raise NotImplementedError


def accept_tokens(scheduler: Scheduler, chunk: ScheduledChunk, token_ids: list[int]) -> None:
    """Append to a sequence those of its sampled tokens that count. (Replaces Scheduler.accept_tokens.)

        chunk.seq              the sequence. Its tokens do not include the draft tokens
        chunk.draft_token_ids  the tokens that were expected to come next, perhaps none
        token_ids              what was sampled: after the known tokens, then after each draft token; one more than
                               there are draft tokens. NO_TOKEN where no token could be chosen

    A draft token is accepted if it is the token that was sampled in its place. A row counts only if all draft tokens
    before it were accepted and the sequence had not ended. Append each sampled token that counts with
    seq.append(token_id), in order; NO_TOKEN is no token, and is not appended. For each row that counts, call
    scheduler.check_stop(seq, token_id) once, after its token was appended: it returns (reason, stop_reason), and ends
    the sequence with a reason that is not None. Call it for NO_TOKEN, too: the reason is then "error".

    check_stop does not only answer. A request may have stop strings; then check_stop adds the token to the request's
    text, where nothing can be taken back, and the string may be complete in the middle of the draft tokens. So decide
    which rows it may hear of, and when.

    Then put the counts right. So far seq.num_computed_tokens counts the known tokens only. K and V have been written
    for the known tokens and for all draft tokens; they are right for the known and for the accepted ones. So
    num_computed_tokens must become the number of tokens in seq.tokens, without the last one, whose K and V are right,
    and blocks that are full of these must be registered: scheduler.block_manager.register_prefix(seq). (Where the
    sequence ends with an accepted draft token, K and V of the last token are right, too; nobody counts it, since
    nothing follows. Without draft tokens nothing changes here.)

    seq.status is DECODE from here on. If the sequence ends, call scheduler.finish(seq, reason, stop_reason) after
    everything else: it gives the blocks back.
    """
    raise NotImplementedError


def share_guesses(acceptances: list[float], limits: list[int], step_s: list[float], draft_s: float = 0.0) -> list[int]:
    """How many draft tokens each sequence gets in the next step, so that the step gives the most tokens a second.

        acceptances  for each sequence, the probability that a draft token is accepted if those before it are, 0 to 1
        limits       for each sequence, the most draft tokens that it may have
        step_s       seconds that a step takes with 0, 1, 2, ... draft tokens, counted over all sequences; the end of
                     the list limits their sum. More draft tokens never take less time
        draft_s      seconds of a step of the draft model, which makes the draft tokens before the step: one more for
                     every sequence that wants one. Its steps come one after another, so making n draft tokens for a
                     sequence takes n of them. 0 if draft tokens come from the text

    Every sequence gets one token from the step anyway, whether or not a draft token is accepted. Return a number for
    each sequence. What counts is the expected number of tokens of all sequences, divided by the seconds of the step and
    of the draft model before it. Of choices that are equally good, take one with the fewest draft tokens.

    Example: acceptances [0.5], limits [3], step_s [10, 11, 12, 13]: 1 token in 10 s, 1.5 in 11, 1.75 in 12, 1.875 in
    13: the third choice is the best, so the answer is [2]. With draft_s 2 it is [1]: 1.5 tokens in 13 s, 1.75 in 16.
    With two sequences and draft_s 2, two draft tokens of one sequence take 4 s to make, and one of each takes 2.
    """
    raise NotImplementedError


def resume(seq: Sequence) -> Sequence:
    """`seq` has lost its K and V. Return the sequence that waits in its place. (Replaces Sequence.reset.)

    The engine calls it for a sequence that is preempted, and for every sequence when a step has failed. It throws
    `seq` away and goes on with the new one. What you do not carry over is lost. No client may notice: every client
    gets the tokens that it would have got, and each token once.

    Decide for each of these whether it belongs to the answer, or only says how far the engine had come with it:

        tokens, num_prompt_tokens               prompt and generated tokens, and how many of them are the prompt
        sampling_params                         what the request said about its answer
        cache_salt, lora_id, mm_spans           what goes into the hashes of its blocks, besides tokens
        seed, sample_index                      from these and the position in the output the sampler makes a number. If
                                                sampling_params.seed is None, the engine has chosen `seed`
        status                                  it is WAITING from now on
        block_table, num_registered_blocks      its blocks are no longer its own
        num_computed_tokens, num_cached_tokens  they count K and V that are no longer there

    Sequence(prompt_token_ids, sampling_params, cache_salt=..., lora_id=..., mm_spans=...) makes a new one, which waits.
    Its append(token_id) adds a generated token. Other attributes (priority, grammar, ...) are not used here.
    """
    raise NotImplementedError
