import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 10: The optimization stack")

with app.setup(hide_code=True):
    import math
    import random
    from dataclasses import replace
    from functools import partial

    import torch
    from torch import Tensor

    from chapters.ch06_prefill_decode.lab_parts import read_rate
    from chapters.ch10_optimization_stack import setups
    from chapters.ch10_optimization_stack.batch_invariant import (
        NUM_OUTPUT,
        NUM_PROMPT,
        PIECE,
        OneQuestion,
        added,
        float32,
        in_equal_shares,
        in_fixed_pieces,
    )
    from chapters.ch10_optimization_stack.lab_parts import (
        DECODES,
        KINDS,
        counted_bytes,
        make_table,
        not_faster,
        say_noise,
        tell_each_alone,
    )
    from chapters.ch10_optimization_stack.setups import CONTEXT, NUM_REQUESTS, World
    from chapters.ch10_optimization_stack.tiles import LADDER, TILE, TILE_ROWS, Memory, rows_read, tiles_of_paged_keys
    from chapters.lab_notebook import the_story
    from chapters.playing import title
    from chapters.story import one_core, stopwatch
    from nanovllm import SamplingParams
    from nanovllm.worker import attention
    from nanovllm.worker.batch import Batch
    from nanovllm.worker.kernels import TORCH_KERNELS


@app.cell(hide_code=True)
def _():
    title(10, playable=False)
    return


@app.cell(hide_code=True)
def begin():
    story = the_story()
    return (story,)


@app.cell
def settings():
    NUM_NUMBERS = 1_000  # of the row that several workers add up
    return (NUM_NUMBERS,)


@app.cell
def _(story):
    world = World(story.load)
    return (world,)


@app.cell(expand_output=True)
def tell_bytes(story, world):
    story.part("Counted: the bytes that each optimization should save")
    story.say(
        f"Megabytes that a step reads and writes, counted from the ModelConfig; decodes at a context of {CONTEXT}. "
        "Left of the arrow are PyTorch's operations, each reading its inputs and writing its result; right of it is "
        "one kernel that keeps what lies between:"
    )
    _table = make_table("part", *KINDS, width=18)
    for _name, _cells in counted_bytes(world).items():
        _table.add_row(_name, *(f"{plain:.1f} -> {fused:.1f}" for plain, fused in _cells.values()))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_operations(story, world):
    story.part("Counted: the operations of a step")
    story.say("Every PyTorch operation costs some microseconds before it does anything. One decode step makes:")
    _table = make_table("one after another", "operations", "fewer")
    with world.decoding(1):
        _before = None
        for _setup in world.in_order:
            _count = world.num_operations(_setup)
            _table.add_row(_setup.name, f"{_count:,}", "" if _before is None else f"{_before - _count:,}", "(measured)")
            _before = _count
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_ladder(story):
    story.part("Counted: FlashAttention in five steps, one head")
    story.say(
        f"float32, head_dim 64, {TILE} keys a tile, {TILE_ROWS} query rows a tile. Each step must agree with the one "
        "before. The table shows the largest tensor that each makes beside its result, in bytes, as PyTorch reports it:"
    )
    _lengths = (64, 128, 256)
    _generator = torch.Generator().manual_seed(10)
    _found: dict[str, list[str]] = {_name: [] for _name, _ in LADDER}
    with torch.inference_mode():
        for _n in _lengths:
            _q, _k, _v = torch.randn(3, _n, 64, generator=_generator)
            _before = None
            for _name, _step in LADDER:
                with Memory() as _memory:
                    _out = _step(_q, _k, _v)
                _found[_name].append(f"{_memory.largest_bytes(_out):,}")
                if _before is not None and not torch.allclose(_out, _before, atol=1e-5):
                    raise AssertionError(f"{_name} disagrees with the step before it at n = {_n}")
                _before = _out
    _table = make_table("step", *(f"n = {_n:,}" for _n in _lengths), f"K, V rows read, n = {_lengths[-1]:,}")
    for _name, _cells in _found.items():
        _table.add_row(_name, *_cells, f"{rows_read(_name, _lengths[-1]):,}")
    story.show(_table)
    story.say(
        "All agree to within 1e-5. (a) grows with n x n, (b) with n; (c), (d) and (e) do not grow.\n\n"
        f"(b), (c) and (d) read K and V again for each query row, (c) K even twice. (e) reads them once for "
        f"{TILE_ROWS} rows: that is what the second kind of tile is for."
    )
    return


@app.cell(expand_output=True)
def tell_paged(story, world):
    story.part("Counted: (f) over the block table, in the engine")
    _differences: list[float] = []

    def _both(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int) -> Tensor:
        floats = q.float(), k_cache.float(), v_cache.float()
        out = tiles_of_paged_keys(q.float(), k_cache, v_cache, batch, window)
        _differences.append((out - attention.paged_attention(*floats, batch, window)).abs().max().item())
        return out.to(q.dtype)

    world.use(replace(world.in_order[0], kernels=replace(TORCH_KERNELS, paged_attention=_both)))
    _prompts = ["The capital of France is", "Once upon a time"]
    _outputs = world.llm.generate(_prompts, SamplingParams(temperature=0, max_tokens=4), False)
    story.say(
        f"The same tiles, now for all heads, keys found through the block table, at most {TILE} of them at a time. "
        f"For two prompts and 4 steps each the engine ran with it: {len(_differences)} calls, one a layer and step."
        "\n\nCompared in float32 with attention.paged_attention on the same cache: "
        f"{'every number agrees to within 1e-4' if max(_differences) < 1e-4 else f'{max(_differences)} APART'}."
    )
    story.say(f"Largest difference {max(_differences):.1e}.", measured=True)
    world.use(world.all_on)
    story.say(f"The model said: {(_outputs[0].prompt or '') + _outputs[0].outputs[0].text!r}", measured=True)
    return


@app.cell(expand_output=True)
def tell_order(NUM_NUMBERS, story):
    story.part("Counted: sums that depend on their order")
    _large = 2.0**24
    _left, _right = added([_large, 1, 1]), float32(_large + added([1, 1]))
    story.say(
        f"float32 has 24 bits for a number's digits. Let a be {_large:,.0f}: a + 1 needs 25 of them and is rounded to "
        f"a.\n\n(a + 1) + 1 = {_left:,.0f}\na + (1 + 1) = {_right:,.0f}\n\nNow {NUM_NUMBERS:,} random numbers between "
        f"-1 and 1, added up by several workers. Left, each worker has an equal share of them. Right, the row is cut "
        f"into pieces of {PIECE} numbers, whoever adds them up, and the pieces' sums are added in the order of "
        "the pieces:"
    )
    _rng = random.Random(10)
    _numbers = [float32(_rng.uniform(-1, 1)) for _ in range(NUM_NUMBERS)]
    _table = make_table("workers", "equal shares", f"pieces of {PIECE}", width=14)
    for _num_workers in (1, 2, 3, 5, 8):
        _sums = in_equal_shares(_numbers, _num_workers), in_fixed_pieces(_numbers, _num_workers)
        _table.add_row(str(_num_workers), *(f"{total:.8f}" for total in _sums))
    story.show(_table)
    story.say(f"In exact arithmetic: {math.fsum(_numbers):.8f}.")
    return


@app.cell(expand_output=True)
def tell_same_bits(story):
    story.part("Counted: one question in six ways")
    story.say(
        f"The engine computes in float32. A question of {NUM_PROMPT} tokens gets {NUM_OUTPUT} tokens of answer. A hash "
        "is made of the bits of their log probabilities, and of those of the four next best: where one bit differs, "
        "the hash does. The left column has the C kernels, the right one PyTorch's operations:"
    )
    _engines = {"C kernels": ("reordered_weights", "c_kernels"), "PyTorch": ()}
    _found = {name: OneQuestion(story.load, optimizations).answers() for name, optimizations in _engines.items()}
    _table = make_table("the question", *_found, width=16)
    for _way, _number in _found["C kernels"].items():
        _table.add_row(_way, f"{_number:,}", f"{_found['PyTorch'][_way]:,}", "(measured)")
    story.show(_table)
    _counts = (f"{name} {len(set(answers.values()))}" for name, answers in _found.items())
    story.say(f"Different hashes: {', '.join(_counts)}.", measured=True)
    return


@app.cell(expand_output=True)
def tell_hierarchy(story):
    story.part("Measured: how far away is a number?")
    story.say(
        "One thread reads a tensor over and over. The first fits into the caches of most processors, the other does "
        "not:"
    )
    _table = make_table("size of the tensor", "GB/s")
    for _size, _times in ((2 << 20, 500), (256 << 20, 5)):
        _matrix, _vector = torch.ones(_size // (4 << 10), 1 << 10), torch.ones(1 << 10)  # their product reads each once
        with one_core():
            _best_s = min(stopwatch(lambda: torch.mv(_matrix, _vector)) for _ in range(_times))  # noqa: B023
        _table.add_row(f"{_size >> 10:,} KiB", f"{_matrix.nbytes / _best_s / 1e9:.0f}", "(measured)")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_shares(story, world):
    story.part("Measured: what each one saves")
    if not world.c_products and world.c_kernels is not None:
        story.say("cpu/linear.c leaves this dtype or this processor to oneDNN: C's matrix products are oneDNN's here.")
    _rate = read_rate(torch.device("cpu")) / 1e9
    story.say(f"All threads together read {_rate:.0f} GB/s from memory here.", measured=True)
    _times = {kind: world.decode_ms(num_seqs) for kind, num_seqs in DECODES.items()}
    _rounds = ", ".join(f"{kind} {len(_times[kind][world.all_on].rounds)}" for kind in DECODES)
    story.say(
        "The setups take turns, one step each a round, so that a busy moment does not hit one of them alone. A saving "
        "is the difference between the fastest steps. It counts if the faster one won more than three of four rounds; "
        "otherwise it is below the noise."
    )
    story.say(f"Rounds: {_rounds}.", measured=True)
    tell_each_alone(story, world, _times, _rate)
    story.say("One after another: the fastest step, and the median.")
    _columns = (name for kind in DECODES for name in (f"{kind}, ms", "median"))
    _table = make_table("one after another", *_columns, width=8)
    for _setup in world.in_order:
        _found = [_times[kind][_setup] for kind in DECODES]
        _table.add_row(_setup.name, *(f"{ms:.1f}" for each in _found for ms in (each.best, each.median)), "(measured)")
    story.show(_table)
    _rows = {kind: [(_setup.name, _times[kind][_setup]) for _setup in world.in_order] for kind in DECODES}
    say_noise(story, [f"{name} ({kind})" for kind in DECODES for name in not_faster(_rows[kind])])
    _ratios = (
        f"{kind} {_times[kind][world.in_order[0]].best / _times[kind][world.all_on].best:.1f}" for kind in DECODES
    )
    story.say(f"All together: {', '.join(f'{ratio} times' for ratio in _ratios)} as fast.", measured=True)
    return


@app.cell(expand_output=True)
def tell_workload(story, world):
    story.part("Measured: the control plane in the same picture")
    story.say(
        f"{NUM_REQUESTS} requests about the same text: {setups.NUM_SHARED} tokens in common, {setups.NUM_OWN} of their "
        f"own, {setups.NUM_OUTPUT} tokens of answer. The rows below the kernels are what chapters 5 and 7 do. The "
        "columns are the fastest of some rounds, and the median:"
    )
    _fast = world.all_on
    _stages = {
        "plain, one by one": (world.in_order[0], 1, False),
        "+ C kernels" if world.c_kernels else "+ reordered weights": (_fast, 1, False),
        "+ batching": (_fast, NUM_REQUESTS, False),
        "+ prefix caching": (_fast, NUM_REQUESTS, True),
    }
    _computed: dict[str, int] = {}

    def _turn(_name: str) -> float:
        setup, at_once, caching = _stages[_name]
        milliseconds, _computed[_name] = world.workload_ms(setup, at_once=at_once, caching=caching)
        return milliseconds

    _rows = list(setups.in_turn({_name: partial(_turn, _name) for _name in _stages}, 2, setups.MAX_ROUNDS).items())
    _table = make_table("one after another", "fastest, ms", "median")
    for _name, _found in _rows:
        _table.add_row(_name, f"{_found.best:.1f}", f"{_found.median:.1f}", "(measured)")
    story.show(_table)
    say_noise(story, not_faster(_rows))
    story.say("The tokens that each row computed:")
    _table = make_table("", "tokens computed")
    for _name, _num_tokens in _computed.items():
        _table.add_row(_name, f"{_num_tokens:,}")
    story.show(_table)
    return


if __name__ == "__main__":
    app.run()
