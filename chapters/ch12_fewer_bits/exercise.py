"""Exercises of chapter 12. Edit this file, then:  python -m chapters check 12

Five functions that the real engine then generates with. The tasks are independent of each other. All five work on
lists of plain numbers, and need no torch.
"""

from collections.abc import Callable

from chapters.ch12_fewer_bits.groups import Row, to_float16  # noqa: F401 (you will need it)

Dpbusd = Callable[[int, list[int], list[int]], int]


def quantize(group: list[float], bits: int, zero: int, has_minimum: bool) -> tuple[list[int], float, float]:
    """Round a group of numbers to whole numbers, with a scale, and perhaps a minimum.

        group        the numbers. There may be any number of them (the engine's groups have 32)
        bits         of a code
        zero         the code that stands for 0 where there is no minimum. With a minimum, zero is 0
        has_minimum  does the format have one?

    Return (codes, scale, minimum): a code for each number; minimum is 0.0 if the format has none. The number restored
    later is  scale * (code - zero) + minimum.

    Without a minimum, the codes are symmetric around zero: the group's largest magnitude becomes top = 2**(bits-1) - 1
    steps, so the scale is largest / top, and codes go from zero - top to zero + top.
    With a minimum, minimum is the group's smallest number, the scale is (largest - minimum) / (2**bits - 1), and codes
    go from 0 to 2**bits - 1.

    Round to the nearest code (round). Scale and minimum are stored in float16: to_float16(x) is the nearest such
    number. Numbers are restored with the stored values, so work out the codes with the stored values, too. A code that
    then comes out below the first or beyond the last is set to that one. The scale may be 0: with a minimum where all
    numbers are equal, without one where all are 0, and wherever float16 has no number so small. Then every code is
    zero. group stays as it is.

    Example, 8 bits without a minimum, zero 128: the group [127, -63.6, 0.2] has scale 1.0 and codes [255, 64, 128].
    """
    raise NotImplementedError


def restore(row: Row) -> list[float]:
    """The numbers that a row of a quantized weight stands for, row.k of them. (See Row in groups.py.)

        row.codes     for each group its bytes, from 0 to 255. With 8 bits a byte is a code. With 4 bits byte i of a
                      group holds two: code i in its low half (byte & 15), code i + 16 in its high half (byte >> 4)
        row.scales    one for each group
        row.minimums  one for each group; 0.0 where the format has none
        row.bits, row.zero
        row.k         how many numbers the row has. The last group may have more places: leave those out

    weight = scale * (code - zero) + minimum, group after group. Do not change anything that you are given.
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

        activations, activation_scale  32 ints from -127 to 127; each stands for activation_scale * activation
        codes, scale, minimum, zero    32 ints from 0 to 255; each stands for scale * (code - zero) + minimum
                                       (minimum is 0.0 where the format has none)
        dpbusd                         the processor's instruction: dpbusd(total, four_codes, four_activations)
                                       returns total plus the four products, all ints. It takes codes as they are, from
                                       0 to 255 (no sign), and activations from -128 to 127

    Return the dot product of the 32 numbers and the 32 weights that these ints stand for, as a float. dpbusd does every
    product of a code with an activation, and 8 calls do all of them: so zero and the minimum must come in afterwards,
    for the whole group at once. (For that you need one more whole number, which does not depend on the weights.)

    Example: activations [2, -1] + 30 zeros, activation_scale 0.5, codes [10, 3] + 30 zeros, scale 0.1, minimum 1.0,
    zero 0 -> 1.0 * 2.0 + -0.5 * 1.3 = 1.35.
    """
    raise NotImplementedError


def quantized_linear(x: list[list[float]], weight: list[Row], bias: list[float] | None) -> list[list[float]]:
    """y = x W^T + b for a weight in groups, with activations that are rounded to 8 bits first.

        x       T rows of k numbers
        weight  n rows of k numbers, one for each output: see restore()
        bias    n numbers, or None

    Round each row of x in groups of 32, like the groups of the weight: the group's largest magnitude becomes 127, the
    scale is largest / 127 (no float16 here), codes = round(number / scale), from -127 to 127. A group of zeros stays
    zero. (k need not be a multiple of 32: then the last group has fewer numbers.) A row's codes and scales depend on
    that row alone.

    Then multiply codes by codes and add up, group by group, with group_dot's formula. Return T rows of n numbers.
    Leave x, weight and bias as they are.
    """
    raise NotImplementedError


def unpack_words(
    words: list[int], bits: int, order: list[int], scale: float, stored_zero: int | None, added: int
) -> list[float]:
    """The numbers of one group of a published checkpoint: GPTQ, AWQ or compressed-tensors.

        words        numbers of an int32 tensor, from -2**31 to 2**31 - 1. Each holds 32 // bits codes
        bits         of a code: 4 or 8
        order        place p of a word, counted from its lowest bits, holds code order[p] of the word's codes
        scale        the group's
        stored_zero  the group's zero point as the file has it. None: the file has none, and the code in the middle,
                     2**(bits-1), stands for 0
        added        what the stored zero point is short of: 1 in GPTQ's files, 0 in others. With `bits` bits, 1 more
                     than the largest code is 0: so zero points are counted, too

    Return the numbers, word after word: scale * (code - zero). Leave the lists as they are.

    Example: the codes 0 to 7, in this order, make the word 0x76543210. With scale 0.5 and the zero point 4 they stand
    for [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5].
    """
    raise NotImplementedError
