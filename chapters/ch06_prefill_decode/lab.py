import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 6: Prefill and decode")

with app.setup(hide_code=True):
    from functools import partial
    from statistics import median

    from chapters.ch06_prefill_decode.lab_parts import (
        CONTEXT,
        H100_BYTES_PER_S,
        H100_FLOPS_PER_S,
        LONG_PROMPT,
        NUM_DECODE_STEPS,
        World,
        compute_rate,
        draw_batch,
        draw_steps,
        make_table,
        read_rate,
        repeat,
    )
    from chapters.ch06_prefill_decode.roofline import decode_chunks, prompt_chunk
    from chapters.lab_notebook import the_story
    from chapters.playing import title
    from chapters.stage import Stage


@app.cell(hide_code=True)
def _():
    title(6, playable=False)
    return


@app.cell(hide_code=True)
def begin():
    story = the_story()
    return (story,)


@app.cell
def settings():
    PROMPT_LENS = (16, 64, 256, 1024)
    BATCH_SIZES = (1, 2, 4, 8, 16)
    BUDGETS = (64, 256, 2048)
    return BATCH_SIZES, BUDGETS, PROMPT_LENS


@app.cell
def _(story):
    world = World(story)
    return (world,)


@app.cell(expand_output=True)
def tell_paper(BATCH_SIZES, PROMPT_LENS, story, world):
    story.part("What a step costs on paper")
    _config, _itemsize = world.config, world.itemsize
    _whole = world.on_paper.cost(decode_chunks(1, CONTEXT)).weight_bytes
    _layers = world.on_paper.cost([prompt_chunk(0, 1, 2)]).weight_bytes  # nobody samples: no output matrix
    _theirs = world.engine.model_runner.weight_bytes
    story.say(
        f"The weight matrices of all layers hold {_layers // _itemsize:,} numbers, the output matrix "
        f"{(_whole - _layers) // _itemsize:,}: {_whole / 1e6:.1f} MB at {_itemsize} bytes each. The model runner says "
        f"that it holds {_theirs / 1e6:.1f} MB (norms included). K and V of one token: "
        f"{_config.kv_bytes_per_token(_itemsize):,} bytes.\n\nThe table shows the FLOPs and bytes of a step, counted "
        "from the ModelConfig and the step's chunks:"
    )
    _table = make_table("step", "tokens", "GFLOP", "weights MB", "K/V MB", "FLOPs a byte", width=10)
    _rows = [(f"{n} x decode, context {CONTEXT}", decode_chunks(n, CONTEXT)) for n in BATCH_SIZES]
    _rows += [(f"16 x decode, context {n:,}", decode_chunks(16, n)) for n in (1024, 8192)]
    _rows += [(f"prompt of {n:,}", [prompt_chunk(0, n, n)]) for n in PROMPT_LENS]
    for _name, _chunks in _rows:
        _cost, _num_tokens = world.on_paper.cost(_chunks), sum(chunk.end - chunk.start for chunk in _chunks)
        _bytes_mb = f"{_cost.weight_bytes / 1e6:.1f}", f"{_cost.kv_bytes / 1e6:.1f}"
        _table.add_row(_name, f"{_num_tokens:,}", f"{_cost.flops / 1e9:.2f}", *_bytes_mb, f"{_cost.intensity:.1f}")
    story.show(_table)
    _ridge = H100_FLOPS_PER_S / H100_BYTES_PER_S
    story.say(
        f"FLOPs a byte: the arithmetic intensity. An H100's data sheet says {H100_FLOPS_PER_S / 1e12:.0f} TFLOP/s and "
        f"{H100_BYTES_PER_S / 1e12:.2f} TB/s, so it can do {_ridge:.0f} FLOPs in the time in which it reads one byte. "
        "A step below that waits for memory, a step above it for arithmetic."
    )
    return


@app.cell(expand_output=True)
def tell_packed(story):
    story.part("Two decodes and a prompt chunk in one batch")
    _stage = Stage(16, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=40)
    _stage.add([10, 11, 12], answer=[13, 14])
    _stage.add([20, 21, 22, 23, 24], answer=[25, 26])
    _stage.step()
    _stage.add(list(range(30, 40)))
    story.say(
        "The budget is 8 tokens a step, and blocks have 4. A and B have computed their prompts and sampled tokens 13 "
        "and 25. Now C arrives with a prompt of 10 tokens, 30 to 39. This is the next step, as the model gets it:"
    )
    _output = _stage.schedule()
    story.show(draw_batch(_output, _stage.names))
    story.say(
        "A and B have a row each, C the six that are left of the budget. Row 7 is not the end of C's prompt, so nobody "
        "asks for its logits. The step after that has the rest of C, and samples for all three:"
    )
    _stage.finish(_output)
    story.show(draw_batch(_stage.schedule(), _stage.names))
    return


@app.cell
def _(world):
    world.add(256, num_output=1)
    _first = world.engine.step()  # it waits for memory
    return


@app.cell(expand_output=True)
def tell_one_request(story, world):
    story.part("One request, step by step")
    story.say("Let nothing else run now: programs that share the cores can make single steps many times longer.")
    _steps, _metrics = world.one_request()
    story.say("The prompt has 256 tokens, the output has six, and nobody else is in the engine:")
    _table = make_table("step", "tokens", "ms", "ms a token")
    for _number, (_num_tokens, _seconds) in enumerate(_steps, start=1):
        _row = _number, _num_tokens, f"{_seconds * 1e3:.1f}", f"{_seconds * 1e3 / _num_tokens:.2f}"
        _table.add_row(*map(str, _row), "(measured)")
    story.show(_table)
    story.say(
        "Step 1 is the prefill: 256 tokens at once, and from the last of them comes the first output token. Steps 2 to "
        "6 are decodes: one token each. A decode token costs many times what a prompt token costs."
    )
    _ttft_ms, _tpot_ms = (_metrics.ttft_s or 0) * 1e3, (_metrics.tpot_s or 0) * 1e3
    story.say(
        f"By its own stopwatch: TTFT {_ttft_ms:.1f} ms; TPOT {_tpot_ms:.1f} ms, over "
        f"{_metrics.num_output_tokens - 1} gaps.",
        measured=True,
    )
    return


@app.cell(expand_output=True)
def tell_rates(BATCH_SIZES, PROMPT_LENS, story, world):
    story.part("The two phases, in tokens per second")
    _seconds = {("prompt", _n): world.prefill_s(_n) for _n in PROMPT_LENS}
    _seconds |= {("decode", _n): _step_s for _n, _step_s in world.decode_s(BATCH_SIZES).items()}
    _decodes = f"Decode steps at a context of about {CONTEXT} tokens, the median of up to {NUM_DECODE_STEPS}:"
    for _kind, _column, _told, _sizes in (
        ("prompt", "prompt", "The first table shows a whole prompt in one step, the best of up to three:", PROMPT_LENS),
        ("decode", "sequences", _decodes, BATCH_SIZES),
    ):
        story.say(_told)
        _table = make_table(_column, "ms a step", "tokens/s")
        for _n in _sizes:
            _step_s = _seconds[_kind, _n]
            _table.add_row(str(_n), f"{_step_s * 1e3:.1f}", f"{_n / _step_s:,.0f}", "(measured)")
        story.show(_table)
    _times = _seconds["decode", 16] / _seconds["decode", 1]
    story.say(
        f"Sixteen sequences take {_times:.1f} times as long as one, and give 16 tokens instead of one.", measured=True
    )
    seconds = _seconds
    return (seconds,)


@app.cell(expand_output=True)
def tell_roofline(seconds, story, world):
    story.part("Bytes and FLOPs on this machine")
    _runner = world.engine.model_runner
    _bytes_per_s, _flops_per_s = read_rate(_runner.device), compute_rate(_runner.device, _runner.dtype)
    story.note_machine(6, {"GB/s": _bytes_per_s / 1e9, "GFLOP/s": _flops_per_s / 1e9})
    story.say(
        f"Reads {_bytes_per_s / 1e9:.0f} GB/s, does {_flops_per_s / 1e9:,.0f} GFLOP/s in matrix products: "
        f"{_flops_per_s / _bytes_per_s:.0f} FLOPs a byte.",
        measured=True,
    )
    story.say(
        "The table shows what each step would take if only its bytes counted, or only its FLOPs; and what it took:"
    )
    _table = make_table("step", "FLOPs a byte", "bytes, ms", "FLOPs, ms", "took, ms", width=11)
    for (_kind, _n), _step_s in sorted(seconds.items(), key=lambda item: item[0]):
        _chunks = decode_chunks(_n, CONTEXT) if _kind == "decode" else [prompt_chunk(0, _n, _n)]
        _cost = world.on_paper.cost(_chunks)
        _memory_s, _compute_s = _cost.read_bytes / _bytes_per_s, _cost.flops / _flops_per_s
        _name = f"{_n} x decode" if _kind == "decode" else f"prompt of {_n}"
        _times = (f"{value * 1e3:.1f}" for value in (_memory_s, _compute_s, _step_s))
        _table.add_row(_name, f"{_cost.intensity:.1f}", *_times, "(measured)")
    story.show(_table)
    story.say(
        "The larger of the two floors is the one that counts: bytes for a few decodes, FLOPs for long prompts. What a "
        "step took above it went into attention, small operations, Python, and whatever else this machine was doing."
    )
    return


@app.cell(expand_output=True)
def tell_budgets(BUDGETS, story, world):
    story.part("Moving the chunk size")
    story.say(
        f"Request A is decoding. Request B arrives with a prompt of {LONG_PROMPT:,} tokens. max_num_batched_tokens is "
        "all that differs. Until B's first token:"
    )
    _arrivals = {_budget: repeat(partial(world.newcomer, _budget), 3) for _budget in BUDGETS}
    _table = make_table("budget", "steps", "tokens of B in each step", "A's tokens meanwhile")
    for _budget, _runs in _arrivals.items():
        _sizes, _ = _runs[0]
        _whole, _last = len(_sizes) - 1, _sizes[-1]
        _shape = f"{_whole} x {_sizes[0]}, then {_last}" if _whole else f"{_last}"
        _table.add_row(str(_budget), str(len(_sizes)), _shape, str(len(_sizes)))
    story.show(_table)
    story.say("The steps under a budget of 256, 16 prompt tokens a cell:")
    story.show(draw_steps(_arrivals[256][0][0]))
    story.say("This is what the two users notice, the median of up to three runs:")
    _table = make_table("budget", "B's TTFT, ms", "A waits at most, ms", "A waits usually, ms")
    for _budget, _runs in _arrivals.items():
        _times = (f"{median(values) * 1e3:.0f}" for values in zip(*(seconds for _, seconds in _runs), strict=True))
        _table.add_row(str(_budget), *_times, "(measured)")
    story.show(_table)
    story.say(
        "The longest pause of A shrinks with the budget. The price is more steps: each reads all weights again, and "
        "each later chunk reads the K and V of those before it. How much of that B notices depends on the machine."
    )
    return


if __name__ == "__main__":
    app.run()
