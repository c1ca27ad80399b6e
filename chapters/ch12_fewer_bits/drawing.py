"""Pictures of numbers and of their rounding."""

from rich.text import Text
from torch import Tensor

from chapters.sheet import Histogram
from nanovllm.features.quantization.formats import Format


def histogram(title: str, x: Tensor, low: float, high: float, *, width: int = 72, height: int = 5) -> Histogram:
    inside = x[(x >= low) & (x <= high)]
    counts = inside.float().histc(width, low, high).int().tolist()
    return Histogram(title, counts, low, high, x.numel() - inside.numel(), height)


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
