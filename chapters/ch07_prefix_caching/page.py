"""Chapter 7's simulator as a web page shows it: the same object as in the terminal, drawn as HTML."""

from html import escape

from chapters.ch07_prefix_caching import beyond_page
from chapters.ch07_prefix_caching.scenes import SCENES as OF_POOL
from chapters.ch07_prefix_caching.simulator import BLOCK_SIZE, Simulator, in_words
from chapters.ch07_prefix_caching.world import ACTIONS, World
from chapters.site import pictures
from chapters.site.pictures import draw_events, draw_queue
from nanovllm.core.block_hash import extra_keys
from nanovllm.core.block_manager import Block
from nanovllm.serving.http.html_pictures import color, draw_counters, holders, label, marks

__all__ = ["ACTIONS", "ASK", "SCENES", "TITLE", "new_world", "panels", "values"]

TITLE = "Prefix caching, on the engine's BlockManager"
ASK = "a prompt of your own"
KINDS = {"hit": "=", "miss": "+", "own": "·", "wrong": "!"}
LEGEND = {"hit": "found", "miss": "computed, now findable", "own": "not full, its own", "wrong": "K/V of another text"}
NUM_BARS = 24
SCENES = [*OF_POOL, *beyond_page.SCENES]
new_world = World


def values(world: World) -> dict[str, str]:
    pool, tiers = world.pool, world.tiers
    of_pool = {"w": pool.workload, "s": pool.salt or "none", "m": f"{len(pool.manager.blocks)} blocks"}
    of_tiers = {key: str(tiers.sizes[tier]) for key, tier in (("p", "pool"), ("h", "memory"), ("d", "disk"))}
    return of_pool | {"f": pool.fault or "none", "v": tiers.order} | of_tiers


def panels(world: World) -> list[tuple[str, str]]:
    return panels_of_pool(world.pool) if world.shows == "pool" else beyond_page.panels(world.tiers)


def panels_of_pool(world: Simulator) -> list[tuple[str, str]]:
    held = holders((request.seq for request in world.running), world.names)
    salt = f", salt {world.salt}" if world.salt else ""
    fault = f", fault: {world.fault}" if world.fault else ""
    return [
        ("What just happened to blocks, in order", draw_events(world.events, world.names)),
        (f"Requests (the next one: {world.workload}{salt}){fault}", draw_requests(world)),
        (f"The pool: {len(world.manager.blocks)} blocks of {BLOCK_SIZE} tokens", _draw_pool(world, held)),
        (
            f"The free queue: {len(world.manager.free_blocks)} blocks, the head is taken next",
            draw_queue(world.manager, world.events, lambda block: world.text(block.token_ids)),
        ),
        (f"The hash map as a tree: {len(world.manager.hash_to_block)} hashes", draw_tree(world, held)),
        ("Prompt tokens computed and saved", draw_counters(world.counters()) + draw_chart(world)),
    ]


def draw_requests(world: Simulator, last: int = 6) -> str:
    """Each block in the colour of what was done for it, as in the terminal."""
    if not world.requests:
        return '<p class="none">None yet. Send one, type one, or open a scene.</p>'
    rows = []
    for number, request in list(enumerate(world.requests))[-last:]:
        salt = f" <em>salt {escape(request.seq.cache_salt)}</em>" if request.seq.cache_salt else ""
        pictures = "".join(f" <em>[{escape(span.content_hash)}]</em>" for span in request.seq.mm_spans)
        chips = []
        for index, block_id in enumerate(request.table):
            kind = request.kind(index)
            words = escape(world.text(request.seq.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]))
            keys = extra_keys(index, BLOCK_SIZE, mm_spans=request.seq.mm_spans)
            extra = "".join(f" <em>{escape(in_words(key))}</em>" for key in keys)
            is_last = request is world.requests[-1]
            chips.append(
                f'<li class="chip {kind}" data-key="r{number}-{index}" data-from="q{block_id} b{block_id}"'
                f"{marks(world.events, block_id) if is_last else ''}>"
                f'<span class="sign">{KINDS[kind]}</span><b>{block_id}</b> <span class="words">{words}</span>'
                f"{extra}</li>"
            )
        if request.seq.tokens and request.num_computed == 0:
            chips.append('<li class="chip wrong"><span class="sign">!</span>no logits: nothing was computed</li>')
        state = "" if request.running else " ended"
        head = f'<span class="name">{label(request.name)}{salt}{pictures}{state}</span>'
        rows.append(f'<li class="request{state}">{head}<ol class="blocks">{"".join(chips)}</ol></li>')
    legend = "".join(
        f'<li class="chip {kind}"><span class="sign">{sign}</span>{LEGEND[kind]}</li>' for kind, sign in KINDS.items()
    )
    return f'<ol class="requests">{"".join(rows)}</ol><ul class="legend" aria-label="Legend">{legend}</ul>'


def _draw_pool(world: Simulator, held: dict[int, list[str]]) -> str:
    def words(block: Block) -> str:
        return world.written_in(block.block_id) if held.get(block.block_id) else world.text(block.token_ids)

    return pictures.draw_pool(world.manager, held, world.events, words)


def draw_tree(world: Simulator, held: dict[int, list[str]]) -> str:
    """Each hash below its parent's. A chain without branches is one column."""
    names = world.manager.hash_to_block
    if not names:
        return '<p class="none">No block has a hash yet.</p>'
    children: dict[bytes | None, list[bytes]] = {}
    parents = {name: next(iter(copies.values())).parent_hash for name, copies in names.items()}
    for name, parent in parents.items():
        children.setdefault(parent if parent in names and parent != name else None, []).append(name)
    drawn: set[bytes] = set()

    def node(name: bytes) -> str:
        drawn.add(name)
        copies = names[name]
        block = next(iter(copies.values()))
        extra = "".join(f" <em>{escape(in_words(key))}</em>" for key in block.extra_keys)
        blocks = "".join(
            f'<span class="id{" " + color(held[i][0]) if held.get(i) else ""}">{i}</span>' for i in sorted(copies)
        )
        # With the fault that leaves hashes in the map, a hash stands for a block that no longer says what it holds.
        words = escape(world.text(block.token_ids)) or "<em>taken for another text</em>"
        return (
            f'<span class="node" data-key="n{name.hex()}" data-from="b{block.block_id}">'
            f"<code>{name.hex()[:6]}</code> {words}{extra} {blocks}</span>"
        )

    def branch(name: bytes) -> str:
        chain = [node(name)]
        while len(below := [child for child in children.get(name, []) if child not in drawn]) == 1:
            [name] = below
            chain.append(node(name))
        lists = "".join(map(branch, below))
        return f"<li>{''.join(chain)}{f'<ul>{lists}</ul>' if lists else ''}</li>"

    trees = "".join(branch(name) for name in children.get(None, []))
    trees += "".join(branch(name) for name in names if name not in drawn)  # rings, which only a fault can make
    return f'<ul class="tree">{trees}</ul>'


def draw_chart(world: Simulator) -> str:
    """Prompt tokens after each request, summed: computed below, saved above."""
    if not world.requests:
        return '<p class="none">The chart begins with the first request.</p>'
    total, computed, bars, sums = 0, 0, [], []
    for request in world.requests:
        total, computed = total + request.seq.num_prompt_tokens, computed + request.num_computed
        sums.append((request.name, total, computed))
    for place, (name, tokens, done) in enumerate(sums[-NUM_BARS:]):
        x, top, middle = 34 + place * 12, 100 - 90 * tokens / total, 100 - 90 * done / total
        bars.append(
            f"<g><title>after {escape(name)}: {done} of {tokens} tokens computed</title>"
            f'<rect class="saved" x="{x}" y="{top:.1f}" width="9" height="{middle - top:.1f}"/>'
            f'<rect class="computed" x="{x}" y="{middle:.1f}" width="9" height="{100 - middle:.1f}"/>'
            f'<text x="{x + 4.5}" y="112" text-anchor="middle">{escape(name)}</text></g>'
        )
    what = f"{computed} of {total} prompt tokens were computed, {total - computed} were saved"
    return (
        f'<figure class="chart"><svg viewBox="0 0 {34 + NUM_BARS * 12} 116" role="img" aria-label="{what}">'
        f'<text x="30" y="14" text-anchor="end">{total}</text><text x="30" y="100" text-anchor="end">0</text>'
        f'<line x1="32" y1="100" x2="{34 + NUM_BARS * 12}" y2="100"/>{"".join(bars)}</svg>'
        f'<figcaption><i class="computed"></i> computed <i class="saved"></i> saved; {what}.</figcaption></figure>'
    )
