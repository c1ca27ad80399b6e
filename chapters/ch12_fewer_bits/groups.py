"""What the exercises of chapter 12 are given: a row of a weight in groups, as plain numbers. Needs no torch.

(The engine's class for many rows, as tensors, is QuantizedRows.)
"""

import struct
from dataclasses import dataclass

GROUP_SIZE = 32


@dataclass(frozen=True)
class Row:
    """The weights of one output: weight = scale * (code - zero) + minimum.

    bits: of a code, 8 or 4. zero: the code that stands for 0 where there is no minimum.
    codes: for each group its bytes, as numbers from 0 to 255. With 8 bits there are 32, a code each; with 4 bits 16,
    and byte i holds two: code i in its low half (byte & 15), code i + 16 in its high half (byte >> 4).
    scales, minimums: one for each group. Where the format has no minimum it is 0.0.
    k: numbers of the row. The last group may have more places than that.
    """

    bits: int
    zero: int
    codes: list[list[int]]
    scales: list[float]
    minimums: list[float]
    k: int


def to_float16(x: float) -> float:
    """The float16 number that is nearest to x. Raises OverflowError above 65,504."""
    return struct.unpack("<e", struct.pack("<e", x))[0]
