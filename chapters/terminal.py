"""A recording of a terminal as an animated SVG: the quickstart, with what it printed and when.

record() runs it and writes recorded_quickstart.json; draw() makes the picture of that. rich's export_svg() draws one
screen that does not move, in one scheme, with a font from elsewhere; asciinema's recordings need its player, a script,
which GitHub runs in no README.
"""

import json
import os
import subprocess
import sys
import time
from html import escape
from itertools import groupby

from rich.style import Style
from rich.text import Text

from chapters.course import ROOT

KEPT = ROOT / "drawn" / "recorded_quickstart.json"
COMMAND = "python examples/quickstart.py"
COLUMNS, ROWS = 76, 36
CHARACTER, LINE, PADDING = 6.6, 14.5, 12
TYPED_S, LAST_S, LIMIT_S = 1.0, 6.0, 20.0  # before the program runs; after its last line; of the whole
STARTS, ENDS = "┏┡└╭╰", "┓┩┘╮╯"
ACROSS = STARTS + ENDS + "━─┳╇┴"
UP, DOWN = "│┃┡╇┩└┴┘╰╯", "│┃┏┳┓┡╇┩╭╮"  # marks with a line from their middle up, and down
FRAME = {*ACROSS, *UP, *DOWN}
COLORS = {2: "hit", 3: "miss", 6: "answer"}  # a terminal's numbers of green, yellow and cyan


def record() -> None:
    """Lines of the quickstart, each with the seconds after which it was printed. Raises ValueError if it takes long."""
    environment = os.environ | {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "PYTHONUNBUFFERED": "1", "TERM": "xterm"}
    lines: list[tuple[float, str]] = []
    started = time.perf_counter()
    command = [sys.executable, "examples/quickstart.py"]
    with subprocess.Popen(command, cwd=ROOT.parent, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((round(time.perf_counter() - started, 2), shown(line.rstrip("\n"))))
    if process.returncode:
        raise ValueError(f"the quickstart ended with {process.returncode}")
    if (total := TYPED_S + lines[-1][0] + LAST_S) > LIMIT_S:
        raise ValueError(f"the recording takes {total:.1f} s, more than {LIMIT_S:g}: is this machine busy?")
    KEPT.write_text("[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n", "utf-8")


def draw() -> str:
    """The screen scrolls when lines arrive. Where nothing moves (prefers-reduced-motion), its end is seen."""
    recorded = json.loads(KEPT.read_text("utf-8"))
    lines = [(0.0, Text.assemble(("$ ", "green"), COMMAND))]
    lines += [(TYPED_S + at, Text.from_ansi(text)) for at, text in recorded]
    total = lines[-1][0] + LAST_S
    width, height = round(COLUMNS * CHARACTER + 2 * PADDING), round(ROWS * LINE + 2 * PADDING)
    moments = [(at, len(list(same))) for at, same in groupby(lines, key=lambda line: line[0])]
    frames, num_lines, rules, body = [], 0, [], []
    for number, (at, count) in enumerate(moments):
        shift = max(0, num_lines + count - ROWS) * LINE
        frames.append((100 * at / total, shift))
        rows = [row(num_lines + i, text) for i, (_, text) in enumerate(lines[num_lines : num_lines + count])]
        name = f"t{number}"
        body.append(f'<g class="late {name}">\n' + "\n".join(rows) + "\n</g>")
        appears = 100 * at / total
        if number:
            hidden, seen = f"0%, {appears - 0.01:.2f}% {{ opacity: 0; }}", f"{appears:.2f}% {{ opacity: 1; }}"
            rules.append(f"@keyframes {name} {{ {hidden} {seen} }}")
            rules.append(f".{name} {{ animation-name: {name}; }}")
        num_lines += count
    steps = [f"{at:.2f}% {{ transform: translateY(-{shift:.1f}px); }}" for at, shift in frames]
    steps.append(f"100% {{ transform: translateY(-{frames[-1][1]:.1f}px); }}")
    rules.append("@keyframes scroll { " + " ".join(steps) + " }")
    plain = "\n".join(text.plain for _, text in lines)
    said = [line.strip("│ ") for line in plain.split("\n") if "prompt tokens came in" in line]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" \
viewBox="0 0 {width} {height}" role="img" aria-labelledby="title what">
<title id="title">A recording of {escape(COMMAND)}</title>
<desc id="what">{total:.0f} seconds of a terminal. Two tables of answers are printed. {escape(" ".join(said))}</desc>
<style>
svg {{ color-scheme: light dark; --bg: #fdfdfb; --fg: #1d2126; --line: #8a929c; --answer: #11607e; --hit: #1d6b35; \
--miss: #7c5200; font: 11px monospace; }}
@media (prefers-color-scheme: dark) {{ svg {{ --bg: #15181c; --fg: #e4e6e8; --line: #77808b; --answer: #79c0dc; \
--hit: #7fcf95; --miss: #e3b65c; }} }}
.paper {{ fill: var(--bg); stroke: var(--line); }}
text {{ fill: var(--fg); white-space: pre; }}
.answer {{ fill: var(--answer); }} .hit {{ fill: var(--hit); }} .miss {{ fill: var(--miss); }} \
.bold {{ font-weight: 700; }} .frame {{ fill: none; stroke: var(--line); }}
.screen {{ animation: scroll {total:.2f}s step-end infinite; transform: translateY(-{frames[-1][1]:.1f}px); }}
.late {{ animation: {total:.2f}s step-end infinite; }}
{chr(10).join(rules)}
@media (prefers-reduced-motion: reduce) {{ .screen, .late {{ animation: none; }} }}
</style>
<clipPath id="window"><rect width="{width}" height="{height}" rx="6"/></clipPath>
<rect class="paper" width="{width}" height="{height}" rx="6"/>
<g clip-path="url(#window)"><g class="screen">
{chr(10).join(body)}
</g></g>
</svg>
"""


def shown(line: str) -> str:
    """Where the checkpoint is on this machine is left out."""
    return line if not line.startswith("Loaded ") else f"Loaded the demo model in {line.rpartition(' in ')[2]}"


def row(number: int, text: Text) -> str:
    """Words where they were printed. The lines of tables are drawn as lines, for fonts do not join them."""
    y = PADDING + (number + 0.8) * LINE
    plain, parts = text.plain, []
    styles = [["fg"] for _ in plain]
    for span in text.spans:
        style = Style.parse(span.style) if isinstance(span.style, str) else span.style
        number_of = style.color.number if style.color is not None else None
        names = ([COLORS[number_of]] if number_of in COLORS else []) + (["bold"] if style.bold else [])
        for at in range(span.start, min(span.end, len(plain))):
            styles[at] += names
    if path := frame(PADDING + number * LINE, plain):
        parts.append(f'<path class="frame" d="{path}"/>')
    marks = ["" if mark in FRAME else mark for mark in plain]
    cells = [(mark, " ".join(dict.fromkeys(style))) for mark, style in zip(marks, styles, strict=True)]
    at = 0
    for key, group in groupby(cells, key=lambda cell: (cell[0] == "", cell[1])):
        characters = "".join(mark or " " for mark, _ in group)
        start = at + len(characters) - len(characters.lstrip())
        at += len(characters)
        if said := characters.strip():
            x, long = PADDING + start * CHARACTER, len(said) * CHARACTER
            parts.append(
                f'<text x="{x:.1f}" y="{y:.1f}" textLength="{long:.1f}" lengthAdjust="spacingAndGlyphs" '
                f'class="{key[1].removeprefix("fg").strip()}">{escape(said)}</text>'
            )
    return "".join(parts)


def frame(top: float, plain: str) -> str:
    """The lines of a table or a box, as a path."""
    middle, bottom = top + LINE / 2, top + LINE
    path: list[str] = []
    for at, mark in enumerate(plain):
        left, right = PADDING + at * CHARACTER, PADDING + (at + 1) * CHARACTER
        center = (left + right) / 2
        if mark in ACROSS:
            start, end = center if mark in STARTS else left, center if mark in ENDS else right
            if path and path[-1].endswith(f"H{start:.1f}"):
                path[-1] = path[-1].rpartition("H")[0] + f"H{end:.1f}"
            else:
                path.append(f"M{start:.1f},{middle:.1f}H{end:.1f}")
    for at, mark in enumerate(plain):
        center = PADDING + (at + 0.5) * CHARACTER
        if mark in UP or mark in DOWN:
            start, end = top if mark in UP else middle, bottom if mark in DOWN else middle
            path.append(f"M{center:.1f},{start:.1f}V{end:.1f}")
    return "".join(path)
