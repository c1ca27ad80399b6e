import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 12: Fewer bits")

with app.setup(hide_code=True):
    from collections.abc import Callable
    from typing import Any

    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from chapters.ch12_fewer_bits.lab_parts import (
        ACTIONS,
        NUM_SHOWN,
        draw_changes,
        draw_group,
        draw_matrix,
        load_world,
        panels,
    )
    from chapters.ch12_fewer_bits.rounding import KINDS, ROW, Change, error, rounded
    from chapters.ch12_fewer_bits.world import OUTLIERS, TEXT, size_name
    from chapters.draw import make_table
    from chapters.lab_notebook import the_story
    from chapters.playing import playground, start_button, title
    from chapters.story import one_core, stopwatch
    from nanovllm.features.quantization.formats import (
        FORMATS,
        GROUP_SIZE,
        Q4_0,
        Q4_1,
        Q8_0,
        Format,
        MergedWeight,
        QuantizedWeight,
        quantize_q8_0,
    )
    from nanovllm.features.quantization.q4_1_search import quantize_q4_1
    from nanovllm.features.quantization.quantized_kernels import kernels_for
    from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
    from nanovllm.worker.kernels import TORCH_KERNELS


@app.cell(hide_code=True)
def _():
    title(12)
    return


@app.cell(hide_code=True)
def play_it():
    player, turn = playground(lambda: load_world(the_story().load), panels, ACTIONS, ask="a text to predict", first="m")
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
def settings():
    NUM_ROWS = (1, 16, 128)
    return (NUM_ROWS,)


@app.cell
def _(story):
    world = load_world(story.load)
    return (world,)


@app.cell(expand_output=True)
def tell_bytes(story, world):
    story.part("What the weights weigh")
    _num_weights = sum(weight.numel() for weight in world.model.weights.values())
    story.say(
        f"The model's linear layers and its output matrix have {_num_weights:,} weights. A step reads all of them."
    )
    _table = make_table("", "bytes a group of 32", "bits a weight", "MB", "of bf16", first=22, width=12)
    _group_bytes = {"bf16": 2 * GROUP_SIZE}
    _group_bytes |= {_name: FORMATS[_name].group_bytes for _name in ("Q8_0", "Q4_0", "Q4_1")}
    for _name, _num_bytes in _group_bytes.items():
        _bits, _megabytes = 8 * _num_bytes / GROUP_SIZE, _num_weights * _num_bytes / GROUP_SIZE / 1e6
        _table.add_row(
            _name, str(_num_bytes), f"{_bits:.1f}", f"{_megabytes:.1f}", f"{_num_bytes / 2 / GROUP_SIZE:.2f}"
        )
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_group(story, world):
    story.part("A group, rounded")
    world.model.shuffle()  # the demo's own groups lie on a grid of 16 steps already
    world.choose("gate_proj", 5)
    for _format in (Q8_0, Q4_0, Q4_1):
        world.format = _format
        story.say(f"{_format.name}: the first {NUM_SHOWN} of 32 numbers.")
        story.show(draw_group(world))
    story.part("A matrix, rounded")
    story.show(draw_matrix(world))
    _table = make_table("error of the matrix", *(size_name(size) for size in (32, 128, ROW)), first=22, width=12)
    for _format in (Q8_0, Q4_0, Q4_1):
        _cells = (error(world.weight, rounded(world.weight, _format, size)) for size in (32, 128, ROW))
        _table.add_row(_format.name, *(f"{cell:.2%}" for cell in _cells))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_outlier(story, world):
    story.part("An outlier")
    story.say(
        "The first number of a row becomes as large as the row's largest, then 4 and 16 times as large. What happens "
        "to the row's other numbers in Q8_0, with a scale for each 32, and with one for the row?"
    )
    _table = make_table("outlier", "32: its group", "32: the row", "one scale: the row", first=22, width=12)
    world.format = Q8_0
    for world.outlier in OUTLIERS:
        world.size = 32
        _small = world.shown()
        world.size = ROW
        _name = f"{world.outlier} times the largest" if world.outlier else "none"
        _table.add_row(_name, *(f"{x:.2%}" for x in (_small.group_error, _small.row_error, world.shown().row_error)))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_activations(story, world):
    story.part("Activations")
    _model = world.model
    _model.shuffle()  # back
    story.say(
        "How far does the largest number of a row stand out? Its magnitude over the root mean square of its row: the "
        "median of all rows, and the largest. Then the error in Q8_0."
    )
    _table = make_table("", "median", "largest", "error, 32", "error, row", first=34, width=10)
    _inputs = {_name: _model.inputs(_name) for _name in ("self_attn.qkv_proj", "mlp.down_proj")}
    for _layer in (5, 20):
        for _name, _kind in (("self_attn.qkv_proj", "q_proj"), ("mlp.down_proj", "down_proj")):
            [_weight_name] = _model.names(_kind, _layer)
            _weight, _x_in = _model.weights[_weight_name], _inputs[_name][_layer]
            for _what, _x in ((f"weights of {_kind}", _weight), ("what goes into it", _x_in)):
                _ratio = _x.abs().amax(-1) / _x.square().mean(-1).sqrt()
                _errors = (error(_x, rounded(_x, Q8_0, size)) for size in (32, ROW))
                _cells = f"{_ratio.median():.1f}", f"{_ratio.max():.1f}", *(f"{e:.2%}" for e in _errors)
                _table.add_row(f"layer {_layer}, {_what}", *_cells)
    story.show(_table)
    story.say(
        "The table shows the largest magnitude that goes into down_proj, at the first token of the text and at "
        "all others:"
    )
    _table = make_table("layer", "first token", "the others", first=22, width=12)
    for _layer, _x in _inputs["mlp.down_proj"].items():
        _first, _others = float(_x[0].abs().max()), float(_x[1:].abs().max())
        if _first > 10 * _others or _layer in (0, 20):
            _table.add_row(str(_layer), f"{_first:,.1f}", f"{_others:,.1f}")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_model(story, world):
    story.part("What the model makes of it: 8 bits")
    _model, _changes = world.model, list[tuple[str, Change]]()
    story.say(f"{len(_model.token_ids)} tokens of a text that the model has not seen: {TEXT[:90]!r} and so on.")
    for _size in (32, ROW):
        with _model.rounded(_model.names(), Q8_0, _size):
            _changes.append((f"weights, {size_name(_size)}", _model.change()))
            with _model.rounded_activations(Q8_0, _size):
                _both = _model.change()
        with _model.rounded_activations(Q8_0, _size):
            _changes.append((f"activations, {size_name(_size)}", _model.change()))
        _changes.append((f"both, {size_name(_size)}", _both))
    story.show(draw_changes(_model, _changes, measured=True))
    return


@app.cell(expand_output=True)
def tell_four_bits(story, world):
    story.part("4 bits, and a model that was 4 bits before")
    _model = world.model

    def _change(format: Format, names: list[str]) -> Change:
        with _model.rounded(names, format, 32):
            return _model.change()

    _layers, _head = _model.names(layer=range(len(_model.decoder.layers))), _model.names("lm_head")
    _changes = [("layers, Q4_1", _change(Q4_1, _layers)), ("lm_head, Q4_1", _change(Q4_1, _head))]
    _model.shuffle()
    _changes += [(f"shuffled: layers, {format.name}", _change(format, _layers)) for format in (Q4_1, Q4_0)]
    story.show(draw_changes(_model, _changes))
    return


@app.cell(expand_output=True)
def tell_layers(story, world):
    story.part("One at a time")
    _model = world.model
    story.say(
        "The shuffled model again, one kind of matrix at a time in Q4_1, in all layers; then some layers at a time."
    )
    _changes = []
    for _kind in KINDS:
        with _model.rounded(_model.names(_kind), Q4_1, 32):
            _changes.append((f"every {_kind}", _model.change()))
    _num_layers = len(_model.decoder.layers)
    for _first in range(0, _num_layers, -(-_num_layers // 5)):
        _layers = range(_first, min(_first + -(-_num_layers // 5), _num_layers))
        with _model.rounded(_model.names(layer=_layers), Q4_1, 32):
            _changes.append((f"layers {_layers.start} to {_layers.stop - 1}", _model.change()))
    story.show(draw_changes(_model, _changes))
    return


@app.cell(expand_output=True)
def tell_speed(NUM_ROWS, story, world):
    story.part("Fetched and multiplied")
    _config = world.model.llm.engine.model_config
    _kernels = load_cpu_kernels(_config, torch.bfloat16) or TORCH_KERNELS
    _weights = [layer.mlp.gate_up_proj.weight for layer in world.model.decoder.layers]
    story.say(
        f"The {len(_weights)} matrices gate_up_proj, one after another, on one core, with the engine's own products: "
        "milliseconds for all of them, the best of three. (Without a C compiler PyTorch does it, and fewer "
        "bits are slower.)"
    )
    _products: dict[str, list[tuple[Callable[..., Tensor], Any]]] = {"bf16": [], "Q8_0": [], "Q4_1": []}
    for _weight in _weights:
        _plain = _weight.bfloat16()
        _reordered = _kernels.reorder_weight(_plain)
        _products["bf16"].append((F.linear, _plain) if _reordered is None else (_kernels.linear, _reordered))
        for _groups in (quantize_q8_0(_weight), quantize_q4_1(_weight)):
            _in_blocks = MergedWeight([QuantizedWeight.of(_groups)])
            _products[_groups.format.name].append((kernels_for(_kernels).quantized_linear, _in_blocks))
    _best: dict[str, list[float]] = {_name: [] for _name in _products}
    for _num_rows in NUM_ROWS:
        _x = torch.randn(_num_rows, _config.hidden_size).bfloat16()
        _rounds = [  # the formats take turns: a busy moment of the machine does not hit one alone
            [stopwatch(lambda: [product(_x, w, None) for product, w in layers]) for layers in _products.values()]  # noqa: B023
            for _ in range(3)
        ]
        for _found, _times in zip(_best.values(), zip(*_rounds, strict=True), strict=True):
            _found.append(min(_times))
    _table = make_table("rows", *map(str, NUM_ROWS), "", first=22, width=12)
    for _name, _found in _best.items():
        _table.add_row(_name, *(f"{1e3 * seconds:.1f}" for seconds in _found), "(measured)")
    story.show(_table)
    return


if __name__ == "__main__":
    app.run()
