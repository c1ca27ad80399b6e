"""Lab of chapter 12: the weights of a real model in fewer bits, and what that does to the numbers and to the model.

Everything is computed in float32, on one core.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from chapters.app import explorer
from chapters.ch12_fewer_bits.drawing import histogram, levels
from chapters.ch12_fewer_bits.rounding import KINDS, ROW, Change, Model, error, rounded
from chapters.ch12_fewer_bits.world import OUTLIERS, TEXT, World, size_name
from chapters.draw import make_table
from chapters.play import actions
from chapters.story import Story, one_core, stopwatch
from nanovllm import LLM
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

NUM_SHOWN = 8  # numbers of a group in a table
NUM_ROWS = (1, 16, 128)


def load_world(load: Callable[..., LLM]) -> World:
    llm = load(dtype="float32", enforce_eager=True, max_model_len=256, num_gpu_blocks_override=16, block_size=16)
    with one_core():
        return World(Model(llm))


# -- drawings ---------------------------------------------------------------------------------------------------------


def draw_group(world: World, count: int = NUM_SHOWN) -> Group:
    """The first numbers of the chosen group: number, code, what comes back."""
    shown = world.shown()
    numbers, codes, restored = (x[:count].tolist() for x in (shown.numbers, shown.codes, shown.restored))
    errors = ((shown.restored - shown.numbers) / (shown.scale or 1))[:count].tolist()
    table = make_table("", *(str(i) for i in range(count)), first=1)
    table.add_row("number", *(f"{x:.4f}" for x in numbers))
    table.add_row("code", *map(str, codes))
    table.add_row("restored", *(f"{x:.4f}" for x in restored))
    table.add_row("error, in steps", *(f"{x:+.2f}" for x in errors))
    return Group(levels(shown.numbers, world.format, shown.scale, shown.minimum), table, Text(describe_group(world)))


def describe_group(world: World) -> str:
    shown = world.shown()
    minimum = f", minimum {shown.minimum:.4g}" if world.format.has_minimum else ""
    others = " of the other numbers" if world.outlier else ""
    errors = f"error{others}: {shown.group_error:.2%} in the group, {shown.row_error:.2%} in the row"
    return f"row {world.row}, group {world.group}: scale {shown.scale:.4g}{minimum}; {errors}"


def draw_matrix(world: World) -> Group:
    """All numbers of the matrix, and their rounding errors."""
    low_high = float(4 * world.weight.std())
    off = error(world.weight, rounded(world.weight, world.format, world.size))
    [name] = world.names
    weights = f"{name} {list(world.weight.shape)}: root mean square {world.weight.square().mean().sqrt():.4f}"
    errors = f"the rounding errors, in steps of {world.format.name}; error of the matrix {off:.2%}"
    return Group(
        histogram(weights, world.weight.flatten(), -low_high, low_high),
        histogram(errors, world.rounding_errors(), -0.6, 0.6, height=3),
    )


def draw_changes(model: Model, changes: Iterable[tuple[str, Change]], measured: bool = False) -> Table:
    """measured: the last bits of these depend on the machine."""
    columns = ("perplexity", "more", "KL divergence", "new best token")
    table = make_table("rounded", *columns, *[""] * measured, first=24, width=8)
    table.add_row("nothing", f"{model.perplexity:.2f}", "", "", "", *["(measured)"] * measured)
    for name, change in changes:
        other = f"{change.num_other} of {change.num_tokens}"
        cells = f"{change.perplexity:.2f}", f"{change.more:+.1%}", f"{change.divergence:.4f}", other
        table.add_row(name, *cells, *["(measured)"] * measured)
    return table


def panels(world: World) -> list[tuple[str, RenderableType]]:
    shuffled = ", dimensions shuffled" if world.model.is_shuffled else ""
    outlier = f", outlier x{world.outlier}" if world.outlier else ""
    chosen = f"{world.format.name}, a group is {size_name(world.size)}{outlier}{shuffled}"
    changes = draw_changes(world.model, world.measured)
    return [
        (f"a group: {chosen}", draw_group(world)),
        ("the matrix", draw_matrix(world)),
        (f"measured on {len(world.model.token_ids)} tokens (m: this matrix, a: all of its kind)", changes),
    ]


ACTIONS = actions(
    "k|kind|next_kind, l|layer|next_layer, L||previous_layer, f|format|next_format, s|size|next_size, "
    "g|group|next_group, o|outlier|next_outlier, m|measure|measure, a|all|measure_kind, h|shuffle|shuffle, "
    "r|reset|reset"
)


def make_app(model: str | None) -> Any:
    return explorer("Fewer bits", load_world(Story(model).load), panels, ACTIONS, ask="a text to predict")


# -- the story --------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    world = load_world(story.load)
    with one_core():
        tell_bytes(story, world)
        tell_group(story, world)
        tell_outlier(story, world)
        tell_activations(story, world)
        tell_model(story, world)
        tell_four_bits(story, world)
        tell_layers(story, world)
        tell_speed(story, world)


def tell_bytes(story: Story, world: World) -> None:
    story.part("What the weights weigh")
    num_weights = sum(weight.numel() for weight in world.model.weights.values())
    story.say(
        f"The model's linear layers and its output matrix have {num_weights:,} weights. A step reads all of them."
    )
    table = make_table("", "bytes a group of 32", "bits a weight", "MB", "of bf16", first=22, width=12)
    group_bytes = {"bf16": 2 * GROUP_SIZE} | {name: format.group_bytes for name, format in FORMATS.items()}
    for name, num_bytes in group_bytes.items():
        bits, megabytes = 8 * num_bytes / GROUP_SIZE, num_weights * num_bytes / GROUP_SIZE / 1e6
        table.add_row(name, str(num_bytes), f"{bits:.1f}", f"{megabytes:.1f}", f"{num_bytes / 2 / GROUP_SIZE:.2f}")
    story.show(table)


def tell_group(story: Story, world: World) -> None:
    story.part("A group, rounded")
    world.model.shuffle()  # the demo's own groups lie on a grid of 16 steps already
    world.choose("gate_proj", 5)
    for format in (Q8_0, Q4_0, Q4_1):
        world.format = format
        story.say(f"{format.name}: the first {NUM_SHOWN} of 32 numbers.")
        story.show(draw_group(world))
    story.part("A matrix, rounded")
    story.show(draw_matrix(world))
    table = make_table("error of the matrix", *(size_name(size) for size in (32, 128, ROW)), first=22, width=12)
    for format in (Q8_0, Q4_0, Q4_1):
        cells = (error(world.weight, rounded(world.weight, format, size)) for size in (32, 128, ROW))
        table.add_row(format.name, *(f"{cell:.2%}" for cell in cells))
    story.show(table)


def tell_outlier(story: Story, world: World) -> None:
    story.part("An outlier")
    story.say(
        "The first number of a row becomes as large as the row's largest, then 4 and 16 times as large. What happens "
        "to the row's other numbers in Q8_0, with a scale for each 32, and with one for the row?"
    )
    table = make_table("outlier", "32: its group", "32: the row", "one scale: the row", first=22, width=12)
    world.format = Q8_0
    for world.outlier in OUTLIERS:
        world.size = 32
        small = world.shown()
        world.size = ROW
        name = f"{world.outlier} times the largest" if world.outlier else "none"
        table.add_row(name, *(f"{x:.2%}" for x in (small.group_error, small.row_error, world.shown().row_error)))
    story.show(table)


def tell_activations(story: Story, world: World) -> None:
    story.part("Activations")
    model = world.model
    model.shuffle()  # back
    story.say(
        "How far does the largest number of a row stand out? Its magnitude over the root mean square of its row: the "
        "median of all rows, and the largest. Then the error in Q8_0."
    )
    table = make_table("", "median", "largest", "error, 32", "error, row", first=34, width=10)
    inputs = {name: model.inputs(name) for name in ("self_attn.qkv_proj", "mlp.down_proj")}
    for layer in (5, 20):
        for name, kind in (("self_attn.qkv_proj", "q_proj"), ("mlp.down_proj", "down_proj")):
            [weight_name] = model.names(kind, layer)
            weight, x_in = model.weights[weight_name], inputs[name][layer]
            for what, x in ((f"weights of {kind}", weight), ("what goes into it", x_in)):
                ratio = x.abs().amax(-1) / x.square().mean(-1).sqrt()
                errors = (error(x, rounded(x, Q8_0, size)) for size in (32, ROW))
                cells = f"{ratio.median():.1f}", f"{ratio.max():.1f}", *(f"{e:.2%}" for e in errors)
                table.add_row(f"layer {layer}, {what}", *cells)
    story.show(table)
    story.say(
        "The table shows the largest magnitude that goes into down_proj, at the first token of the text and at "
        "all others:"
    )
    table = make_table("layer", "first token", "the others", first=22, width=12)
    for layer, x in inputs["mlp.down_proj"].items():
        first, others = float(x[0].abs().max()), float(x[1:].abs().max())
        if first > 10 * others or layer in (0, 20):
            table.add_row(str(layer), f"{first:,.1f}", f"{others:,.1f}")
    story.show(table)


def tell_model(story: Story, world: World) -> None:
    story.part("What the model makes of it: 8 bits")
    model, changes = world.model, list[tuple[str, Change]]()
    story.say(f"{len(model.token_ids)} tokens of a text that the model has not seen: {TEXT[:90]!r} and so on.")
    for size in (32, ROW):
        with model.rounded(model.names(), Q8_0, size):
            changes.append((f"weights, {size_name(size)}", model.change()))
            with model.rounded_activations(Q8_0, size):
                both = model.change()
        with model.rounded_activations(Q8_0, size):
            changes.append((f"activations, {size_name(size)}", model.change()))
        changes.append((f"both, {size_name(size)}", both))
    story.show(draw_changes(model, changes, measured=True))


def tell_four_bits(story: Story, world: World) -> None:
    story.part("4 bits, and a model that was 4 bits before")
    model = world.model

    def change(format: Format, names: list[str]) -> Change:
        with model.rounded(names, format, 32):
            return model.change()

    layers, head = model.names(layer=range(len(model.decoder.layers))), model.names("lm_head")
    changes = [("layers, Q4_1", change(Q4_1, layers)), ("lm_head, Q4_1", change(Q4_1, head))]
    model.shuffle()
    changes += [(f"shuffled: layers, {format.name}", change(format, layers)) for format in (Q4_1, Q4_0)]
    story.show(draw_changes(model, changes))


def tell_layers(story: Story, world: World) -> None:
    story.part("One at a time")
    model = world.model
    story.say(
        "The shuffled model again, one kind of matrix at a time in Q4_1, in all layers; then some layers at a time."
    )
    changes = []
    for kind in KINDS:
        with model.rounded(model.names(kind), Q4_1, 32):
            changes.append((f"every {kind}", model.change()))
    num_layers = len(model.decoder.layers)
    for first in range(0, num_layers, -(-num_layers // 5)):
        layers = range(first, min(first + -(-num_layers // 5), num_layers))
        with model.rounded(model.names(layer=layers), Q4_1, 32):
            changes.append((f"layers {layers.start} to {layers.stop - 1}", model.change()))
    story.show(draw_changes(model, changes))


def tell_speed(story: Story, world: World) -> None:
    story.part("Fetched and multiplied")
    config = world.model.llm.engine.model_config
    kernels = load_cpu_kernels(config, torch.bfloat16) or TORCH_KERNELS
    weights = [layer.mlp.gate_up_proj.weight for layer in world.model.decoder.layers]
    story.say(
        f"The {len(weights)} matrices gate_up_proj, one after another, on one core, with the engine's own products: "
        "milliseconds for all of them, the best of three. (Without a C compiler PyTorch does it, and fewer "
        "bits are slower.)"
    )
    products: dict[str, list[tuple[Callable[..., Tensor], Any]]] = {"bf16": [], "Q8_0": [], "Q4_1": []}
    for weight in weights:
        plain = weight.bfloat16()
        reordered = kernels.reorder_weight(plain)
        products["bf16"].append((F.linear, plain) if reordered is None else (kernels.linear, reordered))
        for groups in (quantize_q8_0(weight), quantize_q4_1(weight)):
            in_blocks = MergedWeight([QuantizedWeight.of(groups)])
            products[groups.format.name].append((kernels_for(kernels).quantized_linear, in_blocks))
    table = make_table("rows", *map(str, NUM_ROWS), "", first=22, width=12)
    for name, layers in products.items():
        times = []
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, config.hidden_size).bfloat16()
            best = min(stopwatch(lambda: [product(x, w, None) for product, w in layers]) for _ in range(3))  # noqa: B023
            times.append(f"{1e3 * best:.1f}")
        table.add_row(name, *times, "(measured)")
    story.show(table)
