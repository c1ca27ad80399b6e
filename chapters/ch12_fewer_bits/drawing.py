"""Pictures of numbers and of their rounding."""

from rich.text import Text
from torch import Tensor

from nanovllm.features.quantization.formats import Format

BARS = " ▁▂▃▄▅▆▇█"


def histogram(x: Tensor, low: float, high: float, *, width: int = 72, height: int = 5) -> Text:
    """How many numbers fall where, between low and high; the ends of the axis below. Numbers outside are counted."""
    inside = x[(x >= low) & (x <= high)]
    counts = inside.float().histc(width, low, high)
    levels = (counts / counts.max().clamp_min(1) * height * 8).round().int().tolist()
    lines = ["".join(BARS[min(max(n - row * 8, 0), 8)] for n in levels) for row in reversed(range(height))]
    left, right = f"{low:.3g}", f"{high:.3g}"
    axis = left + ("0" if low == -high else "").center(width - len(left) - len(right)) + right
    outside = x.numel() - inside.numel()
    return Text("\n".join([*lines, axis.rstrip()]) + (f"\n{outside:,} of {x.numel():,} lie outside" * bool(outside)))


def levels(group: Tensor, format: Format, scale: float, minimum: float, width: int = 84) -> Text:
    """Where a group's numbers lie and where its codes do, on one axis that begins and ends with the group's numbers."""
    low, high = float(group.min()), float(group.max())
    at = (width - 1) / (high - low or 1)

    def place(x: float) -> int:
        return round((x - low) * at)

    dots, marks = [0] * width, [" "] * width
    for number in group.tolist():
        dots[place(number)] += 1
    num_marks = 0
    for code in range(2**format.bits):
        number = scale * (code - format.zero) + minimum
        if 0 <= place(number) < width:
            marks[place(number)], num_marks = "|", num_marks + 1
    line = "".join(" .:⁝#"[min(count, 4)] for count in dots)
    crowded = num_marks > width // 2
    below = f"{num_marks} codes, one every {scale:.3g}" if crowded else "".join(marks)
    name = "codes  " if not crowded else "       "
    return Text(f"numbers {line}\n{name} {below}\n        {f'{low:.3g}':<{width // 2}}{f'{high:.3g}':>{width // 2}}")
