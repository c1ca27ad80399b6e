"""The pictures of chapter 16: two memories, their size by a sequence's length, and a notebook's state as a heat map."""

import re
from pathlib import Path

from chapters.ch16_fixed_memory.notebook import SIZE, Notebook, State
from chapters.recording import quotes
from chapters.svg import Axis, Chart, Frame, Moved, arrow, box, svg, words

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


def heat_map(state: State, left: float, top: float, cell: float) -> list[str]:
    """The darker, the larger the number; two colors for the two signs."""
    size = SIZE * cell + 1
    parts = [f'<rect class="empty" x="{left - 1}" y="{top - 1}" width="{size}" height="{size}"/>']
    for at, number in enumerate(number for row in state for number in row):
        x, y = left + cell * (at % SIZE), top + cell * (at // SIZE)
        kind, share = "one" if number > 0 else "two", abs(number) / 1.6
        square = f'x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}"'
        parts.append(f'<rect class="{kind}" {square} style="fill-opacity:{min(share, 1):.2f}"/>')
    return parts


def two_memories() -> str:
    """Twelve tokens: attention has something of each, a state is one thing that each has changed."""
    book, parts, num_tokens, block_size, cell = Notebook(), list[str](), 12, 4, 6
    ends = {4: "gone", 8: "a snapshot", 12: "in use"}
    parts.append(words(1, 12, "attention keeps K and V of each token, in blocks", "name"))
    parts.append(words(1, 74, "each token changes the whole state", "name"))
    middle_of_last = 0.0
    for token in range(1, num_tokens + 1):
        book.come_in()
        x = 1 + 26 * (token - 1) + 4 * ((token - 1) // block_size)
        parts.append(box(x, 19, 24, 28, str(token), "one"))
        if token in ends:
            left = min(x + 12 - SIZE * cell / 2, 320 - SIZE * cell)
            middle = left + SIZE * cell / 2
            if middle_of_last:
                parts.append(arrow(middle_of_last + SIZE * cell / 2 + 2, 107, left - 4, 107))
            middle_of_last = middle
            parts += heat_map(book.state, left, 83, cell)
            parts.append(words(middle, 147, f"after {token}", "tick", "middle"))
            parts.append(words(middle, 162, ends[token], "strong" if token == 8 else "", "middle"))
    text = (
        f"Of {num_tokens} tokens, attention keeps {num_tokens} keys and values, in three blocks. The state after the "
        "last token is the only one in use; the one after token 4 is gone, and of the one after token 8 a snapshot was "
        "kept."
    )
    return svg("Two memories", text, parts, 168)


def state() -> str:
    """The same squares after more and more lines."""
    book, parts, cell = Notebook(), list[str](), 12
    for panel, num_lines in enumerate((1, 4, 12)):
        while len(book.lines) < num_lines:
            book.come_in()
        left = 1 + 110 * panel
        largest = max(abs(number) for row in book.state for number in row)
        parts += heat_map(book.state, left, 20, cell)
        parts.append(words(left, 12, f"{num_lines} line{'s' * (num_lines > 1)}", "name"))
        parts.append(words(left, 132, f"largest {largest:.2f}", "tick"))
    text = (
        "An 8 by 8 state after 1, 4 and 12 lines. Every line changes every square, so the pattern of the first line is "
        "soon no longer to be seen."
    )
    return svg("A state as a heat map", text, parts, 138)
