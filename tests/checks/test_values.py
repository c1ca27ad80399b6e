"""Checks of what a person passes in; what each class refuses is tested where the class is."""

from fractions import Fraction
from numbers import Integral, Real

import numpy as np
import pytest
import torch

from nanovllm.checks.values import check_number, reject_unknown
from tests.errors import expect


def test_unknown_names():
    reject_unknown({"a": 1}, ["a", "b"], "f")
    text = "f has no argument 'colour' (found 'red'); did you mean 'color'? examples/move_to_vllm.md lists what"
    expect(text, reject_unknown, {"color": 1, "colour": "red"}, ["size", "color"], "f")


@pytest.mark.parametrize(
    ("value", "kind", "bounds", "text"),
    [
        (2.5, Integral, (0,), "x must be a whole number from 0, found 2.5 (float)"),
        (-1, Integral, (0, 9), "x must be a whole number between 0 and 9, found -1 (int)"),
        (10, Integral, (0, 9), "found 10 (int)"),
        (True, Integral, (), "x must be a whole number, found True (bool)"),
        ("1", Real, (), "x must be a number, found '1' (str)"),
        (float("inf"), Real, (0.0,), "x must be a number between 0.0 and 3.4e+38, found inf (float)"),
        (float("nan"), Real, (), "found nan"),
        (2**63, Integral, (-1,), "x must be a whole number between -1 and 9223372036854775807, found 92233"),
        (10**400, Integral, (), "and 9223372036854775807, found 1000"),
        (10**400, Real, (), "x must be a number between -3.4e+38 and 3.4e+38, found 1000"),
        (1e39, Real, (), "between -3.4e+38 and 3.4e+38, found 1e+39"),
        (Fraction(10**400), Real, (), "found Fraction(1000"),
        pytest.param(10**5000, Integral, (0, 9), "between 0 and 9, found what cannot be", id="too long to print"),
        (np.int64(-1), Integral, (0,), "x must be a whole number from 0, found np.int64(-1)"),
        (np.bool_(True), Integral, (), "found np.True_ (bool)"),
        (np.float32("inf"), Real, (), "found np.float32(inf)"),
        (torch.tensor(3), Integral, (), "found tensor(3) (Tensor)"),
    ],
)
def test_numbers(value, kind, bounds, text):
    expect(text, check_number, "x", value, kind, *bounds)


@pytest.mark.parametrize("number", [7, np.int8(7), np.uint64(7), np.int64(7)])
def test_numbers_within_their_bounds_leave_as_plain_python(number):
    assert type(check_number("x", number, Integral, 0, 7)) is type(check_number("x", number, Integral, 7, 300)) is int
    assert type(check_number("x", number, Real, 0, 300)) is float
    assert type(check_number("x", np.float16(number), Real, 0, 3e38)) is float
