"""The picture of chapter 5: static and continuous batches, as the real scheduler ran them."""

from chapters.ch05_scheduler.batching import REQUESTS, StaticStage, letter
from chapters.stage import Stage
from chapters.svg import svg, words

KINDS = {"P": "two", "d": "one", "-": "gone"}
LEFT, CELL, HIGH = 18, 13, 12


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
