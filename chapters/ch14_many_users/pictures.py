"""The pictures of chapter 14: waiting against load, before one counter and in an engine."""

from pathlib import Path

from chapters.ch14_many_users.queues import SERVICES, expected_wait_s
from chapters.recording import quoted_sheet
from chapters.svg import Axis, Chart, Frame, Moved

HERE = Path(__file__).parent
BUSY = (10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92, 94, 95, 96, 97)  # percent
KINDS = ("one", "two", "three")
LONGEST_S = 32


def waiting() -> Moved:
    """The formula's curves, the lab's simulated waits as open marks, and the wait at one load."""
    sheet = quoted_sheet(HERE, "busy", *SERVICES)
    simulated = {name: [*zip(sheet.column("busy"), sheet.column(name), strict=True)] for name in SERVICES}
    frames = []
    for busy in BUSY:
        x = Axis("the counter is busy, %", (0, 20, 40, 60, 80, 100), 0, 100)
        chart = Chart(x, Axis("mean wait, s", (0, 10, 20, 30), 0, LONGEST_S), 220)
        chart.curve([(busy, 0), (busy, LONGEST_S)], "gone thin dashed")
        waits = {name: expected_wait_s(busy / 100, name) for name in SERVICES}
        for place, (name, kind) in enumerate(zip(SERVICES, KINDS, strict=True)):
            points = [(at / 2, expected_wait_s(at / 200, name)) for at in range(0, 198)]
            chart.curve((point for point in points if point[1] <= LONGEST_S), kind)
            chart.dots(simulated[name], f"{kind} open", 2.6)
            chart.dots([(busy, waits[name])] * (waits[name] <= LONGEST_S), kind, 4)
            chart.key(4, LONGEST_S - 4 - 3 * place, name, kind)
        text = "Mean wait by the formula: " + ", ".join(f"{name} {wait_s:.1f} s" for name, wait_s in waits.items())
        text += f". So {100 - busy}% of the time is spare."
        frames.append(Frame(f"{busy}%", chart.draw(f"Waits at a load of {busy}%", text), text))
    return Moved("the counter is busy", frames, BUSY.index(80))


def engine() -> str:
    """The lab's table: time to the first token near the capacity."""
    sheet = quoted_sheet(HERE, "load", "tokens a step", "p99")
    loads, y = sheet.column("load"), Axis("ms", (0, 1000, 2000, 3000), 0, 3300)
    chart = Chart(Axis("load, % of the capacity", (30, 50, 70, 90, 100, 120), 26, 124), y)
    chart.curve([(100, 0), (100, y.high)], "gone thin dashed")
    for name, kind in (("p99", "two"), ("TTFT", "one")):
        points = [*zip(loads, sheet.column(name), strict=True)]
        chart.curve(points, kind)
        chart.dots(points, kind)
    chart.key(97, 1400, "TTFT, p99", "two", "end")
    chart.key(123, 120, "TTFT, mean", "one", "end")
    rows = "; ".join(f"{row[0]}: mean {row[2]}, p99 {row[3]} ms" for row in sheet.rows)
    return chart.draw("Time to the first token against load", rows)
