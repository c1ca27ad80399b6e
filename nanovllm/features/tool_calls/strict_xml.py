"""Calls in Qwen3-Coder's form that fit their functions' schemas, as structural tags (features/grammar/tags.py).

A text stands in it as it is, without quotes, so what a schema says of a text becomes regular expressions.
"""

import json
import re
from functools import lru_cache
from typing import Any

from nanovllm.features.grammar.schemas import checked_schema, close
from nanovllm.features.grammar.tags import in_regex
from nanovllm.features.tool_calls.schema_types import Schema, alternatives, in_standard_words, words

DEFINITIONS = ("$defs", "definitions")
END = "\n</parameter>\n"
MAX_LENGTH = 5000  # characters that are counted
MAX_PATTERN = 1000  # characters of one
_DAY, _TIME = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_ZONED, _BYTE = rf"{_TIME}(\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])", "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
FORMATS = {
    "date": _DAY,
    "time": _ZONED,
    "date-time": f"{_DAY}T{_ZONED}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+",
}
# Of an ECMA pattern, what is not a regular expression of llguidance, or means something else there.
ESCAPES = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]", "/": "/"}
TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[=!<][=!]?|.", re.DOTALL)


def xml_tags(schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """schemas: name -> schema. With the outer tags, which some answers leave out, and without."""
    calls = [(name, _parameters(schema)) for name, schema in schemas.items()]
    frames = (("<tool_call>\n", "\n</tool_call>"), ("", ""))
    return [
        {"type": "tag", "begin": f"{before}<function={name}>\n", "content": content, "end": f"</function>{behind}"}
        for before, behind in frames
        for name, content in calls
    ]


def not_held(name: str, schema: Any) -> list[str]:
    """What a function's schema says and its calls need not fit, as a warning names it."""
    options = alternatives(schema or {})
    if len(options) != 1:
        return [f"'anyOf' of {name[:40]!a}"]
    properties = options[0].get("properties")
    found = []
    for parameter, value in properties.items() if isinstance(properties, dict) else ():
        for part in alternatives(value, schema):
            if "string" in part.get("type", ()) and words(part) is None:
                found += [f"{keyword[:40]!a} of {name[:40]!a}, {parameter[:40]!a}" for keyword in _fits(part)[1]]
    return found


def _parameters(given: Any) -> dict[str, Any]:
    """In the schema's order, those that are not required perhaps. Any, where it names none."""
    schema = in_standard_words(checked_schema(given or {"type": "object", "properties": {}}))
    close(schema)
    options = alternatives(schema)
    if len(options) != 1 or "properties" not in options[0]:
        return {"type": "any_text"}
    shared = {name: schema[name] for name in DEFINITIONS if name in schema}
    properties, required = options[0]["properties"], options[0].get("required")
    elements: list[dict[str, Any]] = [{"type": "const_string", "value": ""}]
    for name, value in properties.items() if isinstance(properties, dict) else ():
        begin = f"<parameter={name}>\n"
        tags = [{"type": "tag", "begin": begin, "content": form, "end": END} for form in _forms(value, schema, shared)]
        is_required = isinstance(required, list) and name in required
        elements.append(
            {"type": "tags_with_separator", "tags": tags, "at_least_one": is_required, "stop_after_first": True}
        )
    return {"type": "sequence", "elements": elements}


def _forms(schema: Any, root: Schema, shared: dict[str, Any]) -> list[dict[str, Any]]:
    """What a parameter's value may look like."""
    forms: list[dict[str, Any]] = []
    for part in alternatives(schema, root):
        types = part.get("type", ["string"])
        if (known := words(part)) is not None:
            texts = [word if isinstance(word, str) else json.dumps(word, ensure_ascii=False) for word in known]
            forms += [{"type": "const_string", "value": text} for text in texts]
            continue
        if "string" in types:
            fits = _fits(part)[0]
            if not fits:
                return [{"type": "any_text"}]
            forms.append({"type": "any_text", "fits": fits})
        if others := [name for name in types if name != "string"]:
            forms.append({"type": "json_schema", "json_schema": part | {"type": others} | shared})
    return forms or [{"type": "json_schema", "json_schema": {"not": {}}}]


def _fits(schema: Schema) -> tuple[list[str], list[str]]:
    """Regular expressions for all of a text that fits; keywords that could not be said so."""
    fits: list[str] = []
    left_out: list[str] = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", None)
    if least or most is not None:
        if all(isinstance(bound, int) and 0 <= bound <= MAX_LENGTH for bound in (least, most or 0)):
            fits.append(f"(?s:.{{{least},{'' if most is None else most}}})")
        else:
            left_out += [name for name in ("minLength", "maxLength") if name in schema]
    if "pattern" in schema:
        pattern = _all_of(schema["pattern"])
        fits += [] if pattern is None else [pattern]
        left_out += ["pattern"] if pattern is None else []
    if "format" in schema:
        known = FORMATS.get(schema["format"]) if isinstance(schema["format"], str) else None
        fits += [] if known is None else [known]
        left_out += ["format"] if known is None else []
    return fits, left_out


def _all_of(pattern: Any) -> str | None:
    """A pattern, which may match anywhere in a text, as one that matches all of it; None if we have none."""
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        return None
    tokens = TOKENS.findall(pattern)
    is_begun, is_ended = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    tokens = tokens[is_begun : len(tokens) - is_ended]
    depth = 0
    for token in tokens:
        depth += token == "("
        depth -= token == ")"
        if token in ("^", "$", "\\b", "\\B") or token.startswith("(?") or re.fullmatch(r"\\[1-9ckpPuUx]", token):
            return None
        if token == "|" and not depth and (is_begun or is_ended):
            return None
    body = "".join(ESCAPES.get(token[1:], token) if token[0] == "\\" else _in_class(token) for token in tokens)
    whole = f"{'' if is_begun else '(?s:.*)'}({body}){'' if is_ended else '(?s:.*)'}"
    return whole if _is_regular(whole) else None


@lru_cache
def _is_regular(pattern: str) -> bool:
    """Does llguidance know all that is in it?"""
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: /{in_regex(pattern)}/"))


def _in_class(token: str) -> str:
    """Inside of [...] a class may stand in a class."""
    return re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), token, flags=re.DOTALL)
