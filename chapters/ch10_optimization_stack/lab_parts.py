"""Lab 10: FlashAttention built up in six steps, sums and their order, and what each optimization saves on this machine.

First what can be counted (bytes, operations, memory), then what has to be measured. One engine serves all of it: its
weights are laid out and its kernels swapped between steps (setups.py). The steps of attention are in tiles.py.
"""

from functools import partial
from itertools import pairwise

from chapters import draw
from chapters.ch10_optimization_stack.setups import BATCH, CONTEXT, Setup, Times, World
from chapters.recording import Recording
from chapters.story import Story
from nanovllm.checkpoint import ModelConfig

DECODES = {"1 decode": 1, f"{BATCH} decodes": BATCH}
KINDS = {  # (sequences, rows of each, keys of each)
    **{kind: (num_seqs, 1, CONTEXT) for kind, num_seqs in DECODES.items()},
    f"prompt of {CONTEXT}": (1, CONTEXT, CONTEXT),
}

make_table = partial(draw.make_table, width=11, first=28)


# -- counted ----------------------------------------------------------------------------------------------------------


def bytes_of_parts(config: ModelConfig, itemsize: int, num_seqs: int, rows: int, keys: int) -> dict[str, list[float]]:
    """(plain, optimized) bytes that a step reads and writes, by part: `num_seqs` sequences, each with `rows` rows and
    `keys` keys. An operation of PyTorch reads its inputs from memory and writes its result there; a fused kernel keeps
    what lies between in registers and L1."""
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    tokens = num_seqs * rows
    per_layer = hidden * (q_size + 2 * kv_size) + q_size * hidden + 3 * hidden * inner
    weights = layers * per_layer + config.vocab_size * hidden
    kv = layers * num_seqs * keys * 2 * kv_size
    # Decode: _gather copies K and V (read, write), the product reads the copies. A prompt's are copied twice, and its
    # scores are written, masked and softened in place of each other: five passes over rows x keys numbers a head.
    scores = 0 if rows == 1 else layers * tokens * keys * config.num_attention_heads
    rotated, written = layers * tokens * (q_size + kv_size), layers * tokens * kv_size
    numbers = {
        "matrix products": (weights, weights),
        "attention": (3 * kv if rows == 1 else 5 * kv + 5 * scores, kv),
        # rotate() has 4 products and 2 sums of halves, a cat and a copy: 11 passes; K and V go to the cache.
        "rotary + write": (11 * rotated + 4 * written, 2 * rotated + 3 * written),
        "add + norm": (5 * (2 * layers + 1) * tokens * hidden, 4 * (2 * layers + 1) * tokens * hidden),
        "silu * up": (5 * layers * tokens * inner, 3 * layers * tokens * inner),
    }
    return {name: [number * itemsize / 1e6 for number in pair] for name, pair in numbers.items()}


def counted_bytes(world: World) -> dict[str, dict[str, list[float]]]:
    """[part][kind of step]: (plain, optimized) megabytes."""
    kinds = {kind: bytes_of_parts(world.config, world.itemsize, *sizes) for kind, sizes in KINDS.items()}
    return {part: {kind: parts[part] for kind, parts in kinds.items()} for part in kinds["1 decode"]}


# -- measured ---------------------------------------------------------------------------------------------------------


def say_noise(story: Story, names: list[str]) -> None:
    """Which rows of what was shown are not clearly faster than what they are compared with."""
    story.say(f"Below the noise: {'; '.join(names) if names else 'nothing'}.", measured=True)


def not_faster(rows: list[tuple[str, Times]]) -> list[str]:
    """Names of the rows that are not clearly faster than the row before them."""
    return [name for (_, before), (name, times) in pairwise(rows) if not times.is_faster_than(before)]


def tell_each_alone(story: Story, world: World, times: dict[str, dict[Setup, Times]], rate: float) -> None:
    plain, parts, noise = world.alone[0], counted_bytes(world), []
    story.say(
        "Now each is alone, and everything else plain. In ms a step, this is what the bytes promised, and what was "
        "saved (0.0 if that is below the noise):"
    )
    columns = (name for kind in DECODES for name in (f"{kind}: promised", "saved"))
    table = make_table("alone", *columns, width=8, first=15)
    for setup in world.alone[2 if world.c_kernels else 1 :]:
        name = setup.name.removeprefix("C: ") if world.c_kernels else "matrix products"
        cells = list[str]()
        for kind in DECODES:
            before, after = parts[name][kind]
            cells += [f"{(before - after) / rate:.1f}", f"{times[kind][setup].saved(times[kind][plain]):.1f}"]
            if not times[kind][setup].is_faster_than(times[kind][plain]):
                noise.append(f"{name} ({kind})")
        table.add_row(name, *cells, "(measured)")
    story.show(table)
    say_noise(story, noise)


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: what is near is read faster, no optimization costs
    much, all together gain, and half of the rounds are nearly as fast as the fastest."""
    [sheet] = recorded.sheets("Measured: how far away is a number?")
    near, far = sheet.column("GB/s")
    if near < 1.5 * far:
        raise ValueError(f"a tensor in the caches is read at {near} GB/s, a large one at {far}")
    _, steps = recorded.sheets("Measured: what each one saves")
    workload, _ = recorded.sheets("Measured: the control plane in the same picture")
    for sheet in (steps, workload):
        cells = [[float(cell) for cell in row[1:-1]] for row in sheet.rows]
        for column in range(0, len(cells[0]), 2):
            best, median = ([row[at] for row in cells] for at in (column, column + 1))
            name = sheet.columns[1 + column]
            if best[-1] > 0.8 * best[0] or any(after > 1.1 * before for before, after in pairwise(best)):
                raise ValueError(f"{name}, one after another: {best}")
            if any(m > 1.2 * b for b, m in zip(best, median, strict=True)):
                raise ValueError(f"{name}: the medians {median} are far from the fastest {best}")
