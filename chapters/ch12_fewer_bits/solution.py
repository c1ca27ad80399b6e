"""Our solutions of the exercises of chapter 12."""

from collections.abc import Callable

from chapters.ch12_fewer_bits.groups import GROUP_SIZE, Row, to_float16

Dpbusd = Callable[[int, list[int], list[int]], int]


def quantize(group: list[float], bits: int, zero: int, has_minimum: bool) -> tuple[list[int], float, float]:
    """See exercise.py."""
    if has_minimum:
        minimum, first, last = to_float16(min(group)), 0, 2**bits - 1
        scale = to_float16((max(group) - minimum) / last)
    else:
        top = 2 ** (bits - 1) - 1
        minimum, first, last = 0.0, zero - top, zero + top
        scale = to_float16(max(map(abs, group)) / top)
    if scale == 0:
        return [zero] * len(group), scale, minimum
    codes = [round((number - minimum) / scale) + zero for number in group]
    return [min(max(code, first), last) for code in codes], scale, minimum


def restore(row: Row) -> list[float]:
    """See exercise.py."""
    numbers: list[float] = []
    for group, scale, minimum in zip(row.codes, row.scales, row.minimums, strict=True):
        numbers += [scale * (code - row.zero) + minimum for code in codes_of(group, row.bits)]
    return numbers[: row.k]


def codes_of(group: list[int], bits: int) -> list[int]:
    """The codes in the bytes of a group, one for each place."""
    if bits == 8:
        return group
    return [byte & 15 for byte in group] + [byte >> 4 for byte in group]


def group_dot(
    activations: list[int],
    activation_scale: float,
    codes: list[int],
    scale: float,
    minimum: float,
    zero: int,
    dpbusd: Dpbusd,
) -> float:
    """See exercise.py."""
    total = 0
    for i in range(0, 32, 4):
        total = dpbusd(total, codes[i : i + 4], activations[i : i + 4])
    activation_sum = sum(activations)
    return activation_scale * (scale * (total - zero * activation_sum) + minimum * activation_sum)


def quantized_linear(x: list[list[float]], weight: list[Row], bias: list[float] | None) -> list[list[float]]:
    """See exercise.py."""
    y = []
    for numbers in x:
        rounded = []
        for start in range(0, len(numbers), GROUP_SIZE):
            group = numbers[start : start + GROUP_SIZE]
            scale = max(map(abs, group)) / 127
            rounded.append(([round(number / scale) if scale else 0 for number in group], scale))
        y.append([row_dot(rounded, row) for row in weight])
    return y if bias is None else [[value + b for value, b in zip(row, bias, strict=True)] for row in y]


def row_dot(rounded: list[tuple[list[int], float]], row: Row) -> float:
    """Codes are multiplied by codes; scales, zero and minimum come in once for each group.

    rounded: for each group its activations as whole numbers, and their scale.
    """
    y = 0.0
    groups = zip(rounded, row.codes, row.scales, row.minimums, strict=True)
    for (activations, activation_scale), group, scale, minimum in groups:
        # The last group of the weight may have more places than there are activations.
        total = sum(a * code for a, code in zip(activations, codes_of(group, row.bits), strict=False))
        activation_sum = sum(activations)
        y += activation_scale * (scale * (total - row.zero * activation_sum) + minimum * activation_sum)
    return y


def unpack_words(
    words: list[int], bits: int, order: list[int], scale: float, stored_zero: int | None, added: int
) -> list[float]:
    """See exercise.py."""
    top = 2**bits - 1
    zero = 2 ** (bits - 1) if stored_zero is None else (stored_zero + added) & top
    numbers: list[float] = []
    for word in words:
        codes = [0] * len(order)
        for place, index in enumerate(order):
            codes[index] = word >> bits * place & top
        numbers += [scale * (code - zero) for code in codes]
    return numbers
