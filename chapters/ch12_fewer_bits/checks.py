"""Grading of the exercises of chapter 12. What runs no model needs no torch: a browser grades it, too."""

import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from chapters.ch12_fewer_bits.groups import GROUP_SIZE, Row, to_float16
from chapters.expect import cases, differs, expect, is_list_of, read_again, unchanged
from chapters.grading import Bench, Task, Wrong

Quantize = Callable[[list[float], int, int, bool], tuple[list[int], float, float]]
Restore = Callable[[Row], list[float]]
GroupDot = Callable[..., float]
UnpackWords = Callable[[list[int], int, list[int], float, int | None, int], list[float]]
QuantizedLinear = Callable[[list[list[float]], list[Row], list[float] | None], list[list[float]]]

SCALE, FOUR_BITS = "A group and its scale", "Four bits, and a minimum"  # headings
FORMATS = {"Q8_0": (8, 128, False), "Q4_0": (4, 8, False), "Q4_1": (4, 0, True)}  # bits, zero, is there a minimum?


def show(numbers: Any, count: int = 6) -> str:
    shown = ", ".join(f"{x:.4g}" for x in numbers[:count])
    return f"[{shown}{', ...' if len(numbers) > count else ''}]"


def gauss(num: int, rng: random.Random, size: float = 1.0) -> list[float]:
    return [rng.gauss(0, size) for _ in range(num)]


# -- quantize ---------------------------------------------------------------------------------------------------------


def compare_quantize(function: Quantize, group: list[float], name: str, hint: str) -> None:
    bits, zero, has_minimum = FORMATS[name]
    with unchanged("the group, which you were given, has been changed", group):
        got: Any = function(group, bits, zero, has_minimum)
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong("return three things: codes, scale, minimum (0.0 if there is none)", got=repr(got)[:80])
    codes, scale, minimum = got
    if not is_list_of(int, codes, len(group)):
        raise Wrong(f"codes must be a list of {len(group)} ints ({name}; {hint})", got=repr(codes)[:200])
    smallest = min(group) if has_minimum else 0.0
    reach = max(group) - to_float16(smallest) if has_minimum else max(map(abs, group))
    num_steps = 15 if has_minimum else TOP[name]
    for what, ours, theirs in (("minimum", smallest, minimum), ("scale", reach / num_steps, scale)):
        said = f"the {what} of the group {show(group)} in {name}"
        if not isinstance(theirs, int | float) or differs(ours, theirs, 1e-7, 2e-3):
            raise Wrong(f"{said} is wrong: {hint}", expected=f"{ours:.5g}", got=repr(theirs))
        if not is_float16(theirs):
            raise Wrong(f"{said} is stored in float16, and this is not such a number: to_float16 rounds it", got=theirs)
    # Judged by their own scale, so that a last bit there does not matter.
    exact = [zero + ((x - minimum) / scale if scale else 0.0) for x in group]
    first, last = (0, 15) if has_minimum else (zero - TOP[name], zero + TOP[name])
    if any(differs(min(max(x, first), last), code, 0.5 + 1e-4) for code, x in zip(codes, exact, strict=True)):
        say = f"the codes of the group {show(group, 5)} in {name} are off: {hint}"
        nearest = [nearest_code(x, scale, minimum, zero, range(first, last + 1)) for x in group]
        raise Wrong(say, expected=show(nearest, 12), got=show(codes, 12))


TOP = {"Q8_0": 127, "Q4_0": 7}


def nearest_code(x: float, scale: float, minimum: float, zero: int, codes: range) -> int:
    """The one that comes back nearest to x, and of equals the one nearest to zero, found by trying all."""
    return min(codes, key=lambda code: (abs(scale * (code - zero) + minimum - x), abs(code - zero)))


def is_float16(x: float) -> bool:
    with suppress(OverflowError):
        return to_float16(x) == x
    return False


@read_again("Where it sits in the engine")
def check_quantize_generates(function: Quantize, bench: Bench) -> None:
    """The engine generates with weights of which you have rounded some rows: the same tokens"""
    _ = bench.model  # where there is none there is no torch either
    from chapters.ch12_fewer_bits.checks_engine import generate_with_quantize

    generate_with_quantize(function, bench)


WITH_MINIMUM, STORED = (
    "minimum = smallest, scale = (largest - minimum) / 15, code = round((number - minimum) / scale)",
    "round scale and minimum to float16 first, then divide by the stored scale",
)
ZEROS = [[0.0] * 32, [0.5] * 32, [i / 31 * 2 - 1 for i in range(32)]]
NO_SCALE = "where the scale is 0 you cannot divide by it: every code of such a group is zero"
ANY = [gauss(32, random.Random(i), i / 50) for i in range(100)]
NEARLY_HALVES = [[x * (1 + i / 50) for x in [3.3] * 31 + [3.3 * 100.47 / 127]] for i in range(50)]
ONE_SIDE = [[100, 101.5, 100.7], [-103, -101.5, -102.2]]
QUANTIZE_CHECKS = (
    *cases(
        compare_quantize,
        {
            "8 bits: a group whose scale is 1": [
                ([127, -63.6, 0.2], "Q8_0", "scale = largest magnitude / 127, code = round(number / scale) + 128")
            ],
            "8 bits: the largest magnitude is a negative number": [
                ([-254, 100.0, 3, 0], "Q8_0", "the largest magnitude counts, whatever its sign")
            ],
            ("4 bits without a minimum: 7 steps up, 7 steps down", FOUR_BITS): [
                ([7, -3.4, 0.6, -7], "Q4_0", "top is 2**(bits-1) - 1, and zero is the code of 0")
            ],
            ("4 bits with a minimum: 16 codes from the smallest number to the largest", FOUR_BITS): [
                ([-1, 14.0, 2.4, 6.6], "Q4_1", WITH_MINIMUM),
                *((group, "Q4_1", "this also holds where all numbers are on the same side of 0") for group in ONE_SIDE),
            ],
            "Groups of zeros, groups of equal numbers": [
                (group, name, NO_SCALE) for group in ZEROS for name in ("Q8_0", "Q4_1")
            ],
            "Codes are worked out with the stored float16 scale": [
                *((group, name, STORED) for group in ANY for name in FORMATS),
                *((group, "Q8_0", STORED) for group in NEARLY_HALVES),
            ],
            "Groups of tiny numbers": [
                ([1e-7, 0.0, -5e-8], "Q8_0", f"float16 has no scale so small, so it is 0: {NO_SCALE}"),
                ([1e-5, 4e-6], "Q8_0", "float16 rounds a tiny scale so much that a code is too large: clip it"),
            ],
        },
    ),
    check_quantize_generates,
)


# -- restore ----------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """A row of a quantized weight, and the numbers that it stands for: known, because it was made of its codes."""

    row: Row
    numbers: list[float]


def make_known(name: str, codes: list[int], scales: list[float], minimums: list[float], k: int) -> Known:
    """codes: one for each place of the groups, those after k included."""
    bits, zero, _ = FORMATS[name]
    numbers = []
    for i, code in enumerate(codes):
        numbers.append(scales[i // GROUP_SIZE] * (code - zero) + minimums[i // GROUP_SIZE])
    groups = [codes[i : i + GROUP_SIZE] for i in range(0, len(codes), GROUP_SIZE)]
    if bits == 4:
        groups = [[a | b << 4 for a, b in zip(group, group[16:], strict=False)] for group in groups]
    return Known(Row(bits, zero, groups, scales, minimums, k), numbers[:k])


def compare_restore(function: Restore, known: Known, hint: str) -> None:
    row, expected = known
    with unchanged("the row, which you were given, has been changed", row):
        got: Any = function(row)
    if not is_list_of((int, float), got, row.k):
        hint = "return a list of row.k numbers: the groups one after another, without the places after k"
        raise Wrong(hint, expected=f"{row.k} numbers", got=repr(got)[:80] if not isinstance(got, list) else len(got))
    largest = max(map(abs, expected))
    wrong = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if differs(a, b, 1e-9 * largest, 1e-6)]
    if wrong:
        at = wrong[0] // 8 * 8
        where = f"numbers {at} to {at + 5}, {row.bits} bits, zero {row.zero}"
        raise Wrong(f"{hint} ({where})", expected=show(expected[at : at + 6]), got=show(got[at : at + 6]))


@read_again("Where it sits in the engine")
def check_restore_generates(function: Restore, bench: Bench) -> None:
    """The engine restores rows of its weights with your function: the same tokens"""
    _ = bench.model
    from chapters.ch12_fewer_bits.checks_engine import generate_with_restore

    generate_with_restore(function, bench)


def random_rows(name: str, num: int, k: int, seed: int = 0) -> list[Known]:
    rng = random.Random(f"{name} {seed}")
    bits, _, has_minimum = FORMATS[name]
    num_groups = -(-k // GROUP_SIZE)
    found = []
    for _ in range(num):
        codes = rng.choices(range(1, 2**bits), k=num_groups * GROUP_SIZE)
        scales = [to_float16(rng.uniform(1, 3) / 2 ** (bits - 1)) for _ in range(num_groups)]
        minimums = [to_float16(rng.uniform(-3, -1)) if has_minimum else 0.0 for _ in range(num_groups)]
        found.append(make_known(name, codes, scales, minimums, k))
    return found


FIVE, EACH_TWICE = [128, 129, 127, 255, 1], [*range(16), *reversed(range(16))]
HALVES = "byte i holds code i in its low half and code i + 16 in its high half"
RESTORE_CHECKS = (
    *cases(
        compare_restore,
        {
            ("8 bits: code 128 stands for 0", SCALE): [
                (make_known("Q8_0", FIVE + [128] * 27, [0.5], [0.0], 32), "subtract zero from the code")
            ],
            "4 bits: two codes in a byte": [(make_known("Q4_0", EACH_TWICE, [1.0], [0.0], 32), HALVES)],
            "4 bits with a minimum, several groups in a row": [
                (known, "each group has its own scale and its own minimum") for known in random_rows("Q4_1", 5, 96)
            ],
            "Rows whose last group is not full": [
                (known, "leave out the places after k") for name in FORMATS for known in random_rows(name, 5, 72)
            ],
        },
    ),
    check_restore_generates,
)


# -- group_dot --------------------------------------------------------------------------------------------------------


class Dpbusd:
    """The instruction: four products of an unsigned and a signed byte, added to a 32-bit sum. Counts its calls.

    too_much: what it adds beside them, to see what becomes of its sums.
    """

    def __init__(self, too_much: int = 0) -> None:
        self.num_calls, self.too_much = 0, too_much

    def __call__(self, total: int, four_codes: list[int], four_activations: list[int]) -> int:
        self.num_calls += 1
        for name, numbers, low, high in (("codes", four_codes, 0, 255), ("activations", four_activations, -128, 127)):
            if len(numbers) != 4 or not all(isinstance(x, int) and low <= x <= high for x in numbers):
                raise Wrong(f"dpbusd takes 4 {name}, ints from {low} to {high}", got=str(numbers))
        if not isinstance(total, int):
            raise Wrong("dpbusd adds to a whole number: scales come in at the end", got=repr(total))
        return total + self.too_much + sum(a * b for a, b in zip(four_codes, four_activations, strict=True))


def compare_dot(function: GroupDot, args: tuple, hint: str) -> float:
    activations, activation_scale, codes, scale, minimum, zero = args
    meant = [(activation_scale * a, scale * (c - zero) + minimum) for a, c in zip(activations, codes, strict=True)]
    expected, magnitude = sum(a * w for a, w in meant), sum(abs(a * w) for a, w in meant)
    dpbusd = Dpbusd()
    with unchanged("activations or codes, which you were given, have been changed", activations, codes):
        got: Any = function(activations, activation_scale, codes, scale, minimum, zero, dpbusd)
    if not isinstance(got, float | int) or differs(expected, got, 1e-6 * max(magnitude, 1e-6)):
        raise Wrong(hint, expected=f"{expected:.6g}", got=repr(got))
    if not 8 <= dpbusd.num_calls <= 16:
        hint = "the right number, but dpbusd must do the 32 products of a code with an activation, four in each call"
        raise Wrong(hint, expected="8 calls, 16 at most", got=f"{dpbusd.num_calls} calls")
    return got


def check_products(function: GroupDot, bench: Bench) -> None:
    """Products and scales: a zero of 0, no minimum"""
    args = list(range(-16, 16)), 0.5, [i % 16 for i in range(3, 35)], 0.25, 0.0, 0
    got = compare_dot(function, args, "activation_scale * scale * the sum of the products")
    if function(*args, Dpbusd(too_much=1000)) == got:
        raise Wrong("the right number, but dpbusd's sums are thrown away: the products come from them")


def check_dot_zero(function: GroupDot, bench: Bench) -> None:
    """Q8_0: code 128 stands for 0"""
    args = [3, -1, 2] + [0] * 29, 1.0, [128, 130, 125] + [7] * 29, 1.0, 0.0, 128
    hint = "sum(a * (c - zero)) is sum(a * c) - zero * sum(a)"
    compare_dot(function, args, hint)


def check_dot_minimum(function: GroupDot, bench: Bench) -> None:
    """Q4_1: a minimum in every weight"""
    args = [2, -1] + [0] * 30, 0.5, [10, 3] + [0] * 30, 0.1, 1.0, 0
    compare_dot(function, args, "each product has a * minimum in it: together activation_scale * minimum * sum(a)")


def check_dot_random(function: GroupDot, bench: Bench) -> None:
    """Random groups in all three formats"""
    rng = random.Random(1)
    for name, (bits, zero, has_minimum) in [*FORMATS.items()] * 10:
        codes = rng.choices(range(2**bits), k=32)
        minimum = rng.uniform(-1, 1) if has_minimum else 0.0
        args = rng.choices(range(-127, 128), k=32), rng.random(), codes, rng.random(), minimum, zero
        compare_dot(function, args, f"work this example out by hand ({name})")


def check_dot_generates(function: GroupDot, bench: Bench) -> None:
    """In the engine: one output of every quantized product is yours, and the same tokens come out"""
    _ = bench.model
    from chapters.ch12_fewer_bits.checks_engine import generate_with_dot

    generate_with_dot(function, bench)


# -- quantized_linear -------------------------------------------------------------------------------------------------

Matrix = list[list[float]]


def compare_linear(
    function: QuantizedLinear,
    x: Matrix,
    rounded: Matrix,
    weight: list[Known],
    hint: str,
    bias: list[float] | None = None,
) -> Matrix:
    """rounded: what x becomes when its groups are rounded to 8 bits."""
    rows = [known.row for known in weight]
    with unchanged("x or bias, which you were given, has been changed", x, bias):
        got: Any = function(x, rows, bias)
    if not (isinstance(got, list) and len(got) == len(x) and all(is_numbers(row, len(weight)) for row in got)):
        raise Wrong(f"return {len(x)} lists of {len(weight)} numbers: a list for each row of x", got=repr(got)[:200])
    for row, theirs in enumerate(got):
        expected = products(rounded[row], weight, bias)
        if differs(0.0, off_by(expected, theirs), 1e-3):
            why = _why_linear(function, x, rounded, weight, bias, got, row)
            section = "Activations are harder" if why else None
            raise Wrong(f"{why or hint} (row {row})", expected=show(expected), got=show(theirs), section=section)
    return got


def products(numbers: list[float], weight: list[Known], bias: list[float] | None) -> list[float]:
    """Of one row with each row of a weight."""
    found = [sum(a * w for a, w in zip(numbers, known.numbers, strict=True)) for known in weight]
    return [value + b for value, b in zip(found, bias or [0.0] * len(weight), strict=True)]


def is_numbers(row: Any, size: int) -> bool:
    return is_list_of((int, float), row, size)


def off_by(expected: list[float], got: list[float]) -> float:
    """The difference of two rows, as a share of the first one's length."""
    length = sum(a * a for a in expected) ** 0.5
    return sum((a - b) ** 2 for a, b in zip(expected, got, strict=True)) ** 0.5 / max(length, 1e-6)


def _why_linear(
    function: QuantizedLinear,
    x: Matrix,
    rounded: Matrix,
    weight: list[Known],
    bias: list[float] | None,
    got: Matrix,
    row: int,
) -> str:
    """The likely mistake; empty where no known one explains it."""
    zeros, rows = [0.0] * len(weight), [known.row for known in weight]
    if not differs(0.0, off_by(products(x[row], weight, bias), got[row]), 1e-4):
        return "that is the product with x as it came: round each row of x to whole numbers first"
    expected = products(rounded[row], weight, None)

    def is_right(parts: Matrix) -> bool:
        """These parts of the row, each alone, add up to the row's product."""
        found = [function([list(part)], rows, bias)[0] for part in parts]
        total = [sum(column) - len(parts) * b for *column, b in zip(*found, bias or zeros, strict=True)]
        return not differs(0.0, off_by(expected, total), 1e-3)

    starts = range(0, len(x[row]), GROUP_SIZE)
    lonely = [[a if i // GROUP_SIZE * GROUP_SIZE == start else 0.0 for i, a in enumerate(x[row])] for start in starts]
    with suppress(Exception):  # of code that is wrong anyway, and gets different numbers here
        if is_right([x[row]]):
            return "a scale is shared by rows: each row has scales of its own, and alone this row is right"
        if is_right(lonely):
            return "a scale is shared by groups: take a scale for each group of 32 activations; alone, each is right"
    return ""


def random_x(num_rows: int, k: int, seed: int, outlier: float = 0.0) -> tuple[Matrix, Matrix]:
    """Rows, made of the codes to which they are rounded, and the numbers that these codes stand for.

    outlier: the size of one number of the first row, so large that the others of its group are rounded to 0.
    """
    rng = random.Random(seed)
    x: Matrix = [[] for _ in range(num_rows)]
    rounded: Matrix = [[] for _ in range(num_rows)]
    for row in range(num_rows):
        for start in range(0, k, GROUP_SIZE):
            size = min(GROUP_SIZE, k - start)
            largest, at, spread = rng.uniform(1.5, 3.0), rng.randrange(size), 45.0
            if outlier and row == start == 0:
                largest, spread = outlier, 0.0
            scale = largest / 127
            codes = [min(max(round(rng.gauss(0, spread)), -126), 126) for _ in range(size)]
            codes[at] = rng.choice((-127, 127))
            besides = [rng.uniform(-0.45, 0.45) for _ in range(size)]  # of a step: less than half of it
            besides[at] = 0.0
            rounded[row] += [scale * code for code in codes]
            x[row] += [scale * (code + by) for code, by in zip(codes, besides, strict=True)]
    return x, rounded


def check_one_row(function: QuantizedLinear, bench: Bench) -> None:
    """One row, a weight of 8 bits"""
    hint = "round each group of 32 with its own scale, largest / 127, then multiply"
    compare_linear(function, *random_x(1, 64, 1), random_rows("Q8_0", 40, 64), hint)


@read_again("Whole numbers times whole numbers")
def check_formats(function: QuantizedLinear, bench: Bench) -> None:
    """Weights of 4 bits, without a minimum and with one"""
    for name in ("Q4_0", "Q4_1"):
        hint = f"zero and the minimum are multiplied by the sum of the group's activations ({name})"
        compare_linear(function, *random_x(3, 96, 2), random_rows(name, 40, 96), hint)


def check_bias(function: QuantizedLinear, bench: Bench) -> None:
    """A bias, and a row length that is no multiple of 32"""
    bias = gauss(7, random.Random(3))
    weight = random_rows("Q8_0", 7, 72)
    compare_linear(function, *random_x(2, 72, 3), weight, "the bias is added once to each row", bias)


def check_groups(function: QuantizedLinear, bench: Bench) -> None:
    """An outlier in one group of a row leaves the other groups alone"""
    weight = random_rows("Q8_0", 16, 128)
    for row, numbers in weight:  # small weights where the outlier is
        numbers[:GROUP_SIZE] = [number * 2**-13 / row.scales[0] for number in numbers[:GROUP_SIZE]]
        row.scales[0] = 2**-13
    hint = "a scale for each group of 32 activations, not one for the row"
    compare_linear(function, *random_x(2, 128, 4, outlier=2000.0), weight, hint)


def check_neighbors(function: QuantizedLinear, bench: Bench) -> None:
    """A row gets the same result alone and beside a row of large numbers"""
    weight, (x, rounded) = random_rows("Q8_0", 16, 64), random_x(3, 64, 5)
    for rows in (x, rounded):
        rows[1], rows[2] = [1000 * number for number in rows[1]], [0.0] * 64
    hint = "each row has scales of its own, and a group of zeros stays zero"
    together = compare_linear(function, x, rounded, weight, hint)
    alone = function([list(x[0])], [known.row for known in weight], None)[0]
    expect(show(alone), show(together[0]), "a row's result depends on its neighbors")


def check_small(function: QuantizedLinear, bench: Bench) -> None:
    """Small activations, whose scales float16 cannot hold"""
    x, rounded = ([[number * 2**-16 for number in row] for row in rows] for rows in random_x(2, 64, 6))
    hint = "the activations' scales are not stored: do not round them to float16"
    compare_linear(function, x, rounded, random_rows("Q8_0", 16, 64), hint)


@read_again("Where it sits in the engine")
def check_linear_generates(function: QuantizedLinear, bench: Bench) -> None:
    """In the engine: two outputs of every quantized product are yours, and the same tokens come out"""
    _ = bench.model
    from chapters.ch12_fewer_bits.checks_engine import generate_with_linear

    generate_with_linear(function, bench)


# -- unpack_words -----------------------------------------------------------------------------------------------------

PUBLISHED = "Files that others have rounded"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Stored(NamedTuple):
    """A group as a file holds it, and the codes and the zero point that it was made of."""

    words: list[int]
    bits: int
    order: list[int]
    scale: float
    stored_zero: int | None
    added: int
    codes: list[int]
    zero: int


def make_stored(
    codes: list[int],
    bits: int = 4,
    order: list[int] | None = None,
    scale: float = 0.5,
    zero: int | None = None,
    added: int = 0,
) -> Stored:
    """zero: None, there is none in the file."""
    per_word = 32 // bits
    order, words = order or list(range(per_word)), []
    for start in range(0, len(codes), per_word):
        word = sum(codes[start + order[place]] << bits * place for place in range(per_word))
        words.append(word - 2**32 if word >= 2**31 else word)  # as an int32
    stored_zero = None if zero is None else (zero - added) % 2**bits
    return Stored(words, bits, order, scale, stored_zero, added, codes, 2 ** (bits - 1) if zero is None else zero)


def compare_unpack(function: UnpackWords, stored: Stored, hint: str) -> list[float]:
    words, bits, order, scale, stored_zero, added, codes, zero = stored
    expected = [scale * (code - zero) for code in codes]
    with unchanged("words or order, which you were given, have been changed", words, order):
        got: Any = function(words, bits, order, scale, stored_zero, added)
    if not is_list_of((int, float), got, len(expected)):
        raise Wrong(
            "return a number for each code of each word", expected=f"{len(expected)} numbers", got=repr(got)[:80]
        )
    if any(differs(a, b, 1e-9, 1e-6) for a, b in zip(expected, got, strict=True)):
        word = f"0x{words[0] % 2**32:08x}, {bits} bits, order {order}, stored zero {stored_zero}, added {added}"
        raise Wrong(f"{hint} (the first word is {word})", expected=show(expected, 8), got=show(got, 8))
    return got


@read_again("Where it sits in the engine")
def check_unpack_generates(function: UnpackWords, bench: Bench) -> None:
    """The engine's weights come in words, and you unpack some rows of them: the same tokens"""
    _ = bench.model
    from chapters.ch12_fewer_bits.checks_engine import generate_with_unpack

    generate_with_unpack(function, bench)


def random_codes(num: int, bits: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2**bits), k=num)


UNPACK_CHECKS = (
    *cases(
        compare_unpack,
        {
            "A word of eight codes": [
                (make_stored([3, 10, 5, 8, 0, 7, 12, 2], zero=8), "the lowest 4 bits of a word hold its first code")
            ],
            "Several words, some of them negative": [
                (make_stored(random_codes(32, 4, seed), zero=7), "a code is never negative: & takes its bits alone")
                for seed in range(5)
            ],
            "8 bits: four codes in a word": [
                (make_stored(random_codes(32, 8, 1), bits=8, zero=130), "a word holds 32 // bits codes")
            ],
            "No zero point in the file: the code in the middle stands for 0": [
                (make_stored(random_codes(16, bits, 2), bits=bits), "without a stored zero, zero is 2**(bits-1)")
                for bits in (4, 8)
            ],
            "A zero point of 0": [
                (make_stored([*range(8)], zero=0), "0 is a zero point; None says that the file has none")
            ],
            "AWQ's order": [
                (
                    make_stored([*range(8)], order=AWQ_ORDER, zero=0),
                    "place p holds code order[p], so code order[p] is at place p",
                ),
                (make_stored(random_codes(64, 4, 3), order=AWQ_ORDER, zero=9), "the order holds in each word"),
            ],
            "GPTQ's zero points": [
                (make_stored(random_codes(32, 4, 4), zero=8, added=1), "zero is what is stored, plus added"),
                (make_stored(random_codes(32, 4, 5), zero=0, added=1), "15 plus 1 is 0, with 4 bits"),
                (make_stored(random_codes(32, 8, 6), bits=8, zero=0, added=1), "255 plus 1 is 0, with 8 bits"),
            ],
        },
    ),
    check_unpack_generates,
)

DOT_CHECKS = (check_products, check_dot_zero, check_dot_minimum, check_dot_random, check_dot_generates)
LINEAR_CHECKS = (
    check_one_row,
    check_formats,
    check_bias,
    check_groups,
    check_neighbors,
    check_small,
    check_linear_generates,
)
TASKS = [
    Task("quantize", SCALE, nullcontext, QUANTIZE_CHECKS),
    Task("restore", FOUR_BITS, nullcontext, RESTORE_CHECKS),
    Task("group_dot", "Whole numbers times whole numbers", nullcontext, DOT_CHECKS),
    Task("quantized_linear", "Activations are harder", nullcontext, LINEAR_CHECKS),
    Task("unpack_words", PUBLISHED, nullcontext, UNPACK_CHECKS),
]
