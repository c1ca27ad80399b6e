"""Svg: pictures for pages: charts with axes, curves, dots and bars; boxes and arrows. No figure is made up here.

A picture is 320 wide and as readable on a phone as elsewhere. Colours are classes of course.css (light and dark). Who
does not see it is told its title and its text.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import log

from chapters.sheet import Histogram, Levels

WIDTH = 320
LINE = 13  # from one line of a text to the next
LEFT, RIGHT, TOP, BOTTOM = 38, 10, 20, 34  # around a chart's area
KEY, LETTER = 29, 6.4  # a piece of a curve before its name; the width of a letter, at most
FEW_LEVELS = 64  # with more, lines would touch
Point = tuple[float, float]


@dataclass(frozen=True)
class Frame:
    """A picture at one setting of what can be moved."""

    setting: str
    picture: str
    text: str = ""


@dataclass(frozen=True)
class Moved:
    """Pictures of which one is seen at a time. what: is moved, as "sequences in the step"."""

    what: str
    frames: list[Frame]
    first: int = 0


def svg(title: str, text: str, parts: Iterable[str], height: float) -> str:
    body = "".join(parts)
    name = "p" + hashlib.sha256(f"{title}{text}{body}".encode()).hexdigest()[:10]
    return (
        f'<svg class="picture" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{name} {name}d">'
        f'<title id="{name}">{escape(title)}</title><desc id="{name}d">{escape(text)}</desc>{body}</svg>'
    )


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, text: str = "", kind: str = "") -> str:
    """With a text in its middle, of one line or several."""
    lines = text.split("\n")
    first = y + height / 2 + 4 - LINE * (len(lines) - 1) / 2
    middle = "".join(words(x + width / 2, first + at * LINE, line, "in", "middle") for at, line in enumerate(lines))
    area = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {area} rx="3" class="box {kind}"/>{middle}'


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    """Across, or down or up, in two bends where it must."""
    across = abs(y2 - y1) < LINE
    sign = 1 if (x2 > x1 if across else y2 > y1) else -1
    tip = f"l{-5 * sign},-3.5v7z" if across else f"l-3.5,{-5 * sign}h7z"
    bend = f"H{(x1 + x2) / 2:.1f}V{y2:.1f}H{x2:.1f}" if across else f"V{(y1 + y2) / 2:.1f}H{x2:.1f}V{y2:.1f}"
    return f'<path class="wire {kind}" d="M{x1:.1f},{y1:.1f}{bend}"/><path class="tip" d="M{x2:.1f},{y2:.1f}{tip}"/>'


def short(value: float) -> str:
    """A number at an axis."""
    if abs(value) < 10_000:
        return f"{value:,g}"
    return f"{value / 1e3:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"


@dataclass(frozen=True)
class Axis:
    """What it measures, with its unit, and the numbers that are written at it."""

    name: str
    ticks: Sequence[float]
    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value is: 0 at the lower end, 1 at the upper one."""
        low, high, at = (log(x) if self.is_log else x for x in (self.low, self.high, value))
        return (at - low) / (high - low)


class Chart:
    """Axes, and what is drawn between them, in the units of the axes."""

    def __init__(self, x: Axis, y: Axis, height: float = 210) -> None:
        self.x, self.y, self.height = x, y, height
        right, bottom = WIDTH - RIGHT, height - BOTTOM
        self.parts = [f'<path class="axis" d="M{LEFT},{TOP}V{bottom}H{right}"/>', words(2, 11, y.name, "name")]
        self.parts += [words(right, height - 4, x.name, "name", "end")]
        for value in x.ticks:
            self.parts.append(words(self.at(value, y.low)[0], bottom + 14, short(value), "tick", "middle"))
        for value in y.ticks:
            at = self.at(x.low, value)[1]
            self.parts.append(f'<path class="grid" d="M{LEFT},{at:.1f}H{right}"/>')
            self.parts.append(words(LEFT - 5, at + 4, short(value), "tick", "end"))

    def at(self, x: float, y: float) -> Point:
        across = LEFT + (WIDTH - RIGHT - LEFT) * self.x.share(x)
        return across, TOP + (self.height - BOTTOM - TOP) * (1 - self.y.share(y))

    def curve(self, points: Iterable[Point], kind: str = "one") -> None:
        path = " ".join("{:.1f},{:.1f}".format(*self.at(*point)) for point in points)
        self.parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def dots(self, points: Iterable[Point], kind: str = "one", radius: float = 3.2) -> None:
        """Squares for the second kind, so that the colour is not the only sign."""
        for x, y in (self.at(*point) for point in points):
            if kind.split()[0] == "two":
                corner, side = f'x="{x - radius:.1f}" y="{y - radius:.1f}"', f"{2 * radius:g}"
                self.parts.append(f'<rect class="{kind}" {corner} width="{side}" height="{side}"/>')
            else:
                self.parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')

    def bars(self, bars: Iterable[tuple[float, float, float]], kind: str = "one") -> None:
        """Each from one value to another on the x axis, and as high as a third."""
        for low, high, value in bars:
            (left, top), (right, bottom) = self.at(low, value), self.at(high, self.y.low)
            area = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{max(bottom - top, 0):.1f}"'
            self.parts.append(f'<rect class="{kind}" {area}/>')

    def note(self, x: float, y: float, text: str, kind: str = "one", anchor: str = "start", by: Point = (0, 0)) -> None:
        """Words beside a point; `by` moves them, in 320ths of the width."""
        across, down = self.at(x, y)
        self.parts.append(words(across + by[0], down + by[1], text, kind, anchor))

    def key(self, x: float, y: float, text: str, kind: str, anchor: str = "start", by: Point = (0, 0)) -> None:
        """As a note, after a piece of the curve that it names: readers who cannot tell the colours have the dashes."""
        across, down = self.at(x, y)
        left = across + by[0] - (KEY + LETTER * len(text) if anchor == "end" else 0)
        middle = down + by[1] - 4
        self.parts.append(
            f'<polyline class="{kind}" points="{left:.1f},{middle:.1f} {left + KEY - 5:.1f},{middle:.1f}"/>'
        )
        self.parts.append(words(left + KEY, down + by[1], text, kind))

    def draw(self, title: str, text: str) -> str:
        return svg(title, text, self.parts, self.height)


def histogram(found: Histogram, name: str, kind: str = "one") -> str:
    """name: what its numbers are, with their unit."""
    width, most = (found.high - found.low) / len(found.counts), max(found.counts) / 1000
    ticks = [round(found.low + share * (found.high - found.low), 2) for share in (0, 0.25, 0.5, 0.75, 1)]
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if step * 5 > most)
    y = Axis("thousands of numbers", range(0, int(most) + 1, step), 0, most)
    chart = Chart(Axis(name, ticks, found.low, found.high), y, 170)
    edges = [found.low + at * width for at in range(len(found.counts))]
    chart.bars(((edge, edge + width, count / 1000) for edge, count in zip(edges, found.counts, strict=True)), kind)
    inside = f"{sum(found.counts):,} numbers from {found.low:.3g} to {found.high:.3g}"
    text = f"{inside}; at most {max(found.counts):,} in a bin."
    return chart.draw(found.title, text)


def levels(*found: Levels) -> str:
    """The same axis for each, one below the other: a dot for a number, a line for a level."""
    parts, said, each = list[str](), list[str](), 106
    low, high = min(min(one.numbers) for one in found), max(max(one.numbers) for one in found)
    for place, one in enumerate(found):
        top, drawn = each * place, [level for level in one.met if len(one.met) <= FEW_LEVELS]
        said.append(f"{one.title}: {len(one.met)} levels, {one.step}")
        parts.append(words(2, top + 12, said[-1], "name"))
        across = {at: 14 + (WIDTH - 28) * (at - low) / (high - low or 1) for at in {*one.numbers, *drawn}}
        parts += [f'<path class="wire" d="M{across[level]:.1f},{top + 22}v56"/>' for level in drawn]
        columns = Counter[int]()
        for number in sorted(one.numbers):
            column = round(across[number] / 5)
            middle = f'cx="{across[number]:.1f}" cy="{top + 72 - 9 * columns[column]}"'
            parts.append(f'<circle class="one" {middle} r="3.6"/>')
            columns[column] += 1
        parts.append(words(2, top + 92, f"{low:.3g}", "tick"))
        parts.append(words(WIDTH - 2, top + 92, f"{high:.3g}", "tick", "end"))
    return svg("Numbers, and the levels to which they are rounded", "; ".join(said) + ".", parts, each * len(found) - 8)
