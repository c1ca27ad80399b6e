"""The picture of chapter 16: the memory of one sequence by its length, from the sizes that the text quotes."""

import re
from pathlib import Path

from chapters.recording import quotes
from chapters.svg import Axis, Chart, Frame, Moved

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
        chart.note(1600, 24, "with states", "one", "end")
        chart.note(1200, 66, "all attention", "two", "end")
        both = f"With states {hybrid:.1f} MB, if all layers attend {attention:.1f} MB"
        said = f"{both}: {hybrid / attention:.2f} times as much."
        frames.append(Frame(f"{length:,}", chart.draw(f"Memory of a sequence of {length:,} tokens", said), said))
    return Moved("tokens in the sequence", frames, LENGTHS.index(100))
