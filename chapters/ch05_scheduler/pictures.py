"""The pictures of chapter 5, as the real scheduler ran them: seven steps; static and continuous batches."""

from chapters.ch05_scheduler.batching import REQUESTS, StaticStage, letter
from chapters.stage import Stage
from chapters.svg import box, svg, words
from nanovllm.core.sequence import SequenceStatus

KINDS = {"P": "two", "d": "one", "-": "gone"}
LEFT, CELL, HIGH = 18, 13, 12
SEVEN = [(3, 4), (3, 6), (7, 2), (3, 2)]  # A to D: tokens of the prompt, and of the answer
POOL, SEATS, BUDGET = 5, 3, 8


def batches() -> str:
    """A row for each request, a cell for each step in which it has a seat."""
    parts, said, top = list[str](), list[str](), 14
    stages = {"static batches": StaticStage, "continuous batching": Stage}
    for title, make in stages.items():
        stage = make(32, max_num_seqs=4, max_num_batched_tokens=64)
        for request in REQUESTS:
            stage.add(*request)
        stage.run()
        parts.append(words(0, top, f"{title}: {len(stage.steps)} steps", "name"))
        said.append(f"{title} take {len(stage.steps)} steps" if make is StaticStage else f"{title} {len(stage.steps)}")
        for row, seq in enumerate(stage.seqs.values()):
            y = top + 8 + (HIGH + 2) * row
            parts.append(words(2, y + 10, "ABCDEFGH"[row], ""))
            for number in range(len(stage.steps)):
                if kind := KINDS.get(letter(stage, seq, number)):
                    area = f'x="{LEFT + CELL * number}" y="{y}" width="{CELL - 2}" height="{HIGH}"'
                    parts.append(f'<rect class="box {kind}" {area} rx="2"/>')
        top += 34 + (HIGH + 2) * len(REQUESTS)
    left = 0
    for kind, text, width in (("two", "prefill", 74), ("one", "decode", 76), ("gone", "ended, keeps its seat", 0)):
        parts.append(f'<rect class="box {kind}" x="{left}" y="{top - 10}" width="11" height="{HIGH}" rx="2"/>')
        parts.append(words(left + 17, top, text, "name"))
        left += width
    text = f"Eight requests, four seats: {', '.join(said)}. In static batches the seats of ended requests stay empty."
    return svg("Static and continuous batches", text, parts, top + 6)


def seven_steps() -> str:
    """A row for each step: what the running sequences compute, who waits, and how many blocks are left."""
    stage = Stage(POOL, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET, enable_prefix_caching=False)
    for request in SEVEN:
        stage.add(*request)
    parts, said, row, seat = list[str](), list[str](), 27, 62
    for x, name in ((0, "step"), (30, "running, and what is computed"), (220, "waiting"), (276, "free")):
        parts.append(words(x, 10, name, "name"))
    while stage.has_unfinished():
        top, number = 18 + row * len(stage.steps), len(stage.steps) + 1
        output = stage.schedule()
        kinds = {c.seq.seq_id: "two" if c.seq.status is SequenceStatus.PREFILL else "one" for c in output.chunks}
        waiting, num_free = list(stage.scheduler.waiting), len(stage.manager.free_blocks)
        step = stage.finish(output)
        parts.append(words(8, top + 15, str(number), ""))
        for place, chunk in enumerate(step.chunks):
            name = f"{stage.names[chunk.seq.seq_id]} {chunk.start}..{chunk.end}" + "*" * chunk.reaches_end
            kind = kinds[chunk.seq.seq_id] + " strong" * (chunk.seq in step.finished)
            parts.append(box(30 + seat * place, top, seat - 4, 21, name, kind))
        for place, seq in enumerate(step.preempted, len(step.chunks)):
            parts.append(box(30 + seat * place, top, seat - 4, 21, f"{stage.names[seq.seq_id]} out", "gone"))
        for place, seq in enumerate(waiting):
            parts.append(box(220 + 24 * place, top, 20, 21, stage.names[seq.seq_id], "empty"))
        parts.append(words(288, top + 15, str(num_free), "", "middle"))
        line = f"step {number}: {stage.describe(step)}; waiting: {stage.list_names(waiting)}; free blocks: {num_free}"
        said.append(line + (f"; ended: {stage.list_names(step.finished)}" if step.finished else ""))
    bottom = 18 + row * len(stage.steps) + 10
    for x, kind, name in ((0, "two", "prefill"), (48, "one", "decode")):
        parts.append(words(x, bottom, name, kind))
    parts.append(words(320, bottom, "* samples a token; thick: ends with it", "name", "end"))
    return svg("Seven steps of a scheduler", ". ".join(said) + ".", parts, bottom + 6)
