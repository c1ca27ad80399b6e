"""Exam questions on chapters 11 and 12: benchmarks, fewer bits."""

from chapters.ch11_benchmarks.solution import summarize
from chapters.ch11_benchmarks.timing import Summary, Timing
from chapters.ch12_fewer_bits.solution import group_dot, quantize
from chapters.teaching.questions.bank import Draw, Question, asks, listed, table, text

FORMATS = {"bf16": 64, "Q8_0": 34, "Q4_1": 20}  # bytes of 32 weights


@asks(11, "compute")
def four_requests_timed(draw: Draw) -> Question:
    def make() -> tuple[list[Timing], Summary]:
        timings = []
        for number in range(4):
            start, first, gap, count = number * 0.5, draw.number(2, 12), draw.number(1, 4), draw.number(3, 5)
            times = tuple(round(start + 0.1 * (first + gap * i), 1) for i in range(count))
            timings.append(Timing(start, times))
        return timings, summarize(timings, 0.75, 0.25)

    def is_good(made: tuple[list[Timing], Summary]) -> bool:
        firsts = [round(t.token_times_s[0] - t.arrival_s, 1) for t in made[0]]
        seconds = max(t.token_times_s[-1] for t in made[0])
        num_good = round(made[1].goodput * seconds)
        num_fast = sum(first < 0.75 for first in firsts)
        return len(set(firsts)) == 4 and 0 < num_good < num_fast < 4

    timings, summary = draw.until(make, is_good)
    rows = [(n, t.arrival_s, ", ".join(map(str, t.token_times_s))) for n, t in zip("ABCD", timings, strict=True)]
    seconds, num_tokens = max(t.token_times_s[-1] for t in timings), sum(len(t.token_times_s) for t in timings)
    num_good = round(summary.goodput * seconds)
    return Question(
        text(
            """
        Four requests were timed, in seconds:

        {rows}

        The limits are TTFT 0.75 s and TPOT 0.25 s. Give the mean TTFT, the largest latency, the output tokens per
        second from the first arrival to the last token (one decimal), and the number of requests that kept both
        limits.
        """,
            rows=table(["request", "arrives", "its tokens come"], rows),
        ),
        f"Mean TTFT {round(summary.ttft_s, 4):g} s, largest latency {round(summary.latency_s, 1):g} s, "
        f"{summary.output_tokens_per_s:.1f} tokens/s, {num_good} kept both.",
        (
            (1, f"TTFT: first token minus arrival; the mean is {round(summary.ttft_s, 4):g} s"),
            (1, "latency: last token minus arrival"),
            (1, f"{num_tokens} tokens in {seconds:g} s"),
            (2, "TPOT: (last - first) / (tokens - 1); both limits are checked for each request"),
        ),
    )


@asks(11, "decide")
def does_the_report_add_up(draw: Draw) -> Question:
    rate, clients = draw.one_of([5, 10, 20, 25]), draw.one_of([40, 60, 80, 100])
    honest = clients / rate
    claimed = round(honest / draw.one_of([2, 4]), 2)
    return Question(
        text(f"""
        A report says: "{clients} clients, each sends its next request as soon as it has the answer. Throughput: {rate}
        requests a second. Mean latency: {claimed:g} s." (a) Can that be right? Show it with a law. (b) Which mean
        latency fits the other two numbers? (c) Name a mistake in the measurement that could have led to the small
        number.
        """),
        f"(a) No: {rate} · {claimed:g} = {rate * claimed:g} requests would be in the system on average, but it is "
        f"{clients}. (b) {clients} / {rate} = {honest:g} s (c) For example: the clock starts when the engine takes "
        "the request out of its queue, not when the client sends it; or requests that waited too long were left "
        "out of the mean.",
        (
            (2, "(a) Little's law, L = λ · W, with numbers"),
            (1, f"(b) {honest:g} s"),
            (1, "(c) any mistake that makes latencies too small"),
        ),
    )


@asks(11, "decide", is_fixed=True)
def an_unfair_comparison(draw: Draw) -> Question:
    return Question(
        text("""
        "We compared engine X with ours. X: 32 prompts of 512 tokens, bf16, 10.2 s for 4,096 output tokens, measured
        from the start of the program. Ours: the same 32 prompts in float16, the second of two runs in a warm process,
        7.9 s for 3,790 output tokens; both with temperature 0. Ours is 1.3 times as fast." Name four things that make
        these two numbers incomparable, and say for each what should have been done.
        """),
        text("""
        Four of: X's time includes loading and compiling, ours does not (warm up both, and time the same part of the
        run). Ours runs the same prompts a second time, so a prefix cache may already have them (use new prompts for
        each run, or turn the caches off in both). The number of output tokens differs, so some of our answers ended
        early (ignore EOS, or compare tokens per second). The dtypes differ (use one for both). Each was run once, so
        the spread is unknown (do several runs, alternating). 10.2 / 7.9 compares seconds for different amounts of work.
        """),
        ((4, "one for each difference with its remedy; half for a difference alone, with the sum rounded down"),),
    )


@asks(12, "compute")
def a_group_of_four_bits(draw: Draw) -> Question:
    scale = draw.one_of([0.25, 0.5, 2.0])

    def make() -> list[float]:
        numbers = [round(scale * draw.number(-69, 69) / 10, 3) for _ in range(3)]
        return [*numbers, draw.one_of([7, -7]) * scale]

    def is_good(numbers: list[float]) -> bool:
        steps = [abs(number / scale) for number in numbers[:3]]
        return all(0.15 < step % 1 < 0.4 or 0.6 < step % 1 < 0.85 for step in steps) and len({*steps}) == 3

    numbers = draw.until(make, is_good)
    codes, found, _ = quantize(numbers, 4, 8, has_minimum=False)
    restored = [found * (code - 8) for code in codes]
    worst = max(abs(a - b) for a, b in zip(numbers, restored, strict=True))
    return Question(
        text(f"""
        A group has the four numbers {listed(f"{n:g}" for n in numbers)}. It is stored with 4 bits per number, the code
        8 stands for 0, and the largest magnitude gets the code 1 or 15. Give the scale, the four codes, the numbers
        restored from them, and the largest error. What is the largest possible error with this scale?
        """),
        f"Scale {found:g}, codes {codes}, restored {listed(f'{n:g}' for n in restored)}, largest error {worst:.3g}; "
        f"at most {found / 2:g}.",
        (
            (1, f"scale: largest magnitude / 7 = {found:g}"),
            (2, "codes: number / scale, rounded, + 8"),
            (1, "restored: scale · (code - 8)"),
            (1, "half a step"),
        ),
    )


@asks(12, "compute")
def a_product_of_codes(draw: Draw) -> Question:
    activations = draw.until(lambda: draw.numbers(4, -5, 6), lambda a: sum(a) not in (0, 1) and len(set(a)) == 4)
    codes, scale, minimum = draw.numbers(4, 0, 15), draw.one_of([0.5, 0.25]), -draw.number(1, 4)
    unit = draw.one_of([0.1, 0.2])

    def dpbusd(total: int, a: list[int], b: list[int]) -> int:
        return total + sum(x * y for x, y in zip(a, b, strict=True))

    pad = [0] * 28
    found = group_dot([*activations, *pad], unit, [*codes, *pad], scale, float(minimum), 0, dpbusd)
    products = dpbusd(0, codes, activations)
    return Question(
        text(f"""
        In a format with a minimum, weight = {scale} · code - {-minimum}. A group (of four here) has the codes {codes}.
        The activations have the codes {activations} with the scale {unit}: activation = {unit} · code. (a) Compute the
        dot product of the real weights and activations from the integer dot product of the codes and one correction.
        (b) Why does the kernel need the sum of the activations' codes, and how often is this sum computed for one row
        of activations?
        """),
        f"(a) {found:.6g} (b) Each weight contains the minimum, so the product contains minimum · (sum of the "
        "activations). The sum is computed once for each group of the row, not once for each output, because all "
        "outputs use the same activations.",
        (
            (1, f"(a) codes · codes = {products}"),
            (2, f"(a) {unit} · ({scale} · {products} + ({minimum}) · {sum(activations)}) = {found:.6g}"),
            (1, "(b) the minimum times the sum"),
            (1, "(b) shared by all outputs"),
        ),
    )


@asks(12, "compute")
def bytes_of_a_step(draw: Draw) -> Question:
    millions, bandwidth = draw.one_of([800, 1600, 3200]), draw.one_of([20, 25, 40, 50])
    times = {name: millions * 1e6 * size / 32 / (bandwidth * 1e9) * 1e3 for name, size in FORMATS.items()}
    shown = listed(f"{name} {ms:.2f} ms" for name, ms in times.items())
    factor = times["bf16"] / times["Q4_1"]
    return Question(
        text(f"""
        A model has {millions:,} million weights, and a machine reads {bandwidth} GB/s. 32 weights take 64 bytes in
        bf16, 34 in Q8_0 and 20 in Q4_1. (a) How many ms does it take to read all weights in each format (two decimals)?
        (b) By which factor can a single stream become faster with Q4_1? (c) 256 sequences decode in one step, and the
        step is bound by arithmetic. What do the fewer bytes of Q4_1 gain there, and what may still help?
        """),
        f"(a) {shown} (b) {factor:.1f} (c) Nothing: weights are read once for all, and reading is not what the step "
        "waits for. Products of whole numbers may help, if the processor does more of them in a second.",
        (
            (2, "(a) weights / 32 · bytes / bandwidth"),
            (1, f"(b) 64 / 20 = {factor:.1f}"),
            (2, "(c) fewer bytes gain nothing, 1; whole-number arithmetic, 1"),
        ),
    )
