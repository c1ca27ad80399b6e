"""Exercises of chapter 13. Edit this file, then:  python -m chapters check 13

Four functions that the real engine then guesses, checks and begins again with. Tasks are independent of each other.
"""

from typing import Any

from nanovllm.core.scheduler import ScheduledChunk, Scheduler
from nanovllm.core.sequence import Sequence, SequenceStatus  # noqa: F401 (you will need them)


def guess(memory: dict[Any, Any], tokens: list[int], num_guesses: int, longest: int, shortest: int) -> list[int]:
    """What may follow these tokens: what followed their last few tokens the last time these stood together.

        memory       this sequence's own dict, empty at first. What you put into it is there at the next call
        tokens       prompt and output so far. From call to call a few more; fewer if a step has failed: then forget
                     all and begin anew
        num_guesses  this many tokens, exactly, if there is anything to guess from
        longest      tokens of an n-gram, at most
        shortest     and at least

    Look for the last `longest` tokens at an earlier place. If they are nowhere, look for the last longest - 1, and so
    on down to `shortest`; then return []. Of several places the newest counts. The n-gram at the end of the text
    itself is no earlier place: nothing follows it. An earlier one may overlap it.

    Return the tokens that followed. Where the text ends before there are num_guesses of them, it repeats itself: the
    tokens between the two places come again, from the first, as often as needed.

    A call may read the tokens that are new since the last call, and a few more at the end of the text and at the place
    that was found. It does not go through the text again: put into `memory` what followed each n-gram.

    Examples, longest 3, shortest 1:  [1, 2, 3, 9, 1, 2] and 2 guesses -> [3, 9].  [5, 7, 8, 7, 8] and 5 -> [7, 8, 7, 8,
    7], for 7, 8 stood two places before.
    """
    raise NotImplementedError


def accept_tokens(scheduler: Scheduler, chunk: ScheduledChunk, token_ids: list[int]) -> bool:
    """Take in what a step has sampled for one sequence, as far as it holds. Returns: has the sequence ended?

        chunk.seq      the sequence. Its tokens do not have the guesses in them
        chunk.draft_token_ids  the tokens that were guessed to come next, perhaps none
        token_ids      what was sampled: behind the known tokens, then behind each guess; one more than guesses

    A guess holds if it is the token that was sampled in its place. A row counts only if all guesses before it hold.
    Append each sampled token that counts with seq.append(token_id), in order. After each ask
    scheduler.finish_reason_of(seq, token_id), which returns (reason, stop_reason); with a reason that is not None the
    sequence ends there, and nothing more is appended.

    Then bring the counts in order. Before this step's guesses, seq.num_computed_tokens was that of the known tokens.
    K and V have been written for the known tokens and for all guesses; they are right for the known ones and for the
    guesses that hold. So num_computed_tokens must become the number of leading tokens in seq.tokens whose K/V is right,
    and blocks that are now full of these get their names: scheduler.block_manager.register_prefix(seq). (Without
    guesses nothing changes here.)

    seq.status is DECODE from here on. At the end of a sequence call scheduler.finish(seq, reason, stop_reason), after
    everything else: it gives the blocks back.
    """
    raise NotImplementedError


def share_guesses(acceptances: list[float], limits: list[int], step_s: list[float]) -> list[int]:
    """How many guesses each sequence gets in the next step, so that the step makes the most tokens a second.

        acceptances  for each sequence, the probability that a guess holds if those before it do, from 0 to 1
        limits       for each sequence, how many guesses it may have, at most
        step_s       seconds that a step takes with 0, 1, 2, ... guesses, counted over all sequences; the list's end
                     limits the sum of guesses. More guesses never take less time

    Every sequence gets one token from the step anyway, whether or not a guess holds. Return a number for each sequence.
    What counts is the expected number of tokens of all sequences, divided by the seconds of the step. Of choices that
    are equally good, one with the fewest guesses.

    Example: acceptances [0.5], limits [3], step_s [10, 11, 12, 13]: 1 token in 10 s, 1.5 in 11, 1.75 in 12, 1.875 in
    13: the third choice is the best, so [2].
    """
    raise NotImplementedError


def resume(seq: Sequence) -> Sequence:
    """`seq` has lost its K and V. Return the sequence that waits in its place. (In place of Sequence.reset.)

    The engine calls it for a sequence that was preempted, and for every sequence when a step has failed. It throws
    `seq` away and goes on with the new one. What you do not carry over is lost. Nobody who waits for an answer may
    notice: all get the tokens that they would have got, and each token once.

    Decide for each of these whether it belongs to the answer, or only says how far the engine had come with it:

        tokens, num_prompt_tokens               prompt and generated tokens, and how many of them are the prompt
        sampling_params                         what the request said of its answer
        cache_salt, lora_id, mm_spans           what the names of its blocks are made of, besides tokens
        seed, sample_index                      what the sampler makes a number of, with the position in the output. If
                                                sampling_params.seed is None, the engine has chosen `seed`
        status, block_table                     it is WAITING from now on; its blocks have been given to others
        num_computed_tokens, num_cached_tokens  after a failed step they count K and V that are not there, of guesses,
                                                too. The guesses themselves are not in `tokens`

    Sequence(prompt_token_ids, sampling_params, cache_salt=..., lora_id=..., mm_spans=...) makes a new one, which waits.
    Its append(token_id) adds a generated token. Other attributes (priority, grammar, ...) are not used here.
    """
    raise NotImplementedError
