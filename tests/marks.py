"""Marks of parameters."""

from typing import Any

import pytest


def by_night(*values: object) -> Any:
    """The parameters of a case that repeats, for another kind, what the test checks by day for one."""
    return pytest.param(*values, marks=pytest.mark.nightly)
