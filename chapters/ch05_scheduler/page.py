"""Chapter 5's two schedulers as a web page shows them: the same object as in the terminal, drawn as HTML."""

from chapters.ch05_scheduler.batching import ACTIONS, Comparison, letter, summary
from chapters.player import Scene
from chapters.site.pictures import draw_events, draw_pool, draw_queue
from chapters.stage import Stage
from nanovllm.serving.http.html_pictures import color, draw_card, holders, label

__all__ = ["ACTIONS", "ASK", "SCENES", "TITLE", "new_world", "panels", "values"]

TITLE = "The scheduler, step by step, and static batches beside it"
ASK = ""
SCENES = [
    Scene(
        "Three requests, step by step",
        "/s12",
        "A, B and C are admitted as far as the budget of 16 tokens a step allows. Then each step gives every running "
        "request one more token, until it ends.",
    ),
    Scene(
        "Newcomers take the seats of those that have ended",
        "/s2a5s24",
        "Five more requests arrive while others run. The scheduler seats them as soon as a seat is free. The static "
        "batches wait until the whole batch has ended, with seats idle meanwhile.",
    ),
    Scene(
        "The pool runs dry",
        "/a2s3m4s3Ms15",
        "Blocks are taken away until a running request needs one and there is none. Then the youngest is preempted: "
        "its blocks are freed, it waits at the head of the queue, and starts again from what is still cached.",
    ),
    Scene(
        "A client leaves",
        "/s2xs3",
        "The oldest request is given up in the middle of its answer. Its blocks are free at once.",
    ),
]
new_world = Comparison
MAX_STEPS = 40
SIGNS = {"P": "prefill", "d": "decode", "x": "preempted", ".": "waits", "-": "has ended and keeps its seat"}


def values(world: Comparison) -> dict[str, str]:
    return {"m": f"{sum(len(hog.block_table) for hog in world.ours.hogs)} taken"}


def panels(world: Comparison) -> list[tuple[str, str]]:
    ours, scheduler = world.ours, world.ours.scheduler
    used = ours.steps[-1].num_tokens if ours.steps else 0
    held = holders([*scheduler.running, *ours.hogs], ours.names)
    return [
        ("What just happened to blocks, in order", draw_events(world.events, ours.names)),
        (f"Step {len(ours.steps)}: {used} of {scheduler.max_num_batched_tokens} tokens", draw_step(ours)),
        (f"Running, {scheduler.max_num_seqs} seats, and waiting", draw_seats(ours)),
        (summary("Continuous", ours), draw_timeline(ours)),
        (summary("Static batches", world.static), draw_timeline(world.static)),
        (
            f"The pool: {len(ours.manager.blocks)} blocks of {ours.manager.block_size} tokens",
            draw_pool(ours.manager, held, world.events),
        ),
        (f"The free queue: {len(ours.manager.free_blocks)} blocks", draw_queue(ours.manager, world.events)),
    ]


def draw_step(stage: Stage) -> str:
    """The budget of the last step: who got how many of its tokens."""
    if not stage.steps:
        return '<p class="none">No step yet.</p>'
    step, budget = stage.steps[-1], stage.scheduler.max_num_batched_tokens
    parts = [
        f'<li class="{color(stage.names[c.seq.seq_id])}" style="flex-grow:{c.end - c.start}">'
        f"{label(stage.names[c.seq.seq_id])} {c.start}..{c.end}{'*' if c.reaches_end else ''}</li>"
        for c in step.chunks
    ]
    if left := budget - step.num_tokens:
        parts.append(f'<li class="unused" style="flex-grow:{left}">{left} unused</li>')
    notes = [
        f"<p>{what}: {' '.join(label(stage.names[seq.seq_id]) for seq in seqs)}</p>"
        for what, seqs in (("Preempted", step.preempted), ("Ended", step.finished))
        if seqs
    ]
    told = '<p class="small">A 3..5* is positions 3 and 4 of A; * samples.</p>'
    return f'<ol class="budget">{"".join(parts)}</ol>{told}{"".join(notes)}'


def draw_seats(stage: Stage) -> str:
    """A card for each request: it moves from the waiting queue to a seat, and back when it is preempted."""
    running, waiting = stage.scheduler.running, stage.scheduler.waiting
    seats = [draw_card(seq, stage.names[seq.seq_id]) for seq in running]
    seats += ['<li class="card empty">free seat</li>'] * (stage.scheduler.max_num_seqs - len(running))
    queue = "".join(draw_card(seq, stage.names[seq.seq_id]) for seq in waiting) or '<li class="none">nobody waits</li>'
    return f'<ol class="cards seats">{"".join(seats)}</ol><ol class="cards waiting" aria-label="Waiting">{queue}</ol>'


def draw_timeline(stage: Stage) -> str:
    """Rows are requests, columns are steps."""
    first = max(len(stage.steps) - MAX_STEPS, 0)
    if not stage.steps:
        return '<p class="none">The timeline begins with the first step.</p>'
    head = "".join(f'<th scope="col">{number + 1}</th>' for number in range(first, len(stage.steps)))
    rows = []
    for name, seq in stage.seqs.items():
        if stage.ended.get(seq.seq_id, first + 1) <= first:
            continue
        cells = []
        for number in range(first, len(stage.steps)):
            sign = letter(stage, seq, number)
            kind = {"P": "prefill", "d": "decode", "x": "preempted", "-": "idle", ".": "waits"}.get(sign, "absent")
            cells.append(f'<td class="{kind} {color(name)}">{sign.strip()}</td>')
        rows.append(f'<tr><th scope="row">{label(name)}</th>{"".join(cells)}</tr>')
    legend = ", ".join(f"{sign} {what}" for sign, what in SIGNS.items())
    return (
        '<div class="scroll" tabindex="0"><table class="timeline">'
        f'<thead><tr><th scope="col">step</th>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="small">{legend}</p>'
    )
