"""The pictures of chapter 3: a step writes its K/V into slots and reads slots; the pool of the lab."""

from chapters.svg import arrow, box, svg, words
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import Batch

NUM_BLOCKS, BLOCK_SIZE, BLOCK_TABLE, NUM_TOKENS = 5, 4, [3, 2], 6  # no slot is its position
CELL, GAP = 14, 8
POOL_BLOCKS, POOL_BLOCK_SIZE, STEPS_OF_A = 10, 8, 6  # the lab's


def write_then_read() -> str:
    """A decode of the sequence's last token, with the slots that the engine's Batch gives."""
    seq = Sequence(list(range(NUM_TOKENS)))
    seq.block_table = list(BLOCK_TABLE)

    def slots_of(start: int) -> list[int]:
        output = SchedulerOutput([ScheduledChunk(seq, start, NUM_TOKENS, start)], [], NUM_TOKENS - start)
        return Batch.from_scheduler_output(output, BLOCK_SIZE).slot_mapping.tolist()

    [written], held = slots_of(NUM_TOKENS - 1), slots_of(0)
    across = {slot: CELL * slot + GAP * (slot // BLOCK_SIZE) for slot in range(NUM_BLOCKS * BLOCK_SIZE)}
    parts = [box(0, 16, 116, 26, f"token at position {NUM_TOKENS - 1}"), words(2, 11, "1  write", "name strong")]
    parts.append(box(136, 16, 46, 26, "k, v", "two"))
    parts.append(box(274, 16, 46, 26, "q", "one"))
    parts.append(arrow(116, 29, 135, 29))
    parts.append('<path class="wire" d="M125,29V6H297V10"/><path class="tip" d="M297,16l-3.5,-6h7z"/>')
    top, middle = 98, across[written] + CELL / 2
    parts.append(f'<path class="wire" d="M159,42V66H{middle}V92"/>')
    parts.append(f'<path class="tip" d="M{middle},{top - 2}l-3.5,-6h7z"/>')
    parts.append(words(166, 61, f"slot_mapping: {written}", "tick"))
    for slot, left in across.items():
        kind = "two strong" if slot == written else "one" if slot in held else "empty"
        position = str(held.index(slot)) if slot in held else ""
        parts.append(box(left, top, CELL, 22, position, kind))
    for block in range(NUM_BLOCKS):
        x = across[block * BLOCK_SIZE] + CELL * BLOCK_SIZE / 2
        parts.append(words(x, top + 36, f"block {block}", "tick", "middle"))
    below = top + 42
    for block in BLOCK_TABLE:
        x = across[block * BLOCK_SIZE] + CELL * BLOCK_SIZE / 2
        parts.append(f'<path class="wire" d="M{x},{below}V{below + 16}H160V{below + 30}"/>')
    parts.append(f'<path class="tip" d="M160,{below + 36}l-3.5,-6h7z"/>')
    parts.append(words(2, below + 54, "2  read", "name strong"))
    parts.append(box(90, below + 37, 140, 26, "paged_attention", "one"))
    parts.append(
        f'<path class="wire" d="M316,42V{below + 50}H237"/><path class="tip" d="M231,{below + 50}l6,-3.5v7z"/>'
    )
    parts.append(words(160, below + 82, "the same slots in every layer; q is not kept", "name", "middle"))
    text = (
        f"The k and v of the token at position {NUM_TOKENS - 1} are written to slot {written}. Then attention takes "
        f"its q and reads positions 0 to {NUM_TOKENS - 1} from blocks {BLOCK_TABLE[0]} and {BLOCK_TABLE[1]}."
    )
    return svg("Write, then read, in each layer", text, parts, below + 88)


def pool() -> str:
    """The pool of the text's lab after the step that admits B: which position of which request each slot has."""
    manager = BlockManager(POOL_BLOCKS, POOL_BLOCK_SIZE)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    shared = list(range(POOL_BLOCK_SIZE))
    a, b = Sequence([*shared, 10, 11, 12, 13]), Sequence([*shared, 20, 21, 22, 23])
    scheduler.add(a)
    for _ in range(STEPS_OF_A):
        output = scheduler.schedule()
        scheduler.update(output, [[30]])
    scheduler.add(b)
    output = scheduler.schedule()
    written = set(Batch.from_scheduler_output(output, POOL_BLOCK_SIZE).slot_mapping.tolist())

    held: dict[int, list[str]] = {}
    for name, seq in (("A", a), ("B", b)):
        for position in range(seq.num_computed_tokens):
            index, offset = divmod(position, POOL_BLOCK_SIZE)
            held.setdefault(seq.block_table[index] * POOL_BLOCK_SIZE + offset, []).append(f"{name}{position}")
    parts, left, cell, row = [words(0, 10, "slots, one row for each block", "name")], 64, 32, 21
    for block_id in range(POOL_BLOCKS):
        top = 18 + row * block_id
        parts.append(words(0, top + 13, f"block {block_id}", ""))
        for offset in range(POOL_BLOCK_SIZE):
            slot = block_id * POOL_BLOCK_SIZE + offset
            who = held.get(slot, [])
            kind = "empty" if not who else "three" if len(who) > 1 else "one" if who[0].startswith("A") else "two"
            name = "AB" + who[0][1:] if len(who) > 1 else "".join(who)
            parts.append(box(left + cell * offset, top, cell - 3, 18, name, kind + " strong" * (slot in written)))
    bottom = 18 + row * POOL_BLOCKS + 12
    for x, kind, said in ((0, "one", "A"), (26, "two", "B"), (52, "three", "both read it")):
        parts.append(words(x, bottom, said, kind))
    parts.append(words(320, bottom, "thick: written in this step", "name", "end"))
    text = (
        f"Block table of A: {a.block_table}; of B: {b.block_table}. Both read block {a.block_table[0]}. "
        f"This step writes slots {', '.join(map(str, sorted(written)))}."
    )
    return svg("The pool after the step that admits B", text, parts, bottom + 6)
