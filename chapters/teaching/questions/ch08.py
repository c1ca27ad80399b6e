"""Exam questions on chapter 8: sampling."""

import math
from fractions import Fraction

from chapters.ch08_sampling.solution import allowed_tokens
from chapters.ch08_sampling.theory import reshape
from chapters.teaching.questions import faulty
from chapters.teaching.questions.bank import Draw, Question, asks, code_of, listed, table, text
from nanovllm.sampling_params import SamplingParams


@asks(8, "compute")
def a_colder_distribution(draw: Draw) -> Question:
    weights = draw.until(lambda: sorted(draw.some(range(1, 8), 3), reverse=True), lambda w: math.gcd(*w) == 1)
    cold = reshape([math.log(w) for w in weights], SamplingParams(temperature=0.5)).after
    shares = [Fraction(p).limit_denominator(200) for p in cold]
    total = sum(weights)
    return Question(
        text(f"""
        At temperature 1 the tokens A, B and C have the probabilities {listed(f"{w}/{total}" for w in weights)}. What
        are their probabilities, as fractions, at temperature 0.5? What do the probabilities become when the temperature
        goes to 0, and what when it becomes very large?
        """),
        f"{listed(shares)} at 0.5. Towards 0: 1, 0 and 0. Very large: a third each.",
        (
            (1, "dividing the logits by 0.5 squares the probabilities, which are then scaled to add up to 1 again"),
            (2, f"{listed(f'{w}² = {w * w}' for w in weights)}, each divided by {sum(w * w for w in weights)}"),
            (1, "at 0 the likeliest gets everything; at a very large temperature all get the same"),
        ),
    )


@asks(8, "trace")
def filter_after_filter(draw: Draw) -> Question:
    def make() -> tuple[list[int], float, int, float]:
        cuts = sorted(draw.some(range(4, 100, 2), 5))
        percents = sorted((b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)), reverse=True)
        return percents, draw.one_of([0.1, 0.2, 0.25]), draw.number(3, 4), draw.one_of([0.7, 0.8, 0.9])

    def left(made: tuple[list[int], float, int, float]) -> list[int]:
        percents, min_p, top_k, top_p = made
        steps = [{"min_p": min_p}, {"min_p": min_p, "top_k": top_k}, {"min_p": min_p, "top_k": top_k, "top_p": top_p}]
        logits = [math.log(p) for p in percents]
        return [reshape(logits, SamplingParams(temperature=1.0, **step)).num_left for step in steps]  # pyrefly: ignore[bad-argument-type]

    def is_good(made: tuple[list[int], float, int, float]) -> bool:
        percents, min_p, top_k, top_p = made
        if len({*percents}) < 6:
            return False
        counts, kept = left(made), sum(percents[: min(top_k, left(made)[0])])
        sums = [sum(percents[:n]) for n in range(1, 6)]
        apart = all(abs(p - min_p * percents[0]) > 0.5 for p in percents) and all(
            abs(s - top_p * kept) > 1 for s in sums
        )
        return 6 > counts[0] > counts[1] > counts[2] > 1 and apart

    made = draw.until(make, is_good)
    percents, min_p, top_k, top_p = made
    counts = left(made)
    names, kept = "ABCDEF", sum(percents[: counts[1]])
    return Question(
        text(
            f"""
        At temperature 1 six tokens have these probabilities:

        {{shown}}

        A request has `min_p={min_p}`, `top_k={top_k}` and `top_p={top_p}`. Say which tokens are left after each of the
        three, in the order in which the sampler applies them, and with what probability A is drawn (as a fraction).
        """,
            shown=table(names, [[p / 100 for p in percents]]),
        ),
        f"After min_p {listed(names[: counts[0]])}; after top_k {listed(names[: counts[1]])}; after top_p "
        f"{listed(names[: counts[2]])}. A: {Fraction(percents[0], sum(percents[: counts[2]]))}",
        (
            (1, f"min_p: at least {min_p} · {percents[0] / 100} = {min_p * percents[0] / 100:.4g}"),
            (1, f"top_k: the {top_k} likeliest"),
            (2, f"top_p: until the sum is at least {top_p} of the {kept / 100:g} that are left"),
            (1, f"{percents[0]} of {sum(percents[: counts[2]])}"),
        ),
    )


@asks(8, "fault")
def nucleus_without_its_edge(draw: Draw) -> Question:
    def make() -> tuple[list[int], int]:
        cuts = sorted(draw.some(range(5, 100, 5), 3))
        percents = sorted((b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)), reverse=True)
        return percents, draw.one_of([60, 70, 80, 90])

    def is_good(made: tuple[list[int], int]) -> bool:
        percents, top_p = made
        return len(set(percents)) == 4 and top_p not in (sum(percents[:n]) for n in range(5)) and percents[0] < top_p

    percents, top_p = draw.until(make, is_good)
    probs = [p / 100 for p in percents]
    found = faulty.keep_top_p(probs, top_p / 100)
    right = reshape([math.log(p) for p in probs], SamplingParams(temperature=1.0, top_p=top_p / 100)).num_left
    low = draw.number(1, (percents[0] - 1) // 10) / 10
    return Question(
        text(
            f"""
        This function should keep the smallest set of likeliest tokens whose probabilities add up to at least `top_p`:

        {{code}}

        (a) What does it return for the probabilities {listed(probs)} with `top_p={top_p / 100}`, and what should it
        return? (b) What does it return with `top_p={low}`, and what happens to a request then? (c) Correct it: which
        two steps must change places?
        """,
            code=code_of(faulty.keep_top_p),
        ),
        f"(a) It returns {found}, and should return {probs[:right]}. (b) `{faulty.keep_top_p(probs, low)}`: no token "
        "is left to be drawn. (c) A token must be kept before the sum is compared, so the one that crosses `top_p` "
        "belongs to the set: append first, then break if `mass >= top_p`.",
        (
            (2, "(a) the token with which the sum reaches `top_p` is missing"),
            (1, "(b) the likeliest token alone exceeds it, nothing is left"),
            (1, "(c) append, then compare"),
        ),
    )


@asks(8, "trace")
def what_a_choice_allows(draw: Draw) -> Question:
    a, b, c, d, e = draw.some(range(10, 60), 5)
    choices = [[a, b], [a, c, d], [e, b], [a, c, b, d]]
    eos = 2
    states = [[], [a], [a, c], [a, c, d]]
    found = [sorted(set(allowed_tokens(choices, state, eos))) for state in states]
    return Question(
        text(f"""
        An answer must be one of four texts; as tokens they are {listed(f"`{choice}`" for choice in choices)}. EOS is
        {eos}, and an answer ends with it. Which tokens does the mask allow when the answer so far is {
            listed(f"`{s}`" for s in states)
        }? Why is {b} not allowed as the first token, although three of the four texts contain it?
        """),
        "; ".join(f"`{state}`: {listed(tokens)}" for state, tokens in zip(states, found, strict=True))
        + ". The mask allows only what continues the answer so far, and no text begins with this token.",
        (
            (1, "empty: the first tokens, each once"),
            (2, "then the next token of every text that begins with the answer so far"),
            (1, f"`{states[3]}` is complete and begins no longer text: only EOS"),
            (1, f"{b} occurs only in second place or later"),
        ),
    )
