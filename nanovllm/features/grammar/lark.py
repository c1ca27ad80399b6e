"""Pieces of Lark's notation, as llguidance extends it (chapter 8)."""

import json

# The last line of a grammar in which a terminal may take what has to come after it (A "a", where A is /a+/). llguidance
# looks for the bytes that have to come, to take them in the fewest tokens, and here there is no end of them.
NO_FORCING = '\n%llguidance {"no_forcing": true}'


def quoted(text: str) -> str:
    """As a string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def nested(lark: str) -> str:
    """A grammar as a part of another."""
    return f"%lark {{\n{lark}\n}}"
