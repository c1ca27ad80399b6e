"""Parts of lab 12: the weights of a real model in fewer bits, and what that does to the numbers and to the model.

Everything is computed in float32, on one core.
"""

from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chapters.ch12_fewer_bits.drawing import histogram, levels
from chapters.ch12_fewer_bits.rounding import Change, Model, error, rounded
from chapters.ch12_fewer_bits.world import World, size_name
from chapters.draw import make_table
from chapters.player import actions
from chapters.recording import Recording
from chapters.story import one_core
from nanovllm import LLM

NUM_SHOWN = 8  # numbers of a group in a table


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


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: with one row, fewer bits take less time.

    Nothing is said of 4 and 8 bits with many rows, where it depends on the processor's instructions.
    """
    [sheet] = recorded.sheets("Fetched and multiplied")
    ms = sheet.column("1")
    if ms != sorted(ms, reverse=True):
        raise ValueError(f"one row took {ms} ms in bf16, Q8_0 and Q4_1")
