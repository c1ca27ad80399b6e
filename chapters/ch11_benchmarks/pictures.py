"""The pictures of chapter 11, of the figures that the text quotes: throughput against TPOT, TTFT against load."""

from pathlib import Path

from chapters.recording import quoted_sheet
from chapters.svg import Axis, Chart, Frame, Moved

HERE = Path(__file__).parent


def throughput() -> Moved:
    """A limit for the time a token, and the measured batch that gives most within it."""
    sheet = quoted_sheet(HERE, "batch", "TPOT, ms", "output tokens/s")
    batches = sheet.column("batch")
    points = [*zip(sheet.column("TPOT, ms"), sheet.column("output tokens/s"), strict=True)]
    x, y = Axis("TPOT, ms", (0, 10, 20, 30, 40, 50), 0, 54), Axis("output tokens/s", (0, 100, 200, 300), 0, 330)
    frames = []
    for limit in range(15, 55, 5):
        chart = Chart(x, y)
        chart.curve([(limit, 0), (limit, y.high)], "four thin dashed")
        chart.curve(points)
        chart.dots(points)
        for batch, point in zip(batches, points, strict=True):
            chart.note(*point, f"{batch:g}", "one", by=(6, 10))
        within = [at for at, (tpot_ms, _) in enumerate(points) if tpot_ms <= limit]
        text = f"No batch gives every request a token in {limit} ms."
        if within:
            best = max(within, key=lambda at: points[at][1])
            chart.dots([points[best]], "four ring", 7)
            rate = f"{points[best][1]:,.0f} tokens/s"
            text = f"If a token may take {limit} ms, a batch of {batches[best]:g} is best: {rate}."
        frames.append(Frame(f"{limit} ms", chart.draw("Throughput against time per token, by batch", text), text))
    return Moved("a token must not take longer than", frames, 2)


def knee() -> Moved:
    """TTFT against load: the usual one, and the worst of a hundred. What is moved is which of the measured loads."""
    sheet = quoted_sheet(HERE, "load", "TTFT p50", "TTFT p99", "goodput")
    sheet.rows = [row for row in sheet.rows if row[0] != "closed"]
    loads, frames = sheet.column("load"), []
    measured = {name: sheet.column(name) for name in ("TTFT p50", "TTFT p99", "requests/s", "goodput")}
    for at, load in enumerate(loads):
        y = Axis("TTFT, ms", (0, 300, 600, 900), 0, 1150)
        chart = Chart(Axis("load, % of the capacity", (40, 80, 100, 160), 30, 166), y)
        chart.curve([(100, 0), (100, y.high)], "gone thin dashed")
        chart.curve([(load, 0), (load, measured["TTFT p99"][at])], "four thin dashed")
        for name, kind in (("TTFT p99", "two"), ("TTFT p50", "one")):
            points = [*zip(loads, measured[name], strict=True)]
            chart.curve(points, kind)
            chart.dots(points, kind)
            chart.dots([points[at]], "four ring", 7)
            chart.key(*points[-1], name, kind, "end", by=(-14, -10))
        usual, worst, served, good = (values[at] for values in measured.values())
        text = (
            f"TTFT is usually {usual:g} ms, and {worst:g} ms at p99. "
            f"Of {served:g} requests that are answered in a second, {good:g} stay within both limits."
        )
        frames.append(Frame(f"{load:g}%", chart.draw(f"Time to the first token at a load of {load:g}%", text), text))
    return Moved("load", frames, 1)
