"""Chapter 4's two memories as a web page shows them: the same object as in the terminal, drawn as HTML."""

from html import escape

from chapters.ch04_paged_attention.memories import ACTIONS, BLOCK_SIZE, COLUMNS, TwoMemories, slots_of
from chapters.player import Scene
from chapters.site.pictures import draw_events, draw_queue, draw_table
from nanovllm.serving.http.html_pictures import color, label, marks

__all__ = ["ACTIONS", "ASK", "SCENES", "TITLE", "new_world", "panels", "values"]

TITLE = "Two memories of the same size, the same requests"
ASK = ""
SCENES = [
    Scene(
        "Ten requests ask for room",
        "/a10",
        "The contiguous memory reserves max_model_len = 32 slots for each request, whatever it will need, and refuses "
        "the fifth and all later ones. The paged memory takes blocks only for the tokens that are there.",
    ),
    Scene(
        "They grow",
        "a4/g8fg4",
        "Each request gets one token at a time. The paged memory takes a block when the last one is full. In the "
        "contiguous memory, most of what is reserved stays empty.",
    ),
    Scene(
        "Holes",
        "p/a5g6a6",
        "Now the contiguous memory reserves prompt + max_tokens, which is closer to the need. Five requests come, and "
        "six tokens later two of them have ended and left holes. A newcomer needs one hole that is long enough: free "
        "slots here and there do not add up.",
    ),
    Scene(
        "The pool runs dry",
        "/a9g4fgfg",
        "Nine requests are in, three blocks are free, and all requests grow. When no block is free, append_slots "
        "returns False, and a request waits until another one ends. In the engine the scheduler of chapter 5 decides "
        "who gives way.",
    ),
    Scene(
        "Shared blocks",
        "c/a4g3f2a2",
        "With prefix caching on, the first two blocks of every prompt are the same ones. A shared block is taken once, "
        "and freed when its last holder ends.",
    ),
]
new_world = TwoMemories


def values(world: TwoMemories) -> dict[str, str]:
    caching = "on" if world.caching else "off"
    return {"p": world.reservation, "c": caching, "m": f"{len(world.manager.blocks)} blocks"}


def panels(world: TwoMemories) -> list[tuple[str, str]]:
    caching = f", prefix caching {'on' if world.caching else 'off'}"
    return [
        ("What just happened to blocks, in order", draw_events(world.events, world.names)),
        (f"Contiguous: reserves {world.reservation}", draw_contiguous(world)),
        (f"Paged: the engine's BlockManager, blocks of {BLOCK_SIZE}{caching}", draw_paged(world)),
        ("Slots stored, taken and empty, and free", draw_shares(world) + draw_numbers(world)),
        (f"The free queue: {len(world.manager.free_blocks)} blocks", draw_queue(world.manager, world.events)),
        ("Block tables in the paged memory", draw_tables(world)),
    ]


def draw_contiguous(world: TwoMemories) -> str:
    """A cell for each slot: filled where a token is stored, striped where reserved and empty."""
    cells = [("free", "")] * world.contiguous.num_slots
    for name, slots in world.contiguous.reserved.items():
        for index, slot in enumerate(slots):
            cells[slot] = (f"{'stored' if index < world.lengths[name] else 'empty'} {color(name)}", name)
    reserved = sorted(world.contiguous.reserved.items(), key=lambda item: item[1].start)
    told = [f"{name} has slots {s.start} to {s.stop - 1}, {world.lengths[name]} filled" for name, s in reserved]
    groups = [
        f'<li class="group"><span class="id">{start}</span>{_cells(cells[start : start + BLOCK_SIZE])}</li>'
        for start in range(0, len(cells), BLOCK_SIZE)
    ]
    return _memory("Contiguous memory", told, groups)


def draw_paged(world: TwoMemories) -> str:
    """The same for the pool. +1 after a block says that one more sequence shares it."""
    kinds = ["cached" if block.block_hash else "free" for block in world.manager.blocks]
    cells = [(kind, "") for kind in kinds for _ in range(BLOCK_SIZE)]
    for name, seq in reversed(world.seqs.items()):
        for index, slot in enumerate(slots_of(seq)):
            cells[slot] = (f"{'stored' if index < seq.num_computed_tokens else 'empty'} {color(name)}", name)
    told = [f"{name} has blocks {' '.join(map(str, seq.block_table))}" for name, seq in world.seqs.items()]
    groups = []
    for block in world.manager.blocks:
        number, shared = block.block_id, f"<b>+{block.ref_count - 1}</b>" if block.ref_count > 1 else ""
        groups.append(
            f'<li class="group" data-key="b{number}"{marks(world.events, number)}>'
            f'<span class="id">{number}{shared}</span>'
            f"{_cells(cells[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])}</li>"
        )
    return _memory("Paged memory", told, groups)


def _memory(title: str, told: list[str], groups: list[str]) -> str:
    what = escape(f"{title}. {'. '.join(told) or 'All free'}.")
    return f'<div role="img" aria-label="{what}"><ol class="memory">{"".join(groups)}</ol></div>'


def _cells(cells: list[tuple[str, str]]) -> str:
    return f'<span class="cells">{"".join(f"<i class={kind!r}>{name}</i>" for kind, name in cells)}</span>'


def draw_shares(world: TwoMemories) -> str:
    bars = []
    for name, numbers in world.counters().items():
        stored = numbers["taken"] - numbers["empty"]
        parts = {"stored": stored, "empty": numbers["empty"], "free": numbers["free"]}
        cells = "".join(
            f'<span class="{kind}" style="flex-grow:{size}">{size if size > 5 else ""}</span>'
            for kind, size in parts.items()
            if size
        )
        bars.append(f'<li><span class="name">{name}</span><span class="bar">{cells}</span></li>')
    legend = "".join(
        f'<li><span class="key {kind}"></span> {what}</li>'
        for kind, what in (("stored", "a token is stored"), ("empty", "taken and empty"), ("free", "free"))
    )
    return f'<ol class="shares">{"".join(bars)}</ol><ul class="legend" aria-label="Legend">{legend}</ul>'


def draw_numbers(world: TwoMemories) -> str:
    rows = ([name, *(str(numbers[column]) for column in COLUMNS)] for name, numbers in world.counters().items())
    return draw_table(("", *COLUMNS), rows)


def draw_tables(world: TwoMemories) -> str:
    if not world.seqs:
        return '<p class="none">Nothing is running.</p>'
    rows = []
    for name, seq in world.seqs.items():
        tokens = f"{seq.num_prompt_tokens}+{seq.num_generated_tokens}"
        rows.append([label(name), tokens, str(seq.num_cached_tokens), " ".join(map(str, seq.block_table))])
    return draw_table(("", "tokens", "found in cache", "block table"), rows)
