"""What is asked about grammars. See checks/sandbox.py."""

import json
from typing import Any

from llguidance import grammar_from

from nanovllm.features.grammar.oracle import Oracle
from nanovllm.features.grammar.schema_rules import lark_of_schema


def answer(kind: str, text: str, limits: dict[str, Any]) -> str:
    """Raises what is wrong with a grammar. limits: llguidance's.

    "convert"  a grammar in Lark's notation or in GBNF -> the same in Lark's notation
    "schema"   the arguments of lark_of_schema(), as a JSON list -> its grammar
    "compile"  a grammar -> nothing, if it can be compiled
    """
    if kind == "convert":
        return grammar_from("grammar", text)
    oracle = Oracle(limits)
    if kind == "schema":
        schema, form, is_closed, guidance = json.loads(text)
        return lark_of_schema(schema, form, is_closed, guidance, oracle)
    matcher = oracle.matcher(text)
    matcher.compute_bitmask()  # a failure here is one of the first token: it is explained in the other process
    return ""
