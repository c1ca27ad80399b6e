"""Exam questions on chapter 13: guess and check."""

from chapters.ch13_guess_and_check.solution import share_guesses
from chapters.teaching.questions.bank import Draw, Question, asks, listed, request, scheduler, table, text
from nanovllm.features.speculation.ngrams import NgramIndex


@asks(13, "trace")
def drafts_from_the_text(draw: Draw) -> Question:
    a, b, c, d, e, f = draw.some(range(1, 10), 6)  # c a b comes first, and a b once more after it
    between = draw.one_of([[f], [f, e], []])
    tokens = [*draw.one_of([[], [e], [f, d]]), c, a, b, d, *between, a, b, e, *draw.one_of([[f], []]), c, a, b]

    def proposed(tokens: list[int], longest: int = 3) -> list[int]:
        return NgramIndex(range(longest, 1, -1)).propose(tokens, 4)

    two = proposed(tokens, 2)
    return Question(
        text(f"""
        A text has the tokens {", ".join(map(str, tokens))} so far. The n-gram proposer looks for the text's last tokens
        earlier in the text: first for the last three, then for the last two; among several places it takes the newest.
        It should propose four draft tokens. (a) Which are they? (b) Which would it propose if it looked only for the
        last two?
        """),
        f"(a) {proposed(tokens)} (b) {two}",
        (
            (2, f"(a) what followed {tokens[-3:]} earlier, and so on from there"),
            (2, f"(b) what followed {tokens[-2:]} last"),
        ),
    )


@asks(13, "trace")
def what_the_check_keeps(draw: Draw) -> Question:
    draft = draw.some(range(10, 40), 4)
    num_accepted, num_known = draw.number(1, 3), draw.number(9, 20)
    rows = [*draft[:num_accepted], *draw.some(range(50, 99), 5 - num_accepted)]
    engine = scheduler(16, 4, 64, caching=True)
    seq = request(num_known, 40)
    engine.add(seq)
    engine.update(engine.schedule(), [[7]])
    start = len(seq.tokens) - 1
    engine.update(engine.schedule({seq.seq_id: draft}), [rows])
    engine.check_integrity()
    new = seq.tokens[start + 1 :]
    return Question(
        text(f"""
        A sequence has {start + 1} tokens, and the K and V of all but the last are in the cache. A step computes this
        last token and the four draft tokens {draft}. The tokens {rows} are sampled from its five rows. (a) Which tokens
        does the sequence get? (b) For how many of its tokens does the cache then hold the right K and V? (c) What
        happens to the K and V that were written for the rejected draft tokens?
        """),
        f"(a) {new} (b) {seq.num_computed_tokens} (c) They stay in their slots until the next steps overwrite "
        "these slots with the tokens that came instead; they are never registered.",
        (
            (
                2,
                f"(a) {num_accepted} {'draft token is' if num_accepted == 1 else 'draft tokens are'} accepted, and "
                "the row after gives one more",
            ),
            (1, f"(b) {start} + 1 + {num_accepted}"),
            (1, "(c) they are overwritten"),
        ),
    )


@asks(13, "decide")
def whose_draft_tokens_to_check(draw: Draw) -> Question:
    def make() -> tuple[list[float], list[int], list[int]]:
        first = draw.number(10, 14)
        steps = [first]
        for _ in range(3):
            steps.append(steps[-1] + draw.number(1, 6))
        return [draw.one_of([0.5, 0.6, 0.8, 0.9]), draw.one_of([0.2, 0.3, 0.4])], [2, 2], steps

    def rates(made: tuple[list[float], list[int], list[int]]) -> list[float]:
        chances = sorted((a**j for a in made[0] for j in (1, 2)), reverse=True)
        return [1e3 * (2 + sum(chances[:num])) / ms for num, ms in enumerate(made[2])]

    def is_good(made: tuple[list[float], list[int], list[int]]) -> bool:
        found = sorted(rates(made), reverse=True)
        chances = [a**j for a in made[0] for j in (1, 2)]
        return found[0] - found[1] > 1 and rates(made).index(found[0]) in (1, 2) and len({*chances}) == 4

    made = draw.until(make, is_good)
    chances, limits, steps = made
    shares = share_guesses(chances, limits, [ms / 1e3 for ms in steps])
    shown = table(
        ["draft tokens in all", "step", "tokens a second"],
        ([n, f"{ms} ms", f"{r:.0f}"] for n, (ms, r) in enumerate(zip(steps, rates(made), strict=True))),
    )
    return Question(
        text(f"""
        Two sequences decode. A draft token of the first is accepted with probability {chances[0]}, one of the second
        with {chances[1]}, if those before it are. Each may have at most two draft tokens. A step takes
        {listed(f"{ms} ms" for ms in steps)} with 0, 1, 2 and 3 draft tokens in all. How many should each sequence get,
        so that the engine generates as many tokens per second as possible?
        """),
        f"{shares[0]} and {shares[1]}.\n\n{shown}",
        (
            (1, "a draft token adds the probability that it and all before it are accepted: a, then a²"),
            (2, "the best chances first, and the tokens per second for each number of draft tokens"),
            (1, f"the largest: {sum(shares)} in all, {shares[0]} and {shares[1]}"),
        ),
    )
