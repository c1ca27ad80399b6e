"""A student's functions in the engine's quantized layers (chapter 12). Needs torch.

The engine computes in float32; the matrices of its first and its last layer are quantized, attention's to 8 bits, the
MLP's to 4 bits with a minimum. A student's function does a few rows or outputs of each, as plain numbers.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from chapters.ch12_fewer_bits.checks import (
    GroupDot,
    Known,
    Quantize,
    QuantizedLinear,
    Restore,
    UnpackWords,
    compare_dot,
    compare_linear,
    compare_unpack,
    make_stored,
)
from chapters.ch12_fewer_bits.groups import Row
from chapters.ch12_fewer_bits.rounding import in_groups_of, quantize
from chapters.grading import Bench
from chapters.patching import replaced
from nanovllm import LLM
from nanovllm.features.quantization.formats import (
    Q4_1,
    Q8_0,
    Format,
    MergedWeight,
    QuantizedRows,
    QuantizedWeight,
    in_groups,
    quantize_rows,
    unpack_nibbles,
)
from nanovllm.features.quantization.formats import quantized_linear as our_linear
from nanovllm.worker.layers import Linear, plain_linear

Rounds = Callable[[Tensor, Format], tuple[Tensor, Tensor, Tensor | None]]
Product = Callable[[Tensor, MergedWeight, Tensor | None], Tensor]
OUR_DEQUANTIZE = QuantizedRows.dequantize
NUM_ROWS = 16  # of each matrix, that are rounded by the student


@cache
def float32_bench(model: str) -> Bench:
    """Plain PyTorch in float32, where rounding does not change a token. Expected are those of quantized layers."""
    bench = Bench(model, dtype="float32", enforce_eager=True)
    with quantized_layers(bench.llm, quantize, our_linear):
        _ = bench.expected_tokens
    return bench


def pack(codes: Tensor, scales: Tensor, minimums: Tensor | None, format: Format, k: int) -> QuantizedRows:
    """codes: uint8 [n, num_groups, 32], a byte each."""
    if format.bits == 4:
        codes = codes[..., :16] | codes[..., 16:] << 4
    return QuantizedRows(format, k, codes, scales, minimums)


@contextmanager
def quantized_layers(llm: LLM, rounds: Rounds, product: Product) -> Iterator[None]:
    """The matrices of the first and the last layer are quantized for a while, and multiplied by this product."""
    model = llm.engine.model_runner.model
    before: list[tuple[Linear, Any]] = []
    try:
        for layer in (model.layers[0], model.layers[-1]):
            for part, format in ((layer.self_attn, Q8_0), (layer.mlp, Q4_1)):
                for linear in [module for module in part.modules() if isinstance(module, Linear)]:
                    weight = linear.weight
                    groups = pack(*rounds(in_groups_of(weight, 32), format), format, weight.shape[1])
                    before.append((linear, weight))
                    del linear.weight  # no longer a parameter
                    linear.weight, linear.product = MergedWeight([QuantizedWeight.of(groups)]), product
        yield
    finally:
        for linear, weight in before:
            del linear.weight
            linear.weight, linear.product = weight, plain_linear


def check_tokens(bench: Bench, rounds: Rounds = quantize, product: Product = our_linear) -> None:
    other = float32_bench(bench.model)
    try:
        with quantized_layers(other.llm, rounds, product):
            other.same_tokens()
    finally:
        other.clean()


def row_of(rows: QuantizedRows, index: int) -> Row:
    """One row as plain numbers."""
    minimums = [0.0] * rows.scales.shape[1] if rows.minimums is None else rows.minimums[index].tolist()
    codes, scales = rows.codes[index].tolist(), rows.scales[index].tolist()
    return Row(rows.format.bits, rows.format.zero, codes, scales, minimums, rows.k)


def generate_with_quantize(function: Quantize, bench: Bench) -> None:
    def rounds(groups: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor | None]:
        codes, scales, minimums = quantize(groups, format)
        for index, row in enumerate(groups[:NUM_ROWS].tolist()):
            found = [function(group, format.bits, format.zero, format.has_minimum) for group in row]
            codes[index] = torch.tensor([codes for codes, _, _ in found])
            scales[index] = torch.tensor([scale for _, scale, _ in found])
            if minimums is not None:
                minimums[index] = torch.tensor([minimum for _, _, minimum in found])
        return codes, scales, minimums

    check_tokens(bench, rounds=rounds)


def generate_with_restore(function: Restore, bench: Bench) -> None:
    generate_with_rows(bench, lambda rows, index: function(row_of(rows, index)))


def generate_with_rows(bench: Bench, restored: Callable[[QuantizedRows, int], list[float] | None]) -> None:
    """A row of each weight is what restored(rows, index) says of it, unless that is None."""
    rng = random.Random(1)

    def dequantize(rows: QuantizedRows) -> Tensor:
        weight, index = OUR_DEQUANTIZE(rows), rng.randrange(len(rows.codes))
        numbers = restored(rows, index)
        if numbers is not None:
            weight[index] = torch.tensor(numbers)
        return weight

    _ = float32_bench(bench.model)  # what is expected comes without the student's code
    with replaced(QuantizedRows, "dequantize", dequantize):
        check_tokens(bench)


def generate_with_dot(function: GroupDot, bench: Bench) -> None:
    rng = random.Random(2)

    def product(x: Tensor, weight: MergedWeight, bias: Tensor | None) -> Tensor:
        y = our_linear(x, weight, bias)
        [part], row, column = weight.parts, rng.randrange(len(x)), rng.randrange(weight.parts[0].shape[0])
        groups, (codes, scales) = part.rows(torch.tensor([column])), quantize_rows(x[row : row + 1])
        weight_codes = unpack_nibbles(groups.codes[0]) if groups.format.bits == 4 else groups.codes[0]
        total = 0.0 if bias is None else float(bias[column])
        for g in range(codes.shape[1]):
            minimum = 0.0 if groups.minimums is None else float(groups.minimums[0, g])
            numbers = weight_codes[g].tolist(), float(groups.scales[0, g]), minimum, groups.format.zero
            args = [int(a) for a in codes[0, g].tolist()], float(scales[0, g]), *numbers
            total += compare_dot(function, args, f"in the engine, group {g} of output {column}")
        y[row, column] = total
        return y

    check_tokens(bench, product=product)


def as_rounded(x: Tensor) -> tuple[list[list[float]], list[list[float]]]:
    """x [T, k], and what the engine rounds it to.

    Numbers halfway between two codes are moved away from there: float32 and float64 may round them differently.
    """
    codes, scales = quantize_rows(x)
    steps = scales.double()[..., None]
    rounded = codes.double() * steps
    besides = (in_groups(x).double() - rounded).clamp(-0.49 * steps, 0.49 * steps)
    moved = rounded + besides
    return moved.flatten(1)[:, : x.shape[1]].tolist(), rounded.flatten(1)[:, : x.shape[1]].tolist()


def generate_with_linear(function: QuantizedLinear, bench: Bench) -> None:
    rng = random.Random(3)

    def product(x: Tensor, weight: MergedWeight, bias: Tensor | None) -> Tensor:
        y, [part] = our_linear(x, weight, bias), weight.parts
        columns = rng.sample(range(part.shape[0]), 2)
        rows = part.rows(torch.tensor(columns))
        known = [Known(row_of(rows, index), numbers) for index, numbers in enumerate(rows.dequantize().tolist())]
        biases = None if bias is None else bias[columns].tolist()
        got = compare_linear(function, *as_rounded(x), known, f"in the engine, outputs {columns}", biases)
        y[:, columns] = torch.tensor(got, dtype=y.dtype)
        return y

    check_tokens(bench, product=product)


def generate_with_unpack(function: UnpackWords, bench: Bench) -> None:
    """Rows of 8 bits are put into words, as GPTQ does."""

    def restored(rows: QuantizedRows, index: int) -> list[float] | None:
        if rows.minimums is not None:
            return None
        numbers: list[float] = []
        for codes, scale in zip(rows.codes[index].tolist(), rows.scales[index].tolist(), strict=True):
            group = make_stored(codes, bits=8, scale=scale, zero=128, added=1)
            numbers += compare_unpack(function, group, "in the engine, a group of 8 bits")
        return numbers[: rows.k]

    generate_with_rows(bench, restored)
