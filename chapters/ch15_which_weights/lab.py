import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 15: Which weights does a request meet?")

with app.setup(hide_code=True):
    import math
    import tempfile
    from pathlib import Path
    from typing import Any

    import torch
    from rich.table import Table
    from rich.text import Text

    from chapters.ch13_guess_and_check.world import chunks_watched
    from chapters.ch15_which_weights.lab_parts import ACTIONS, panels
    from chapters.ch15_which_weights.tell import (
        COST_RANK,
        MAX_ROUNDS,
        NUM_SEQS,
        NUM_TOKENS,
        NUMS_ADAPTERS,
        RANKS,
        draw_runs,
        hashes_without_adapters,
        one_after_another,
        send,
        start_over,
        step_s,
    )
    from chapters.ch15_which_weights.tuning import BEGINNING, ENDINGS, MAX_STEPS, RANK, TARGETS, random_adapter
    from chapters.ch15_which_weights.world import NOBODY, World, load_adapters, rows_of
    from chapters.draw import make_table
    from chapters.lab_notebook import the_story
    from chapters.playing import playground, start_button, title
    from chapters.story import one_core
    from nanovllm import LoRARequest, SamplingParams
    from nanovllm.features.lora.adapter import linear_shapes
    from nanovllm.features.lora.adapter_rows import TILE_ROWS
    from nanovllm.worker.model import Decoder


@app.cell(hide_code=True)
def _():
    title(15)
    return


@app.cell(hide_code=True)
def play_it():
    player, turn = playground(
        lambda: World(*load_adapters(the_story().model)),
        panels,
        ACTIONS,
        ask="a prompt",
        first="s",
        preparing="Training three small adapters: up to a minute",
    )
    return player, turn


@app.cell(hide_code=True, expand_output=True)
def show_it(player, turn):
    turn()
    controls = player.controls()
    player.show(controls)
    return


@app.cell(hide_code=True)
def start_it():
    start = start_button("a minute")
    start
    return (start,)


@app.cell(hide_code=True)
def begin(start):
    story = the_story(start)
    story.enter(one_core())
    return (story,)


@app.cell
def _(story):
    llm, adapters = load_adapters(story.model, max_loras=3)
    return adapters, llm


@app.cell(expand_output=True)
def tell_answers(adapters, llm, story):
    story.part("One question, four answers")
    story.say(
        f"Three adapters of rank {RANK}, of {' and '.join(TARGETS)} in every layer, were trained here for at most "
        f'{MAX_STEPS} steps, each on one sentence that begins "{BEGINNING}". One call of generate():'
    )
    _names = [NOBODY, *ENDINGS]
    _params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with chunks_watched(llm) as _chunks:
        _outputs = llm.generate([BEGINNING] * 4, _params, False, lora_request=[adapters.get(_name) for _name in _names])
    _table = make_table("adapter", "goes on", first=12)
    _table.columns[1].justify = "left"
    for _name, _output in zip(_names, _outputs, strict=True):
        _table.add_row(_name, Text(_output.outputs[0].text.replace("\n", "⏎")))
    story.show(_table)
    story.say(f"4 requests, {len(_chunks) // 4} steps: {len(_chunks)} chunks, so all four were in every step.")
    return


@app.cell(expand_output=True)
def tell_rank(llm, story):
    story.part("How small an adapter is")
    _config = llm.engine.model_config
    with torch.device("meta"):
        _total = sum(parameter.numel() for parameter in Decoder(_config).parameters())
    _shapes = [shape for path, shape in linear_shapes(_config).items() if path != "lm_head"]
    story.say(
        f"The demo model has {_total / 1e6:.1f} million numbers. The table shows an adapter of all linear layers "
        "but the head:"
    )
    _table = make_table("rank", "million", "MB in bf16", "of the model", "fit", width=12, first=6)
    for _rank in RANKS:
        _numbers = _rank * sum(map(sum, _shapes))
        _sizes = f"{_numbers / 1e6:.2f}", f"{2 * _numbers / 1e6:.1f}"
        _table.add_row(str(_rank), *_sizes, f"{_numbers / _total:.1%}", str(_total // _numbers))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_rows(adapters, llm, story):
    story.part("The rows of a step")
    _names = ["harbor", "market", NOBODY, "harbor", "library"]
    _entries = start_over(llm, adapters, _names[:3])
    story.say(
        "Requests #1, #2 and #3 come first, #4 and #5 one step later. Each line is a step; #1 x 9 are nine rows of #1. "
        "The last column counts the adapters that the step's rows meet."
    )
    _table = Table("step", "rows", NOBODY, *ENDINGS, "sets", show_edge=False)
    for _number in range(1, 5):
        if _number == 2:
            _entries += [send(llm, adapters, number, name) for number, name in enumerate(_names[3:], 4)]
        with chunks_watched(llm) as _chunks:
            llm.engine.step()
        _rows = rows_of(_chunks, _entries)
        _cells = (", ".join(f"{e.name} x {n}" for e, n in _rows if e.adapter == name) for name in (NOBODY, *ENDINGS))
        _num_sets = len({entry.adapter for entry, _ in _rows} - {NOBODY})
        _table.add_row(str(_number), str(sum(num_rows for _, num_rows in _rows)), *_cells, str(_num_sets))
    llm.engine.abort_requests(list(llm.engine.requests.values()))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_cost(story):
    story.part("What adapters cost")
    _sizes: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": NUM_SEQS}
    _num_adapters = max(NUMS_ADAPTERS)
    _llm = story.load(enable_lora=True, max_loras=_num_adapters, max_lora_rank=COST_RANK, **_sizes)
    _shapes = linear_shapes(_llm.engine.model_config)
    story.say(
        f"{NUM_SEQS} sequences decode in bf16, on one core, with random adapters of rank {COST_RANK} of all linear "
        "layers. Either none of them names an adapter, or all name the same one, or they take turns with several. Up "
        f"to {TILE_ROWS} rows of an adapter are multiplied together: a group. MB: the adapters' numbers that a step "
        "reads. ms: a step, the best of some."
    )
    with tempfile.TemporaryDirectory() as _folder:
        _paths = [random_adapter(Path(_folder, str(i)), _shapes, COST_RANK) for i in range(_num_adapters)]
        _requests = [LoRARequest(f"random {i}", i + 1, path) for i, path in enumerate(_paths)]
        _rounds = [{_num: step_s(_llm, _requests[:_num]) for _num in NUMS_ADAPTERS} for _ in range(MAX_ROUNDS)]
        _seconds = {_num: min(_found[_num] for _found in _rounds) for _num in NUMS_ADAPTERS}
    _adapter_bytes = 2 * COST_RANK * sum(sum(shape) for path, shape in _shapes.items() if path != "lm_head")
    _table = make_table("adapters", "groups", "MB of adapters", "ms", "ms more", "", width=14, first=10)
    for _num, _found in _seconds.items():
        _num_groups = _num * math.ceil(NUM_SEQS / _num / TILE_ROWS) if _num else 0
        _counts = str(_num), str(_num_groups), f"{_num * _adapter_bytes / 1e6:.1f}"
        _table.add_row(*_counts, f"{1e3 * _found:.1f}", f"{1e3 * (_found - _seconds[0]):.1f}", "(measured)")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_seats(story):
    story.part("Who may come in")
    _llm, _adapters = load_adapters(story.model)
    _sent = ("harbor", 2), ("harbor", 4), ("market", 3), (NOBODY, 2), ("library", 3), ("market", 2)  # names, tokens
    start_over(_llm, _adapters, [])
    _entries = [send(_llm, _adapters, _i, _name, _num_tokens) for _i, (_name, _num_tokens) in enumerate(_sent, 1)]
    story.say(
        "Six requests come at once; there are eight seats, and max_loras = 2. The table shows which run in each step, "
        "with their adapters, and which wait:"
    )
    _table = Table("step", "runs", "adapters", "waits", show_edge=False)
    _number = 0
    while _llm.engine.has_unfinished_requests():
        _number += 1
        with chunks_watched(_llm) as _chunks:
            _llm.engine.step()
        _rows = rows_of(_chunks, _entries)
        _waiting = [_entry.name for _entry in _entries if _entry.seq in _llm.engine.scheduler.waiting]
        _met = " ".join(dict.fromkeys(_entry.adapter for _entry, _ in _rows if _entry.adapter != NOBODY))
        _table.add_row(str(_number), " ".join(_entry.name for _entry, _ in _rows), _met, " ".join(_waiting))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_hashes(adapters, llm, story):
    story.part("What goes into a block hash")
    _names = ["harbor", "market", NOBODY, "harbor"]
    _size = llm.engine.block_manager.block_size
    story.say(
        f"The same prompt four times, one request after another, with blocks of {_size} tokens. The table shows the "
        "first half of the hashes of its full blocks, the tokens that it found in the cache, and how it goes on."
    )
    story.show(draw_runs(one_after_another(llm, adapters, _names)))
    with hashes_without_adapters():
        story.say("Now the id is left out of the hashes, which is a mistake made on purpose:")
        story.show(draw_runs(one_after_another(llm, adapters, _names)))
    assert llm.reset_prefix_cache()
    return


if __name__ == "__main__":
    app.run()
