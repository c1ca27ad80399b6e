"""patternProperties whose pattern fits a few names only: each name becomes a property of its own.

llguidance takes from a pattern the names that properties have. Where none is left, it still allows the comma before
one, and no name can follow.
"""

import json
from typing import Any

from nanovllm.features.grammar.parts import map_in, own_parts, values_of
from nanovllm.features.grammar.trial import tried


def name_finite_patterns(root: dict[str, Any]) -> None:
    """Rewrite them in the whole schema. Raises ValueError for patterns that cost too much."""
    parts = [part for value in values_of(root) for part in own_parts(value) if map_in(part, "patternProperties")]
    patterns = sorted({pattern for part in parts for pattern in part["patternProperties"]})
    if not patterns:
        return
    names_of = dict(zip(patterns, json.loads(tried("names", json.dumps(patterns))), strict=True))
    for part in parts:
        given = part["patternProperties"]
        part["patternProperties"] = {each: schema for each, schema in given.items() if names_of[each] is None}
        if not part["patternProperties"]:
            del part["patternProperties"]
        properties = dict(map_in(part, "properties"))
        for pattern, schema in given.items():
            for name in names_of[pattern] or ():
                properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
        if properties or "properties" in part:
            part["properties"] = properties
