"""Lab of chapter 4: the same requests in two memories of the same size, and who runs out first.

What is done to them is in memories.py, pictures are here.
"""

from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from chapters.app import explorer
from chapters.ch04_paged_attention import page
from chapters.ch04_paged_attention.memories import (
    ACTIONS,
    BLOCK_SIZE,
    COLUMNS,
    LONGEST,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    POOL_SLOTS,
    SYSTEM_PROMPT,
    Request,
    TwoMemories,
    make_jobs,
    requests,
    run_contiguous,
    run_paged,
    slots_of,
)
from chapters.draw import color_of, draw_free_queue, draw_pool, draw_sequences
from chapters.stage import Stage
from chapters.story import Story
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.attention import paged_attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import rotary_and_write

GROUPS_PER_ROW = 8

# -- pictures of the two memories -------------------------------------------------------------------------------------


def panels(world: TwoMemories) -> list[tuple[str, RenderableType]]:
    paged = Group(draw_paged(world), draw_free_queue(world.manager, limit=12))
    caching = f", prefix caching {'on' if world.caching else 'off'}"
    return [
        (f"contiguous: reserves {world.reservation}", draw_contiguous(world)),
        (f"paged: the engine's BlockManager, blocks of {BLOCK_SIZE}{caching}", paged),
        ("both", draw_counters(world)),
        ("sequences in the paged memory", draw_sequences(world.seqs.values(), world.names)),
    ]


def draw_contiguous(world: TwoMemories) -> Text:
    """A letter for each slot: capital where a token is stored, small where reserved and empty."""
    cells = [("·", "dim")] * world.contiguous.num_slots
    for name, slots in world.contiguous.reserved.items():
        for index, slot in enumerate(slots):
            cells[slot] = _cell(world, name, index < world.lengths[name])
    return _draw_cells("slot", BLOCK_SIZE, cells, [""] * (len(cells) // BLOCK_SIZE))


def draw_paged(world: TwoMemories) -> Text:
    """The same for the pool: = is cached and nobody's, +1 after a block says that one more sequence shares it."""
    cells: list[tuple[str, str]] = []
    for block in world.manager.blocks:
        cells += [("=", "white on grey37") if block.block_hash else ("·", "dim")] * BLOCK_SIZE
    for name, seq in reversed(world.seqs.items()):
        for index, slot in enumerate(slots_of(seq)):
            cells[slot] = _cell(world, name, index < seq.num_computed_tokens)
    shared = [f"+{block.ref_count - 1}" if block.ref_count > 1 else "" for block in world.manager.blocks]
    return _draw_cells("block", 1, cells, shared)


def draw_counters(world: TwoMemories) -> Table:
    table = Table("", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, numbers in world.counters().items():
        table.add_row(name, *(str(numbers[column]) for column in COLUMNS))
    return table


def _cell(world: TwoMemories, name: str, stored: bool) -> tuple[str, str]:
    color = color_of(world.arrivals[name])
    return (name, f"black on {color}") if stored else (name.lower(), color)


def _draw_cells(unit: str, step: int, cells: list[tuple[str, str]], marks: list[str]) -> Text:
    text = Text()
    for group, mark in enumerate(marks):
        if group % GROUPS_PER_ROW == 0:
            text.append("\n" if group else "").append(f"{unit} {group * step:>3}  ", "dim")
        for cell, style in cells[group * BLOCK_SIZE : (group + 1) * BLOCK_SIZE]:
            text.append(cell, style)
        text.append(f"{mark:<3}")
    return text


def make_app(model: str | None = None) -> Any:
    return explorer("4. PagedAttention: two memories, the same requests", TwoMemories(), panels, ACTIONS, page=page)


# -- attention over a block table -------------------------------------------------------------------------------------


def attend(table: list[int], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Batch, Batch]:
    """Put K/V of 10 prompt tokens and of 1 more into the blocks of `table` and attend: [11, num_heads, head_dim].

    All other blocks are full of other numbers, as if they were other sequences'.
    """
    trash = torch.Generator().manual_seed(9)
    shape = 16, BLOCK_SIZE, *k.shape[1:]
    kv_layer = torch.randn(shape, generator=trash), torch.randn(shape, generator=trash)
    seq = Sequence(list(range(len(q))))
    seq.block_table = table
    outs, batches = [], []
    for start, end in ((0, 10), (10, 11)):  # the prompt in one step, then one token
        output = SchedulerOutput([ScheduledChunk(seq, start, end, write_start=start)], [], end - start)
        batch = Batch.from_scheduler_output(output, BLOCK_SIZE)
        rows = q[start:end].clone(), k[start:end].clone(), v[start:end]
        no_rotation = torch.ones(end - start, q.shape[2] // 2), torch.zeros(end - start, q.shape[2] // 2)
        rotary_and_write(*rows, no_rotation, kv_layer, batch)
        outs.append(paged_attention(rows[0], *kv_layer, batch))
        batches.append(batch)
    return torch.cat(outs), batches[0], batches[1]


# -- the story --------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    tell_reserving(story)
    tell_growing(story)
    tell_holes(story)
    tell_dry(story)
    tell_totals(story)
    tell_attention(story)
    tell_sharing(story)
    tell_no_copies(story)


def tell_reserving(story: Story) -> None:
    story.part("The same requests, the same memory")
    story.say(
        f"Two memories of {NUM_BLOCKS * BLOCK_SIZE} slots, each slot for the K and V of one token. Requests come one "
        f"after another; the model allows {MAX_MODEL_LEN} tokens, prompt and output together, and nobody knows when an "
        f"answer will end. The contiguous memory reserves {MAX_MODEL_LEN} slots in one piece for each. The paged one "
        f"is the engine's BlockManager with {NUM_BLOCKS} blocks of {BLOCK_SIZE}: blocks for what is there."
    )
    world = TwoMemories()
    story.log(*(world.admit() for _ in range(10)))
    story.say(
        "This is the contiguous memory. A capital letter is a stored token, a small one a slot reserved and empty:"
    )
    story.show(draw_contiguous(world))
    story.say("This is the paged memory:")
    story.show(draw_paged(world))
    story.say(
        "From tokens on, the table counts slots. Taken: given to somebody; empty: the part of it without a token; "
        "fits: the longest request that would still be let in. Stalls: how often append_slots said False."
    )
    story.show(draw_counters(world))


def tell_growing(story: Story) -> None:
    story.part("A sequence grows, its table now and then")
    story.say(
        "One sequence of 7 tokens is in a pool that others have left. Each token needs a slot, every fourth one a "
        "block:"
    )
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    others = [Sequence([1] * num_tokens) for num_tokens in (4, 48, 8, 20, 4, 40)]
    for other in others:
        manager.allocate_with_prefix(other)
    for index in (1, 3, 5, 2, 0, 4):
        manager.free(others[index])
    seq = Sequence([1] * 7)
    manager.allocate_with_prefix(seq)
    table = Table("what happens", "tokens stored", "block table", "slot of the newest", "head of the free queue")
    for step in range(7):
        if step:
            seq.append(1)
            assert manager.append_slots(seq)
        seq.num_computed_tokens = len(seq.tokens)
        block, offset = divmod(slots_of(seq)[seq.num_computed_tokens - 1], BLOCK_SIZE)
        slot = f"{block} x {BLOCK_SIZE} + {offset} = {block * BLOCK_SIZE + offset}"
        blocks, head = (" ".join(map(str, ids)) for ids in (seq.block_table, manager.eviction_candidates(4)))
        what = "append_slots" if step else "allocate_with_prefix"
        table.add_row(what, str(seq.num_computed_tokens), blocks, slot, head)
    story.show(table)


def tell_holes(story: Story) -> None:
    story.part("Reserving less, and the holes that it leaves")
    story.say(
        "A request says how long its answer may become: max_tokens. So contiguous could reserve the prompt and that, "
        "and more fit. Five requests come, and six tokens later two of them have reached their limits:"
    )
    world = TwoMemories(reserve_longest=False)
    said = [world.admit() for _ in range(5)]
    for _ in range(6):
        world.grow()
    story.log(*said)
    story.show(draw_contiguous(world))
    story.say("The next request:")
    story.log(world.admit())
    story.show(draw_counters(world))
    numbers = world.counters()["contiguous"]
    story.say(
        f"{numbers['free']} slots are free, but the longest piece has {numbers['fits']}. A free block has no such "
        "problem: any block will do. More requests come, and the paged memory takes the blocks that the others left, "
        "wherever they lie:"
    )
    story.log(*(world.admit() for _ in range(5)))
    story.show(draw_paged(world))
    story.show(draw_sequences(world.seqs.values(), world.names))


def tell_dry(story: Story) -> None:
    story.part("The price: a pool can run dry in the middle")
    story.say(
        "A reservation is a promise that a sequence can grow to its end. The paged memory promised nothing. Nine "
        "requests are in, 3 blocks are free; everybody grows:"
    )
    world = TwoMemories()
    for _ in range(9):
        world.admit()

    def grow(what: str) -> str:
        said = world.grow() or "everybody has a slot"
        return f"{what}: {said} ({len(world.manager.free_blocks)} free)"

    story.log(*(grow(f"token {step}") for step in range(1, 5)))
    story.say(
        "append_slots changed nothing where it said False, so those sequences are as they were, with one token waiting "
        "for its slot. The oldest ends, and its blocks serve the others:"
    )
    story.log(world.end_oldest(), grow("one token"), world.end_oldest(), grow("one token"))
    story.say("In the engine nobody waits for that: the scheduler takes the blocks of the youngest (chapter 5).")


def tell_totals(story: Story) -> None:
    jobs = make_jobs()
    story.part(f"{len(jobs)} requests to the end")
    num_tokens = [len(request.prompt) for request, _ in jobs]
    story.say(
        f"A pool of {POOL_SLOTS:,} slots, max_model_len {LONGEST:,}, {len(jobs)} requests at once. Prompts have "
        f"{min(num_tokens)} to {max(num_tokens):,} tokens, {sum(num_tokens) / len(jobs):.0f} on average; answers "
        f"{sum(n for _, n in jobs) / len(jobs):.0f} on average, and max_tokens is 128, 256 or 512. In a step everybody "
        "gets a token. The paged rows are the engine's Scheduler and BlockManager, without a model. Shares of the pool "
        "are averages over the steps in which somebody waits."
    )
    table = Table("", "at once", "tokens", "taken, empty", "free", "steps", "preempted")
    for title, totals in (
        ("contiguous, max_model_len", run_contiguous(jobs, lambda request: LONGEST)),
        ("contiguous, prompt + max_tokens", run_contiguous(jobs, lambda request: request.limit)),
        ("paged, blocks of 16", run_paged(jobs, 16)),
    ):
        table.add_row(title, *totals.row(), str(totals.preempted))
    story.show(table)
    story.say("This is what the size of a block changes:")
    table = Table("block size", "at once", "tokens", "taken, empty", "free", "steps", "blocks in a table")
    for block_size in (1, 4, 16, 64, 256):
        totals = run_paged(jobs, block_size)
        table.add_row(str(block_size), *totals.row(), f"{totals.table_entries / totals.running:.1f}")
    story.show(table)


def tell_attention(story: Story) -> None:
    story.part("Attention does not mind")
    story.say(
        "The same 11 tokens (random q, k, v; 4 query heads, 2 KV heads of 8) are written into a KV tensor of 16 blocks "
        "by the engine's rotary_and_write and read by its paged_attention: the prompt of 10 in one step, then the next."
    )
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(11, heads, 8, generator=generator) for heads in (4, 2, 2))
    tables = {"in order": [0, 1, 2], "scattered": [13, 2, 7], "backwards": [15, 14, 13]}
    results = {name: attend(block_table, q, k, v) for name, block_table in tables.items()}
    table = Table("block table", "slots of tokens 0 to 9", "of token 10", "same bits")
    for name, (out, prompt, decode) in results.items():
        same = str(torch.equal(out, results["in order"][0]))
        slots = [" ".join(map(str, batch.slot_mapping.tolist())) for batch in (prompt, decode)]
        table.add_row(f"{name}: {tables[name]}", *slots, same)
    story.show(table)
    wrong = attend([13, 2, 7], q, k, v)[0], attend([2, 13, 7], q, k, v)[0]
    story.say(
        "The numbers are the same to the last bit: first the blocks are gathered in the order of the table, and from "
        "there on nobody can tell where they lay. Even a table in a different order gives the same, as long as writing "
        f"and reading go by the same table: [13, 2, 7] and [2, 13, 7] are equal: {torch.equal(*wrong)}."
    )


def tell_sharing(story: Story) -> None:
    story.part("Shared blocks are counted")
    story.say(
        "Prefix caching is on. A and B have the same prompt of 10 tokens; C begins with the same 8 and goes on in its "
        "own way. Only full blocks are shared; +2 means that two more sequences have the block in their tables:"
    )
    first = requests()[0]
    world = TwoMemories(12, caching=True, source=[first, first, Request([*SYSTEM_PROMPT, 70, 71, 72], 9)])
    for _ in range(3):
        world.admit()
    story.show(draw_pool(world.manager, world.seqs.values(), world.names))
    story.show(draw_sequences(world.seqs.values(), world.names))
    table = Table("", *(f"block {i}" for i in range(5)), "free queue", title="reference counts", title_style="dim")
    for what in ("all three run", "A ends", "B ends", "C ends"):
        if what.endswith("ends"):
            world.end_oldest()
        refs = [str(block.ref_count) for block in world.manager.blocks[:5]]
        table.add_row(what, *refs, " ".join(map(str, world.manager.free_blocks)))
    story.show(table)
    story.say(
        "Blocks 0 and 1 still have their hashes: a later request can find them. So they went to the tail, to be taken "
        "last; the others have no hash, and went to the head."
    )
    story.show(draw_pool(world.manager, [], world.names))


def tell_no_copies(story: Story) -> None:
    story.part("Nobody writes into a shared block")
    story.say(
        "The engine's Scheduler and Batch work with blocks of 4. Y repeats X's prompt of 10 tokens, Z only its first "
        "8. The table shows the slots that a step writes; -1 is not written:"
    )
    stage, prompt = Stage(16, max_model_len=MAX_MODEL_LEN), list(range(10))
    table = Table("", "block table", "found", "computes", "slots written")
    for name, tokens in (("X", prompt), ("Y", prompt), ("Z", prompt[:8])):
        seq = stage.add(tokens)
        output = stage.schedule()
        chunk = output.chunks[-1]
        slots = Batch.from_scheduler_output(output, BLOCK_SIZE).slot_mapping[-(chunk.end - chunk.start) :].tolist()
        positions = f"{chunk.start}" if chunk.end - chunk.start == 1 else f"{chunk.start} to {chunk.end - 1}"
        blocks = " ".join(map(str, seq.block_table))
        table.add_row(name, blocks, str(seq.num_cached_tokens), positions, " ".join(map(str, slots)))
        stage.finish(output)
    story.show(table)
    story.say(
        "Y computes positions 8 and 9 again and writes them into a block of its own. Z has nothing left to write: it "
        "computes its last token once more, for the logits, and leaves the block as it is."
    )
