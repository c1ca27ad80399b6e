import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 17: Which experts does a token meet?")

with app.setup(hide_code=True):
    import torch
    from rich.text import Text

    from chapters.ch06_prefill_decode.lab_parts import read_rate
    from chapters.ch17_experts import large
    from chapters.ch17_experts.chance import expected_met
    from chapters.ch17_experts.drawing import draw_visits
    from chapters.ch17_experts.lab_parts import ACTIONS, panels
    from chapters.ch17_experts.sparse import NUM_STEPS, busiest_rank, load_sparse, shares_of, visits_of
    from chapters.ch17_experts.tell import (
        BYTES,
        NUMS_RANKS,
        READ_RATE,
        large_config,
        rows_of,
        texts_of_all_kinds,
        top_two,
    )
    from chapters.ch17_experts.world import World
    from chapters.draw import make_table
    from chapters.lab_notebook import the_story
    from chapters.playing import playground, start_button, title
    from chapters.story import busy, one_core
    from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
    from nanovllm.worker.kernels import TORCH_KERNELS


@app.cell(hide_code=True)
def _():
    title(17)
    return


@app.cell(hide_code=True)
def play_it():
    player, turn = playground(
        lambda: World(load_sparse()),
        panels,
        ACTIONS,
        ask="a text",
        preparing="Training a small model with eight experts",
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
def _():
    sparse = load_sparse()
    return (sparse,)


@app.cell(expand_output=True)
def tell_visits(sparse, story):
    story.part("Which experts a text visits")
    _config = sparse.engine.model_config
    story.say(
        f"A model of {_config.num_hidden_layers} layers with {_config.num_experts} experts each, of which a token "
        f"meets {_config.num_experts_per_tok}. It was trained just now, for {NUM_STEPS} steps, on sums, prose and "
        "code, letter by letter. Here are three texts of these kinds, which it has not seen:"
    )
    _texts = texts_of_all_kinds()
    _table = make_table("kind", "begins", first=8)
    _table.columns[1].justify = "left"
    for _kind, _text in _texts.items():
        _table.add_row(_kind, Text(_text[:60]))
    story.show(_table)
    story.say("What percentage of the choices of all tokens of a text fell on each expert?")
    _visits = {_kind: visits_of(sparse, [_text]) for _kind, _text in _texts.items()}
    _shares = {_kind: shares_of(_found) for _kind, _found in _visits.items()}
    story.show(draw_visits(_shares))
    story.say(
        "These are the same choices in the first layer and in the last, by kind of character, in all three texts:"
    )
    _letters, _chosen = "".join(_texts.values()), torch.cat(list(_visits.values()), dim=1)
    _ends = (0, len(_chosen) - 1)
    _found = {name: shares_of(_chosen[list(_ends)][:, rows]) for name, rows in rows_of(_letters).items()}
    story.show(draw_visits(_found, _ends))
    _concentration = ", ".join(f"{name} {100 * top_two(share[0]):.0f} %" for name, share in _found.items())
    story.say("How many of its choices in the first layer does each kind give to the two experts that it chooses most?")
    story.say(f"{_concentration}", measured=True)
    shares = _shares
    return (shares,)


@app.cell(expand_output=True)
def tell_products(story):
    story.part("One batch, many weights")
    _num_experts, _num_chosen, _mib = large.NUM_EXPERTS, large.NUM_CHOSEN, large.IN_SIZE * large.OUT_SIZE * 2 / 2**20
    story.say(
        f"{_num_experts} experts of {large.IN_SIZE} x {large.OUT_SIZE} numbers in bf16, {_mib:g} MiB each. Each row "
        f"meets {_num_chosen} of them, at random. The table shows milliseconds on one core: for every row multiplied "
        "on its own; for the rows of an expert multiplied together, expert after expert; and for one pass of the "
        "engine's kernel."
    )

    _kernels = load_cpu_kernels(large_config(), torch.bfloat16) or TORCH_KERNELS
    _nums_rows = (1, 2, 4, 8, 16, 32, 64, 128)
    _table = make_table("rows", "pairs", "met", "expected", *large.WAYS, "ms a row", "", width=8, first=5)
    for _num_rows, (_num_met, _best) in zip(_nums_rows, large.time_products(_kernels, _nums_rows, 6), strict=True):
        _numbers = _num_rows * _num_chosen, _num_met, expected_met(_num_rows, _num_experts, _num_chosen)
        _times = (f"{1e3 * seconds:.1f}" for seconds in _best.values())
        _counts = (f"{number:.0f}" for number in (_num_rows, *_numbers))
        _table.add_row(*_counts, *_times, f"{1e3 * _best['one pass'] / _num_rows:.2f}", "(measured)")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_large(story):
    story.part("What memory holds, and what a token reads")
    _config, _sizes = large_config(), large.sizes_of(large_config())
    story.say(
        f"Qwen3-30B-A3B: {_config.num_hidden_layers} layers, {_config.num_experts} experts each, of which a token "
        f"meets {_config.num_experts_per_tok}. The table shows billions of weights, and the GB (10^9 bytes) that "
        "they take."
    )
    _experts = _sizes.num_layers * _sizes.num_experts * _sizes.expert
    _chosen = _sizes.num_layers * _sizes.num_chosen * _sizes.expert
    _table = make_table("", "weights", *BYTES, width=8, first=40)
    for _name, _number in (
        ("all: what memory holds", _sizes.total),
        ("  experts", _experts),
        ("  attention, norms, routers, output", _sizes.shared),
        ("  embedding", _sizes.embedding),
        ("a token meets", _sizes.shared + _chosen + _sizes.embedding),
        ("  8 experts a layer", _chosen),
        ("  reads: without the embedding", _sizes.shared + _chosen),
    ):
        _table.add_row(_name, f"{_number / 1e9:.2f}", *(f"{_number * b / 1e9:.2f}" for b in BYTES.values()))
    story.show(_table)
    with busy("measuring how fast this machine reads"):
        _rate = read_rate(torch.device("cpu"))
    story.say(
        "Suppose that a step takes only as long as reading its weights, on a machine that reads "
        f"{READ_RATE / 1e9:.0f} GB/s. The next table shows the experts that n rows meet in a layer, the billions of "
        "weights that a step reads, and the tokens a second of all rows together; the last column is a dense model "
        "with as many weights."
    )
    story.say(
        f"This machine reads {_rate / 1e9:.1f} GB/s from memory, with the threads that it has: multiply by "
        f"{_rate / READ_RATE:.2f}.",
        measured=True,
    )
    _table = make_table("rows", "met", "weights", *BYTES, "dense, int4", width=9, first=5)
    for _num_rows in (1, 2, 4, 8, 16, 32, 64, 256):
        _numbers, _dense = _sizes.met(_num_rows), _sizes.total - _sizes.embedding
        _met = f"{expected_met(_num_rows, _sizes.num_experts, _sizes.num_chosen):.0f}", f"{_numbers / 1e9:.1f}"
        _read = [*(_numbers * b for b in BYTES.values()), _dense * BYTES["int4"]]
        _table.add_row(str(_num_rows), *_met, *(f"{_num_rows * READ_RATE / size:.1f}" for size in _read))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_balance(shares, sparse, story):
    story.part("Who waits for a popular expert")
    story.say(
        "If the experts of each layer are spread over ranks, neighbors together, all ranks wait for the one with the "
        "most rows. The table shows the time of a step as a multiple of what it would be if all ranks had equally many "
        "rows. In this engine it is 1 whatever the router chooses, since every rank holds a slice of every expert."
    )
    _batches = {f"{kind} only": share for kind, share in shares.items()}
    _batches["all three"] = shares_of(visits_of(sparse, list(texts_of_all_kinds().values())))
    _table = make_table("a batch of", *(f"{n} ranks" for n in NUMS_RANKS), "", width=9, first=12)
    for _name, _found in _batches.items():
        _table.add_row(_name, *(f"{busiest_rank(_found, n):.2f}" for n in NUMS_RANKS), "(measured)")
    story.show(_table)
    return


if __name__ == "__main__":
    app.run()
