"""Exam questions on chapter 17: experts."""

from fractions import Fraction

from chapters.ch17_experts.chance import expected_met
from chapters.teaching.questions.bank import Draw, Question, asks, listed, table, text


@asks(17, "trace")
def rows_sorted_by_expert(draw: Draw) -> Question:
    num_experts = 6

    def make() -> list[list[int]]:
        return [draw.some(range(num_experts), 2) for _ in range(4)]

    chosen = draw.until(make, lambda c: 4 <= len({e for row in c for e in row}) <= 5)
    weights = [draw.one_of([(0.3, 0.1), (0.4, 0.2), (0.45, 0.15), (0.5, 0.3), (0.3, 0.2)]) for _ in chosen]
    groups = {e: [row for row, experts in enumerate(chosen) if e in experts] for e in range(num_experts)}
    met = {e: rows for e, rows in groups.items() if rows}
    shares = [[Fraction(str(p)) / sum(map(Fraction, map(str, pair))) for p in pair] for pair in weights]
    rows = [[n, *experts, *pair] for n, (experts, pair) in enumerate(zip(chosen, weights, strict=True))]
    pairs = "; ".join(f"expert {e}: {'row' if len(r) == 1 else 'rows'} {listed(r)}" for e, r in met.items())
    return Question(
        text(
            f"""
        A layer has {num_experts} experts, numbered from 0, and each row of a step goes to two of them. These are the
        router's choices and probabilities:

        {{rows}}

        (a) Sort the pairs of row and expert by expert: which rows does each expert compute? (b) How many experts'
        weights are read, and how many products of a row with an expert are there? (c) The two weights of a row are
        scaled to add up to 1. What are they for row 0 (as fractions)? (d) With 256 rows, how many experts are read?
        """,
            rows=table(["row", "first choice", "second choice", "probability of the first", "of the second"], rows),
        ),
        f"(a) {pairs} (b) {len(met)} and {2 * len(chosen)} (c) {listed(shares[0])} (d) Almost certainly all "
        f"{num_experts} are read, once each.",
        (
            (2, "(a) all pairs, sorted"),
            (1, f"(b) {len(met)} different experts; each row has two"),
            (1, "(c) each divided by their sum"),
            (1, "(d) no more than there are"),
        ),
    )


@asks(17, "compute")
def experts_met_by_chance(draw: Draw) -> Question:
    num_experts, num_chosen = draw.one_of([(8, 2), (16, 4), (12, 3), (16, 8), (8, 4), (10, 2), (20, 4)])
    num_rows, megabytes = draw.number(2, 3), draw.one_of([5, 10, 20])
    met = expected_met(num_rows, num_experts, num_chosen)
    left = Fraction(num_experts - num_chosen, num_experts)
    return Question(
        text(f"""
        A layer has {num_experts} experts of {megabytes} MB each, and a row goes to {num_chosen} of them, at random. (a)
        What is the probability that none of {num_rows} rows goes to a given expert? (b) What is the expected number of
        different experts for {num_rows} rows (as a decimal number), and how many MB is that? (c) A draft token of
        chapter 13 is one more row in a step. Why does it cost more here than in a model without experts?
        """),
        f"(a) {left**num_rows} (b) {met:g}, {met * megabytes:g} MB (c) It may need additional experts, whose "
        "weights must be read; without experts it uses weights that are read anyway.",
        (
            (1, f"(a) ({left})^{num_rows}"),
            (2, f"(b) {num_experts} · (1 - {left**num_rows}) = {met:g}"),
            (1, "(c) more experts are read"),
        ),
    )


@asks(17, "explain", is_fixed=True)
def whole_experts_or_slices(draw: Draw) -> Question:
    return Question(
        text("""
        Four devices share a layer of 64 experts. Each device can have 16 whole experts, or a quarter (a slice of the
        inner dimension) of every expert. (a) What does a device wait for in each case when a step's rows choose the
        same few experts? (b) Name one advantage of whole experts. (c) With whole experts, one device happens to have
        the popular ones. What can be done about that while the model is served, without training it again?
        """),
        text("""
        (a) With whole experts, the other devices wait for the one whose experts are popular, because it has most of the
        rows. With slices, all devices have the same work and wait only for the all-reduce. (b) Products stay large, and
        a device reads an expert's weights as a whole; or: rows go only to the devices of their experts, instead of to
        all. (c) Put copies of popular experts on several devices, or place popular and rare experts together, based on
        statistics of real requests.
        """),
        ((2, "(a) one each"), (1, "(b) an advantage"), (1, "(c) copies or another placement")),
    )
