"""Exam questions on chapters 9 and 10: tensor parallelism, the optimization stack."""

from dataclasses import replace
from decimal import Context, Decimal
from fractions import Fraction

from chapters.teaching.questions.bank import Draw, Question, asks, listed, model, table, text


@asks(9, "compute")
def two_ranks_by_hand(draw: Draw) -> Question:
    weight = [draw.numbers(4, -2, 3) for _ in range(2)]
    x = draw.until(lambda: draw.numbers(4, 1, 4), lambda found: len(set(found)) > 2)
    parts = [[sum(row[i] * x[i] for i in half) for row in weight] for half in (range(2), range(2, 4))]
    y = [a + b for a, b in zip(*parts, strict=True)]
    columns = weight[0], weight[1]
    single = [sum(w * v for w, v in zip(row, x, strict=True)) for row in columns]
    return Question(
        text(f"""
        A linear layer computes y = W x with the stored weight W = {weight} (two outputs, four inputs) and x = {x}. (a)
        It is row-parallel on 2 ranks: which numbers of W and of x does rank 0 have, and what does each rank compute?
        (b) What does the all-reduce do, and what is y? (c) If it were column-parallel instead, what would each rank
        compute, and from which part of x?
        """),
        f"(a) Rank 0 has {[row[:2] for row in weight]} and {x[:2]} and computes {parts[0]}; rank 1 computes "
        f"{parts[1]}. (b) It adds them: y = {y}. (c) Rank 0 computes [{single[0]}], rank 1 [{single[1]}], each from "
        "all of x.",
        (
            (2, "(a) the first two columns of the stored weight, the first two inputs; two partial sums"),
            (1, "(b) the sum of the partial sums, on every rank"),
            (2, "(c) each rank computes one finished output; it needs the whole of x"),
        ),
    )


@asks(9, "compute")
def memory_of_a_rank(draw: Draw) -> Question:
    ranks = draw.one_of([2, 4])
    layers, kv_heads, head_dim = draw.one_of([16, 24, 32]), draw.one_of([4, 8]), draw.one_of([64, 128])
    config, gigabytes = model(layers, 4 * kv_heads, kv_heads, head_dim), draw.number(2, 8)
    whole = config.kv_bytes_per_token(2)
    share = replace(config, num_key_value_heads=kv_heads // ranks).kv_bytes_per_token(2)
    tokens, alone = gigabytes * 10**9 // share, gigabytes * 10**9 // whole
    return Question(
        text(f"""
        A model has {layers} layers, {4 * kv_heads} query heads, {kv_heads} KV heads and a head size of {head_dim}. It
        runs in bf16 on {ranks} ranks, and each rank has {gigabytes} GB ({gigabytes} · 10^9 bytes) left for K and V.
        (a) How many bytes does one token take on one rank? (b) How many tokens does the group hold? (c) A colleague
        says: "There are {ranks} ranks, so it must be {ranks} times as many as in (b)." What is wrong with that?
        """),
        f"(a) {share:,} (b) {tokens:,} (c) Every token has a part of its K and V on each rank: all ranks hold the "
        f"same tokens. (a) already counts that each holds only a {'half' if ranks == 2 else 'quarter'}; one "
        f"device with all KV heads would hold {alone:,}.",
        (
            (2, f"(a) 2 · {layers} · {kv_heads} / {ranks} KV heads · {head_dim} · 2 bytes"),
            (1, f"(b) {gigabytes} · 10^9 / {share:,}"),
            (1, "(c) all ranks hold the same tokens, each rank different heads of them"),
        ),
    )


@asks(9, "explain", is_fixed=True)
def columns_before_rows(draw: Draw) -> Question:
    return Question(
        text("""
        In the MLP `gate_up_proj` is column-parallel and `down_proj` row-parallel. (a) Why is no message needed between
        the two? SiLU and a multiplication stand between them. (b) Somebody swaps the two kinds: first row-parallel,
        then column-parallel. Where are messages needed now, and how many numbers does each message carry for one token?
        """),
        text("""
        (a) A column-parallel layer gives each rank finished numbers of the result, those of its own outputs. SiLU and
        the product work on each number alone, and the row-parallel layer needs exactly these numbers as inputs. (b) The
        row-parallel layer leaves partial sums, and SiLU of a partial sum is wrong, so all outputs of gate and up (twice
        the intermediate size) need an all-reduce before SiLU. After the column-parallel layer each rank has a part of
        the outputs, which must be gathered: as many numbers as the hidden size. There are two messages, and the first
        is large.
        """),
        (
            (2, "(a) finished numbers, elementwise operations, the same numbers as inputs"),
            (2, "(b) before SiLU, because it is not linear; twice the intermediate size"),
            (1, "(b) after the second layer, hidden size"),
        ),
    )


@asks(10, "trace")
def softmax_in_two_tiles(draw: Draw) -> Question:
    scores = draw.until(
        lambda: draw.numbers(4, 0, 5), lambda s: max(s[2:]) - max(s[:2]) in (1, 2) and s[0] != s[1] and s[2] != s[3]
    )
    values = draw.numbers(4, 1, 6)
    states, top, total, mix = [], -99, Fraction(0), Fraction(0)
    for at in (0, 2):
        new_top = max(top, *scores[at : at + 2])
        factor = Fraction(2) ** (top - new_top) if at else Fraction(0)
        shares = [Fraction(2) ** (score - new_top) for score in scores[at : at + 2]]
        total = total * factor + sum(shares)
        mix = mix * factor + sum(s * v for s, v in zip(shares, values[at : at + 2], strict=True))
        top = new_top
        states.append((top, total, mix))
    rows = [[f"after tile {n}", *map(str, state)] for n, state in enumerate(states, 1)]
    return Question(
        text(f"""
        One query meets four keys with the scores {listed(scores)}; the values are {listed(values)}. They come in two
        tiles of two keys. To make this easy by hand, use 2 instead of e everywhere. Write down the running maximum, the
        sum and the weighted sum after each tile (as fractions), and the output.
        """),
        f"{table(['', 'maximum', 'sum', 'weighted sum'], rows)}\n\nOutput: {mix / total}",
        (
            (2, "after tile 1: powers 2^(score - maximum), their sum, and their sum with the values"),
            (1, f"the factor 2^({states[0][0]} - {states[1][0]}) for both sums, because the maximum has moved"),
            (1, "after tile 2: what this tile adds"),
            (1, "the output: weighted sum / sum"),
        ),
    )


@asks(10, "compute")
def three_digits(draw: Draw) -> Question:
    context = Context(prec=3, rounding="ROUND_HALF_EVEN")

    def sums(numbers: list[Decimal]) -> list[Decimal]:
        a, b, c, d = numbers
        one_by_one = context.add(context.add(context.add(a, b), c), d)
        return [one_by_one, context.add(context.add(a, b), context.add(c, d))]

    def make() -> list[Decimal]:
        small = [Decimal(draw.number(11, 49)) / 100 for _ in range(3)]
        return [Decimal(draw.number(101, 989)) / 10, *small]

    def is_good(numbers: list[Decimal]) -> bool:
        exact = numbers[0] + numbers[1]
        ties = [exact, sums(numbers)[0] + numbers[3], numbers[2] + numbers[3] + context.add(*numbers[:2])]
        steps = [exact, context.add(*numbers[:2]) + numbers[2], *ties]
        return len(set(sums(numbers))) == 2 and all(s * 1000 % 100 != 50 for s in steps) and sum(numbers) < 100

    numbers = draw.until(make, is_good)
    found = sums(numbers)
    return Question(
        text(f"""
        A machine keeps three significant decimal digits: it rounds after every addition (23.46 becomes 23.5). It adds
        {listed(numbers)}. (a) What does it get if it adds one number after the other, from left to right? (b) What does
        it get as (first + second) + (third + fourth)? (c) In some engine the number of requests in a step decides how a
        row's sum is split. What may users see if they send the same request twice at temperature 0?
        """),
        f"(a) {found[0]} (b) {found[1]} (c) Now and then a different answer: the last bits of the logits depend on "
        "which other requests were there. If two tokens are nearly equal, the other one may be taken, and from there "
        "on the texts differ.",
        (
            (2, f"(a) rounded after each addition: {found[0]}"),
            (1, f"(b) {found[1]}"),
            (1, "(c) the answer depends on the other requests in the step"),
        ),
    )


@asks(10, "explain", is_fixed=True)
def rows_that_pad(draw: Draw) -> Question:
    return Question(
        text("""
        A CUDA graph was recorded for 8 rows, and 6 sequences decode. (a) Why does the engine compute two extra rows
        instead of running the graph with 6? (b) A colleague gives the two extra rows the slot 0 in `slot_mapping`.
        Which requests does that harm, and when does anybody notice? (c) What does this engine write there?
        """),
        text("""
        (a) A graph replays recorded launches: their sizes and addresses are fixed. A different number of rows would
        need another recording. (b) The padding's K and V go into slot 0, which is the first slot of block 0: every
        sequence with that block in its table reads nonsense from then on, and if the block has a hash, so does every
        request that finds it later. No error is raised; answers become wrong. (c) -1: this row writes nothing.
        """),
        (
            (1, "(a) shapes and addresses are fixed when it is recorded"),
            (2, "(b) the owners of block 0, 1; silently, through wrong answers, 1"),
            (1, "(c) -1"),
        ),
    )
