"""Structural tags that are none: each is refused with a reason, whatever stands in place of a type."""

from typing import Any

import pytest

from nanovllm.features.grammar.tags import lark_of


def nested(depth: int) -> dict[str, Any]:
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        form = {"type": "sequence", "elements": [form]}
    return form


@pytest.mark.parametrize(
    "form", [{"type": []}, {"type": {}}, {"type": 1}, {}, None, "any_text", nested(1000), nested(5000)]
)
def test_no_format(form):
    with pytest.raises(ValueError, match=r"a format is an object|nested too deeply|it is not JSON"):
        lark_of({"type": "structural_tag", "format": form})
