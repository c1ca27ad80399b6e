"""The pictures of chapter 10: trips to memory, a block of K and its lanes, what each optimization takes away, and the
setups under the line that memory draws.
"""

import re
from pathlib import Path

from chapters.ch06_prefill_decode.pictures import readers_machine
from chapters.ch06_prefill_decode.roofline import demo_decodes
from chapters.recording import quoted_sheet, quotes
from chapters.svg import Axis, Chart, Frame, Moved, arrow, box, svg, words

HERE = Path(__file__).parent
CONTEXT = 256  # tokens of a sequence, as in the lab
LABELS, LONGEST, ROW = 114, 156, 19  # widths of the names and of the longest bar, height of a row
KINDS = {"1 decode": ("one", 1, "start", 9), "16 decodes": ("two", 16, "end", -9)}  # and where the words stand


def trips() -> str:
    """What goes to memory and comes back: of three operations and of one, and of attention's scores and of tiles."""
    rows = (
        ("three operations", ("x · cos", "x · sin", "+"), "one fused kernel", "all three", ""),
        ("attention, plain", ("q · k", "softmax", "· v"), "in tiles", "max, sum, acc", "K, V"),
    )
    parts, said = list[str](), list[str]()
    for row, (slow, operations, fast, kernel, comes) in enumerate(rows):
        top = 126 * row
        parts += [words(2, top + 12, slow, "name"), words(208, top + 12, fast, "name")]
        parts += [box(2, top + 18, 194, 22, "memory", "gone"), box(208, top + 18, 110, 22, "memory", "gone")]
        for place, name in enumerate(operations):
            left = 2 + 68 * place
            parts.append(box(left, top + 84, 58, 24, name, "two"))
            for x, is_down in ((left + 17, True), (left + 41, False)):
                is_scores = row == 1 and (x, is_down) not in ((19, True), (179, False))
                ends = (top + 40, top + 84) if is_down else (top + 84, top + 40)
                parts.append(arrow(x, ends[0], x, ends[1]))
                if is_scores:
                    parts.append(f'<path class="stream" d="M{x},{min(ends) + 6}V{max(ends) - 6}"/>')
        parts.append(box(208, top + 84, 110, 24, kernel, "one"))
        parts += [arrow(236, top + 40, 236, top + 84), arrow(290, top + 84, 290, top + 40)]
        parts.append(words(232, top + 66, comes, "tick", "end"))
        said.append(f"{slow}: six trips; {fast}: two")
    parts.append(words(2, 250, "thick: n × n scores, for each head of each layer", "name"))
    return svg("Trips between memory and the processor", "; ".join(said) + ".", parts, 256)


def k_block() -> str:
    """A block of K as the C kernels keep it, a key in each column, and the vectors that one instruction multiplies."""
    lanes, left, wide, high = 16, 62, 16, 15
    parts = [words(left, 12, "a block of K: a column is a key", "name")]
    dims = ("0", "1", "2", "3", "...", "63")
    for row, dim in enumerate(dims):
        top = 20 + high * row
        parts.append(words(left - 6, top + 11, f"no. {dim}" if dim != "..." else dim, "tick", "end"))
        for lane in range(lanes):
            kind = "one" if dim == "1" else "three" if lane == 2 else "empty"
            parts.append(box(left + wide * lane, top, wide, high, "", kind))
    middle = left + wide * 2.5
    parts.append(arrow(middle, 20 + high * len(dims) + 13, middle, 20 + high * len(dims), ""))
    parts.append(words(middle + 9, 20 + high * len(dims) + 12, "key 2", "tick"))
    parts.append(words(left + wide * lanes, 20 + high * len(dims) + 12, "memory runs along the rows", "tick", "end"))
    vectors = (
        ("vector", "", "one", "number 1 of 16 keys: one load"),
        ("times", "q", "two", "number 1 of the query, in all lanes"),
        ("added to", "", "", "a lane has the score of one key"),
    )
    for row, (name, letter, kind, note) in enumerate(vectors):
        top = 142 + 38 * row
        parts += [words(left - 6, top + 13, name, "tick", "end"), words(left, top + 31, note, "tick")]
        parts += [box(left + wide * lane, top, wide, 19, letter or str(lane), kind) for lane in range(lanes)]
    return svg(
        "A block of K and the lanes that read it",
        "Number 1 of sixteen keys lies together in memory and fills the sixteen lanes of a vector. Multiplied by "
        "number 1 of the query, it is added to sixteen scores.",
        parts,
        254,
    )


def best_ms(column: str) -> dict[str, float]:
    """Setup -> the fastest time, in the order in which the optimizations were switched on."""
    sheet = quoted_sheet(HERE, "one after another", column)
    return dict(zip((row[0] for row in sheet.rows), sheet.column(column), strict=True))


def steps() -> str:
    """A step of 1 and of 16 decodes, one optimization after another."""
    return waterfalls("A step, one optimization after another", {kind: best_ms(f"{kind}, ms") for kind in KINDS})


def workload() -> str:
    """The same for requests about one text."""
    return waterfalls("Four requests, one optimization after another", {"four requests": best_ms("fastest, ms")})


def waterfalls(title: str, times: dict[str, dict[str, float]]) -> str:
    """A bar for each setup: solid is what is left, dashed what this setup has taken away."""
    parts, said, top = list[str](), list[str](), 0
    for kind, found in times.items():
        parts.append(words(2, top + 12, f"{kind}, ms", "name"))
        top, before, longest = top + 19, 0.0, max(found.values())
        for name, ms in found.items():
            left, right = (LABELS + LONGEST * each / longest for each in (ms, max(before, ms)))
            parts += [
                words(LABELS - 5, top + 11, name.split(" (")[0], "", "end"),
                box(left, top, right - left, 14, "", "gone"),
            ]
            parts += [box(LABELS, top, left - LABELS, 14, "", "one"), words(right + 5, top + 11, f"{ms:.1f}", "tick")]
            top, before = top + ROW, ms
        said.append(f"{kind}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in found.items()))
        top += 8
    return svg(title, "; ".join(said) + ".", parts, top - 6)


def memory_rate() -> float:
    """GB/s."""
    found = re.search(r"together read ([\d.]+) GB/s", "\n".join(quotes(HERE)))
    assert found is not None
    return float(found[1])


def roofline() -> Moved:
    """GFLOP/s that a step of 1 and of 16 decodes comes to, one optimization after another."""
    gigabytes, theirs, frames = memory_rate(), readers_machine(), list[Frame]()
    costs = {kind: demo_decodes(n, CONTEXT) for kind, (_, n, *_) in KINDS.items()}
    times = {kind: best_ms(f"{kind}, ms") for kind in KINDS}
    for place, setup in enumerate(times["1 decode"]):
        x = Axis("FLOPs a byte of the step", (1, 2, 4, 8, 16), 0.7, 20, is_log=True)
        chart = Chart(x, Axis("GFLOP/s", (10, 30, 100, 300), 5, 500, is_log=True), 220)
        chart.curve([(x.low, x.low * gigabytes), (500 / gigabytes, 500)], "gone")
        chart.note(2.2, 2.2 * gigabytes, f"{gigabytes:g} GB/s", "gone", "end", (-6, -6))
        if theirs is not None:  # the dots stay those of the text's machine
            ends = max(x.low, chart.y.low / theirs[0]), min(x.high, chart.y.high / theirs[0])
            if ends[0] < ends[1]:
                chart.curve(((end, end * theirs[0]) for end in ends), "three dashed")
                middle = (ends[0] * ends[1]) ** 0.5
                chart.note(middle, middle * theirs[0], f"yours: {theirs[0]:.3g} GB/s", "three", "start", (6, 14))
        said = []
        for kind, (colour, _, anchor, by) in KINDS.items():
            cost, done = costs[kind], [*times[kind].values()][: place + 1]
            points = [(cost.intensity, cost.flops / ms / 1e6) for ms in done]
            chart.dots(points[:-1], f"{colour} open", 2.6)
            chart.dots(points[-1:], colour, 5)
            chart.note(*points[-1], kind, colour, anchor, (by, 4))
            least_ms = cost.read_bytes / gigabytes / 1e6
            said.append(f"{kind} {done[-1]:.1f} ms, of which its bytes need {least_ms:.1f}")
        text = "; ".join(said) + "."
        frames.append(Frame(setup, chart.draw(f"Under the roof, with {setup}", text), text))
    return Moved("the last one that is on", frames, len(frames) - 1)
