"""The pictures of chapter 14: a request's way, and waiting against load, before one counter and in an engine."""

from pathlib import Path

from chapters.ch14_many_users.queues import SERVICES, expected_wait_s
from chapters.recording import quoted_sheet
from chapters.svg import Axis, Chart, Frame, Moved, arrow, box, svg, words
from nanovllm.serving.routing import Announced, soonest

HERE = Path(__file__).parent
BUSY = (10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92, 94, 95, 96, 97)  # percent
KINDS = ("one", "two", "three")
LONGEST_S = 32
NUM_PROMPT_TOKENS, NUM_SHARED_TOKENS, BLOCK_SIZE = 2100, 1600, 16


def way() -> str:
    """A prompt comes to the engine's router, which sends it to one of two replicas. Their loads are given here."""
    announced = Announced(BLOCK_SIZE)
    block_hashes = announced.block_hashes_of(range(NUM_PROMPT_TOKENS))
    announced.sent(0, block_hashes[: NUM_SHARED_TOKENS // BLOCK_SIZE])
    loads = {0: 900, 1: 300}
    taken = soonest(block_hashes, loads, announced)
    parts = [words(160, 12, "requests, at random times", "name", "middle"), arrow(160, 18, 160, 34)]
    parts.append(box(72, 35, 176, 36, f"router\na prompt of {NUM_PROMPT_TOKENS:,} tokens", "four"))
    said = list[str]()
    for replica, load in loads.items():
        left = 1 + 163 * replica
        missing = NUM_PROMPT_TOKENS - announced.num_tokens(replica, block_hashes)
        costs = f"{load:,} + {missing:,} = {load + missing:,}"
        said.append(f"replica {replica}: {load:,} tokens to do, {missing:,} of the prompt not cached")
        kind = "" if replica == taken else "dashed"
        parts.append(arrow(160 + (replica - 0.5) * 60, 71, left + 78, 92, kind))
        parts.append(f'<rect class="frame" x="{left}" y="93" width="155" height="178" rx="6"/>')
        parts.append(words(left + 8, 109, f"replica {replica}", "name"))
        parts.append(words(left + 8, 127, costs, "strong" * (replica == taken)))
        parts.append(words(left + 8, 150, "waiting", "tick"))
        parts += [box(left + 60 + 22 * place, 137, 18, 18) for place in range(4 - replica)]
        parts.append(words(left + 8, 176, "seats", "tick"))
        parts += [box(left + 60 + 22 * place, 163, 18, 18, "", "one") for place in range(4)]
        parts.append(box(left + 8, 192, 139, 28, "a step: the model", "two"))
        parts.append(box(left + 8, 228, 139, 34, f"cache: has {NUM_PROMPT_TOKENS - missing:,}\nof its tokens", "three"))
    parts.append(words(1, 289, "leaves the line: refused, if the wait would be too long"))
    parts.append(words(1, 305, "leaves a seat: answered, or its client has gone"))
    compared = f"The router compares {'; '.join(said)}. It takes replica {taken}."
    return svg("The way of a request", f"{compared} In a replica requests wait, then have seats.", parts, 312)


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
