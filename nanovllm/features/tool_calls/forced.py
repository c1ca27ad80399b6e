"""Calls that an answer is made to have, as a structural tag (features/grammar/tags.py); each fits a schema.

Where a format's calls are JSON objects, the form is the model's own; otherwise it is a list of objects.
"""

import json
from collections.abc import Iterator, Set
from itertools import chain, islice
from typing import Any

from nanovllm.features.grammar.patterns import fits_of
from nanovllm.features.grammar.schemas import checked_schema
from nanovllm.features.tool_calls.json_formats import MISTRAL, NAME
from nanovllm.features.tool_calls.parse import FORCED_LIST
from nanovllm.features.tool_calls.schema_types import (
    MAX_STEPS,
    Patterns,
    Root,
    in_standard_words,
    member_of,
    names_of,
    options,
)

# format -> text before a call's name, before its arguments, after them, and between two calls
HERMES = '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"
LLAMA = '{"name": ', ', "parameters": ', "}", "; "
LIST = '{"name": ', ', "arguments": ', "}", ", "
FRAMES = {"hermes": HERMES, "llama3_json": LLAMA, "llama4_json": LLAMA}
XML = ("qwen3_coder", "qwen3_xml")
TRIGGERS = {  # what calls begin with in a text
    "hermes": ("<tool_call>",),
    **dict.fromkeys(("llama3_json", "llama4_json"), ('{"name": ',)),
    **dict.fromkeys(XML, ("<tool_call>", "<function=")),
    "mistral": (MISTRAL,),
}
MAX_PARTS = 30_000  # of a request's schemas that not_held() looks at: some tenths of a second
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as chat templates write it


def forced_format(format_name: str) -> str:
    """The format of answers that are made to call."""
    return format_name if format_name in FRAMES or format_name == "mistral" else FORCED_LIST


def must_call(format_name: str, functions: dict[str, Any], several: bool = True) -> dict[str, Any]:
    """Calls and nothing else. functions: name -> schema. Raises ValueError for a schema that is none."""
    frame = FRAMES.get(format_name, LIST)
    tags = [_tag(frame, name, schema) for name, schema in functions.items()]
    calls = {"type": "tags_with_separator", "tags": tags, "separator": frame[3], "at_least_one": True}
    calls["stop_after_first"] = not several
    if format_name in FRAMES:
        return calls
    first = {"type": "const_string", "value": f"{MISTRAL if format_name == 'mistral' else ''}["}
    return {"type": "sequence", "elements": [first, calls, {"type": "const_string", "value": "]"}]}


def may_call(
    format_name: str, functions: dict[str, Any], strict: Set[str], several: bool = True
) -> dict[str, Any] | None:
    """Any text, in which calls of the strict functions fit their schemas. None for a format that has no such form."""
    if format_name not in TRIGGERS:
        return None
    schemas = {name: schema if name in strict else {"type": "object"} for name, schema in functions.items()}
    if format_name == "mistral":
        tags = _tags_of_mistral(schemas, several)
    elif format_name in XML:
        tags = _tags_of_xml(functions, strict)
    else:
        tags = [_tag(FRAMES[format_name], name, schema) for name, schema in schemas.items()]
    calls: dict[str, Any] = {"type": "triggered_tags", "triggers": [*TRIGGERS[format_name]], "tags": tags}
    return calls | {"stop_after_first": not several}


def not_held(format_name: str, functions: dict[str, Any], strict: Set[str]) -> tuple[str, ...]:
    """What of strict functions' schemas calls under may_call need not fit, as a warning names it."""
    if format_name not in TRIGGERS:
        return (f"strict, which calls in the form {format_name} cannot be held to",) if strict else ()
    named = functions.items() if format_name in XML else ()
    patterns, places = Patterns(), iter(range(MAX_PARTS))
    found = [_not_held_in_xml(name, schema, patterns, places) for name, schema in named if name in strict]
    return tuple(chain.from_iterable(found))


def _not_held_in_xml(name: str, given: Any, patterns: Patterns, places: Iterator[int]) -> list[str]:
    """Where a text has no quotes, it cannot be held to all that can be said of one.

    places: an entry for each part of a schema that may still be looked at.
    """
    root = Root(in_standard_words(given), patterns)
    num_ways = len(options(root.schema, root))
    found = []
    for parameter in names_of(root):
        ways = options(member_of(root, parameter), root)
        num_parts = num_ways + (sum(map(len, ways)) or MAX_STEPS)  # nothing is found where there is too much
        if len([*islice(places, num_parts)]) < num_parts:
            return [*found, f"what else is said of the parameters of {name[:40]!a}"]
        for parts in ways:
            left_out = dict.fromkeys(keyword for part in parts for keyword in fits_of(part)[1])
            found += [f"{keyword[:40]!a} of {name[:40]!a}, {parameter[:40]!a}" for keyword in left_out]
    return found


def _tags_of_xml(functions: dict[str, Any], strict: Set[str]) -> list[dict[str, Any]]:
    """With the outer tags, which some answers leave out, and without."""
    tags = []
    for before, after in (("<tool_call>\n", "\n</tool_call>"), ("", "")):
        for name, schema in functions.items():
            content = _fitting(schema, "qwen_xml_parameter") if name in strict else {"type": "any_text"}
            begin, end = f"{before}<function={name}>\n", f"</function>{after}"
            tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return tags


def _tags_of_mistral(schemas: dict[str, Any], several: bool) -> list[dict[str, Any]]:
    """A list after the marker, as older models write it, or one call, as newer ones do, some with an id."""
    in_list = [_tag(LIST, name, schema) for name, schema in schemas.items()]
    calls = {"type": "tags_with_separator", "tags": in_list, "separator": LIST[3], "at_least_one": True}
    calls["stop_after_first"] = not several
    lists = [{"type": "tag", "begin": f"{MISTRAL}{space}[", "content": calls, "end": "]"} for space in ("", " ")]
    call_id = {"type": "regex", "pattern": "[A-Za-z0-9]{9}"}
    alone = []
    for name, tag in zip(schemas, in_list, strict=True):
        arguments = tag["content"]
        with_id = {"type": "sequence", "elements": [call_id, {"type": "const_string", "value": "[ARGS]"}, arguments]}
        if NAME.fullmatch(name):
            for between, content in (("[ARGS]", arguments), ("", arguments), ("[CALL_ID]", with_id)):
                alone.append({"type": "tag", "begin": f"{MISTRAL}{name}{between}", "content": content, "end": ""})
    return lists + alone


def _tag(frame: tuple[str, str, str, str], name: str, schema: Any) -> dict[str, Any]:
    before, between, after, _ = frame
    begin = f"{before}{json.dumps(name, ensure_ascii=False)}{between}"
    return {"type": "tag", "begin": begin, "content": _fitting(schema, "json_schema"), "end": after}


def _fitting(given: Any, form: str) -> dict[str, Any]:
    """Arguments that fit a function's schema. What a function does not name it does not take."""
    schema = in_standard_words(checked_schema(given or {"type": "object", "properties": {}}))
    spaces = {"x-guidance": SPACES} if form == "json_schema" else {}
    return {"type": form, "json_schema": {"type": "object"} | schema | spaces, "strict_mode": True}
