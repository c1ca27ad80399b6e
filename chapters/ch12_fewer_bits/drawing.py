"""Pictures of numbers and of their rounding."""

from torch import Tensor

from chapters.sheet import Histogram, Levels
from nanovllm.features.quantization.formats import Format


def histogram(title: str, x: Tensor, low: float, high: float, *, width: int = 72, height: int = 5) -> Histogram:
    inside = x[(x >= low) & (x <= high)]
    counts = inside.float().histc(width, low, high).int().tolist()
    return Histogram(title, counts, low, high, x.numel() - inside.numel(), height)


def levels(group: Tensor, format: Format, scale: float, minimum: float) -> Levels:
    """A group's numbers, and what its codes stand for. Where all are equal, the scale may be 0."""
    stored = [scale * (code - format.zero) + minimum for code in range(2**format.bits)]
    return Levels(format.name, [round(number, 4) for number in group.tolist()], [round(level, 6) for level in stored])
