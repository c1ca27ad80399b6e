"""The pictures of chapter 16: the memory of one sequence by its length, and a notebook's state as a heat map."""

import re
from pathlib import Path

from chapters.ch16_fixed_memory.notebook import SIZE, Notebook
from chapters.recording import quotes
from chapters.svg import Axis, Chart, Frame, Moved, svg, words

LENGTHS = (50, 100, 200, 300, 400, 500, 530, 600, 700, 800, 900, 1000, 1200, 1400, 1600)


def memory() -> Moved:
    """Near the length at which both take the same."""
    text = " ".join(quotes(Path(__file__).parent))
    found = re.search(
        r"takes ([\d,]+) bytes of K and V .* ([\d,]+)\s+bytes of states.*attended: ([\d,]+)", text, re.DOTALL
    )
    assert found is not None
    kv, states, kv_of_all = (int(each.replace(",", "")) / 1e6 for each in found.groups())  # MB
    frames = []
    for length in LENGTHS:
        hybrid, attention = states + length * kv, length * kv_of_all
        chart = Chart(Axis("tokens", (0, 400, 800, 1200, 1600), 0, 1640), Axis("MB", (0, 20, 40, 60, 80), 0, 84))
        chart.curve([(length, 0), (length, 84)], "gone thin dashed")
        for kind, start, slope, at in (("one", states, kv, hybrid), ("two", 0, kv_of_all, attention)):
            chart.curve([(0, start), (1640, start + 1640 * slope)], kind)
            chart.dots([(length, at)], kind, 4)
        chart.key(1600, 24, "with states", "one", "end")
        chart.key(1200, 66, "all attention", "two", "end")
        both = f"With states {hybrid:.1f} MB, if all layers attend {attention:.1f} MB"
        said = f"{both}: {hybrid / attention:.2f} times as much."
        frames.append(Frame(f"{length:,}", chart.draw(f"Memory of a sequence of {length:,} tokens", said), said))
    return Moved("tokens in the sequence", frames, LENGTHS.index(100))


def state() -> str:
    """The same squares after more and more lines: the darker, the larger the number; two colours for the two signs."""
    book, parts, cell = Notebook(), list[str](), 12
    for panel, num_lines in enumerate((1, 4, 12)):
        while len(book.lines) < num_lines:
            book.come_in()
        left, numbers = 1 + 110 * panel, [x for row in book.state for x in row]
        largest = max(map(abs, numbers))
        parts.append(f'<rect class="empty" x="{left - 1}" y="19" width="97" height="97"/>')
        for at, number in enumerate(numbers):
            x, y = left + cell * (at % SIZE), 20 + cell * (at // SIZE)
            kind, share = "one" if number > 0 else "two", abs(number) / 1.6
            size = f'x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}"'
            parts.append(f'<rect class="{kind}" {size} style="fill-opacity:{min(share, 1):.2f}"/>')
        parts.append(words(left, 12, f"{num_lines} line{'s' * (num_lines > 1)}", "name"))
        parts.append(words(left, 132, f"largest {largest:.2f}", "tick"))
    text = (
        "An 8 by 8 state after 1, 4 and 12 lines. Every line changes every square, so the pattern of the first line is "
        "soon no longer to be seen."
    )
    return svg("A state as a heat map", text, parts, 138)
