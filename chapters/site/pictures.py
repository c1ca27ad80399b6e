"""Pictures that only labs have, beside those of the server's page (nanovllm/serving/http/html_pictures.py)."""

from collections.abc import Callable, Iterable, Mapping
from html import escape

from nanovllm.core.block_manager import Block, BlockEvent, BlockManager
from nanovllm.serving.http.html_pictures import draw_block, label, marks

VERBS = {"hit": "hit", "allocate": "taken", "register": "cached", "evict": "evicted", "free": "freed"}


def draw_events(events: list[BlockEvent], names: Mapping[int, str]) -> str:
    """What has happened to blocks in the last action, in order."""
    events = [event for event in events if event.kind in VERBS]
    if not events:
        return '<p class="none">No block was touched.</p>'
    items = [
        f'<li class="event" data-event="{event.kind}" style="--order:{order}">'
        f"{VERBS[event.kind]} <b>{event.block_id}</b> {label(names.get(event.seq_id, 'hog'))}</li>"
        for order, event in enumerate(events)
    ]
    return f'<ol class="events">{"".join(items)}</ol>'


def draw_pool(
    manager: BlockManager,
    held: Mapping[int, list[str]],
    events: list[BlockEvent],
    words: Callable[[Block], str] = lambda block: "",
) -> str:
    """A cell for each block."""
    cells = (draw_block(block, held.get(block.block_id, []), events, words(block)) for block in manager.blocks)
    return f'<ol class="pool">{"".join(cells)}</ol>'


def draw_queue(
    manager: BlockManager, events: list[BlockEvent], words: Callable[[Block], str] = lambda block: ""
) -> str:
    """The free queue from its head, which is taken next. A cached block still has its hash, and its K/V is found."""
    chips = []
    for block_id in manager.free_blocks:
        block = manager.blocks[block_id]
        state = "cached" if block.block_hash else "free"
        text = f' <span class="words">{escape(said)}</span>' if (said := words(block)) else ""
        chips.append(
            f'<li class="chip {state}" data-key="q{block_id}" data-from="b{block_id}"{marks(events, block_id)}>'
            f"<b>{block_id}</b>{text}</li>"
        )
    if not chips:
        return '<p class="none">The queue is empty: no block is free.</p>'
    return f'<ol class="queue"><li class="end">taken next</li>{"".join(chips)}<li class="end">tail</li></ol>'


def draw_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose rows begin with a heading. Cells are HTML."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
