"""Exam questions on chapter 1: tokens and attention."""

import math

from chapters.ch08_sampling.theory import softmax
from chapters.teaching.questions import faulty
from chapters.teaching.questions.bank import (
    Draw,
    Question,
    asks,
    code_of,
    listed,
    model,
    play,
    request,
    scheduler,
    table,
    text,
)


@asks(1, "compute")
def forgetful_loop(draw: Draw) -> Question:
    num_prompt, num_answer = draw.number(5, 9), draw.number(4, 6)

    def num_sent(length: int, max_tokens: int) -> int:
        return sum(
            sum(step.num_tokens.values()) for step in play(scheduler(8, 8, 64), {"A": request(length, max_tokens)})
        )

    engine, loop = num_sent(num_prompt, num_answer), sum(num_sent(num_prompt + i, 1) for i in range(num_answer))
    return Question(
        text(f"""
        A prompt has {num_prompt} tokens, and {num_answer} tokens are generated. One program sends the whole text so far
        through the model in every step. The other program is the engine, which keeps keys and values. How many tokens
        does each of them send through the model in all steps together?
        """),
        f"The loop sends {loop} tokens, the engine {engine}.",
        (
            (2, f"the loop: {' + '.join(str(num_prompt + i) for i in range(num_answer))} = {loop}"),
            (
                2,
                f"the engine: {num_prompt} in the first step, then one in each of {num_answer - 1} further steps; "
                "the last generated token is not sent",
            ),
        ),
    )


@asks(1, "compute")
def attention_on_paper(draw: Draw) -> Question:
    rough = {0: 1.0, 1: 2.72, 2: 7.39}

    def make() -> tuple[list[int], list[list[int]], list[int]]:
        return draw.numbers(4, 0, 2), [draw.numbers(4, 0, 2) for _ in range(3)], draw.some(range(1, 10), 3)

    def scores_of(q: list[int], keys: list[list[int]]) -> list[float]:
        return [sum(a * b for a, b in zip(q, key, strict=True)) / math.sqrt(len(q)) for key in keys]

    def is_good(made: tuple[list[int], list[list[int]], list[int]]) -> bool:
        scores = scores_of(*made[:2])
        if len(set(scores)) < 2 or not all(score in rough for score in scores):
            return False
        by_hand = [rough[int(score)] for score in scores]
        shares = [share / sum(by_hand) for share in by_hand]
        far = all(abs(share * 100 % 1 - 0.5) > 0.1 for share in shares)  # the rounding is clear
        percents = [round(share * 100) for share in shares]
        mix = sum(share * value for share, value in zip(softmax(scores), made[2], strict=True))
        mix_of_percents = sum(percent * value for percent, value in zip(percents, made[2], strict=True))
        is_same = abs(mix_of_percents - 100 * round(mix, 1)) < 4.5  # rounded weights lead to the same decimal
        return far and sum(percents) == 100 and is_same and abs(mix * 10 % 1 - 0.5) > 0.2

    q, keys, values = draw.until(make, is_good)
    weights = softmax(scores_of(q, keys))
    mix = sum(weight * value for weight, value in zip(weights, values, strict=True))
    shown = listed(f"{weight:.2f}" for weight in weights)
    return Question(
        text(
            f"""
        A head has keys of four numbers; here its values have one number each. The last of three tokens has the query q
        = {q}. It may look at all three tokens:

        {{rows}}

        Compute the three attention weights to two decimals, and the head's output to one. (e^0 = 1, e^1 = 2.72, e^2 =
        7.39)
        """,
            rows=table(["token", "key", "value"], zip("123", keys, values, strict=True)),
        ),
        f"The weights are {shown}, the output is {mix:.1f}.",
        (
            (
                2,
                f"the scaled scores {listed(f'{score:g}' for score in scores_of(q, keys))}: dot products, divided by "
                "√4",
            ),
            (2, f"the weights: softmax of the scores, {shown}"),
            (1, f"the sum of the values, each times its weight: {mix:.1f}"),
        ),
    )


@asks(1, "fault")
def head_out_of_range(draw: Draw) -> Question:
    heads, kv_heads = draw.one_of([(8, 2), (12, 2), (16, 2), (12, 3), (18, 3), (24, 3), (24, 4), (32, 4)])
    group = heads // kv_heads
    wrong = [h for h in range(heads) if kv_heads > faulty.kv_head_of(h, heads, kv_heads) != h // group]
    head = draw.one_of(wrong)
    found, right = faulty.kv_head_of(head, heads, kv_heads), head // group
    first = next(h for h in range(heads) if faulty.kv_head_of(h, heads, kv_heads) >= kv_heads)
    return Question(
        text(
            f"""
        Grouped-query attention: neighboring query heads share a KV head, and every KV head serves the same number of
        them. A colleague's function says which KV head a query head reads:

        {{code}}

        A layer has {heads} query heads and {kv_heads} KV heads, all numbered from 0. (a) What does this function give
        for query head {head}, and what would be right? (b) For which query head, from 0 on, does it first give a KV
        head that does not exist? (c) Correct the line.
        """,
            code=code_of(faulty.kv_head_of),
        ),
        f"(a) It gives {found}, right is {right}. (b) For query head {first}. (c) `return head // (num_heads // "
        "num_kv_heads)`",
        (
            (2, f"(a) {found}; the group size is {heads} / {kv_heads} = {group}, so {head} // {group} = {right}"),
            (1, f"(b) {first} // {kv_heads} = {kv_heads}, and the last KV head is {kv_heads - 1}"),
            (1, "(c) the divisor is the group size"),
        ),
    )


@asks(1, "compute")
def room_for_texts(draw: Draw) -> Question:
    layers, kv_heads, head_dim = draw.one_of([16, 20, 24, 28, 32]), draw.one_of([2, 4, 8]), draw.one_of([64, 128])
    memory, length = draw.number(2, 12), draw.one_of([1_000, 2_000, 4_000])
    heads = kv_heads * draw.one_of([2, 4])
    per_token = model(layers, heads, kv_heads, head_dim).kv_bytes_per_token(2)
    num_texts = memory * 10**9 // (length * per_token)
    return Question(
        text(f"""
        A model has {layers} layers, {heads} query heads, {kv_heads} KV heads and a head size of {head_dim}. After
        loading the weights a machine has {memory} GB ({memory} · 10^9 bytes) left for keys and values in bf16. How many
        bytes do these take for one token? How many conversations of {length:,} tokens each fit at a time?
        """),
        f"{per_token:,} bytes a token, {num_texts} conversations.",
        (
            (
                2,
                f"2 (K and V) · {layers} · {kv_heads} · {head_dim} · 2 bytes = {per_token:,}; query heads do not count",
            ),
            (1, f"{memory} · 10^9 / ({length:,} · {per_token:,}), rounded down: {num_texts}"),
        ),
    )
