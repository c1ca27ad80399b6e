"""The pictures of chapter 17: rows sorted by expert, and experts met against rows."""

import random
from pathlib import Path

from chapters.ch17_experts.chance import expected_met
from chapters.recording import quoted_sheet
from chapters.svg import Axis, Chart, Frame, Moved, box, svg, words

NUM_EXPERTS, NUM_CHOSEN = 128, 8
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


def met() -> Moved:
    """The curve is the formula's; rings are what the lab counted."""
    sheet = quoted_sheet(Path(__file__).parent, "pairs", "met", "expected")
    counted = [*zip(sheet.column("rows"), sheet.column("met"), strict=True)]
    frames = []
    for num_rows in ROWS:
        x = Axis("rows in the step", (1, 4, 16, 64, 256), 0.9, 280, is_log=True)
        chart = Chart(x, Axis("experts met", (0, 32, 64, 96, 128), 0, 140))
        chart.curve([(n, expected_met(n, NUM_EXPERTS, NUM_CHOSEN)) for n in range(1, 281)])
        chart.dots(counted, "one open", 3.5)
        expected = expected_met(num_rows, NUM_EXPERTS, NUM_CHOSEN)
        chart.curve([(num_rows, 0), (num_rows, expected)], "four dashed")
        chart.dots([(num_rows, expected)], "four", 4.5)
        text = (
            f"{num_rows * NUM_CHOSEN:,} choices meet {expected:.0f} of {NUM_EXPERTS} experts: "
            f"{expected / num_rows:.1f} to be read for each row."
        )
        frames.append(Frame(str(num_rows), chart.draw(f"Experts met by {num_rows} rows", text), text))
    return Moved("rows, 8 experts each at random", frames, ROWS.index(8))


def sorted_rows() -> str:
    """The engine's router and its sorting, for six rows that each choose two of four experts."""
    import torch  # the other picture of this chapter takes none

    from nanovllm.features.experts.rows import route, sort_by_expert

    rng, kinds = random.Random(17), ("one", "two", "three", "four")
    scores = torch.tensor([[rng.gauss(0, 1) for _ in kinds] for _ in range(6)])
    chosen = route(scores, 2, True)[1]
    pairs = sort_by_expert(chosen, len(kinds))
    parts = [
        words(1, 12, "pairs in the order of the rows", "name"),
        words(1, 188, "the same pairs, sorted by expert", "name"),
    ]
    size, places = 318 / chosen.numel(), pairs.places.flatten().tolist()
    experts, rows = chosen.flatten().tolist(), [at // 2 for at in range(chosen.numel())]
    for at, (expert, row, place) in enumerate(zip(experts, rows, places, strict=True)):
        x, to = 1 + size * at, 1 + size * place
        middle, to_middle = x + size / 2 - 1, to + size / 2 - 1
        parts.append(f'<polyline class="{kinds[expert]} thin" points="{middle:.1f},44 {to_middle:.1f},122"/>')
        parts.append(box(x, 20, size - 2, 24, str(row), kinds[expert]))
        parts.append(box(to, 122, size - 2, 24, str(row), kinds[expert]))
    left = 1.0
    for expert, count in pairs.counts:
        wide = size * count
        if count:
            parts.append(f'<path class="wire" d="M{left:.1f},152v5h{wide - 2:.1f}v-5"/>')
            middle = min(left + wide / 2 - 1, 296)
            parts.append(words(middle, 171, f"expert {expert}", "name", "middle"))
        left += wide
    said = ", ".join(f"expert {expert} gets {count} row{'s' * (count != 1)}" for expert, count in pairs.counts)
    return svg("Rows sorted by expert", f"Each of six rows meets two experts; sorted, {said}.", parts, 194)
