"""Exam questions on chapter 6: prefill and decode."""

from typing import Any

from chapters.ch06_prefill_decode.roofline import Machine
from chapters.ch06_prefill_decode.solution import pack, token_budget
from chapters.ch14_many_users.fleet import Cost
from chapters.teaching.questions.bank import (
    Draw,
    Question,
    Step,
    asks,
    listed,
    play,
    request,
    scheduler,
    steps_table,
    table,
    text,
)
from nanovllm.core.scheduler import ScheduledChunk
from nanovllm.core.sequence import Sequence


@asks(6, "compute")
def packed_arrays(draw: Draw) -> Question:
    decode, start, prompt = draw.number(5, 40), draw.number(10, 30), draw.number(3, 8)
    width, rest = draw.number(4, 9), draw.number(5, 20)
    spans = [(decode, decode + 1, decode + 1), (start, start + width, start + width + rest), (0, prompt, prompt)]
    cu_seqlens_q, seqlens_k, logits_rows = pack([ScheduledChunk(Sequence([0] * n), a, b, a) for a, b, n in spans])
    return Question(
        text(f"""
        A step has three chunks, in this order: A decodes at position {decode}; B computes positions {start} to
        {start + width - 1} of a prompt of {start + width + rest} tokens; C computes its whole prompt of {prompt}
        tokens. Write down `cu_seqlens_q` (four numbers) and `seqlens_k` (three), and the rows whose logits are
        needed.
        """),
        f"`cu_seqlens_q = {cu_seqlens_q}`, `seqlens_k = {seqlens_k}`, rows {listed(logits_rows)}",
        (
            (1, "`cu_seqlens_q`: where each sequence's rows begin, and finally the number of rows"),
            (1, "`seqlens_k`: all keys up to the chunk's end, those of earlier steps included"),
            (2, "logits for the last row of A and of C; B's chunk ends inside its prompt"),
        ),
    )


@asks(6, "trace")
def a_long_prompt_and_a_short_one(draw: Draw) -> Question:
    def make() -> tuple[int, int, int, int, list[list[Step]]]:
        budget, threshold, long, short = draw.number(11, 16), draw.number(5, 7), draw.number(17, 24), draw.number(3, 9)
        limits: tuple[dict[str, Any], ...] = ({"long_prefill_token_threshold": threshold}, {})
        return (
            budget,
            threshold,
            long,
            short,
            [
                play(scheduler(16, 8, budget, **limit), {"A": request(long, 1), "B": request(short, 3)})
                for limit in limits
            ],
        )

    def first_token(steps: list[Step]) -> int:
        return len(steps) - 2  # B ends last, and has two more

    budget, threshold, long, short, runs = draw.until(
        make,
        lambda made: (
            all("B" in run[-1].num_tokens for run in made[4])
            and first_token(made[4][0]) < first_token(made[4][1])
            and made[2] % made[1]
            and len(made[4][0]) <= 6
        ),
    )
    steps, first = runs[0], [first_token(run) for run in runs]
    return Question(
        text(f"""
        `max_num_batched_tokens` is {budget} and `long_prefill_token_threshold` is {threshold}. A, with a prompt of
        {long} tokens and `max_tokens=1`, and B, with {short} tokens and `max_tokens=3`, arrive together; there are no
        other requests. (a) Write a table with a row for each step: how many tokens of A and of B does it compute? (b)
        In which step does B get its first token, and in which without a threshold?
        """),
        f"(a)\n\n{steps_table(steps, 'AB')}\n\n(b) In step {first[0]}; without, in step {first[1]}.",
        (
            (3, f"(a) at most {threshold} tokens of one prompt in a step, at most {budget} of all"),
            (1, f"(b) B's prompt is complete in step {first[0]}"),
            (1, f"(b) without: A takes the whole budget first, so step {first[1]}"),
        ),
    )


@asks(6, "compute")
def what_fits_into_a_step(draw: Draw) -> Question:
    def make() -> tuple[int, int, int, int]:
        return (
            draw.one_of([1, 2, 4]),
            draw.one_of([100, 200, 400]),
            draw.one_of([4, 8, 10, 20]),
            draw.one_of([60, 80, 100]),
        )

    billions, bandwidth, flops, limit_ms = draw.until(make, lambda made: 2 * made[0] * 1000 / made[1] < made[3])
    machine = Machine(billions * 2e9, billions * 2e9, bandwidth * 1e9, flops * 1e12)
    read_ms = round(1e3 * machine.weight_bytes / machine.bytes_per_s)
    num_tokens = token_budget(scheduler(2, 16, 8192), machine, limit_ms / 1e3)
    even = round(machine.flops_per_s / machine.bytes_per_s)
    return Question(
        text(f"""
        A model has {billions} billion weights in bf16. Its machine reads {bandwidth} GB/s and does {flops} TFLOP/s.
        Leave attention out. (a) What is the shortest time a step can take, however few tokens it computes? (b) How many
        tokens may a step compute if it should take at most {limit_ms} ms? (c) With how many tokens does computing take
        as long as reading?
        """),
        f"(a) {read_ms} ms (b) {num_tokens:,} (c) {even}",
        (
            (1, f"(a) the weights are read once: {2 * billions} GB / {bandwidth} GB/s"),
            (
                2,
                f"(b) two operations for each weight and token: {limit_ms} ms · {flops} TFLOP/s / {2 * billions} "
                "GFLOP; reading goes on at the same time",
            ),
            (
                1,
                f"(c) {flops} TFLOP/s / {bandwidth} GB/s = {even} operations for each byte, and a token has two for "
                "a weight of two bytes",
            ),
        ),
    )


@asks(6, "decide")
def which_budget(draw: Draw) -> Question:
    cost = Cost(step_s=0.001 * draw.one_of([8, 10, 12]), token_s=0.0001)
    num_decodes, small, large = 8, draw.one_of([64, 128]), draw.one_of([512, 1024])
    length = large - num_decodes
    rows, ms = [], lambda num: 1e3 * cost.of(num)
    for budget in (small, large):
        engine = scheduler(512, 16, budget, max_num_seqs=16)
        seqs = {"P": request(length, 1), **{str(i): request(1, 999, 9000 * i) for i in range(1, num_decodes + 1)}}
        for name in [*seqs][1:]:
            engine.add(seqs[name])
        first = engine.schedule()
        engine.update(first, first.per_chunk([7] * num_decodes))
        engine.add(seqs["P"])
        totals = []
        while seqs["P"].num_generated_tokens == 0:
            output = engine.schedule()
            totals.append(output.num_tokens)
            engine.update(output, [[7] * chunk.num_logits for chunk in output.chunks])
        rows.append((budget, len(totals), sum(map(ms, totals)), max(map(ms, totals))))
    shown = table(
        ["budget", "steps", "TTFT", "longest gap"], ([b, n, f"{t:.1f} ms", f"{g:.1f} ms"] for b, n, t, g in rows)
    )
    return Question(
        text(f"""
        A step takes {ms(0):.0f} ms, and 0.1 ms more for each token that it computes. {num_decodes} sequences decode
        when a prompt of {length} tokens arrives, between two steps. (a) For a budget of {small} and of {large} tokens
        per step: in how many steps is the prompt computed, after how many ms does it have its first token, and what is
        the longest gap between two tokens of a decoding sequence? (b) The service promises that no gap is longer than
        40 ms. Which of the two budgets do you choose, and who pays for it?
        """),
        f"(a)\n\n{shown}\n\n(b) {small}: with {large} the gap breaks the promise. The new request pays: its first "
        "token comes later, because every step costs its fixed part, and the decodes take their share of each budget.",
        (
            (1, f"(a) steps: {num_decodes} tokens of each budget go to the decodes"),
            (2, "(a) TTFT: the sum of all these steps; the last one may be shorter"),
            (1, "(a) the gap is as long as a full step"),
            (2, f"(b) {small}, 1; the waiting prompt pays, with a reason, 1"),
        ),
    )
