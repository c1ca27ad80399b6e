import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 11: Benchmarks")

with app.setup(hide_code=True):
    import random
    from importlib.util import find_spec
    from statistics import mean, median, median_low

    from rich.text import Text

    from chapters import draw
    from chapters.ch11_benchmarks.lab_parts import (
        ARRIVING_INPUT,
        ARRIVING_OUTPUT,
        BATCH,
        BATCH_SIZES,
        INPUT_LEN,
        LOADS,
        LONG_INPUT,
        NUM_ARRIVALS,
        NUM_SEATS,
        OUTPUT_LEN,
        QUESTIONS,
        Peer,
        World,
        ask_questions,
        cached_tokens,
        draw_curve,
        make_table,
        ttfts_s,
    )
    from chapters.lab_notebook import the_story
    from chapters.playing import title
    from nanovllm.tools.bench import measure


@app.cell(hide_code=True)
def _():
    title(11, playable=False)
    return


@app.cell(hide_code=True)
def begin():
    story = the_story()
    return (story,)


@app.cell
def settings():
    NUM_RUNS = 5
    PEERS = ("nanovllm", "transformers, padded batch")
    return NUM_RUNS, PEERS


@app.cell
def _(story):
    world = World(story)
    return (world,)


@app.cell(expand_output=True)
def tell_first_run(story, world):
    story.part("The first run is different")
    story.say(
        f"The engine has just been loaded. A batch of {BATCH} requests, {LONG_INPUT} random prompt tokens and "
        f"{OUTPUT_LEN} output tokens each; then the same with different random prompts, twice."
    )
    _runs = [world.run() for _ in range(3)]
    _table = make_table("run", "TTFT, ms", "TPOT, ms", "latency, s", "output tokens/s")
    for _number, _run in enumerate(_runs, start=1):
        _times = f"{_run.ttft_s * 1e3:.0f}", f"{_run.tpot_s * 1e3:.1f}", f"{_run.latency_s:.2f}"
        _table.add_row(str(_number), *_times, f"{_run.output_tokens_per_s:.0f}", "(measured)")
    story.show(_table)
    story.say(f"Loading took {world.start_s:.1f} s before that.", measured=True)
    story.say(
        "The first run may touch memory that nobody has touched before, and the operating system hands it out page by "
        "page; threads start, buffers get their size. None of that happens again. How much of it is left for the first "
        "run depends on the engine: this one does a part while it loads. From here on it is warm."
    )
    first = _runs
    return (first,)


@app.cell(expand_output=True)
def tell_curve(story, world):
    story.part("The four numbers, and throughput against latency")
    measure(world.llm, max(BATCH_SIZES), INPUT_LEN, 2, seed=99)  # buffers for the largest batch
    _sweep = world.sweep()
    story.say(
        f"{INPUT_LEN} prompt tokens, {OUTPUT_LEN} output tokens a request, all submitted at once. The table shows "
        "medians of up to three runs, and next to them the lowest and the highest throughput:"
    )
    _table = make_table("batch", "TTFT, ms", "TPOT, ms", "latency, s", "output tokens/s", "lowest - highest")
    _points = []
    for _batch_size, _runs in zip(BATCH_SIZES, _sweep, strict=True):
        _ttft_s, _tpot_s = median(run.ttft_s for run in _runs), median(run.tpot_s for run in _runs)
        _latency_s, _rates = median(run.latency_s for run in _runs), sorted(run.output_tokens_per_s for run in _runs)
        _times = f"{_ttft_s * 1e3:.0f}", f"{_tpot_s * 1e3:.1f}", f"{_latency_s:.2f}"
        _spread = f"{_rates[0]:.0f} - {_rates[-1]:.0f}"
        _table.add_row(str(_batch_size), *_times, f"{median(_rates):.0f}", _spread, "(measured)")
        _points.append((_tpot_s * 1e3, median(_rates), str(_batch_size)))
    story.show(_table)
    story.say(
        "The same as a picture, with a point for each batch size: it shows how long one user waits for a token, and "
        "how many tokens all get together:"
    )
    story.show(draw_curve(_points, "TPOT, ms (measured)", "tokens/s"))
    _gain, _price = _points[-1][1] / _points[0][1], _points[-1][0] / _points[0][0]
    story.say(
        f"From a batch of 1 to one of {BATCH_SIZES[-1]}: {_gain:.1f} times the throughput; each token {_price:.1f} "
        "times as slow.",
        measured=True,
    )
    story.say(
        "No single point of the curve is the engine's speed. A number means something only together with its point."
    )
    return


@app.cell(expand_output=True)
def tell_arrivals(story, world):
    story.part("Requests that arrive when they like")
    _at_once = world.serve(world.arrivals(None, run="at once"))
    story.say(
        f"Now {NUM_ARRIVALS} requests of {ARRIVING_INPUT} prompt tokens and {ARRIVING_OUTPUT[0]} to "
        f"{ARRIVING_OUTPUT[1]} output tokens, at most {NUM_SEATS} running at a time. First they come all at once, as "
        "in every benchmark so far:"
    )
    story.say(f"{_at_once.requests_per_s:.1f} requests a second: the engine's capacity for this work.", measured=True)
    story.say(
        "Then they come at random moments (the same list of gaps each time, stretched to the load), whether or not the "
        "engine has time. A load of 80% means: 0.8 times the capacity arrives. The last row is another kind of "
        f"benchmark: {NUM_SEATS} clients, each of which sends its next request when the last one is answered. TTFT is "
        "in ms:"
    )
    _rows = {}
    for _load in LOADS:
        _name = f"{_load:.0%}"
        _rows[_name] = world.serve(world.arrivals(_load * _at_once.requests_per_s, run=_name))
    _rows["closed"] = world.serve_closed(world.arrivals(None, run="closed"), NUM_SEATS)
    _light = _rows[f"{LOADS[0]:.0%}"]
    _limits = 2 * _light.ttft_p50_s, 2 * _light.mean_tpot_s
    _worst_s = max(_served.ttft_p99_s for _served in _rows.values())
    _table = make_table("load", "requests/s", "TTFT p50", "TTFT p99", "latency, s", "goodput", width=8)
    _table.add_column("TTFT p99", width=14)
    for _name, _served in _rows.items():
        _bar = "█" * max(1, round(_served.ttft_p99_s / _worst_s * 14))
        _ttfts = f"{_served.ttft_p50_s * 1e3:.0f}", f"{_served.ttft_p99_s * 1e3:.0f}"
        _rest = f"{_served.mean_latency_s:.2f}", f"{_served.goodput(*_limits):.1f}", _bar, "(measured)"
        _table.add_row(_name, f"{_served.requests_per_s:.1f}", *_ttfts, *_rest)
    story.show(_table)
    story.say(
        f"Goodput: requests a second with a TTFT of at most {_limits[0] * 1e3:.0f} ms and a TPOT of at most "
        f"{_limits[1] * 1e3:.0f} ms.",
        measured=True,
    )
    story.say(
        f"These limits are twice the usual values at a load of {LOADS[0]:.0%}. Well below the capacity a request waits "
        "for little more than its own work. Near it, requests that come close together wait for each other, and p99 "
        "rises faster than p50. Above it the queue grows as long as requests come: with twice as many requests the "
        f"waits would be longer still. The closed loop never has more than {NUM_SEATS} requests in the system: further "
        "clients would wait outside, where nobody measures. (If the rows contradict this, something else has used the "
        'machine in between: see the spread at the end of "Six lies".)\n\n'
        "Little's law: the requests in the system, on average, are the requests per second times the "
        "seconds each stays. On the left is the product of two numbers above; on the right is what was counted before "
        "each step:"
    )
    _table = make_table("load", "requests/s", "x latency, s", "= in the system", "counted")
    for _name, _served in _rows.items():
        _product = _served.requests_per_s * _served.mean_latency_s
        _factors = f"{_served.requests_per_s:.1f}", f"{_served.mean_latency_s:.3f}"
        _table.add_row(_name, *_factors, f"{_product:.1f}", f"{_served.num_counted:.1f}", "(measured)")
    story.show(_table)
    story.say(
        "The counted number is a little smaller where requests come at random: those that fall due while a step runs "
        "are handed in after it, so the count before the step misses them."
    )
    loaded = _rows[f"{LOADS[-1]:.0%}"]
    return (loaded,)


@app.cell(expand_output=True)
def tell_lies(NUM_RUNS, first, loaded, story, world):
    story.part("Six lies")
    story.say("Each row is a benchmark that lies in good faith, with the honest number beside what it says:")
    _runs = [world.run() for _ in range(NUM_RUNS)]
    _rates = [run.output_tokens_per_s for run in _runs]
    _honest = median(_rates)
    _again = world.run(new_prompts=False)  # the prompts of the last run, which the cache still holds
    _num_cached = cached_tokens(world)
    _to_end, _to_limit = (ask_questions(world, ignore_eos) for ignore_eos in (False, True))
    _table = draw.make_table("the benchmark", "unit", "it says", "honest", "factor", width=7, first=7)
    _table.columns[1].justify = "left"
    _with_loading = BATCH * OUTPUT_LEN / (world.start_s + first[0].latency_s)
    _warm = mean(run.output_tokens_per_s for run in first[1:])
    _with_prompts = _honest * (LONG_INPUT + OUTPUT_LEN) / OUTPUT_LEN
    _ttft_ms = median_low(ttfts_s(loaded.metrics_handed)) * 1e3, loaded.ttft_p50_s * 1e3
    for _name, _unit, _says, _is_so in (
        ("starts its clock before loading", "output tokens/s", _with_loading, _warm),
        ("sends the same prompts twice", "output tokens/s", _again.output_tokens_per_s, _rates[-1]),
        ("counts prompt tokens as throughput", "tokens/s", _with_prompts, _honest),
        ("lets answers end when they like", "requests/s", _to_end[0], _to_limit[0]),
        (f"shows the best of {NUM_RUNS} runs", "output tokens/s", max(_rates), _honest),
        ("starts clocks at the handover", "TTFT p50, ms", *_ttft_ms),
    ):
        _table.add_row(_name, _unit, f"{_says:.1f}", f"{_is_so:.1f}", f"{_says / _is_so:.2f}", "(measured)")
    story.show(_table)
    story.say(
        "Honest is, in this order: the mean of the second and the third run of the first part; the run before, in "
        f"which the same prompts were new; the median of {NUM_RUNS} runs, output tokens only; the same questions, EOS "
        f"ignored; the median of the {NUM_RUNS} runs; the load of {LOADS[-1]:.0%} with clocks that start when a "
        f"request is due.\n\nThe same prompts twice: {_num_cached} of {BATCH * LONG_INPUT} prompt tokens came from the "
        "prefix cache. The engine did nothing wrong, the second run had less to do. All prompts are random here and "
        "share nothing, and still a benchmark that is merely repeated is wrong."
    )
    story.say(
        f"Answers that end when they like: {_to_end[1]} tokens instead of {_to_limit[1]} for the same "
        f"{len(QUESTIONS)} questions.",
        measured=True,
    )
    story.say(f"The {NUM_RUNS} runs, in output tokens/s: {' '.join(f'{rate:.0f}' for rate in _rates)}", measured=True)
    _spread = (max(_rates) - min(_rates)) / _honest
    story.say(f"From the slowest to the fastest: {_spread:.0%} of the median.", measured=True)
    story.say("If two engines differ by less than this, you need more runs to know whether they differ at all.")
    return


@app.cell(expand_output=True)
def tell_peers(PEERS, story):
    story.part("The same work on another engine")
    story.say(
        "Each engine has a process of its own, with the same checkpoint in bf16, on the same cores. All load, all do "
        "a small piece of work to warm up; then they take turns at three pieces. A piece: 6 requests, 16 to 48 random "
        "prompt tokens, 8 to 20 output tokens, EOS ignored, the same for all."
    )
    _rng = random.Random(0)

    def _piece(num: int) -> list[tuple[list[int], int]]:
        return [(_rng.choices(range(100, 300), k=_rng.randint(16, 48)), _rng.randint(8, 20)) for _ in range(num)]

    _peers = {_name: Peer(_name, story.model) for _name in PEERS}
    try:
        for _peer in _peers.values():
            _peer.says()
        _warm_up, _pieces = _piece(2), [_piece(6) for _ in range(3)]
        for _peer in _peers.values():
            _peer.seconds(_warm_up)
        _rates: dict[str, list[float]] = {_name: [] for _name in PEERS}
        for _work in _pieces:
            for _name, _peer in _peers.items():
                _rates[_name].append(sum(num for _, num in _work) / _peer.seconds(_work))
    finally:
        for _peer in _peers.values():
            _peer.close()
    _table = draw.make_table("engine", "output tokens/s, three pieces", "median", width=8, first=8)
    for _name, _values in _rates.items():
        _table.add_row(_name, "  ".join(f"{rate:.0f}" for rate in _values), f"{median(_values):.0f}", "(measured)")
    story.show(_table)
    for _name in PEERS[1:]:
        _ratio = median(_rates[PEERS[0]]) / median(_rates[_name])
        story.say(f"{PEERS[0]} does {_ratio:.1f} times the output tokens of {_name!r} in the same time.", measured=True)
    story.say(
        "What this does not say: an engine that pads the batch runs until its longest answer is done. That is how "
        "transformers is used, not the best that could be made of it. Six short requests on this machine are one "
        "point; examples/bench_peers.py has others, with time to first token, a single stream, start and memory."
    )
    return


@app.cell(expand_output=True)
def tell_vllm(story):
    story.part("vLLM")
    if find_spec("vllm"):
        story.say("vLLM is installed in this Python. To put it beside this engine, on the same work:")
        story.show(Text("    python examples/bench_peers.py --only nanovllm 'vLLM, compiled' 'vLLM, eager'"))
    else:
        story.say(
            "vLLM is not installed in this Python, so nothing is said about it here. It may live in an environment of "
            "its own; name that environment's Python:"
        )
        _command = "python examples/bench_peers.py --vllm-python PATH --only nanovllm 'vLLM, compiled' 'vLLM, eager'"
        story.show(Text(f"    {_command}"))
    return


if __name__ == "__main__":
    app.run()
