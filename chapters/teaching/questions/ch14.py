"""Exam questions on chapter 14: many users."""

from fractions import Fraction

from chapters.ch14_many_users.overload import State
from chapters.ch14_many_users.solution import SHARE_OF_DEADLINE, admit
from chapters.teaching.questions.bank import Draw, Question, asks, listed, table, text
from nanovllm.features.cache_reports.events import MEDIUM_GPU, BlockStored
from nanovllm.serving.routing import Announced, soonest


@asks(14, "decide")
def which_replica(draw: Draw) -> Question:
    size, num_blocks = 64, draw.number(8, 14)
    announced = Announced(size)
    block_hashes = announced.block_hashes_of(range(num_blocks * size))

    def costs(made: tuple[list[int], list[int]]) -> list[int]:
        return [load + size * (num_blocks - found) for load, found in zip(*made, strict=True)]

    def make() -> tuple[list[int], list[int]]:
        return [20 * n for n in draw.some(range(2, 50), 3)], draw.some(range(0, num_blocks - 1), 3)

    made = draw.until(
        make,
        lambda m: (
            len({*costs(m)}) == 3
            and costs(m).index(min(costs(m))) not in (m[0].index(min(m[0])), m[1].index(max(m[1])))
        ),
    )
    loads, found = made
    for engine, num in enumerate(found):
        stored = BlockStored(block_hashes[:num], None, [], size, None, MEDIUM_GPU, None)
        announced.take(engine, [stored])
    chosen = soonest(block_hashes, dict(enumerate(loads)), announced)
    least, most = loads.index(min(loads)), found.index(max(found))
    rows = [[n, load, blocks] for n, (load, blocks) in enumerate(zip(loads, found, strict=True))]
    return Question(
        text(
            f"""
        A prompt has {num_blocks} full blocks of {size} tokens. There are three replicas:

        {{rows}}

        (a) To which replica does the prompt go if the least loaded one gets it, and to which one if the replica with
        most of its blocks gets it? (b) On which replica must the fewest tokens be computed before the prompt's first
        output token? Show the numbers.
        """,
            rows=table(
                ["replica", "tokens it still has to compute", "how many of the prompt's first blocks it has"], rows
            ),
        ),
        f"(a) {least}; {most} (b) {chosen}: {listed(costs(made))} tokens on replicas 0, 1 and 2.",
        ((1, "(a) both"), (2, f"(b) load + {size} · missing blocks, for each"), (1, f"(b) replica {chosen}")),
    )


@asks(14, "compute")
def a_wait_at_the_counter(draw: Draw) -> Question:
    short, long = draw.one_of([(1, 3), (2, 4), (1, 5), (2, 6)])
    mean, square = Fraction(short + long, 2), Fraction(short**2 + long**2, 2)
    busy = draw.one_of([Fraction(1, 2), Fraction(3, 4), Fraction(4, 5)])
    rate = busy / mean
    wait, alike = rate * square / (2 * (1 - busy)), rate * mean**2 / (2 * (1 - busy))
    return Question(
        text(f"""
        Customers come to one counter at random, {rate} a second on average. Half of them need {short} s, the others
        {long} s. (a) What share of the time is the counter busy? (b) How long is the mean wait, by λ E[S²] / (2 (1 -
        ρ))? (c) How long would it be if all needed {mean} s? (d) What does comparing (b) with (c) say about long
        prompts in a server?
        """),
        f"(a) {float(busy):.0%} (b) {float(wait):.2f} s (c) {float(alike):.2f} s (d) With the same load the wait is "
        "longer if requests need different amounts of work: a few long prompts make all others wait.",
        (
            (1, f"(a) {rate} · {mean}"),
            (2, f"(b) E[S²] = ({short}² + {long}²) / 2 = {square}"),
            (1, f"(c) E[S²] = {mean}² = {mean**2}"),
            (1, "(d) it is the squares that count, not the mean"),
        ),
    )


@asks(14, "decide")
def whom_the_gate_lets_in(draw: Draw) -> Question:
    seats, rate = draw.one_of([8, 16, 32]), draw.one_of([2, 4, 5])
    deadline = draw.one_of([4, 6, 8])
    limit = int(SHARE_OF_DEADLINE * deadline * rate)
    states = [
        State(0, seats - draw.number(1, 5), seats, draw.number(20, 60), draw.number(5, 15), rate),
        State(limit - draw.number(2, 3), seats, seats, draw.number(20, 60), 8, rate),
        State(limit + draw.number(1, 6), seats, seats, draw.number(20, 60), 8, rate),
        State(0, seats - 2, seats, draw.number(1, 4), draw.number(6, 12), 0),
    ]
    rows = [
        [n, s.num_waiting, s.num_running, s.num_free_blocks, s.num_blocks_needed, s.requests_per_s]
        for n, s in zip("ABCD", states, strict=True)
    ]
    said = ["in" if admit(state, deadline) else "refused" for state in states]
    heads = ["", "waiting", "running", "free blocks", "blocks it needs", "requests a second"]
    return Question(
        text(
            f"""
        An engine has {seats} seats, and the deadline for a first token is {deadline} s. A gate lets a request in at
        once if nobody is waiting and there are a seat and enough blocks for it. Otherwise the gate lets it in if the
        estimated wait for a seat, (waiting + 1) / (requests a second), is at most {SHARE_OF_DEADLINE} of the deadline;
        as long as the queue has never moved (0 requests a second), it lets it in if fewer requests wait than there are
        seats. These are four moments:

        {{rows}}

        (a) Which requests are let in, and which are refused? (b) Why is the limit {SHARE_OF_DEADLINE} of the deadline,
        and not all of it? (c) Why can it be better for the users to refuse somebody?
        """,
            rows=table(heads, rows),
        ),
        f"(a) {listed(f'{n} {s}' for n, s in zip('ABCD', said, strict=True))} (b) After the wait for a seat the "
        "prompt must be computed, and the rate is only an estimate. (c) A request that is too late anyway takes time "
        "from later ones, which then are too late as well. A short queue keeps the others in time, and a user who is "
        "refused can go elsewhere at once.",
        (
            (
                2,
                f"(a) half a point each; the limit is {SHARE_OF_DEADLINE} · {deadline} s · {rate} = "
                f"{SHARE_OF_DEADLINE * deadline * rate:g} requests",
            ),
            (1, "(b) the prompt's own time, or errors of the estimate"),
            (1, "(c) work for answers that come too late helps nobody"),
        ),
    )
