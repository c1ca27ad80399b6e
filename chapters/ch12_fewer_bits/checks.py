"""Grading of the exercises of chapter 12: on numbers that one sees through, then in the engine.

The engine computes in float32; the matrices of its first and its last layer are quantized, attention's to 8 bits, the
MLP's to 4 bits with a minimum.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chapters.ch12_fewer_bits import solution
from chapters.ch12_fewer_bits.rounding import in_groups_of
from chapters.expect import cases, expect, expect_form, read_again, unchanged
from chapters.grading import Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import LLM
from nanovllm.features.quantization.formats import (
    Q4_0,
    Q4_1,
    Q8_0,
    Format,
    MergedWeight,
    QuantizedRows,
    merge,
    quantize_rows,
)
from nanovllm.features.quantization.formats import quantized_linear as our_linear
from nanovllm.worker.layers import Linear

Quantize = Callable[[Tensor, Format], tuple[Tensor, Tensor, Tensor | None]]
Restore = Callable[[QuantizedRows], Tensor]
GroupDot = Callable[..., float]
QuantizedLinear = Callable[[Tensor, QuantizedRows, Tensor | None], Tensor]
Product = Callable[[Tensor, MergedWeight, Tensor | None], Tensor]

SCALE, FOUR_BITS = "A group and its scale", "Four bits, and a minimum"  # headings
OUR_DEQUANTIZE = QuantizedRows.dequantize


class Float32Bench(Bench):
    """Plain PyTorch in float32, where rounding does not change a token."""

    @cached_property
    def llm(self) -> LLM:
        sizes = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "block_size": 16}
        return LLM(self.model, dtype="float32", enforce_eager=True, **sizes)

    @cached_property
    def expected_tokens(self) -> list[list[int]]:
        with quantized_layers(self.llm, solution.quantize, our_linear):
            return self.generate()


@cache
def float32_bench(model: str) -> Float32Bench:
    bench = Float32Bench(model)
    with replaced(QuantizedRows, "dequantize", OUR_DEQUANTIZE):  # what is expected comes without the student's code
        _ = bench.expected_tokens
    return bench


def pack(codes: Tensor, scales: Tensor, minimums: Tensor | None, format: Format, k: int) -> QuantizedRows:
    """codes: uint8 [n, num_groups, 32], a byte each."""
    if format.bits == 4:
        codes = codes[..., :16] | codes[..., 16:] << 4
    return QuantizedRows(format, k, codes, scales, minimums)


@contextmanager
def quantized_layers(llm: LLM, quantize: Quantize, product: Product) -> Iterator[None]:
    """The matrices of the first and the last layer are quantized for a while, and multiplied by this product."""
    model = llm.engine.model_runner.model
    before: list[tuple[Linear, Any]] = []
    try:
        for layer in (model.layers[0], model.layers[-1]):
            for part, format in ((layer.self_attn, Q8_0), (layer.mlp, Q4_1)):
                for linear in [module for module in part.modules() if isinstance(module, Linear)]:
                    weight = linear.weight
                    groups = pack(*quantize(in_groups_of(weight, 32), format), format, weight.shape[1])
                    before.append((linear, weight))
                    del linear.weight  # no longer a parameter
                    linear.weight, linear.product = merge([groups]), product
        yield
    finally:
        for linear, weight in before:
            del linear.weight
            linear.weight, linear.product = weight, F.linear


def check_tokens(bench: Bench, quantize: Quantize = solution.quantize, product: Product = our_linear) -> None:
    other = float32_bench(bench.model)
    try:
        with quantized_layers(other.llm, quantize, product):
            other.same_tokens()
    finally:
        other.clean()


def show(numbers: Any, count: int = 6) -> str:
    flat = numbers.flatten().tolist() if isinstance(numbers, Tensor) else numbers
    shown = ", ".join(f"{x:.4g}" for x in flat[:count])
    return f"[{shown}{', ...' if len(flat) > count else ''}]"


# -- quantize ---------------------------------------------------------------------------------------------------------


def compare_quantize(function: Quantize, groups: Tensor, format: Format, hint: str) -> None:
    with unchanged("groups, which you were given, has been changed", groups):
        got: Any = function(groups, format)
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong("return three things: codes, scales, minimums (or None)", got=repr(got)[:80])
    codes, scales, minimums = got
    expected = solution.quantize(groups, format)
    expect(format.has_minimum, minimums is not None, f"minimums is None exactly if the format has none ({format.name})")
    for name, ours, theirs in zip(("codes", "scales", "minimums"), expected, got, strict=True):
        if ours is not None:
            expect_form(ours, theirs, f"{name} has another type or shape ({format.name}; {hint})")
    for name, ours, theirs in (("minimum", expected[2], minimums), ("scale", expected[1], scales)):
        if ours is not None and not torch.allclose(ours.float(), theirs.float(), rtol=2e-3, atol=1e-7):
            at = int((ours.float() - theirs.float()).abs().flatten().nan_to_num(1e9).argmax())
            group = f"of the group {show(groups.flatten(0, -2)[at])}"
            numbers = {"expected": f"{float(ours.flatten()[at]):.5g}", "got": f"{float(theirs.flatten()[at]):.5g}"}
            raise Wrong(f"the {name} {group} in {format.name} is wrong: {hint}", **numbers)
    # Judged by their own scales, so that a last bit there does not matter.
    scale, offset = scales.double()[..., None], 0 if minimums is None else minimums.double()[..., None]
    exact = torch.where(scale == 0, 0.0, (groups - offset) / scale)
    first, last = (0, 15) if format.has_minimum else (format.zero - TOP[format.name], format.zero + TOP[format.name])
    exact = (exact + format.zero).clamp(first, last)
    wrong = ((codes.double() - exact).abs() > 0.5 + 1e-4).flatten(0, -2).any(-1)
    if wrong.any():
        at = int(wrong.int().argmax())
        say = f"the codes of the group {show(groups.flatten(0, -2)[at], 5)} in {format.name} are off: {hint}"
        raise Wrong(say, expected=show(expected[0].flatten(0, -2)[at], 12), got=show(codes.flatten(0, -2)[at], 12))


TOP = {"Q8_0": 127, "Q4_0": 7}


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@read_again("Where it sits in the engine")
def check_quantize_generates(function: Quantize, bench: Bench) -> None:
    """The engine generates with weights that you have rounded: the same tokens"""
    check_tokens(bench, quantize=function)


WITH_MINIMUM, STORED = (
    "minimum = smallest, scale = (largest - minimum) / 15, code = round((number - minimum) / scale)",
    "round scale and minimum to float16 first, then divide by the stored scale (as float32)",
)
ZEROS = torch.stack((torch.zeros(32), torch.full((32,), 0.5), torch.linspace(-1, 1, 32)))
NO_SCALE = "where the scale is 0, 0 / 0 is nan: every code of such a group is zero"
ANY = random_numbers(6, 50, 32) * torch.linspace(0, 1, 50)[:, None]
NEARLY_HALVES = torch.tensor([3.3] * 31 + [3.3 * 100.47 / 127]).repeat(50, 1) * torch.linspace(1, 2, 50)[:, None]
SCALE_OF_ONE = torch.tensor([[127, -63.6, 0.2]])
ONE_SIDE = torch.tensor([[100, 101.5, 100.7], [-103, -101.5, -102.2]])
QUANTIZE_CHECKS = (
    *cases(
        compare_quantize,
        {
            "8 bits: a group whose scale is 1": [
                (SCALE_OF_ONE, Q8_0, "scale = largest magnitude / 127, code = round(number / scale) + 128")
            ],
            "8 bits: the largest magnitude is a negative number": [
                (torch.tensor([[-254, 100.0, 3, 0]]), Q8_0, "the largest magnitude counts, whatever its sign")
            ],
            ("4 bits without a minimum: 7 steps up, 7 steps down", FOUR_BITS): [
                (torch.tensor([[7, -3.4, 0.6, -7]]), Q4_0, "top is 2**(bits-1) - 1, and zero is format.zero")
            ],
            ("4 bits with a minimum: 16 codes from the smallest number to the largest", FOUR_BITS): [
                (torch.tensor([[-1, 14.0, 2.4, 6.6]]), Q4_1, WITH_MINIMUM),
                (ONE_SIDE, Q4_1, "also where all numbers are on the same side of 0"),
            ],
            "Groups of zeros, groups of equal numbers": [(ZEROS, format, NO_SCALE) for format in (Q8_0, Q4_1)],
            "Codes are worked out with the stored float16 scale": [
                *((ANY, format, STORED) for format in (Q8_0, Q4_1, Q4_0)),
                (NEARLY_HALVES, Q8_0, STORED),
            ],
        },
    ),
    check_quantize_generates,
)


# -- restore ----------------------------------------------------------------------------------------------------------


def use_restore(function: Restore) -> AbstractContextManager[None]:
    """Wherever the engine restores weights, it does so with the student's function."""
    return replaced(QuantizedRows, "dequantize", function)


def random_groups(format: Format, n: int = 5, k: int = 72, scale: float = 1.0) -> QuantizedRows:
    numbers = random_numbers(n, k, seed=format.zero) * scale
    return pack(*solution.quantize(in_groups_of(numbers, 32), format), format, k)


def compare_restore(function: Restore, groups: QuantizedRows, hint: str) -> None:
    given = [x for x in (groups.codes, groups.scales, groups.minimums) if x is not None]
    with unchanged("the groups, which you were given, have been changed", *given):
        got: Any = function(groups)
    expected = OUR_DEQUANTIZE(groups)
    form = "return [n, k] in float32: the rows' groups side by side, without the places behind k"
    expect_form(expected, got, form)
    if not torch.allclose(expected, got, rtol=1e-5, atol=1e-6 * float(expected.abs().amax())):
        section = None
        if torch.allclose(expected, got, rtol=5e-3, atol=1e-3 * float(expected.abs().amax())):
            hint = "nearly: make float32 of codes, scale and minimum before you compute; float16 has 11 bits"
            section = "A group and its scale"
        row = int((expected - got).abs().amax(-1).argmax())
        column = int((expected - got).abs()[row].argmax()) // 8 * 8
        where = f"row {row}, numbers {column} to {column + 5}, in {groups.format.name}"
        e, g = (show(x[row, column : column + 6]) for x in (expected, got))
        raise Wrong(f"{hint} ({where})", expected=e, got=g, section=section)


@read_again("Where it sits in the engine")
def check_restore_generates(function: Restore, bench: Bench) -> None:
    """The engine restores its weights with your function: the same tokens"""
    check_tokens(bench)


NIBBLES = torch.arange(16, dtype=torch.uint8) | torch.arange(15, -1, -1, dtype=torch.uint8) << 4
CODES = torch.tensor([[[128, 129, 127, 255, 1] + [128] * 27]], dtype=torch.uint8)
IN_UINT8 = "subtract zero from the code, as float32: in uint8, 127 - 128 is 255"
HALVES = "byte i holds code i in its low half and code i + 16 in its high half"
LARGE = "float16 ends at 65,504: make float32 of the scale before you multiply"
RESTORE_CHECKS = (
    *cases(
        compare_restore,
        {
            ("8 bits: code 128 stands for 0", SCALE): [
                (QuantizedRows(Q8_0, 32, CODES, torch.full((1, 1), 0.5).half()), IN_UINT8)
            ],
            "4 bits: two codes in a byte": [
                (QuantizedRows(Q4_0, 32, NIBBLES[None, None], torch.ones(1, 1).half()), HALVES)
            ],
            "4 bits with a minimum, several groups in a row": [
                (random_groups(Q4_1, k=96), "each group has its own scale and its own minimum")
            ],
            "Rows whose last group is not full": [
                (random_groups(format), "leave out the places behind k") for format in (Q8_0, Q4_0, Q4_1)
            ],
            ("Scales with which a product does not fit into float16", SCALE): [
                (random_groups(Q8_0, scale=60_000.0), LARGE)
            ],
        },
    ),
    check_restore_generates,
)


# -- group_dot --------------------------------------------------------------------------------------------------------


class Dpbusd:
    """The instruction: four products of an unsigned and a signed byte, added to a 32-bit sum. Counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, total: int, codes: list[int], activations: list[int]) -> int:
        self.num_calls += 1
        for name, numbers, low, high in (("codes", codes, 0, 255), ("activations", activations, -128, 127)):
            if len(numbers) != 4 or not all(isinstance(x, int) and low <= x <= high for x in numbers):
                raise Wrong(f"dpbusd takes 4 {name}, ints from {low} to {high}", got=str(numbers))
        if not isinstance(total, int):
            raise Wrong("dpbusd adds to a whole number: scales come in at the end", got=repr(total))
        return total + sum(a * b for a, b in zip(codes, activations, strict=True))


def compare_dot(function: GroupDot, args: tuple, hint: str) -> float:
    activations, activation_scale, codes, scale, minimum, zero = args
    meant = [(activation_scale * a, scale * (c - zero) + minimum) for a, c in zip(activations, codes, strict=True)]
    expected, magnitude = sum(a * w for a, w in meant), sum(abs(a * w) for a, w in meant)
    dpbusd = Dpbusd()
    with unchanged("activations and codes stay as they are", activations, codes):
        got: Any = function(activations, activation_scale, codes, scale, minimum, zero, dpbusd)
    if not isinstance(got, float | int) or abs(got - expected) > 1e-6 * max(magnitude, 1e-6):
        raise Wrong(hint, expected=f"{expected:.6g}", got=repr(got))
    if not 8 <= dpbusd.num_calls <= 16:
        hint = (
            "the right number, but the 32 products of a code with an activation are to be done by dpbusd, four a call"
        )
        raise Wrong(hint, expected="8 calls, 16 at most", got=f"{dpbusd.num_calls} calls")
    return got


def check_products(function: GroupDot, bench: Bench) -> None:
    """Products and scales: a zero of 0, no minimum"""
    args = list(range(-16, 16)), 0.5, [i % 16 for i in range(3, 35)], 0.25, 0.0, 0
    compare_dot(function, args, "activation_scale * scale * the sum of the products")


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
    for format in (Q8_0, Q4_0, Q4_1) * 10:
        codes = rng.choices(range(2**format.bits), k=32)
        minimum = rng.uniform(-1, 1) if format.has_minimum else 0.0
        args = rng.choices(range(-127, 128), k=32), rng.random(), codes, rng.random(), minimum, format.zero
        compare_dot(function, args, f"work this one out by hand ({format.name})")


def check_dot_generates(function: GroupDot, bench: Bench) -> None:
    """In the engine: one output of every quantized product is yours, and the same tokens come out"""
    rng = random.Random(2)

    def product(x: Tensor, weight: MergedWeight, bias: Tensor | None) -> Tensor:
        y = our_linear(x, weight, bias)
        [part], row, column = weight.parts, rng.randrange(len(x)), rng.randrange(weight.parts[0].shape[0])
        groups, (codes, scales) = part.rows(torch.tensor([column])), quantize_rows(x[row : row + 1])
        weight_codes = groups.codes[0]
        if groups.format.bits == 4:
            weight_codes = torch.cat((weight_codes & 15, weight_codes >> 4), dim=-1)
        total = 0.0 if bias is None else float(bias[column])
        for g in range(codes.shape[1]):
            minimum = 0.0 if groups.minimums is None else float(groups.minimums[0, g])
            numbers = weight_codes[g].tolist(), float(groups.scales[0, g]), minimum, groups.format.zero
            args = [int(a) for a in codes[0, g].tolist()], float(scales[0, g]), *numbers
            total += compare_dot(function, args, f"in the engine, group {g} of output {column}")
        y[row, column] = total
        return y

    check_tokens(bench, product=product)


# -- quantized_linear -------------------------------------------------------------------------------------------------


def compare_linear(
    function: QuantizedLinear,
    x: Tensor,
    groups: QuantizedRows,
    hint: str,
    bias: Tensor | None = None,
    tolerance: float = 1e-3,
) -> None:
    with unchanged("x, which you were given, has been changed", x):
        got: Any = function(x, groups, bias)
    expected = our_linear(x, merge([groups]), bias)
    expect_form(expected, got, "return [T, n] in x's dtype")
    size = expected.float().norm(dim=-1).clamp_min(1e-6)  # of each row
    off = (expected.float() - got.float()).norm(dim=-1) / size
    if not bool((off < tolerance).all()):
        row = int(off.nan_to_num(1e9).argmax())
        why = _why_linear(function, x, groups, bias, got, row, tolerance)
        section = "Activations are harder" if why else None
        numbers = {"expected": show(expected[row].float()), "got": show(got[row].float())}
        raise Wrong(f"{why or hint} (row {row})", **numbers, section=section)


def _why_linear(
    function: QuantizedLinear,
    x: Tensor,
    groups: QuantizedRows,
    bias: Tensor | None,
    got: Tensor,
    row: int,
    tolerance: float,
) -> str:
    """The likely mistake; empty where none of these explains it."""
    plain = x.float() @ OUR_DEQUANTIZE(groups).T + (0 if bias is None else bias)
    if torch.allclose(got.float(), plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max())):
        return "that is the product with x as it came: round each row of x to whole numbers first"
    alone, constant = x[row : row + 1], 0 if bias is None else bias
    expected = our_linear(alone, merge([groups]), None)[0].float()

    def is_right(parts: list[Tensor]) -> bool:
        """These parts of the row, each a step of its own, add up to the row's product."""
        total = sum((function(part, groups, bias)[0].float() - constant for part in parts), torch.zeros_like(expected))
        return float((total - expected).norm()) < tolerance * float(expected.norm())

    lonely = [torch.zeros_like(alone) for _ in range(0, x.shape[1], 32)]
    for start, part in zip(range(0, x.shape[1], 32), lonely, strict=True):
        part[:, start : start + 32] = alone[:, start : start + 32]
    with suppress(Exception):  # of code that is wrong anyway, and gets other shapes here
        if is_right([alone.clone()]):
            return "a scale is shared by rows: each row has scales of its own, and alone this row is right"
        if is_right(lonely):
            return "a scale is shared by groups: take a scale for each group of 32 activations; alone, each is right"
    return ""


def check_one_row(function: QuantizedLinear, bench: Bench) -> None:
    """One row, a weight of 8 bits"""
    torch.manual_seed(1)
    groups = random_groups(Q8_0, n=40, k=64)
    compare_linear(
        function, torch.randn(1, 64), groups, "round each group of 32 with its own scale, largest / 127, then multiply"
    )


@read_again("Whole numbers times whole numbers")
def check_formats(function: QuantizedLinear, bench: Bench) -> None:
    """Weights of 4 bits, without a minimum and with one"""
    torch.manual_seed(2)
    for format in (Q4_0, Q4_1):
        hint = "zero and the minimum meet the sum of the group's activations"
        compare_linear(function, torch.randn(3, 96), random_groups(format, n=40, k=96), f"{hint} ({format.name})")


def check_bias(function: QuantizedLinear, bench: Bench) -> None:
    """A bias, bfloat16 activations, a row length that is no multiple of 32"""
    torch.manual_seed(3)
    groups, bias = random_groups(Q8_0, n=7, k=72), torch.randn(7)
    compare_linear(function, torch.randn(2, 72), groups, "the bias is added once to each row", bias)
    compare_linear(function, torch.randn(2, 72).bfloat16(), groups, "compute in float32", bias, tolerance=1e-2)


def check_groups(function: QuantizedLinear, bench: Bench) -> None:
    """An outlier in one group of a row leaves the other groups alone"""
    torch.manual_seed(4)
    x = torch.randn(2, 128)
    x[0, 5] = 2000.0
    groups = random_groups(Q8_0, n=16, k=128)
    groups.scales[:, 0] = 2**-13  # small weights where the outlier is
    compare_linear(function, x, groups, "a scale for each group of 32 activations, not one for the row")


def check_neighbours(function: QuantizedLinear, bench: Bench) -> None:
    """A row gets the same result alone and beside a row of large numbers"""
    torch.manual_seed(5)
    groups, x = random_groups(Q8_0, n=16, k=64), torch.randn(3, 64)
    x[1] *= 1000
    x[2] = 0
    hint = "each row has scales of its own, and a group of zeros stays zero"
    compare_linear(function, x, groups, hint)
    alone, together = function(x[:1].clone(), groups, None), function(x.clone(), groups, None)[:1]
    if not torch.allclose(alone, together, rtol=1e-5, atol=1e-5):
        raise Wrong("a row's result depends on its neighbours", expected=show(alone), got=show(together))


@read_again("Where it sits in the engine")
def check_linear_generates(function: QuantizedLinear, bench: Bench) -> None:
    """The engine generates with your layer: the same tokens"""

    def product(x: Tensor, weight: MergedWeight, bias: Tensor | None) -> Tensor:
        [part] = weight.parts
        return function(x, part.rows(torch.arange(part.shape[0])), bias)

    check_tokens(bench, product=product)


DOT_CHECKS = (check_products, check_dot_zero, check_dot_minimum, check_dot_random, check_dot_generates)
LINEAR_CHECKS = (check_one_row, check_formats, check_bias, check_groups, check_neighbours, check_linear_generates)
TASKS = [
    Task("quantize", SCALE, nullcontext, QUANTIZE_CHECKS),
    Task("restore", FOUR_BITS, use_restore, RESTORE_CHECKS),
    Task("group_dot", "Whole numbers times whole numbers", nullcontext, DOT_CHECKS),
    Task("quantized_linear", "Activations are harder", nullcontext, LINEAR_CHECKS),
]
