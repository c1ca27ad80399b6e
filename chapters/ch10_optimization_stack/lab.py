"""Lab 10: FlashAttention built up in six steps, sums and their order, and what each optimization saves on this machine.

First what can be counted (bytes, operations, memory), then what has to be measured. One engine serves all of it: its
weights are laid out and its kernels swapped between steps (setups.py). The steps of attention are in tiles.py.
"""

import math
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from chapters import draw
from chapters.ch06_prefill_decode.lab import read_rate
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
from chapters.ch10_optimization_stack.setups import BATCH, CONTEXT, NUM_REQUESTS, Setup, Times, World
from chapters.ch10_optimization_stack.tiles import LADDER, TILE, TILE_ROWS, Memory, rows_read, tiles_of_paged_keys
from chapters.recording import Recording
from chapters.story import Story, one_core, stopwatch
from nanovllm import SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker import attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import TORCH_KERNELS

NUM_NUMBERS = 1_000  # of the row that several workers add up
DECODES = {"1 decode": 1, f"{BATCH} decodes": BATCH}
KINDS = {  # (sequences, rows of each, keys of each)
    **{kind: (num_seqs, 1, CONTEXT) for kind, num_seqs in DECODES.items()},
    f"prompt of {CONTEXT}": (1, CONTEXT, CONTEXT),
}

make_table = partial(draw.make_table, width=11, first=28)


def tell(story: Story) -> None:
    world = World(story.load)
    tell_bytes(story, world)
    tell_operations(story, world)
    tell_ladder(story)
    tell_paged(story, world)
    tell_order(story)
    tell_same_bits(story)
    tell_hierarchy(story)
    tell_shares(story, world)
    tell_workload(story, world)


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


def tell_bytes(story: Story, world: World) -> None:
    story.part("Counted: the bytes that each optimization should save")
    story.say(
        f"Megabytes that a step reads and writes, counted from the ModelConfig; decodes at a context of {CONTEXT}. "
        "Left of the arrow are PyTorch's operations, each reading its inputs and writing its result; right of it is "
        "one kernel that keeps what lies between:"
    )
    table = make_table("part", *KINDS, width=18)
    for name, cells in counted_bytes(world).items():
        table.add_row(name, *(f"{plain:.1f} -> {fused:.1f}" for plain, fused in cells.values()))
    story.show(table)


def counted_bytes(world: World) -> dict[str, dict[str, list[float]]]:
    """[part][kind of step]: (plain, optimized) megabytes."""
    kinds = {kind: bytes_of_parts(world.config, world.itemsize, *sizes) for kind, sizes in KINDS.items()}
    return {part: {kind: parts[part] for kind, parts in kinds.items()} for part in kinds["1 decode"]}


def tell_operations(story: Story, world: World) -> None:
    story.part("Counted: the operations of a step")
    story.say("Every PyTorch operation costs some microseconds before it does anything. One decode step makes:")
    table = make_table("one after another", "operations", "fewer")
    with world.decoding(1):
        before = None
        for setup in world.in_order:
            count = world.num_operations(setup)
            table.add_row(setup.name, f"{count:,}", "" if before is None else f"{before - count:,}", "(measured)")
            before = count
    story.show(table)


def tell_ladder(story: Story) -> None:
    story.part("Counted: FlashAttention in five steps, one head")
    story.say(
        f"float32, head_dim 64, {TILE} keys a tile, {TILE_ROWS} query rows a tile. Each step must agree with the one "
        "before. The table shows the largest tensor that each makes beside its result, in bytes, as PyTorch reports it:"
    )
    lengths = (64, 128, 256)
    generator = torch.Generator().manual_seed(10)
    found: dict[str, list[str]] = {name: [] for name, _ in LADDER}
    with torch.inference_mode():
        for n in lengths:
            q, k, v = torch.randn(3, n, 64, generator=generator)
            before = None
            for name, step in LADDER:
                with Memory() as memory:
                    out = step(q, k, v)
                found[name].append(f"{memory.largest_bytes(out):,}")
                if before is not None and not torch.allclose(out, before, atol=1e-5):
                    raise AssertionError(f"{name} disagrees with the step before it at n = {n}")
                before = out
    table = make_table("step", *(f"n = {n:,}" for n in lengths), f"K, V rows read, n = {lengths[-1]:,}")
    for name, cells in found.items():
        table.add_row(name, *cells, f"{rows_read(name, lengths[-1]):,}")
    story.show(table)
    story.say(
        "All agree to within 1e-5. (a) grows with n x n, (b) with n; (c), (d) and (e) do not grow.\n\n"
        f"(b), (c) and (d) read K and V again for each query row, (c) K even twice. (e) reads them once for "
        f"{TILE_ROWS} rows: that is what the second kind of tile is for."
    )


def tell_paged(story: Story, world: World) -> None:
    story.part("Counted: (f) over the block table, in the engine")
    differences: list[float] = []

    def both(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int) -> Tensor:
        floats = q.float(), k_cache.float(), v_cache.float()
        out = tiles_of_paged_keys(q.float(), k_cache, v_cache, batch, window)
        differences.append((out - attention.paged_attention(*floats, batch, window)).abs().max().item())
        return out.to(q.dtype)

    world.use(replace(world.in_order[0], kernels=replace(TORCH_KERNELS, paged_attention=both)))
    prompts = ["The capital of France is", "Once upon a time"]
    outputs = world.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), False)
    story.say(
        f"The same tiles, now for all heads, keys found through the block table, at most {TILE} of them at a time. "
        f"For two prompts and 4 steps each the engine ran with it: {len(differences)} calls, one a layer and step."
        "\n\nCompared in float32 with attention.paged_attention on the same cache: "
        f"{'every number agrees to within 1e-4' if max(differences) < 1e-4 else f'{max(differences)} APART'}."
    )
    story.say(f"Largest difference {max(differences):.1e}.", measured=True)
    story.say(f"The model said: {(outputs[0].prompt or '') + outputs[0].outputs[0].text!r}", measured=True)
    world.use(world.all_on)


def tell_order(story: Story) -> None:
    story.part("Counted: sums that depend on their order")
    large = 2.0**24
    left, right = added([large, 1, 1]), float32(large + added([1, 1]))
    story.say(
        f"float32 has 24 bits for a number's digits. Let a be {large:,.0f}: a + 1 needs 25 of them and is rounded to a."
        f"\n\n(a + 1) + 1 = {left:,.0f}\na + (1 + 1) = {right:,.0f}\n\nNow {NUM_NUMBERS:,} random numbers between -1 "
        f"and 1, added up by several workers. Left, each worker has an equal share of them. Right, the row is cut into "
        f"pieces of {PIECE} numbers, whoever adds them up, and the pieces' sums are added in the order of the pieces:"
    )
    rng = random.Random(10)
    numbers = [float32(rng.uniform(-1, 1)) for _ in range(NUM_NUMBERS)]
    table = make_table("workers", "equal shares", f"pieces of {PIECE}", width=14)
    for num_workers in (1, 2, 3, 5, 8):
        sums = in_equal_shares(numbers, num_workers), in_fixed_pieces(numbers, num_workers)
        table.add_row(str(num_workers), *(f"{total:.8f}" for total in sums))
    story.show(table)
    story.say(f"In exact arithmetic: {math.fsum(numbers):.8f}.")


def tell_same_bits(story: Story) -> None:
    story.part("Counted: one question in six ways")
    story.say(
        f"The engine computes in float32. A question of {NUM_PROMPT} tokens gets {NUM_OUTPUT} tokens of answer. A hash "
        "is made of the bits of their log probabilities, and of those of the four next best: where one bit differs, "
        "the hash does. The left column has the C kernels, the right one PyTorch's operations:"
    )
    engines = {"C kernels": ("reordered_weights", "c_kernels"), "PyTorch": ()}
    found = {name: OneQuestion(story.load, optimizations).answers() for name, optimizations in engines.items()}
    table = make_table("the question", *found, width=16)
    for way, number in found["C kernels"].items():
        table.add_row(way, f"{number:,}", f"{found['PyTorch'][way]:,}", "(measured)")
    story.show(table)
    counts = (f"{name} {len(set(answers.values()))}" for name, answers in found.items())
    story.say(f"Different hashes: {', '.join(counts)}.", measured=True)


# -- measured ---------------------------------------------------------------------------------------------------------


def tell_hierarchy(story: Story) -> None:
    story.part("Measured: how far away is a number?")
    story.say(
        "One thread reads a tensor over and over. The first fits into the caches of most processors, the other does "
        "not:"
    )
    table = make_table("size of the tensor", "GB/s")
    for size, times in ((2 << 20, 500), (256 << 20, 5)):
        matrix, vector = torch.ones(size // (4 << 10), 1 << 10), torch.ones(1 << 10)  # their product reads each once
        with one_core():
            best_s = min(stopwatch(lambda: torch.mv(matrix, vector)) for _ in range(times))  # noqa: B023
        table.add_row(f"{size >> 10:,} KiB", f"{matrix.nbytes / best_s / 1e9:.0f}", "(measured)")
    story.show(table)


def say_noise(story: Story, names: list[str]) -> None:
    """Which rows of what was shown are not clearly faster than what they are compared with."""
    story.say(f"Below the noise: {'; '.join(names) if names else 'nothing'}.", measured=True)


def tell_shares(story: Story, world: World) -> None:
    story.part("Measured: what each one saves")
    if not world.c_products and world.c_kernels is not None:
        story.say("cpu/linear.c leaves this dtype or this processor to oneDNN: C's matrix products are oneDNN's here.")
    rate = read_rate(torch.device("cpu")) / 1e9
    story.say(f"All threads together read {rate:.0f} GB/s from memory here.", measured=True)
    times = {kind: world.decode_ms(num_seqs) for kind, num_seqs in DECODES.items()}
    rounds = ", ".join(f"{kind} {len(times[kind][world.all_on].rounds)}" for kind in DECODES)
    story.say(
        "The setups take turns, one step each a round, so that a busy moment does not hit one of them alone. A saving "
        "is the difference between the fastest steps. It counts if the faster one won more than three of four rounds; "
        "otherwise it is below the noise."
    )
    story.say(f"Rounds: {rounds}.", measured=True)
    tell_each_alone(story, world, times, rate)
    story.say("One after another: the fastest step, and the median.")
    columns = (name for kind in DECODES for name in (f"{kind}, ms", "median"))
    table = make_table("one after another", *columns, width=8)
    for setup in world.in_order:
        found = [times[kind][setup] for kind in DECODES]
        table.add_row(setup.name, *(f"{ms:.1f}" for each in found for ms in (each.best, each.median)), "(measured)")
    story.show(table)
    rows = {kind: [(setup.name, times[kind][setup]) for setup in world.in_order] for kind in DECODES}
    say_noise(story, [f"{name} ({kind})" for kind in DECODES for name in not_faster(rows[kind])])
    ratios = (f"{kind} {times[kind][world.in_order[0]].best / times[kind][world.all_on].best:.1f}" for kind in DECODES)
    story.say(f"All together: {', '.join(f'{ratio} times' for ratio in ratios)} as fast.", measured=True)


def not_faster(rows: list[tuple[str, Times]]) -> list[str]:
    """Names of the rows that are not clearly faster than the row before them."""
    return [name for (_, before), (name, times) in pairwise(rows) if not times.is_faster_than(before)]


def tell_each_alone(story: Story, world: World, times: dict[str, dict[Setup, Times]], rate: float) -> None:
    plain, parts, noise = world.alone[0], counted_bytes(world), []
    story.say(
        "Now each is alone, and everything else plain. In ms a step, this is what the bytes promised, and what was "
        "saved (0.0 if that is below the noise):"
    )
    table = make_table("alone", *DECODES, width=14)
    for setup in world.alone[2 if world.c_kernels else 1 :]:
        name = setup.name.removeprefix("C: ") if world.c_kernels else "matrix products"
        cells = []
        for kind in DECODES:
            before, after = parts[name][kind]
            cells.append(f"{(before - after) / rate:.1f}, {times[kind][setup].saved(times[kind][plain]):.1f}")
            if not times[kind][setup].is_faster_than(times[kind][plain]):
                noise.append(f"{name} ({kind})")
        table.add_row(name, *cells, "(measured)")
    story.show(table)
    say_noise(story, noise)


def tell_workload(story: Story, world: World) -> None:
    story.part("Measured: the control plane in the same picture")
    story.say(
        f"{NUM_REQUESTS} requests about the same text: {setups.NUM_SHARED} tokens in common, {setups.NUM_OWN} of their "
        f"own, {setups.NUM_OUTPUT} tokens of answer. The rows below the kernels are what chapters 5 and 7 do. The "
        "columns are the fastest of some rounds, and the median:"
    )
    fast = world.all_on
    stages = {
        "plain, one by one": (world.in_order[0], 1, False),
        "+ C kernels" if world.c_kernels else "+ reordered weights": (fast, 1, False),
        "+ batching": (fast, NUM_REQUESTS, False),
        "+ prefix caching": (fast, NUM_REQUESTS, True),
    }
    computed: dict[str, int] = {}

    def turn(name: str) -> float:
        setup, at_once, caching = stages[name]
        milliseconds, computed[name] = world.workload_ms(setup, at_once=at_once, caching=caching)
        return milliseconds

    rows = list(setups.in_turn({name: partial(turn, name) for name in stages}, 2, setups.MAX_ROUNDS).items())
    table = make_table("one after another", "fastest, ms", "median")
    for name, found in rows:
        table.add_row(name, f"{found.best:.1f}", f"{found.median:.1f}", "(measured)")
    story.show(table)
    say_noise(story, not_faster(rows))
    table = make_table("", "tokens computed")
    for name, num_tokens in computed.items():
        table.add_row(name, f"{num_tokens:,}")
    story.show(table)


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
