"""Checks of what a person passes in; what each class refuses is tested where the class is."""

from numbers import Integral, Real

import pytest
from errors import expect

from nanovllm.validation import check_number, reject_unknown


def test_unknown_names():
    reject_unknown(["a"], ["a", "b"], "f")
    expect(
        "f has no argument 'colour'; did you mean 'color'? It takes: size, color",
        reject_unknown,
        ["colour"],
        ["size", "color"],
        "f",
    )


@pytest.mark.parametrize(
    ("value", "kind", "bounds", "text"),
    [
        (2.5, Integral, (0,), "x must be a whole number from 0, found 2.5 (float)"),
        (-1, Integral, (0, 9), "x must be a whole number between 0 and 9, found -1 (int)"),
        (10, Integral, (0, 9), "found 10 (int)"),
        (True, Integral, (), "x must be a whole number, found True (bool)"),
        ("1", Real, (), "x must be a number, found '1' (str)"),
        (float("inf"), Real, (0.0,), "x must be a number from 0.0, found inf (float)"),
        (float("nan"), Real, (), "found nan"),
    ],
)
def test_numbers(value, kind, bounds, text):
    expect(text, check_number, "x", value, kind, *bounds)


def test_bounds_are_allowed():
    check_number("x", 0, Integral, 0, 9)
    check_number("x", 9, Integral, 0, 9)
    check_number("x", 3, Real)
