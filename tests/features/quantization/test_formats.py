"""Weights of 8 and 4 bits: the format; their product in PyTorch against exact arithmetic, in C against PyTorch."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.features.quantization.formats import (
    FORMATS,
    Q4_0,
    Q4_1,
    Q8_0,
    Q8_M,
    MergedWeight,
    QuantizedRows,
    QuantizedWeight,
    concatenate,
    quantize_q8_0,
    quantize_rows,
    quantized_linear,
    quantized_lookup,
)
from nanovllm.features.quantization.q4_1_search import quantize_q4_1
from nanovllm.features.quantization.quantized_kernels import kernels_for
from nanovllm.worker.kernels import TORCH_KERNELS
from tests.worker.cpu.test_kernels import kernels

# Float32 sums in another order, then one rounding. Relative to the sum of the products' magnitudes.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
MAX_ROWS = 70


def random_groups(form, n: int, k: int) -> QuantizedRows:
    """Every code, scales of both signs, some 0 and some denormal in float16."""
    num_groups = -(-k // 32)
    codes = torch.randint(0, 256, (n, num_groups, form.code_bytes), dtype=torch.uint8)
    scales = torch.randn(n, num_groups) / 30
    scales[::5] = 0
    scales[1::5] = 2e-6
    minimums = (torch.randn(n, num_groups) / 10).half() if form.has_minimum else None
    return QuantizedRows(form, k, codes, scales.half(), minimums)


def random_weight(n: int, k: int, *forms) -> MergedWeight:
    return merged(*(random_groups(form, n, k) for form in forms))


def merged(*parts: QuantizedRows) -> MergedWeight:
    return MergedWeight(QuantizedWeight.of(part) for part in parts)


def assert_close(y: torch.Tensor, x: torch.Tensor, weight: MergedWeight, bias: torch.Tensor | None) -> None:
    """y against the product in PyTorch, computed in float32."""
    bias = None if bias is None else bias.float()
    expected = quantized_linear(x.float(), weight, bias)
    magnitude = sum_of_magnitudes(x, weight) + (0 if bias is None else bias.abs()) + 2 * torch.finfo(x.dtype).tiny
    error = ((y.float() - expected).abs() / magnitude).max().item()
    assert error < TOLERANCE[x.dtype], error


def sum_of_magnitudes(x: torch.Tensor, weight: MergedWeight) -> torch.Tensor:
    """Upper bounds: a code's zero and its minimum may cancel each other, their products are rounded on their own."""
    restored = torch.cat([part.rows(torch.arange(part.shape[0])).dequantize() for part in weight.parts]).abs()
    largest = torch.cat([(p.rows(torch.arange(p.shape[0])).scales.float().abs() * 16).amax(1) for p in weight.parts])
    return x.float().abs() @ restored.T + x.float().abs().sum(1, keepdim=True) * largest


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_product_in_c_at_every_row_count(form, dtype):
    """A row's result is the same to the last bit whatever the number of rows beside it."""
    torch.manual_seed(0)
    ours = kernels_for(kernels(dtype)).quantized_linear
    weight, x = random_weight(96, 160, form), torch.randn(MAX_ROWS, 160).to(dtype)
    whole = ours(x, weight, None)
    assert whole.dtype == dtype
    assert_close(whole, x, weight, None)
    for num_rows in range(1, MAX_ROWS):
        assert torch.equal(ours(x[:num_rows], weight, None), whole[:num_rows]), num_rows
    assert torch.equal(ours(x[-3:], weight, None), whole[-3:])
    many = x.repeat(9, 1)  # more than are quantized at a time
    assert torch.equal(ours(many, weight, None), whole.repeat(9, 1))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n, k", [(1, 32), (33, 33), (31, 1), (100, 896), (64, 100), (7, 4864)])
def test_product_in_c_with_ragged_shapes(n, k, dtype):
    """Parts of all formats side by side, k and n that are no multiples of 32, a bias, rows that are a slice."""
    torch.manual_seed(n)
    ours, weight = kernels_for(kernels(dtype)).quantized_linear, random_weight(n, k, Q4_1, Q8_0, Q4_0)
    bias = torch.randn(3 * n).to(dtype)
    x = torch.randn(7, 2 * k + 3).to(dtype)[:, 3 : 3 + k]
    assert not x.is_contiguous()
    assert_close(ours(x, weight, bias), x, weight, bias)
    assert torch.equal(ours(x, weight, bias), ours(x.contiguous(), weight, bias))
    transposed = torch.randn(k, 5).to(dtype).T
    assert_close(ours(transposed, weight, None), transposed, weight, None)
    assert ours(x[:0], weight, bias).shape == (0, 3 * n)


def in_some_order(groups: QuantizedRows, k: int) -> QuantizedRows:
    """The same groups, each input at another place, some places without one."""
    order = torch.full((groups.scales.shape[1] * 32,), -1, dtype=torch.int32)
    order[torch.randperm(len(order))[:k].sort().values] = torch.randperm(k, dtype=torch.int32)
    return replace(groups, k=k, order=order)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("in_c", [False, True], ids=["PyTorch", "C"])
def test_inputs_in_an_order_of_their_own(in_c, dtype):
    """Parts side by side, neighbours of one order among them: each is what it is alone, and its rows come back."""
    torch.manual_seed(0)
    linear = kernels_for(kernels(dtype) if in_c else TORCH_KERNELS).quantized_linear
    k, x, bias = 150, torch.randn(37, 150).to(dtype), torch.randn(3 * 40 + 2 * 33).to(dtype)
    one = in_some_order(random_groups(Q4_0, 40, 192), k)
    parts = [
        one,
        replace(random_groups(Q4_1, 33, 192), k=k, order=one.order.clone()),
        random_groups(Q8_M, 40, k),
        in_some_order(random_groups(Q8_0, 33, 224), k),
        in_some_order(random_groups(Q4_1, 40, 160), k),
    ]
    whole = linear(x, merged(*parts), bias)
    biases = bias.split([len(part.codes) for part in parts])
    alone = [linear(x, merged(part), own) for part, own in zip(parts, biases, strict=True)]
    assert torch.equal(whole, torch.cat(alone, dim=1)) if in_c else torch.allclose(whole, torch.cat(alone, dim=1))
    assert torch.equal(whole[3:5], linear(x[3:5], merged(*parts), bias)) or not in_c
    assert_close(whole, x, merged(*parts), bias)
    for part in parts:
        assert torch.equal(QuantizedWeight.of(part).rows(torch.arange(33)).dequantize(), part.dequantize()[:33])
    places = one.order >= 0
    stored = replace(one, k=192, order=None).dequantize()
    assert torch.equal(one.dequantize()[:, one.order[places]], stored[:, places])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("in_c", [False, True], ids=["PyTorch", "C"])
def test_numbers_that_are_not_finite_stay_in_their_row(in_c, dtype):
    torch.manual_seed(0)
    linear = kernels_for(kernels(dtype) if in_c else TORCH_KERNELS).quantized_linear
    weight = MergedWeight(
        QuantizedWeight.of(quantize(torch.randn(40, 70))) for quantize in (quantize_q8_0, quantize_q4_1)
    )
    x = torch.randn(9, 70).to(dtype)
    before = linear(x, weight, None)
    bad = {1: math.nan, 4: math.inf, 8: -math.inf}
    for row, number in bad.items():
        x[row, 8 * row] = number  # the row 8: in the last group, which is partly empty
    y = linear(x, weight, None)
    for row in range(9):
        if row in bad:
            assert not y[row].isfinite().any(), row
        elif in_c:
            assert torch.equal(y[row], before[row])
        else:
            assert torch.allclose(y[row], before[row])


@pytest.mark.parametrize("in_c", [False, True], ids=["PyTorch", "C"])
def test_activations_are_quantized_by_the_rule(in_c):
    """The weight is the identity with scale 1, so y = code * row scale; ties go to the even number."""
    linear = kernels_for(kernels(torch.float32) if in_c else TORCH_KERNELS).quantized_linear
    codes = torch.full((32, 1, 32), 128, dtype=torch.uint8)
    codes[torch.arange(32), 0, torch.arange(32)] += 1
    identity = merged(QuantizedRows(Q8_0, 32, codes, torch.ones(32, 1, dtype=torch.float16)))
    ties = torch.cat([torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]), torch.zeros(25)])
    torch.manual_seed(0)
    numbers = torch.randn(3000, 32) * 10.0 ** torch.randint(-25, 25, (3000, 1))
    groups = {
        "ties": (ties, [127, 0, 2, 2, 0, -2, 126] + [0] * 25),
        "equal numbers": (torch.full((32,), 0.1), [127] * 32),
        "zeros": (torch.zeros(32), [0] * 32),
        "denormal": (torch.full((32,), 1e-40), [0] * 32),
        "below the smallest": (torch.full((32,), 2.0**-101), [0] * 32),
        "the smallest": (torch.full((32,), -(2.0**-100)), [-127] * 32),
        "large": (torch.full((32,), 3e38), [127] * 32),
    }
    for name, (x, expected) in groups.items():
        scale = x.abs().max() / 127 if any(expected) else torch.tensor(0.0)
        assert torch.equal(linear(x[None], identity, None)[0], torch.tensor(expected) * scale), name
    x_codes, scales = quantize_rows(numbers)
    assert x_codes.abs().amax() == 127
    assert torch.equal(linear(numbers, identity, None), (x_codes * scales[..., None]).flatten(1))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_product_in_pytorch_is_exact_on_the_quantized_values(form):
    torch.manual_seed(0)
    groups, x = random_groups(form, 5, 70), torch.randn(3, 70)
    y = quantized_linear(x, merged(groups), None)
    x_codes, x_scales = quantize_rows(x)
    for t in range(3):
        for row in range(5):
            exact = magnitude = Fraction(0)
            for i in range(70):
                g, place = divmod(i, 32)
                code = int(groups.codes[row, g, place % form.code_bytes])
                if form.bits == 4:
                    code = code >> 4 if place >= 16 else code & 15
                minimum = 0 if groups.minimums is None else Fraction(groups.minimums[row, g].item())
                weight = Fraction(groups.scales[row, g].item()) * (code - form.zero) + minimum
                product = weight * int(x_codes[t, g, place]) * Fraction(x_scales[t, g].item())
                exact, magnitude = exact + product, magnitude + abs(product)
            assert abs(Fraction(y[t, row].item()) - exact) <= magnitude / 10**6


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("n", [1, 32, 45])
def test_rows_of_a_quantized_weight_are_what_went_in(n, form):
    torch.manual_seed(0)
    groups = random_groups(form, n, 70)
    ids = torch.randperm(n)
    rows = QuantizedWeight.of(groups).rows(ids)
    assert (rows.format, rows.k) == (form, 70)
    assert torch.equal(rows.codes, groups.codes[ids]) and torch.equal(rows.scales, groups.scales[ids])
    if groups.minimums is not None:
        assert torch.equal(rows.minimums, groups.minimums[ids])
    looked_up = quantized_lookup(ids[:2], merged(groups), torch.float32)
    assert torch.equal(looked_up, groups.dequantize()[ids[:2]])


@pytest.mark.parametrize("quantize, steps", [(quantize_q8_0, 254), (quantize_q4_1, 15)], ids=["Q8_0", "Q4_1"])
def test_nearest_rounding_of_weights(quantize, steps):
    """Half a step from the original at most, besides the rounding of scale and minimum to float16."""
    torch.manual_seed(0)
    weight = torch.randn(8, 100)
    weight[0, :32], weight[1, :32], weight[2, :32] = 0, 0.75, 1e-7
    groups = quantize(weight)
    assert groups.dequantize().shape == weight.shape
    spread = weight.abs().max() * 2
    assert (groups.dequantize() - weight).abs().max() <= spread / steps / 2 * 1.1
    assert torch.equal(groups.dequantize()[0, :32], weight[0, :32])
    assert torch.allclose(groups.dequantize()[1, :32], weight[1, :32], rtol=1e-3)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("sizes", [(5, 40), (31, 1, 33), (64, 32, 4), (3, 3, 3, 100), (32,)])
def test_rows_may_come_in_portions(form, sizes):
    torch.manual_seed(0)
    parts = [random_groups(form, n, 70) for n in sizes]
    weight, first = QuantizedWeight(form, sum(sizes), 70), 0
    for part in parts:
        weight.put(first, part)
        first += len(part.codes)
    assert torch.equal(weight.blocks, QuantizedWeight.of(concatenate(parts)).blocks)


@pytest.mark.parametrize("quantization", ["int8", "int4", None])
def test_one_line_says_what_quantization_costs_without_c_kernels(checkpoint, caplog, quantization):
    kernels(torch.float32)
    greedy, texts = SamplingParams(temperature=0, max_tokens=12), []
    for optimizations in (("c_kernels",), ()):
        llm = LLM(str(checkpoint()), dtype="float32", quantization=quantization, optimizations=optimizations)
        texts.append(llm.generate("the quick", greedy)[0].outputs[0].text)
        records = [r for r in caplog.records if "without C kernels" in r.message]
        assert [r.levelname for r in records] == ["WARNING"] * (quantization is not None and not optimizations)
    assert texts[0] == texts[1]
