"""Exam questions on chapter 2: two planes."""

from chapters.teaching.questions.bank import Draw, Question, asks, one_step, play, request, scheduler, text


@asks(2, "explain", is_fixed=True)
def two_planes(draw: Draw) -> Question:
    return Question(
        text("""
        In this engine no file of `core/` imports torch. (a) In which object do the two planes meet, and what does it
        say to the data plane? (b) Name two things that the engine or this course can do because of the rule.
        """),
        text("""
        (a) `SchedulerOutput`: the chunks of the step, that is which positions of which sequences are computed (and
        which sequences were preempted, and the number of tokens). (b) For example: scheduler and cache are tested
        without a model, in milliseconds; they run in a browser; a simulator plays many replicas with the real
        scheduler; ranks of a tensor-parallel group need only arrays and hold no state of requests.
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
        Two requests are handed in before the first step: A with a prompt of {prompts[0]} tokens and
        `max_tokens={limits[0]}`, B with {prompts[1]} tokens and `max_tokens={limits[1]}`. A step may compute 64
        tokens, and nobody generates EOS. (a) How many calls of `step()` until both have ended? (b) How many rows do
        all these steps send through the layers? (c) How many rows of logits do they make?
        """),
        f"(a) {len(steps)} (b) {rows} (c) {logits}",
        (
            (1, "(a) the longer answer decides: each step samples one token for every request that runs"),
            (2, f"(b) prompts {sum(prompts)}, then each generated token but the last of each: {sum(limits) - 2}"),
            (1, f"(c) one for each generated token, {logits}: a prompt's other rows get none"),
        ),
    )


@asks(2, "trace")
def after_a_failure(draw: Draw) -> Question:
    num_prompt, num_done, size = draw.number(6, 14), draw.number(2, 6), 4

    seqs, engine = {"A": request(num_prompt, 20)}, scheduler(16, size, 64, caching=True)
    engine.add(seqs["A"])
    for _ in range(num_done):
        one_step(engine, seqs)
    engine.roll_back(engine.schedule())
    step = one_step(engine, seqs)
    found, computed = seqs["A"].num_cached_tokens, step.num_tokens["A"]
    length = num_prompt + num_done
    return Question(
        text(f"""
        A request with a prompt of {num_prompt} tokens is alone in the engine. Blocks hold {size} tokens, prefix
        caching is on, and a step may compute 64 tokens. {num_done} steps have succeeded. The next one raises an
        exception while the model computes, and the engine rolls the step back. Then the request is admitted again.
        How many of its tokens are found in the cache, and how many does the step compute that follows?
        """),
        f"{found} tokens are found, {computed} computed.",
        (
            (1, f"the request has {num_prompt} + {num_done} = {length} tokens when the step fails"),
            (
                2,
                f"the steps before have computed {length - 1} tokens: {found // size} full blocks, {found} tokens, "
                "keep their names; a name that the failed step gave is taken back",
            ),
            (1, f"{length} - {found} = {computed}"),
        ),
    )
