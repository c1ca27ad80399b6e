"""The picture of chapter 17: experts met against rows, by chance and in the lab's batches."""

from pathlib import Path

from chapters.ch17_experts.chance import expected_met
from chapters.recording import quoted_sheet
from chapters.svg import Axis, Chart, Frame, Moved

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
