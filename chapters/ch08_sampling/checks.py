"""Grading of the exercises of chapter 8. Checks that run no model need no torch: a browser grades them, too."""

import builtins
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from chapters.ch08_sampling.theory import compare
from chapters.expect import cases, differs, expect, is_list_of, once, read_again, unchanged
from chapters.grading import Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import SamplingParams
from nanovllm.core.sequence import Sequence

BAR, MASK = "One bar for three filters", "Where a mask comes from"  # headings


# -- asking the student's functions: here, and in the sampler (checks_engine.py) --------------------------------------


def ask_top_p(function: Callable, probs: list[float], top_p: float) -> list[bool]:
    with unchanged("probs must stay as it is: the caller still needs it. Work on a copy", probs), once(len(probs)):
        kept: Any = function(probs, top_p)
    if not is_list_of(bool, kept, len(probs)):
        raise Wrong(f"return a list of bools, one for each of the {len(probs)} tokens", got=repr(kept))
    if not any(kept):
        raise Wrong(f"top_p={top_p:g} keeps no token at all; the one that crosses the border stays")
    return kept


def ask_min_p(function: Callable, logits: list[float], temperature: float, min_p: float) -> list[float]:
    with unchanged("logits must stay as it is: the caller still needs it. Work on a copy", logits), once(len(logits)):
        probs: Any = function(logits, temperature, min_p)
    if not is_list_of((int, float), probs, len(logits)):
        raise Wrong(f"return a list of probabilities, one for each of the {len(logits)} tokens", got=repr(probs))
    return probs


def random_states() -> list[Any]:
    """Of the generators that others draw from. Torch has one where it is loaded."""
    torch = sys.modules.get("torch")
    return [random.getstate(), torch.get_rng_state().tolist() if torch else None]


def ask_draw(function: Callable, probs: list[list[float]], seqs: list[Sequence]) -> list[int]:
    states = random_states()
    with unchanged("probs must stay as it is: work on a copy", probs):
        token_ids: Any = function(probs, list(seqs))
    if not is_list_of(int, token_ids, len(seqs)):
        hint = "return a list of token ids, ints, one for each row"
        raise Wrong(hint, expected=f"{len(seqs)} of them", got=repr(token_ids))
    if random_states() != states:
        raise Wrong(
            "the global random state has moved: what the function draws next depends on who else has drawn. "
            "Compute the number from the three, or give each row a generator of its own, made from the three"
        )
    for row, token_id in zip(probs, token_ids, strict=True):
        if not 0 <= token_id < len(row):
            hint = "there is no such token; the target is u times the sum of the row, and the sum may be below 1"
            raise Wrong(hint, expected=f"0 to {len(row) - 1}", got=token_id)
        if row[token_id] == 0:
            hint = "a token with probability 0 was taken: its cumulative probability does not exceed the one before it"
            raise Wrong(hint, got=f"token {token_id} of {_row(row)}")
    return token_ids


def ask_choices(function: Callable, choices: list[list[int]], generated: list[int], eos_token_id: int) -> list[int]:
    with unchanged("choices and generated must stay as they are: the next question is about them", choices, generated):
        token_ids = function(choices, generated, eos_token_id)
    if not isinstance(token_ids, list) or not all(isinstance(token_id, int) for token_id in token_ids):
        raise Wrong("return a list of token ids", got=repr(token_ids))
    if not token_ids:
        hint = (
            "no token is allowed at all. Where a choice is complete, EOS may come. If this was right for one sequence "
            "at a time: does anything stay from one call to the next?"
        )
        raise Wrong(hint, expected="at least one token", got=f"[] after {generated} for {choices}")
    return token_ids


def _row(values: list[float]) -> str:
    return "[" + ", ".join(f"{x:.4g}" for x in values[:8]) + (", ...]" if len(values) > 8 else "]")


# -- keep_top_p -------------------------------------------------------------------------------------------------------


def compare_top_p(function: Callable, probs: list[float], top_p: float) -> None:
    """Raises Wrong, with a hint for the usual mistakes."""
    got = [i for i, is_kept in enumerate(ask_top_p(function, probs, top_p)) if is_kept]
    expected = exact_top_p(probs, top_p)
    if got == expected:
        return
    wanted = top_p * sum(probs)
    border = min(probs[i] for i in expected)
    if any(probs[i] == 0 for i in got):
        hint = "a token with probability 0 has been cut by an earlier filter; it must not come back"
    elif sum(probs) < 1 and got == exact_top_p(probs, top_p, wanted=top_p):
        hint = f"top_p is a share of what is there: the wanted mass is {top_p:g} x {sum(probs):g}"
    elif got == [i for i, p in enumerate(probs) if p > border]:
        hint = "the token that reaches or crosses the border is missing: it is kept, and the next one is not"
    elif {probs[i] for i in got} == {probs[i] for i in expected}:
        hint = "tokens that are exactly as likely as the last one kept are kept, too"
    elif any(got == kept_in_order(probs, wanted, order) for order in (None, probs.__getitem__)):
        hint = "these are added up in the order of the ids: sort first, from the most likely token downwards"
    elif any(probs[i] < probs[j] for i in got for j in set(expected) - set(got)):
        hint = "a less likely token is kept and a likelier one is not: do the places in your mask belong to the ids?"
    elif got == [i for i, p in enumerate(probs) if p >= min(top_p, max(probs))]:
        hint = "top_p is compared with the sum of the tokens kept so far, not with the probability of a single one"
    elif set(got) > set(expected) and math.fsum(probs[i] for i in expected) == wanted:
        hint = "one token too many: when the mass is reached exactly, the next token is not kept"
    else:
        hint = f"add up from the most likely token downwards, until the sum has reached {wanted:g}"
    raise Wrong(f"probs {_row(probs)}, top_p={top_p:g}: {hint}", expected=f"tokens {expected}", got=f"tokens {got}")


def kept_in_order(probs: list[float], wanted: float, key: Callable[[int], float] | None) -> list[int]:
    kept, mass = [], 0.0
    for i in sorted(range(len(probs)), key=key):
        if mass < wanted and probs[i] > 0:
            kept.append(i)
        mass += probs[i]
    return sorted(kept)


def exact_top_p(probs: list[float], top_p: float, wanted: float | None = None) -> list[int]:
    wanted = top_p * math.fsum(probs) if wanted is None else wanted
    border, mass = 0.0, 0.0
    for p in sorted(probs, reverse=True):
        if mass >= wanted or p == 0:
            break
        border, mass = p, mass + p
    return [i for i, p in enumerate(probs) if p >= border and p > 0]


def random_rows(num: int) -> Iterator[tuple[list[float], float]]:
    rng = random.Random(8)
    for _ in range(num):
        counts = [rng.choice((0, 1, 1, 2, 3, 5, 9)) for _ in range(rng.randint(1, 12))] + [1]
        rng.shuffle(counts)
        yield [count / 128 for count in counts], rng.choice((0.125, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0))


@read_again(BAR)
def check_top_p_generates(function: Callable, bench: Bench) -> None:
    """A model samples the same tokens with it, also after top_k and min_p"""
    _ = bench.model  # where there is none there is no torch either
    from chapters.ch08_sampling.checks_engine import generate_with_top_p

    generate_with_top_p(function, bench)


SORTED, UNSORTED = [0.5, 0.25, 0.125, 0.09375, 0.03125], [0.09375, 0.25, 0.125, 0.5, 0.03125]
CUT = [0.0, 0.125, 0.0, 0.25, 0.0625, 0.0625]  # by filters before this one
TOP_P_CHECKS = (
    *cases(
        compare_top_p,
        {
            "The token that crosses the border is kept, in a sorted row": (
                (SORTED, top_p) for top_p in (0.8, 0.6, 0.9, 0.3)
            ),
            "A row in the order of the ids": ((UNSORTED, top_p) for top_p in (0.6, 0.8, 0.2)),
            "The mass is reached exactly; and top_p=1": ((UNSORTED, top_p) for top_p in (0.5, 0.75, 1.0)),
            "Equals pass together": [([0.125, 0.5, 0.0, 0.25, 0.125], 0.8), ([0.25, 0.25, 0.25, 0.25], 0.3)],
            "Other filters came before: zeros, and a sum below 1": ((CUT, top_p) for top_p in (0.6, 0.5, 0.9, 1.0)),
            "200 random rows": random_rows(200),
        },
    ),
    check_top_p_generates,
)


# -- min_p_probs ------------------------------------------------------------------------------------------------------


def exact_min_p(logits: list[float], temperature: float, min_p: float) -> list[float]:
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    weights = [w if w >= min_p * max(weights) else 0.0 for w in weights]
    return [w / math.fsum(weights) for w in weights]


def compare_min_p(function: Callable, logits: list[float], temperature: float, min_p: float) -> None:
    expected, got = exact_min_p(logits, temperature, min_p), ask_min_p(function, logits, temperature, min_p)
    if not any(differs(a, b, 1e-5) for a, b in zip(expected, got, strict=True)):
        return
    kept, should, alone = ([p > 0 for p in x] for x in (got, expected, exact_min_p(logits, 1.0, min_p)))
    too_few = "too few tokens are left: exactly min_p times the largest probability is enough"
    if any(map(math.isnan, got)):
        hint = "not a number: exp() of a large number is inf, so a softmax subtracts the largest logit first"
    elif min_p == 1 and not any(kept):
        hint = too_few
    elif min_p == 0 and sum(kept) < sum(should):
        hint = "min_p=0 cuts nothing; do you compare it with probabilities, and not with logits?"
    elif kept == should and differs(1.0, sum(got), 1e-5):
        hint = f"the right tokens are left, but their probabilities add up to {sum(got):.4g}: scale what is left to 1"
    elif kept == [p >= min_p for p in exact_min_p(logits, temperature, 0.0)] and kept != should:
        hint = "min_p is a share of the largest probability, not a probability"
    elif temperature != 1 and min_p > 0 and kept == alone:
        hint = "temperature comes first: the filter looks at the probabilities after it"
    elif kept == should:
        hint = "the right tokens, but different probabilities: the logits are divided by the temperature, then softmax"
    elif sum(kept) < sum(should):
        hint = too_few
    else:
        hint = "too many tokens are left: below min_p times the largest probability a token gets 0"
    settings = f"logits {_row(logits)}, temperature {temperature:g}, min_p {min_p:g}"
    raise Wrong(f"{settings}: {hint}", expected=_row(expected), got=_row(got))


def check_min_p_generates(function: Callable, bench: Bench) -> None:
    """A model samples the same tokens with it, also before top_k and top_p"""
    _ = bench.model
    from chapters.ch08_sampling.checks_engine import generate_with_min_p

    generate_with_min_p(function, bench)


MIN_P_CHECKS = (
    *cases(
        compare_min_p,
        {
            ("min_p=0: a softmax and nothing else", "Temperature: the same order, different distances"): (
                ([1.0, 3.0, 2.0, -1.0], temperature, 0.0) for temperature in (1.0, 0.5)
            ),
            "A share of the largest probability": [
                ([0.0, math.log(8), math.log(2)], 1.0, 0.2),
                ([0.1 * i for i in range(30)], 1.0, 0.3),  # the largest probability is about 0.1
                ([5.0, 0.0, 4.0, -2.0], 1.0, 0.1),
            ],
            "Temperature before the filter": (
                ([2.0, 4.0, 3.0, 1.0], *settings) for settings in ((2.0, 0.3), (0.5, 0.2), (1.5, 0.1))
            ),
            "min_p=1, ties, and a token that must not come": [
                ([2.0, 5.0, 5.0, 1.0], 1.0, 1.0),
                ([3.0, 1.0], 0.7, 1.0),
                ([-math.inf, 1.0, 2.0, -math.inf], 1.0, 0.05),
            ],
            "Logits far from 0, a small temperature": [
                ([1000.0, 999.0, 990.0], 1.0, 0.1),
                ([-1000.0, -1001.0], 1.0, 0.1),
                ([20.0, 19.5, 3.0], 0.01, 0.1),
            ],
        },
    ),
    check_min_p_generates,
)


# -- draw -------------------------------------------------------------------------------------------------------------


def make_seq(seed: int | None, sample_index: int = 0, position: int = 0) -> Sequence:
    """A sequence that has generated `position` tokens."""
    return make_many(SamplingParams(seed=seed), [(seed, sample_index, position)])[0]


def make_many(params: SamplingParams, places: list[tuple[Any, ...]], num_prompt: int = 3) -> list[Sequence]:
    """Sequences with these parameters at (seed, sample index, position); a seed need not be the parameters'."""
    seqs = []
    for seed, sample_index, position in places:
        seq = Sequence([*range(1, num_prompt + 1)], params)
        seq.seed, seq.sample_index, seq.tokens = seed, sample_index, seq.tokens + [4] * position
        seqs.append(seq)
    return seqs


def flat(num_rows: int, vocab_size: int = 10_000) -> list[list[float]]:
    return [[1 / vocab_size] * vocab_size] * num_rows


def where_it_falls(function: Callable, probs: list[float], allowed: set[int]) -> None:
    found = set(ask_draw(function, [probs] * 64, [make_seq(seed) for seed in range(64)]))
    why = "all rows get the same token: what does u depend on?"
    if len(found) > 1 or len(allowed) == 1:
        why = f"u is compared with shares of the row's sum, {sum(probs):g}"
    expect(sorted(allowed), sorted(found), f"64 rows {probs} with seeds 0 to 63: {why}")


def hash_of_numbers(value: Any, hash: Callable[[Any], int] = hash) -> int:
    """Python's, but not of a text."""
    if isinstance(value, str | bytes) or (isinstance(value, tuple) and any(isinstance(x, str | bytes) for x in value)):
        hint = "Python's hash() of a text is different in each process; hashlib's functions always give the same"
        raise Wrong(hint, got=f"hash({value!r})")
    return hash(value)


def check_alone_and_together(function: Callable, bench: Bench) -> None:
    """The same alone, in company, in a different order, and called again"""
    seqs, twins = ([make_seq(seed, position=seed % 3) for seed in range(20)] for _ in range(2))
    with replaced(builtins, "hash", hash_of_numbers):
        together = ask_draw(function, flat(20), seqs)
    expect(together, ask_draw(function, flat(20), seqs), "called twice with the same rows, it gives different tokens")
    alone = [ask_draw(function, flat(1), [seq])[0] for seq in seqs]
    hint = "20 sequences, each alone, and then in one batch: does the row's place in the batch enter the number?"
    expect(alone, together, hint)
    backwards = ask_draw(function, flat(20), seqs[::-1])[::-1]
    expect(together, backwards, "the same rows in reverse order give different tokens")
    hint = "another Sequence with the same three numbers gets a different token: what else enters, its seq_id?"
    expect(together, ask_draw(function, flat(20), twins), hint)
    others = [make_many(SamplingParams(seed=seed), [(seed, 0, seed % 3)], num_prompt=9)[0] for seed in range(20)]
    hint = "with a longer prompt, the same three numbers get a different token: the position is that in the output"
    expect(together, ask_draw(function, flat(20), others), hint)


def differ(function: Callable, name: str, places: list[Any]) -> None:
    """40 sequences at these places get about 40 tokens."""
    seqs = [make_seq(*place) for place in places]
    for number, seq in enumerate(seqs):
        seq.seed = 1000 + number if seq.sampling_params.seed is None else seq.seed  # as the engine does it
    found = ask_draw(function, flat(40), seqs)
    if len(set(found)) < 20:
        hint = f"40 rows of 10,000 equally likely tokens, which differ only in {name}"
        raise Wrong(hint, expected="about 40 different tokens", got=f"{len(set(found))}: {sorted(set(found))[:8]}")


def check_unrelated(function: Callable, bench: Bench) -> None:
    """Neighbors are unrelated: no shifted copy, no sum or product of the three"""
    places = [(s, i, p) for s in (1, 2, 11, -1, 2**63 - 1) for i in (0, 1, 2, 11) for p in (0, 1, 2, 3, 11, 12)]
    found = ask_draw(function, flat(len(places), 20_000), [make_seq(*place) for place in places])
    if len(set(found)) < len(places) - 4:
        a, b = next((i, found.index(x)) for i, x in enumerate(found) if found.index(x) < i)
        hint = "two (seed, index, position) share a number, and luck does not explain it: are the three told apart?"
        raise Wrong(hint, expected="a number for each", got=f"the same for {places[b]} and {places[a]}")
    found = ask_draw(function, flat(8, 2**20), [make_seq(seed) for seed in range(8)])
    if all(token_id % 16 == 0 for token_id in found):
        hint = "8 rows of 2**20 equally likely tokens, most of which can never be drawn: u needs more bits, say 53"
        raise Wrong(hint, expected="now and then a token id that 16 does not divide", got=found)


def distribution(function: Callable, name: str, places: list[tuple[int, ...]]) -> None:
    probs = [0.05, 0.0, 0.2, 0.4, 0.02, 0.08, 0.05]  # adds up to 0.8
    shares = [p / 0.8 for p in probs]
    counts = Counter(ask_draw(function, [probs] * 6000, make_many(SamplingParams(), places)))
    fit = compare(counts, shares)
    if fit.chance < 1e-5:
        hint = f"6,000 draws over {name}: chi-square {fit.chi_square:.0f} with {fit.freedom} degrees of freedom"
        # Where u goes beyond the row, one token was taken, whichever it is.
        if any(compare(counts, [p + 0.2 * (i == one) for i, p in enumerate(probs)]).chance > 1e-5 for one in range(7)):
            hint += "; the row adds up to 0.8, not to 1: walk to u times the row's sum"
        elif max(counts.values()) < 2400:
            hint += "; the likeliest token comes too rarely: a token's share of the line is its probability"
        raise Wrong(hint, expected=[round(6000 * p) for p in shares], got=[counts[i] for i in range(len(probs))])


def check_draw_generates(function: Callable, bench: Bench) -> None:
    """A model: the same tokens alone, in a batch, in a different order, and preempted; n=3 gives three texts"""
    _ = bench.model
    from chapters.ch08_sampling.checks_engine import generate_with_draw

    generate_with_draw(function, bench)


DRAW_CHECKS = (
    *cases(
        where_it_falls,
        {
            (
                "Only one possible token; tokens with probability 0; a row that does not add up to 1",
                "One number, one token",
            ): [([0.0, 0.0, 1.0, 0.0], {2}), ([0.0, 0.25, 0.0, 0.25, 0.0], {1, 3}), ([0.001, 0.0], {0})]
        },
    ),
    check_alone_and_together,
    *cases(
        differ,
        {
            "Seed, sample index and position each make a difference": [
                ("the position in the output", [(5, 0, position) for position in range(40)]),
                ("the sample index (n=40 would give the same text 40 times)", [(5, index) for index in range(40)]),
                ("the seed", [(seed,) for seed in range(40)]),
            ]
        },
    ),
    check_unrelated,
    *cases(
        differ,
        {
            "Requests without a seed of their own: the engine has given them one": [
                ("seq.seed, which is an int: seq.sampling_params.seed is None", [(None,)] * 40)
            ]
        },
    ),
    *cases(
        distribution,
        {
            (
                "6,000 draws are spread as they should be, over seeds and over positions",
                "Does it draw what it should?",
            ): [
                ("seeds", [(seed, 0, 0) for seed in range(6000)]),
                ("positions", [(seed, 0, position) for seed in range(10) for position in range(600)]),
            ]
        },
    ),
    check_draw_generates,
)


# -- allowed_tokens ---------------------------------------------------------------------------------------------------

EOS = 2  # of the checks without a model


def exact_allowed(choices: list[list[int]], generated: list[int], eos_token_id: int) -> set[int]:
    allowed = set()
    for choice in choices:
        if choice == generated:
            allowed.add(eos_token_id)
        elif choice[: len(generated)] == generated:
            allowed.add(choice[len(generated)])
    return allowed


def compare_choices(function: Callable, choices: list[list[int]], generated: list[int]) -> None:
    expected, at = exact_allowed(choices, generated, EOS), len(generated)
    got = set(ask_choices(function, choices, generated, EOS))
    if got == expected:
        return
    fitting = [choice for choice in choices if choice[:at] == generated]
    more, less = got - expected, expected - got
    if EOS in less:
        hint = "the output is a whole choice and may end: EOS is missing"
    elif EOS in more:
        hint = "EOS would end the output in the middle of a choice"
    elif got == {EOS}:
        hint = "a choice is complete here, but it is also the beginning of a longer one: the output may go on"
    elif more & {choice[at] for choice in choices if len(choice) > at}:
        hint = "one of these comes next in a choice that begins otherwise: compare everything that was generated"
    elif more & {token_id for choice in fitting for token_id in choice}:
        hint = "one of these is in a choice that fits, but does not come next in it: a token may occur twice"
    elif more:
        hint = "one of these is in no choice that fits"
    else:
        hint = "several choices begin like this, and the next token of each of them may come"
    raise Wrong(f"choices {choices}, generated {generated}: {hint}", expected=sorted(expected), got=sorted(got))


def walk(function: Callable, *choices: list[int]) -> None:
    """One sequence after the other, each token by token from its beginning."""
    for choice in choices:
        for num_generated in range(len(choice) + 1):
            compare_choices(function, [list(each) for each in choices], choice[:num_generated])


def random_choices(num: int) -> Iterator[list[list[int]]]:
    rng = random.Random(8)
    for _ in range(num):
        yield [[rng.choice((0, 1, 3, 4)) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 6))]


def check_choices_generate(function: Callable, bench: Bench) -> None:
    """A model gives one of the choices: greedy, sampled, with four samples of one request, next to other requests"""
    _ = bench.model
    from chapters.ch08_sampling.checks_engine import generate_with_choices

    generate_with_choices(function, bench)


CHOICE_CHECKS = (
    *cases(
        walk,
        {
            ("One choice: its tokens one by one, then EOS", MASK): [([7, 8, 9],)],
            ("Choices that begin alike, and choices that meet again", MASK): [
                ([7, 8, 9], [7, 8, 4], [3, 8, 5], [6, 1, 9, 4])
            ],
            ("One choice is the beginning of another: the output may end, or go on", MASK): [
                ([7], [7, 8], [7, 8, 9, 5], [3])
            ],
            ("A token twice in a choice, a choice twice, and token 0", MASK): [
                ([5, 6, 5, 7], [5, 5], [0, 5, 0, 0], [5, 5])
            ],
            ("100 random sets of choices", MASK): map(tuple, random_choices(100)),
        },
    ),
    check_choices_generate,
)

TASKS = [
    Task("keep_top_p", "Three ways to cut", nullcontext, TOP_P_CHECKS),
    Task("min_p_probs", "Three ways to cut", nullcontext, MIN_P_CHECKS),
    Task("draw", "Where the number comes from", nullcontext, DRAW_CHECKS),
    Task("allowed_tokens", "A mask is one more thing that happens to logits", nullcontext, CHOICE_CHECKS),
]
