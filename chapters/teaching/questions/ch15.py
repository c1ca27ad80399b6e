"""Exam questions on chapter 15: adapters."""

from types import SimpleNamespace
from typing import Any

from chapters.teaching.questions.bank import (
    Draw,
    Question,
    Step,
    asks,
    listed,
    model,
    play,
    request,
    scheduler,
    table,
    text,
)
from nanovllm.features.lora.registry import KnownAdapters


@asks(15, "trace")
def who_runs_beside_whom(draw: Draw) -> Question:
    adapters = [1, 2, 1, 3, 2]

    config: Any = SimpleNamespace(max_loras=2)  # all that is asked of it
    may_run = KnownAdapters(model(1, 1, 1, 1), config).may_run

    def make() -> tuple[list[int], list[int | None], list[Step]]:
        order: list[int | None] = [*draw.some(adapters, 5)]
        order[draw.number(1, 4)] = None
        counts = draw.numbers(5, 2, 4)
        seqs = {n: request(4, m, lora_id=a) for n, m, a in zip("ABCDE", counts, order, strict=True)}
        return counts, order, play(scheduler(64, 4, 256, max_num_seqs=4, may_run=may_run), seqs)

    def is_good(made: tuple[list[int], list[int | None], list[Step]]) -> bool:
        _, order, steps = made
        stopped = len(steps[0].num_tokens)
        return len({*order} - {None}) == 3 and 1 < stopped < 4 and order[-1] in (order[0], order[1]) and len(steps) < 8

    counts, order, steps = draw.until(make, is_good)
    present = [dict.fromkeys(step.num_tokens, "x") for step in steps]
    rows = [[n, *(row.get(name, "") for name in "ABCDE")] for n, row in enumerate(present, 1)]
    asked = table(
        ["request", "adapter", "`max_tokens`"], zip("ABCDE", [a or "none" for a in order], counts, strict=True)
    )
    blocked = "ABCDE"[len(steps[0].num_tokens)]
    return Question(
        text(
            """
        `max_loras` is 2 and there are 4 seats; blocks and budget are large enough. Five requests arrive together, with
        short prompts:

        {asked}

        (a) Which requests are in each step? Write a table with a row for each step, and mark the requests in it. (b)
        Which request stops admission in step 1, and why is no later one admitted?
        """,
            asked=asked,
        ),
        f"(a)\n\n{table(['step', *'ABCDE'], rows)}\n\n(b) {blocked} would need a third adapter. Later requests "
        "may not pass it, or it could wait forever while others with loaded adapters keep coming.",
        (
            (2, "(a) a request takes part in as many steps as it has `max_tokens`"),
            (2, f"(a) {blocked} comes in when an adapter is no longer needed"),
            (1, "(b) no overtaking, so nobody starves"),
        ),
    )


@asks(15, "trace")
def names_under_adapters(draw: Draw) -> Question:
    size, length = 4, draw.number(9, 15)
    kinds = [(None, None), (1, None), (None, "s")]
    order = draw.until(
        lambda: [draw.one_of(kinds) for _ in range(5)], lambda found: len({*found}) == 3 and found[0] != found[1]
    )
    engine, counts = scheduler(64, size, 64, caching=True), []
    for adapter, salt in order:
        seq = request(length, 1, lora_id=adapter, cache_salt=salt)
        play(engine, {"A": seq})
        counts.append(seq.num_cached_tokens)
    rows = [[n, adapter or "none", salt or "none"] for n, (adapter, salt) in enumerate(order, 1)]
    return Question(
        text(
            f"""
        Five requests come one after another, each with the same prompt of {length} tokens; blocks hold {size} tokens:

        {{rows}}

        (a) How many tokens of each are found in the cache? (b) How many hashes are in `hash_to_block` afterwards? (c) A
        salt goes only into the hash of the first block, an adapter's id into the hashes of all blocks. Why is a salt in
        the first block enough to keep all blocks apart?
        """,
            rows=table(["request", "adapter", "salt"], rows),
        ),
        f"(a) {listed(counts)} (b) {len(engine.block_manager.hash_to_block)} (c) Each hash includes its parent's "
        "hash, so different first blocks have different descendants.",
        (
            (2, "(a) a request finds what another one with the same adapter and the same salt has computed"),
            (1, f"(b) 3 kinds of requests, {length // size} full blocks each"),
            (1, "(c) hashes form a chain"),
        ),
    )


@asks(15, "compute")
def an_adapter_by_hand(draw: Draw) -> Question:
    weight, x = [draw.numbers(3, -1, 3) for _ in range(2)], draw.numbers(3, 1, 3)
    a, b, scale = draw.numbers(3, 0, 2), draw.numbers(2, 1, 3), draw.one_of([2, 3])
    base = [sum(w * v for w, v in zip(row, x, strict=True)) for row in weight]
    inner = sum(p * v for p, v in zip(a, x, strict=True))
    y = [number + scale * factor * inner for number, factor in zip(base, b, strict=True)]
    size, rank = draw.one_of([512, 1024, 2048]), draw.one_of([4, 8, 16])
    return Question(
        text(f"""
        A layer has W = {weight}. An adapter of rank 1 has A = [{a}], B = {[[n] for n in b]} and the scale {scale}. (a)
        Compute y for the row x = {x} with the adapter, without building the matrix B A. (b) For a layer with {size}
        inputs and {size} outputs, how many multiplications does one row take for W x, and how many more for an adapter
        of rank {rank}? (c) Eight requests use eight adapters. Why is it bad to add each adapter to a copy of W
        beforehand?
        """),
        f"(a) {y} (b) {size**2:,}, and {2 * size * rank:,} more. (c) There would be eight matrices to keep and to "
        "read in every step; kept separate, W is read once for all rows.",
        (
            (2, f"(a) W x = {base}, A x = {inner}, then {scale} · B · {inner} is added"),
            (2, f"(b) {size} · {size}, and {rank} · ({size} + {size})"),
            (1, "(c) memory, or bytes read in a step"),
        ),
    )
