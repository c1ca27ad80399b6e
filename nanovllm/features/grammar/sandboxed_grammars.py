"""What is asked about grammars. See checks/sandbox.py."""

import json
import re
import time
from typing import Any

from nanovllm.features.grammar.gbnf_terminals import lark_of_gbnf
from nanovllm.features.grammar.lark import NO_FORCING
from nanovllm.features.grammar.oracle import Oracle
from nanovllm.features.grammar.schema_rules import lark_of_schema

IS_LARK = re.compile(r"^[ \t]*(%llguidance\b|[?!]*start[ \t]*:(?!:=))", re.MULTILINE)


def answer(kind: str, text: str, limits: dict[str, Any]) -> tuple[str, float]:
    """Of a question, and the seconds of a processor that it took. Raises what is wrong with a grammar.

    limits: llguidance's.

    "convert"  a grammar in Lark's notation or in GBNF -> the same in Lark's notation
    "schema"   the arguments of lark_of_schema(), as a JSON list -> its grammar
    "compile"  a grammar -> nothing, if it can be compiled
    """
    began = time.process_time()
    return _answer(kind, text, Oracle(limits)), time.process_time() - began


def _answer(kind: str, text: str, oracle: Oracle) -> str:
    if kind == "convert":
        return text + NO_FORCING if IS_LARK.search(text) else lark_of_gbnf(text, oracle)
    if kind == "schema":
        schema, form, is_closed, guidance = json.loads(text)
        return lark_of_schema(schema, form, is_closed, guidance, oracle)
    matcher = oracle.matcher(text)
    matcher.compute_bitmask()  # a failure here is one of the first token: it is explained in the other process
    return ""
