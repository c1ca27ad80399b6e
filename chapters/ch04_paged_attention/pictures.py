"""The picture of chapter 4: where each position of a sequence lies, by the block table of the engine's BlockManager."""

from chapters.svg import Frame, Moved, arrow, box, svg, words
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence

BLOCK_SIZE, NUM_BLOCKS = 4, 8
CELL, STEP = 34, 39  # a block's width, and from one block to the next


def block_table() -> Moved:
    """The third sequence of the text's example, position by position."""
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    first, second, third = Sequence([7] * 9), Sequence([7] * 6), Sequence([7] * 17)
    manager.allocate_with_prefix(first)
    manager.allocate_with_prefix(second)
    manager.free(first)
    manager.allocate_with_prefix(third)
    frames = []
    for position in range(len(third.tokens)):
        index, offset = divmod(position, BLOCK_SIZE)
        block_id = third.block_table[index]
        text = (
            f"Position {position}: entry {position} // {BLOCK_SIZE} = {index} of the table says block {block_id}; the "
            f"offset is {position} % {BLOCK_SIZE} = {offset}. Slot {block_id} x {BLOCK_SIZE} + {offset} = "
            f"{block_id * BLOCK_SIZE + offset}."
        )
        frames.append(Frame(str(position), draw(manager, second, third, position), text))
    return Moved("position in the third sequence", frames, 13)


def draw(manager: BlockManager, second: Sequence, third: Sequence, position: int) -> str:
    index, offset = divmod(position, BLOCK_SIZE)
    block_id = third.block_table[index]
    parts = [words(2, 12, "The third sequence's block table", "name")]
    for place, entry in enumerate(third.block_table):
        parts.append(box(4 + STEP * place, 18, CELL, 26, str(entry), "one" + " strong" * (place == index)))
    parts.append(words(2, 108, "The pool, four slots a block", "name"))
    for block in manager.blocks:
        left = 4 + STEP * block.block_id
        seq = next((seq for seq in (third, second) if block.block_id in seq.block_table), None)
        kind = "empty" if seq is None else "one" if seq is third else "two"
        parts.append(box(left, 114, CELL, 26, str(block.block_id), kind + " strong" * (block.block_id == block_id)))
        filled = len(seq.tokens) - BLOCK_SIZE * seq.block_table.index(block.block_id) if seq else 0
        for slot in range(BLOCK_SIZE):
            state = kind if slot < filled else "box empty"
            state = "four" if (block.block_id, slot) == (block_id, offset) else state
            parts.append(f'<rect x="{left + 8.7 * slot:.1f}" y="144" width="7.5" height="9" class="{state}"/>')
    parts.append(arrow(4 + STEP * index + CELL / 2, 44, 4 + STEP * block_id + CELL / 2, 113))
    parts += [words(2, 174, "the third sequence", "one"), words(160, 174, "the second sequence", "two")]
    text = f"Table of the third sequence: {third.block_table}; of the second: {second.block_table}. "
    return svg(f"Position {position} in the pool", f"{text}Position {position} is in block {block_id}.", parts, 180)
