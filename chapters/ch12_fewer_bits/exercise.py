"""Exercises of chapter 12. Edit this file, then:  python -m chapters check 12

Four functions that the real engine then generates with. Tasks are independent of each other.
"""

from collections.abc import Callable

import torch  # noqa: F401 (you will need it)
from torch import Tensor

from nanovllm.features.quantization.formats import Format, QuantizedRows

Dpbusd = Callable[[int, list[int], list[int]], int]


def quantize(groups: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round groups of numbers to whole numbers, each group with a scale of its own, and perhaps a minimum.

        groups  float32 [..., size]: the last dimension is one group. Any size (the engine's is 32), any number of
                dimensions before it
        format  format.bits: of a code; format.zero: the code that stands for 0 (only without a minimum);
                format.has_minimum

    Returns (codes, scales, minimums): codes uint8 [..., size], scales and minimums float16 [...]; minimums is None if
    the format has none. What comes back later is  scale * (code - zero) + minimum.

    Without a minimum the codes are symmetric around zero: the group's largest magnitude becomes top = 2**(bits-1) - 1
    steps, so the scale is largest / top, and codes go from zero - top to zero + top.
    With a minimum, zero is 0: the minimum is the group's smallest number, the scale is (largest - minimum) /
    (2**bits - 1), and codes go from 0 to 2**bits - 1.

    Round to the nearest code (torch.round). Scale and minimum are stored in float16, and it is with the stored values
    that numbers are restored: so work out the codes with the stored ones, too. In a group whose scale is 0 (all numbers
    are equal, or 0) every code is zero. groups stays as it is.

    Example, 8 bits without a minimum, zero 128: the group [127, -63.6, 0.2] has scale 1 and codes [255, 64, 128].
    """
    raise NotImplementedError


def restore(groups: QuantizedRows) -> Tensor:
    """The weight [n, k] that a QuantizedRows stands for, in float32.

        groups.codes     uint8 [n, num_groups, code_bytes]. With 8 bits a byte is a code. With 4 bits byte i of a group
                         holds two: code i in its low half (byte & 15), code i + 16 in its high half (byte >> 4)
        groups.scales    float16 [n, num_groups]
        groups.minimums  float16 [n, num_groups], or None
        groups.format    a Format: bits, zero
        groups.k         numbers of a row. The last group of a row may have more places than that: leave those out

    weight = scale * (code - zero) + minimum, computed in float32. Nothing that you are given may change.
    """
    raise NotImplementedError


def group_dot(
    activations: list[int],
    activation_scale: float,
    codes: list[int],
    scale: float,
    minimum: float,
    zero: int,
    dpbusd: Dpbusd,
) -> float:
    """The dot product of one group of 32 activations with one group of 32 weights, multiplied as whole numbers.

        activations, activation_scale  32 ints from -127 to 127; the number meant is activation_scale * activation
        codes, scale, minimum, zero    32 ints from 0 to 255; the weight meant is scale * (code - zero) + minimum
                                       (minimum is 0.0 where the format has none)
        dpbusd                         the processor's instruction: dpbusd(total, four_codes, four_activations)
                                       returns total plus the four products, all ints. It takes codes as they are, from
                                       0 to 255 (no sign), and activations from -128 to 127

    Return the dot product of the 32 numbers meant with the 32 weights meant, as a float. Every product of a code with
    an activation is done by dpbusd, and 8 calls do all of them: so zero and the minimum must come in afterwards, for
    the whole group at once. (For that you need one more whole number, which does not depend on the weights.)

    Example: activations [2, -1] + 30 zeros, activation_scale 0.5, codes [10, 3] + 30 zeros, scale 0.1, minimum 1.0,
    zero 0 -> 1.0 * 2.0 + -0.5 * 1.3 = 1.35.
    """
    raise NotImplementedError


def quantized_linear(x: Tensor, weight: QuantizedRows, bias: Tensor | None) -> Tensor:
    """y = x W^T + b for a weight in groups, with activations that are rounded to 8 bits first.

        x       [T, k], float32, bfloat16 or float16
        weight  a weight [n, k], see restore()
        bias    [n] or None

    Round each row of x in groups of 32 along k, as the weight's groups lie: largest magnitude of the group becomes 127,
    scale = largest / 127 in float32, codes = round(x / scale), from -127 to 127. A group of zeros stays zero. (k need
    not be a multiple of 32: then the last group is filled up with zeros.) A row's codes and scales depend on that row
    alone.

    Then multiply codes with codes and sum up in float32, group by group, with group_dot's formula for all rows and
    outputs at once; or restore both sides and multiply those. Returns [T, n] in x's dtype. x, weight and bias stay as
    they are.
    """
    raise NotImplementedError
