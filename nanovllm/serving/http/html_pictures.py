"""Pictures of the engine's objects as HTML, for the course's labs and for the server's page.

What may move has a data-key, its name on the page; a lab lets it glide from where it was to where it is now. Something
new comes from the first of its data-from that was there before. data-event marks what has just happened to it, and
--order says when, so that the reader sees events one after another.
"""

from collections.abc import Iterable, Mapping
from html import escape
from typing import NamedTuple

from nanovllm.core.block_hash import ExtraKeys, extra_keys
from nanovllm.core.block_manager import Block, BlockEvent, BlockManager
from nanovllm.core.sequence import Sequence


def color(name: str) -> str:
    """The class of a request's colour. By its name: the number of a Sequence is another in each run."""
    return "hog" if name == "hog" else f"seq-{(ord(name[0]) - ord('A')) % 8}"


def label(name: str) -> str:
    return f'<b class="who {color(name)}">{escape(name)}</b>'


def marks(events: Iterable[BlockEvent], block_id: int) -> str:
    """Attributes of a block to which something has just happened. Of several events the one that says most."""
    kinds = {event.kind: order for order, event in enumerate(events) if event.block_id == block_id}
    kind = next((kind for kind in ("evict", "hit", "allocate", "free", "register") if kind in kinds), None)
    return f' data-event="{kind}" style="--order:{kinds[kind]}"' if kind else ""


def holders(seqs: Iterable[Sequence], names: Mapping[int, str]) -> dict[int, list[str]]:
    """block_id -> the names of those that have it in their tables."""
    held: dict[int, list[str]] = {}
    for seq in seqs:
        for block_id in seq.block_table:
            held.setdefault(block_id, []).append(names[seq.seq_id])
    return held


def images(manager: BlockManager, seqs: Iterable[Sequence]) -> dict[int, list[str]]:
    """block_id -> the images that the block overlaps, each by the first digits of its content hash."""
    keys: dict[int, ExtraKeys] = {block.block_id: block.extra_keys for block in manager.blocks if block.extra_keys}
    for seq in seqs:
        if seq.mm_spans:  # its blocks that are not full have no keys yet
            for index, block_id in enumerate(seq.block_table):
                keys[block_id] = extra_keys(index, manager.block_size, mm_spans=seq.mm_spans)
    found = {block_id: [key[1][:8] for key in block_keys if key[0] == "mm"] for block_id, block_keys in keys.items()}
    return {block_id: overlapped for block_id, overlapped in found.items() if overlapped}


def draw_block(
    block: Block,
    names: list[str],
    events: Iterable[BlockEvent],
    words: str = "",
    has_snapshot: bool = False,
    images: Iterable[str] = (),
) -> str:
    """A block's holders, or cached, or free. A count that its holders do not explain is shown.

    has_snapshot: a hybrid model's state was kept where this block ends (chapter 16). images: those that it overlaps.
    """
    if block.ref_count != len(names):
        state, what = "lost", f"ref_count {block.ref_count}"
    elif names:
        state, what = "held" if len(names) == 1 else "shared", ""
    else:
        state = what = "cached" if block.block_hash else "free"
    more = f"<b>+{len(names) - 4}</b>" if len(names) > 4 else ""
    who = "".join(map(label, names[:4])) + more + (f"<em>{what}</em>" if what else "")
    text = f'<span class="words">{escape(words)}</span>' if words else ""
    tint = (f" {color(names[0])}" if names else "") + (" snapshot" if has_snapshot else "")
    shown = [f"image {name}" for name in images]
    holds = f"{'shared' if len(names) > 1 else 'held'} by {', '.join(names)}" if names and not what else what
    title = escape(", ".join([f"block {block.block_id}: {holds}", *shown]))
    overlaps = " image" if shown else ""
    return (
        f'<li class="block {state}{tint}{overlaps}" data-key="b{block.block_id}" title="{title}"'
        f"{marks(events, block.block_id)}>"
        f'<span class="id">{block.block_id}</span><span class="holders">{who}</span>{text}</li>'
    )


def draw_card(seq: Sequence, name: str, goal: int = 0, request_id: str = "") -> str:
    """A request, in a seat or in the queue. goal: tokens that it may come to, for a bar of its progress."""
    num_blocks = len(seq.block_table)
    blocks = (
        f"{num_blocks or 'no'} blocks" if not 0 < num_blocks <= 12 else f"blocks {' '.join(map(str, seq.block_table))}"
    )
    bar = f'<progress max="{goal}" value="{seq.num_computed_tokens}" aria-label="tokens computed"></progress>'
    return (
        f'<li class="card {color(name)}" data-key="s{escape(name)}" data-request="{escape(request_id)}">{label(name)} '
        f"{seq.status.name}"
        f"<span>{seq.num_prompt_tokens}+{seq.num_generated_tokens} tokens, {seq.num_computed_tokens} computed</span>"
        f"<span>{blocks}</span>{bar if goal else ''}</li>"
    )


class Step(NamedTuple):
    """One step: tokens of prompts among its tokens, how long it took, sequences that it preempted."""

    num_prefill_tokens: int
    num_tokens: int
    seconds: float
    num_preempted: int


def draw_steps(steps: list[Step], num_shown: int, budget: int, max_num_seqs: int) -> str:
    """Rows of bars over the newest steps: prompt tokens, decoded tokens, milliseconds. Each has a scale of its own."""
    if not steps:
        return '<p class="none">No step yet.</p>'
    rows: dict[str, tuple[str, list[float]]] = {
        f"prompt tokens (a step may have {budget:,} in all)": ("prefill", [step.num_prefill_tokens for step in steps]),
        f"decoded tokens (at most {max_num_seqs:,} requests)": (
            "decode",
            [step.num_tokens - step.num_prefill_tokens for step in steps],
        ),
        "milliseconds": ("time", [step.seconds * 1e3 for step in steps]),
    }
    preempted = [number for number, step in enumerate(steps) if step.num_preempted]
    first = num_shown - len(steps)
    figures = "".join(_draw_bars(title, kind, values, preempted, first) for title, (kind, values) in rows.items())
    note = '<p class="small">A red mark below: the step preempted somebody.</p>' if preempted else ""
    return figures + note


def _draw_bars(title: str, kind: str, values: list[float], marked: list[int], first: int) -> str:
    most = max(max(values), 1)
    bars = "".join(f"M{6 * i},40v-{38 * v / most:.1f}h5V40z" for i, v in enumerate(values, first) if v)
    marks = "".join(f"M{6 * (first + i)},41h5v3h-5z" for i in marked)
    name, width = escape(title), 6 * (first + len(values))
    return (
        f'<figure class="chart"><figcaption>{name}: <b>{values[-1]:,.0f}</b>, highest {most:,.0f}</figcaption>'
        f'<svg viewBox="0 0 {width} 45" preserveAspectRatio="none" role="img" aria-label="{name} by step">'
        f'<path class="{kind}" d="{bars}"/><path class="preempted" d="{marks}"/></svg></figure>'
    )


def draw_history(series: Mapping[str, list[float]], num_seconds: int) -> str:
    """A line for each series of values, one a second, the newest at the right."""
    figures = []
    for title, values in series.items():
        most = 1.0 if title == "hit rate" else max([*values, 1.0])
        shown = (lambda v: f"{v:.0%}") if title == "hit rate" else (lambda v: f"{v:,.0f}")
        first = num_seconds - len(values)
        points = " ".join(f"{first + i},{40 - 38 * v / most:.1f}" for i, v in enumerate(values))
        newest = f"<b>{shown(values[-1])}</b>, highest {shown(max(values))}" if values else "none yet"
        figures.append(
            f'<figure class="chart"><figcaption>{escape(title)}: {newest}</figcaption>'
            f'<svg viewBox="0 0 {num_seconds} 42" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(title)}, last {num_seconds} seconds"><polyline points="{points}"/></svg></figure>'
        )
    return "".join(figures)


def draw_counters(counters: Mapping[str, object]) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in counters.items()
    )
    return f'<dl class="counters">{items}</dl>'
