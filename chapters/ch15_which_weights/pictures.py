"""The picture of chapter 15: the rows of a step, and the weights that they meet."""

from pathlib import Path

from chapters.recording import quoted_sheet
from chapters.svg import box, svg, words

STEP = 2  # of the quoted table
KINDS = {"none": "", "harbor": "one", "market": "two", "library": "three"}


def rows_of_a_step() -> str:
    """All rows meet the base weights in one product; the rows of an adapter then meet the adapter, together."""
    sheet = quoted_sheet(Path(__file__).parent, "step", "rows", "none", "harbor")
    [row] = [row for row in sheet.rows if row[0].strip() == str(STEP)]
    rows: list[tuple[str, str]] = []
    for adapter in KINDS:
        for each in filter(None, row[sheet.columns.index(adapter)].split(", ")):
            name, _, count = each.strip().partition(" x ")
            rows += [(name, adapter)] * int(count)
    rows.sort()
    size = 318 / len(rows)
    parts = [words(1, 12, f"the {len(rows)} rows of step {STEP}, by request", "name")]
    parts.append(box(1, 62, 318, 30, "base weights W: one product for all rows"))
    places: dict[str, list[float]] = {}
    for number, (name, adapter) in enumerate(rows):
        x = 1 + size * number
        parts.append(box(x, 20, size - 2, 24, name, KINDS[adapter]))
        parts.append(f'<path class="wire" d="M{x + size / 2 - 1:.1f},44V62"/>')
        places.setdefault(adapter, []).append(x + size / 2 - 1)
    adapters = [name for name in KINDS if name in places and name != "none"]
    for number, adapter in enumerate(adapters):
        middle = 53 + 106 * number
        for x in places[adapter]:
            parts.append(f'<path class="wire" d="M{x:.1f},92L{middle},128"/>')
        num_rows = len(places[adapter])
        rows_said = "1 row" if num_rows == 1 else f"{num_rows} rows"
        parts.append(box(middle - 46, 128, 92, 36, f"{adapter}\n{rows_said}", KINDS[adapter]))
    parts.append(words(160, 180, "an adapter adds B (A x) to its rows", "name", "middle"))
    text = "; ".join(f"{adapter}: {len(places[adapter])}" for adapter in adapters)
    said = f"All {len(rows)} rows meet the base weights. Rows that also meet an adapter: {text}; without one: "
    return svg("Which rows meet which weights", f"{said}{len(places['none'])}.", parts, 186)
