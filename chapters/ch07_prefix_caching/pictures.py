"""The pictures of chapter 7, of the simulator's BlockManager: a lookup, the chain of hashes, the worked example, a
conversation.

A block's border says who has touched it in this step; its four small cells are its slots.
"""

from chapters.ch07_prefix_caching.simulator import BLOCK_SIZE, Request, Simulator
from chapters.svg import Axis, Chart, Frame, Moved, arrow, box, svg, words
from nanovllm.core.block_manager import Block
from nanovllm.core.sequence import Sequence

COMMON = "the lamp is lit at night in fog for all at sea"
TEXTS = (
    "the lamp is lit when the night comes down over the sea",
    "the lamp is lit when the night comes down over the town",
    "one lamp is lit when the night comes down over the sea",
)
KINDS = ("one", "two", "three")  # colours of three requests
SIGNS = {"hit": "=", "miss": "+", "own": "·"}
CELL, STEP = 27, 31.5  # a block's width, and from one block to the next


def lookup() -> str:
    """A prompt when another with the same beginning has ended: its blocks, their hashes, and where each of them is."""
    world = Simulator(8)
    world.typed(f"{COMMON} who sees it from the land")
    world.end_oldest()
    world.typed(f"{COMMON} may I go up now")
    [request] = world.running
    tokens = request.seq.tokens
    texts = [world.text(tokens[at : at + BLOCK_SIZE]) for at in range(0, len(tokens), BLOCK_SIZE)]
    parts = [words(2, y, text, "name") for y, text in ((38, "prompt"), (103, "hashes"), (168, "pool"))]
    said = list[str]()
    for index, (text, block_id) in enumerate(zip(texts, request.table, strict=True)):
        left, goal = 54 + 53.5 * index, 54 + 33 * block_id + 14
        is_hit, is_full = index < request.num_hits, len(text.split()) == BLOCK_SIZE
        kind, below = "one" if is_hit else "two", 54
        two = text.split()[:2], text.split()[2:]
        parts.append(box(left, 14, 47, 40, "\n".join(" ".join(line) for line in two if line), kind))
        if is_full:
            block_hash = world.manager.hash_block(request.seq, index)[0].hex()[:6]
            parts += [arrow(left + 23, 54, left + 23, 88), box(left, 88, 47, 22, block_hash, kind)]
            parts += [arrow(left - 6.5, 99, left, 99)] * (index > 0)
            below = 110
        dashed = "" if is_hit else " dashed"
        parts.append(f'<path class="wire{dashed}" d="M{left + 23:.1f},{below}V116L{goal},146"/>')
        parts.append(f'<path class="tip" d="M{goal},152l-3.5,-6h7z"/>')
        found = "found in" if is_hit else "not found, computed into" if is_full else "not full, computed into"
        said.append(f"{text}: {found} block {block_id}")
    for block in world.manager.blocks:
        kind = "gone" if block.block_hash else "empty"
        if block.block_id in request.table:
            kind = "one" if request.table.index(block.block_id) < request.num_hits else "two"
        parts.append(box(54 + 33 * block.block_id, 152, 28, 24, str(block.block_id), kind))
    for left, kind, text in ((54, "one", "found"), (112, "two", "computed"), (194, "gone", "cached, not used")):
        parts += [box(left, 188, 11, 11, "", kind), words(left + 16, 198, text)]
    return svg("From a prompt to blocks", "; ".join(said) + ".", parts, 204)


def names() -> str:
    """Three texts in blocks, each hash made of its parent's hash and four words. A colour stands for a shared hash."""
    world, parts = Simulator(), []
    chains = [names_of(world, text) for text in TEXTS]
    shared = [name for name in chains[0] if sum(name in chain for chain in chains) > 1]
    for row, (text, chain) in enumerate(zip(TEXTS, chains, strict=True)):
        top = 4 + 62 * row
        for index, name in enumerate(chain):
            one, two, three, four = text.split()[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            left, kind = 2 + 110 * index, KINDS[shared.index(name)] if name in shared else ""
            parts.append(box(left, top, 96, 48, f"{one} {two}\n{three} {four}\n{name}", kind))
            parts += [arrow(left - 14, top + 24, left, top + 24)] * (index > 0)
    said = "; ".join(f"{text}: {', '.join(chain)}" for text, chain in zip(TEXTS, chains, strict=True))
    return svg("Hashes of the blocks of three texts", said, parts, 180)


def names_of(world: Simulator, text: str) -> list[str]:
    seq = Sequence(world.ids(text))
    return [world.manager.hash_block(seq, index)[0].hex()[:6] for index in range(3)]


def worked_example() -> Moved:
    """Every state of the example: the pool, the free queue, the tables of those who run."""
    world, frames = Simulator(), list[Frame]()
    while True:
        world.events.clear()
        said = world.example()
        if said.startswith("That was"):
            return Moved("step", frames)
        frames.append(Frame(f"{len(frames) + 1} of 9", draw_state(world, said), said))


def draw_state(world: Simulator, said: str) -> str:
    held: dict[int, list[Request]] = {}
    for request in world.running:
        for block_id in request.table:
            held.setdefault(block_id, []).append(request)
    touched = {event.block_id for event in world.events if event.kind in ("hit", "allocate", "evict")}
    parts = [words(2, 12, "The pool; a dot: the block has a hash", "name")]
    for block in world.manager.blocks:
        parts += draw_block(block, held.get(block.block_id, []), 3 + STEP * block.block_id, block.block_id in touched)
    queue = list(world.manager.free_blocks)
    parts.append(words(2, 88, "The free queue: its head, left, is taken next", "name"))
    for place, block_id in enumerate(queue):
        kind = "gone" if world.manager.blocks[block_id].block_hash else "empty"
        parts.append(box(3 + STEP * place, 94, CELL, 22, str(block_id), kind))
    parts.append(words(2, 136, "Block tables: = found, + computed, · not full", "name"))
    for row, request in enumerate(world.running):
        top = 142 + 28 * row
        parts.append(words(4, top + 16, request.name, kind_of(request)))
        for index, block_id in enumerate(request.table):
            sign = SIGNS[request.kind(index)]
            parts.append(box(24 + STEP * index, top, CELL, 22, f"{sign}{block_id}", kind_of(request)))
    tables = "".join(f" Table of {request.name}: {request.table}." for request in world.running)
    return svg("The worked example", f"{said} Free queue: {queue}.{tables}", parts, 200)


def draw_block(block: Block, holders: list[Request], left: float, is_touched: bool) -> list[str]:
    """Its number and its holders, whether it has a hash, and how many of its slots hold a token of theirs."""
    kind = kind_of(holders[0]) if holders else "gone" if block.block_hash else "empty"
    who = "".join(["\n", *(request.name for request in holders)]) if holders else ""
    parts = [box(left, 18, CELL, 36, f"{block.block_id}{who}", kind + " strong" * is_touched)]
    if block.block_hash:
        parts.append(f'<circle class="{kind if holders else "gone"}" cx="{left + 22}" cy="23" r="2.6"/>')
    filled = BLOCK_SIZE if block.block_hash else 0
    for request in holders:
        filled = max(filled, len(request.seq.tokens) - BLOCK_SIZE * request.table.index(block.block_id))
    for slot in range(BLOCK_SIZE):
        state = (kind if holders else "kept") if slot < filled else "box empty"
        parts.append(f'<rect x="{left + 7 * slot:.1f}" y="57" width="5.5" height="5.5" class="{state}"/>')
    return parts


def kind_of(request: Request) -> str:
    return KINDS["ABC".index(request.name)]


def conversation() -> str:
    """Prompt tokens of ten turns, summed: computed, and saved."""
    world = Simulator(48, "a conversation")
    for _ in range(10):
        world.send()
    sums = [(0, 0)]
    for request in world.requests:
        sums.append((sums[-1][0] + request.seq.num_prompt_tokens, sums[-1][1] + request.num_computed))
    total, computed = sums[-1]
    chart = Chart(Axis("turn", range(1, 11), 0.4, 10.6), Axis("prompt tokens so far", (0, 200, 400, 600), 0, 620), 190)
    chart.bars(((turn - 0.4, turn + 0.4, tokens) for turn, (tokens, _) in enumerate(sums) if turn), "three")
    chart.bars(((turn - 0.4, turn + 0.4, done) for turn, (_, done) in enumerate(sums) if turn), "one")
    chart.note(0.8, 500, "saved", "three")
    chart.note(0.8, 430, "computed", "one")
    text = f"After ten turns {computed} of {total} prompt tokens were computed; {total - computed} were found."
    return chart.draw("A conversation's prompt tokens", text)
