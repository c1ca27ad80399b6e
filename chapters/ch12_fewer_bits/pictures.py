"""The pictures of chapter 12: a group, a matrix and its rounding errors, which layers hurt, and the roofline, moved."""

from pathlib import Path

from chapters.ch06_prefill_decode.pictures import rates, readers_machine
from chapters.recording import Recording, quoted_sheet
from chapters.sheet import Histogram, Levels
from chapters.svg import Axis, Chart, Frame, Moved, box, histogram, levels, svg, words

HERE = Path(__file__).parent
ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256)
FORMATS = {"bf16": "three", "Q8_0": "one", "Q4_1": "two"}
GROUP = 32  # weights
FASTER = 2  # products of whole numbers, by the processor's instruction, as a multiple of bf16's


def codes() -> str:
    """A group's numbers, and what its codes of 4 bits stand for, as the lab was recorded."""
    part = Recording(HERE).part("A group, rounded")
    return levels(*(Levels(**what) for kind, what in part if kind == "levels" and what["title"] != "Q8_0"))


def weights() -> str:
    return histogram(histograms()[0], "a weight", "one")


def errors() -> str:
    return histogram(histograms()[1], "a rounding error, in steps of its group", "two")


def histograms() -> list[Histogram]:
    """The lab's, as they were recorded."""
    part = Recording(HERE).part("A matrix, rounded")
    return [Histogram(**what) for kind, what in part if kind == "histogram"]


def layers() -> str:
    """KL divergence, one kind of matrix at a time, then six layers at a time, as the lab was recorded."""
    [sheet] = Recording(HERE).sheets("One at a time")
    sheet.rows = [row for row in sheet.rows if row[0] != "nothing"]
    values, parts = sheet.column("KL divergence"), list[str]()
    left, most = 104, max(values)
    for at, (row, value) in enumerate(zip(sheet.rows, values, strict=True)):
        top = 4 + 19 * at + 8 * row[0].startswith("layers")
        kind = "two" if row[0].startswith("layers") else "one"
        parts += [words(left - 6, top + 11, row[0], "", "end"), box(left, top, 170 * value / most, 14, "", kind)]
        parts.append(words(left + 170 * value / most + 5, top + 11, f"{value:.3f}", "tick"))
    said = "; ".join(f"{row[0]} {row[at]}" for row in sheet.rows for at in [sheet.columns.index("KL divergence")])
    return svg("KL divergence after rounding a part of the model", said, parts, 19 * len(values) + 14)


def roofline() -> Moved:
    """What a machine could do at most with weights in each format, at a number of rows: the reader's where lab 6 has
    measured it, else that of chapter 6's text."""
    theirs = readers_machine()
    gigabytes, gflops = theirs or rates()[:2]
    sheet = quoted_sheet(HERE, "bytes a group of 32")
    names = [row[0] for row in sheet.rows]
    group_bytes = dict(zip(names, sheet.column("bytes a group of 32"), strict=True))
    roofs = {name: gflops * (1 if name == "bf16" else FASTER) for name in FORMATS}

    def attainable(name: str, num_rows: float) -> float:
        """GFLOP/s: a row does two FLOPs with each weight."""
        return min(2 * num_rows * GROUP / group_bytes[name] * gigabytes, roofs[name])

    low, high = attainable("bf16", 0.8) / 1.3, 1.4 * max(roofs.values())
    ticks = [tick for power in range(9) for tick in (10**power, 3 * 10**power) if low <= tick <= high]
    frames = []
    for num_rows in ROWS:
        chart = Chart(
            Axis("rows in the step", (1, 4, 16, 64, 256), 0.8, 320, is_log=True),
            Axis("G operations/s", ticks, low, high, is_log=True),
            220,
        )
        chart.curve([(num_rows, low), (num_rows, high)], "gone thin dashed")
        for place, (name, kind) in enumerate(FORMATS.items()):
            corner = roofs[name] * group_bytes[name] / GROUP / gigabytes / 2
            bends = chart.x.low, min(max(corner, chart.x.low), chart.x.high), chart.x.high
            chart.curve(((at, attainable(name, at)) for at in bends), kind)
            chart.dots([(num_rows, attainable(name, num_rows))], kind, 4)
            chart.key(300, low, name, kind, "end", (0, -50 + 15 * place))
        gains = {name: attainable(name, num_rows) / attainable("bf16", num_rows) for name in FORMATS}
        most = f"at most {gains['Q8_0']:.1f} times as fast as bf16 in Q8_0, {gains['Q4_1']:.1f} times in Q4_1."
        text = f"On {'your' if theirs else 'this'} machine {most}"
        frames.append(Frame(str(num_rows), chart.draw(f"Rooflines at {num_rows} rows", text), text))
    return Moved("rows in the step", frames, ROWS.index(8))
