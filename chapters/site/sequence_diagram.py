"""A mermaid sequence diagram as SVG: a column for each participant, a row for each message."""

import html
import re
import textwrap

COLUMN, ROW, TOP = 172, 40, 62


def draw_sequence(source: str) -> tuple[str, str]:
    """The SVG, and the same in words. Raises ValueError."""
    names: dict[str, str] = {}
    messages = []
    for line in map(str.strip, source.splitlines()[1:]):
        if named := re.match(r"participant (\w+) as (.*)$", line):
            names[named[1]] = named[2]
        elif sent := re.match(r"(\w+)(-?->>)(\w+): (.*)$", line):
            messages.append(sent.groups())
        else:
            raise ValueError(f"no line of a sequence diagram that can be drawn: {line!r}")
    xs = {name: 62 + COLUMN * at for at, name in enumerate(names)}
    height = TOP + ROW * len(messages) + 12
    parts = []
    for name, title in names.items():
        x, lines = xs[name], textwrap.wrap(title, 14)
        parts.append(f'<path class="wire dashed" d="M{x} {TOP - 12}V{height - 6}"/>')
        parts.append(f'<rect class="box" x="{x - 60}" y="2" width="120" height="46" rx="6"/>')
        for at, line in enumerate(lines):
            y = 30 + 18 * (at - (len(lines) - 1) / 2)
            parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{html.escape(line)}</text>')
    for at, (sender, arrow, receiver, text) in enumerate(messages):
        y, a, b = TOP + ROW * at + 22, xs[sender], xs[receiver]
        dashed = " dashed" if arrow == "-->>" else ""
        if sender == receiver:
            parts.append(f'<path class="wire" d="M{a} {y - 8}h22v14H{a + 6}"/>')
            parts.append(f'<path class="tip" d="M{a + 1} {y + 6}l8 -4v8z"/>')
            parts.append(f'<text class="label" x="{a + 29}" y="{y + 4}">{html.escape(text)}</text>')
            continue
        way = 1 if b > a else -1
        parts.append(f'<path class="wire{dashed}" d="M{a} {y}H{b - 8 * way}"/>')
        parts.append(f'<path class="tip" d="M{b - way} {y}l{-8 * way} -4v8z"/>')
        parts.append(
            f'<text class="label" x="{(a + b) / 2}" y="{y - 6}" text-anchor="middle">{html.escape(text)}</text>'
        )
    width = max(xs.values()) + 90
    said = "; ".join(f"{names[a]} to {names[b]}: {text}" for a, _, b, text in messages)
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>', said
