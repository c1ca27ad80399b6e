"""Regular expressions and grammars as a request has them, in Lark's notation (chapter 8)."""

import json
from functools import lru_cache

from nanovllm.features.grammar.schemas import with_compiled_schemas
from nanovllm.features.grammar.trial import tried

MAX_SIGNS = 2000  # llguidance follows rules by recursion, and a full stack would end the process: half of what it holds


def lark_of_regex(pattern: str) -> str:
    from llguidance import LLMatcher

    return json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]


def lark_of_grammar(grammar: str) -> str:
    """Raises ValueError for one that is broken, or too large. grammar: in Lark's notation or in GBNF."""
    source = _as_lark(grammar)
    if (num_signs := sum(map(source.count, ":([{"))) > MAX_SIGNS:
        raise ValueError(f"it has {num_signs} signs of rules and brackets (: ( [ {{), and {MAX_SIGNS} are taken")
    return with_compiled_schemas(source)


@lru_cache(maxsize=64)
def _as_lark(grammar: str) -> str:
    return tried("convert", grammar)
