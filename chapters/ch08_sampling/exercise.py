"""Exercises of chapter 8. Edit this file, then:  python -m chapters check 8

The first three functions work in the real sampler while they are checked, row by row: keep_top_p and min_p_probs in
place of the engine's filters, draw in place of its noise and its choice. allowed_tokens says which tokens a mask lets
pass. All four work on lists of plain numbers, and need no torch. Finally a model generates with each of them.
"""

import hashlib  # noqa: F401 (you may need it)
import math  # noqa: F401

from nanovllm.core.sequence import Sequence


def keep_top_p(probs: list[float], top_p: float) -> list[bool]:
    """Which tokens does top_p keep? (In place of the last part of the engine's logit_threshold.)

    probs: a number for each token of the vocabulary, not negative. probs[i] is token i's probability after the filters
    before this one. Tokens that those filters cut have probability 0, and nothing has been renormalized, so the sum may
    be anything above 0 and up to 1. The tokens are in the order of their ids, not of their probabilities.

    top_p: above 0, at most 1. It is a share of what is there, so the wanted mass is top_p * sum(probs).

    Return a list of bools, one for each token, True for those that are kept:

    - Go through the tokens from the most to the least likely, and keep each one as long as those kept before it have
      less than the wanted mass together. So the token that reaches or crosses the border is kept, the next one is not,
      and at least one token is kept.
    - Ties: a token exactly as likely as the last one kept is kept, too.
    - A token with probability 0 is never kept. (With top_p=1 every other token is.)

    Leave probs as it is. You need not worry about rounding: where a check comes close to a border, the numbers are
    sums of powers of two, and sums of those are exact.

    Example: probs [0.125, 0.5, 0.0, 0.25, 0.125]. top_p=0.5 keeps token 1. top_p=0.6 keeps 1 and 3. top_p=0.8 keeps
    1, 3, and then both tokens with 0.125: one of them would do, but nothing tells them apart.
    """
    raise NotImplementedError


def min_p_probs(logits: list[float], temperature: float, min_p: float) -> list[float]:
    """Probabilities after temperature and min_p. (In place of the engine's temperature, min_p and softmax.)

    logits: a number for each token, perhaps far from 0. Some may be -inf: those tokens must not be sampled. At least
    one is finite.
    temperature: above 0.
    min_p: from 0 to 1; 0 cuts nothing.

    Return a list of probabilities, one for each token:

    - The logits, divided by the temperature, go through a softmax.
    - Then tokens whose probability is below min_p times the largest probability get 0. A token that has exactly this
      much is kept, so min_p=1 keeps the most likely token and any that are tied with it.
    - What is left is scaled so that it adds up to 1.

    Leave logits as it is. The probabilities have to agree with ours to within 1e-5.

    Example: logits [0, ln 8, ln 2, -inf], temperature 1, min_p 0.2. The softmax gives 1/11, 8/11, 2/11, 0. The first
    is below 0.2 * 8/11. The others are scaled to 8/10 and 2/10: [0, 0.8, 0.2, 0].
    """
    raise NotImplementedError


def draw(probs: list[list[float]], seqs: list[Sequence]) -> list[int]:
    """Choose a token for each row. (In place of the engine's uniform_noise, and of the end of sample_randomly.)

    probs: R rows, each with a number for each token, not negative; row r belongs to seqs[r]. Filters have put zeros
    into it, and nobody has renormalized it: a row's sum may be anything above 0 and up to 1.

    Return R token ids. For each row:

    1. Make a number u, 0 <= u < 1, from these three numbers of its sequence, and from nothing else:

           seq.seed                    an int of up to 63 bits and a sign. (seq.sampling_params.seed may be None.)
           seq.sample_index            which of the n samples of its request it is
           seq.num_generated_tokens    the position in the output of the token that is chosen now

       The same three numbers must always give the same u, in this process and in any other. Where one of the three
       differs, u must be unrelated, even for a neighbor such as (seed + 1, index, position - 1). Over many triples the
       values of u must be spread evenly. A hash does this: for instance hashlib.blake2b of a text in which the three
       are told apart.
    2. Take the first token, in the order of the ids, whose cumulative probability (its own included) exceeds u times
       the sum of the row. So a token's share of the draws is its share of the row's sum, and a token with probability
       0 is never taken.

    The result for a row must not depend on the other rows, on their number or order, or on how often the function has
    been called. Leave the global random state (of the module random) alone: others use it. Leave probs and seqs as they
    are. How you compute u is up to you: it need not be the engine's number.

    Example: a row [0.2, 0.0, 0.2] gives token 0 where u is below 0.5, and token 2 otherwise.
    """
    raise NotImplementedError


def allowed_tokens(choices: list[list[int]], generated: list[int], eos_token_id: int) -> list[int]:
    """Which tokens may come next, so that the output becomes exactly one of the choices? (In place of llguidance.)

    choices: one or more lists of token ids, none empty, none with eos_token_id in it. Some may begin alike, one may be
    the beginning of another, and one may be there twice.

    generated: the output so far. It is empty, or the beginning of at least one choice, or a whole choice: your mask has
    prevented anything else.

    Return a list of token ids, in any order; the same id twice does no harm:

    - of each choice that begins with `generated` and is longer, the token that comes next in it;
    - eos_token_id, if `generated` is a whole choice: the output may end here. (Where nothing but EOS may come, the
      engine ends the sequence by itself.)

    Return no other token, and never an empty list.

    The function is asked about many sequences in turn, about each one several times, and from a thread, so keep nothing
    between two calls. Leave choices and generated as they are.

    Example: choices [[7, 8], [7, 9, 4], [7]], EOS 2. After [] comes 7. After [7] come 8, 9 and 2. After [7, 9] comes 4,
    and after [7, 8] comes 2.
    """
    raise NotImplementedError
