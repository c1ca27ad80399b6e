"""Exam questions on chapter 2: two planes."""

from chapters.teaching.questions.bank import Draw, Question, asks, one_step, play, request, scheduler, text


@asks(2, "explain", is_fixed=True)
def two_planes(draw: Draw) -> Question:
    return Question(
        text("""
        In this engine no file in `core/` imports torch. (a) In which object do the two planes meet, and what does it
        tell the data plane? (b) Name two things that the engine or this course can do because of this rule.
        """),
        text("""
        (a) `SchedulerOutput`: it contains the chunks of the step, that is, which positions of which sequences are
        computed (and also which sequences were preempted, and the number of tokens). (b) For example: scheduler and
        cache are tested without a model, in milliseconds; they run in a browser; a simulator plays many replicas with
        the real scheduler; ranks of a tensor-parallel group need only arrays and hold no state of requests.
        """),
        ((1, "(a) names `SchedulerOutput`"), (1, "(a) the positions to compute of each sequence"), (2, "(b) one each")),
    )


@asks(2, "compute")
def rows_and_logits(draw: Draw) -> Question:
    prompts, limits = draw.some(range(4, 13), 2), draw.some(range(2, 6), 2)
    steps = play(scheduler(16, 8, 64), {n: request(*what) for n, *what in zip("AB", prompts, limits, strict=True)})
    rows, logits = sum(sum(step.num_tokens.values()) for step in steps), sum(step.num_logits for step in steps)
    return Question(
        text(f"""
        Two requests arrive before the first step: A with a prompt of {prompts[0]} tokens and `max_tokens={limits[0]}`,
        B with {prompts[1]} tokens and `max_tokens={limits[1]}`. A step may compute 64 tokens, and nobody generates EOS.
        (a) How many calls of `step()` does it take until both have ended? (b) How many rows do all these steps send
        through the layers? (c) How many rows of logits do they make?
        """),
        f"(a) {len(steps)} (b) {rows} (c) {logits}",
        (
            (1, "(a) the longer answer decides: each step samples one token for every running request"),
            (2, f"(b) prompts {sum(prompts)}, then every generated token except each last one: {sum(limits) - 2}"),
            (1, f"(c) one for each generated token, {logits}: a prompt's other rows get none"),
        ),
    )


@asks(2, "trace")
def after_a_failure(draw: Draw) -> Question:
    num_prompt, num_done, size = draw.number(6, 14), draw.number(2, 6), 4

    seqs, engine = {name: request(num_prompt, 20) for name in "AB"}, scheduler(16, size, 64, caching=True)
    for seq in seqs.values():
        engine.add(seq)
    for _ in range(num_done):
        one_step(engine, seqs)
    engine.schedule()
    engine.restart(list(seqs.values()))
    step = one_step(engine, seqs)
    found, computed = seqs["B"].num_cached_tokens, step.num_tokens["B"]
    length = num_prompt + num_done
    return Question(
        text(f"""
        Two requests, A and B, with the same prompt of {num_prompt} tokens have arrived together and have generated the
        same {num_done} tokens so far. Blocks hold {size} tokens, prefix caching is on, and a step may compute 64
        tokens. Their next step raises an exception while the model computes, and the engine restarts from the requests.
        How many tokens does the next step compute for A, and how many for B?
        """),
        f"{step.num_tokens['A']} tokens for A, {computed} for B.",
        (
            (1, f"both keep the tokens that they had before the step: {num_prompt} + {num_done} = {length}"),
            (1, f"nothing is cached any longer, so A computes all {length}"),
            (
                2,
                f"A's full blocks are registered when A is scheduled, in the same step: B finds {found} tokens and "
                f"computes {length} - {found} = {computed}",
            ),
        ),
    )
