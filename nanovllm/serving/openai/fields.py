"""Fields of a body that nobody here knows, at the top and inside the objects that this server reads.

Clients send new fields before servers know them. They are left out, and whoever sent them is told: in a header of the
answer (of a batch job, in the record), and once in the log. A field that is known and asks for what this engine does
not do is refused (checks/names.py).
"""

import difflib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nanovllm.checks.names import neutral_options
from nanovllm.features.chat_template.messages import KEYS_OF_IMAGES
from nanovllm.serving.openai.openai_request import KNOWN_BY_URL

logger = logging.getLogger("nanovllm")

MAX_NAMED, MAX_CHARS = 10, 40  # of names in a warning, of characters in a name
_told: set[str] = set()  # names that the log has
MAX_TOLD = 100

# What is known of a value. None: it is not looked into. A mapping of names: it is an object with these fields ("*": any
# other name). A list of one: it is a list of such values. A tuple: at any other value the field is left out. A function
# finds out, from the value, which of these holds.
Known = None | Mapping[str, Any] | list[Any] | tuple[Any, ...] | Callable[[Any], Any]


def fields(*names: str, **inside: Known) -> dict[str, Known]:
    return dict.fromkeys(names) | inside


def by_type(known: Mapping[str, Known], default: str = "") -> Callable[[Any], Known]:
    """The fields of an object, by its type. Another type is not looked into, but refused or left out as a whole."""

    def of(value: Any) -> Known:
        kind = value.get("type", default) if isinstance(value, dict) else None
        return known.get(kind) if isinstance(kind, str) else None

    return of


IMAGE = fields("url", detail=("auto",))  # how many details are seen the image processor decides
PARTS = {  # of a message's content, by their types. An image in a part of text is refused by features/chat_template
    **dict.fromkeys(("text", "input_text", "output_text"), fields("type", "text", *KEYS_OF_IMAGES)),
    "refusal": fields("type", "refusal", *KEYS_OF_IMAGES),
    "image_url": fields("type", image_url=IMAGE),
    "input_image": fields("type", image_url=IMAGE, detail=("auto",)),
    "image": fields("type", "image", "url", "path", image_url=IMAGE),
}
FORM_OF_JSON = fields("type", "schema", json_schema=fields("name", "description", "schema", "strict"))
DOCUMENTS = ("documents", "items", "text_2", "data_2")  # of /rerank and /score


def _document(value: Any) -> Known:
    return fields("text") if isinstance(value, dict) and "text" in value else None


INSIDE: dict[str, Known] = {
    "messages": [{"*": None, "content": [by_type(PARTS, "text")]}],  # a template may read any field
    "response_format": by_type(
        {
            "text": fields("type"),
            "json_object": FORM_OF_JSON,
            "json_schema": FORM_OF_JSON,
            "structural_tag": fields("type", "format", "structures", "triggers"),
        }
    ),
    "stream_options": fields("include_usage", "continuous_usage_stats", "include_obfuscation"),
    "tool_choice": by_type(
        {
            "function": fields("type", function=fields("name")),
            "allowed_tools": fields("type", "mode", "tools", allowed_tools=fields("mode", "tools")),
        }
    ),
}
INSIDE_OF_PAIRS: dict[str, Known] = {name: [_document] for name in DOCUMENTS}
KNOWN = set().union(neutral_options("body"), *KNOWN_BY_URL.values())


def without_unknown(
    body: dict[str, Any], known: Collection[str] = KNOWN, inside: Mapping[str, Known] = INSIDE
) -> tuple[dict[str, Any], list[str]]:
    """The body without nulls and without fields that nobody knows; their names, as a warning shows them.

    inside: what is known of the fields' values.
    """
    unknown: list[str] = []
    return _kept(body, {name: inside.get(name) for name in known}, "", unknown), unknown


def _kept(value: Any, known: Known, path: str, unknown: list[str]) -> Any:
    """The value without what is unknown in it, whose names are added to unknown. path: where the value is."""
    if callable(known):
        known = known(value)
    if isinstance(known, list) and isinstance(value, list):
        return [_kept(item, known[0], f"{path}[{place}]", unknown) for place, item in enumerate(value)]
    if not isinstance(known, Mapping) or not isinstance(value, dict):
        return value
    kept = {}
    for name, inner in value.items():
        inside = known.get(name, known.get("*"))
        is_known = (name in known or "*" in known) and not (isinstance(inside, tuple) and inner not in inside)
        if inner is None:
            continue
        if is_known:
            kept[name] = _kept(inner, inside, f"{path}.{name}" if path else name, unknown)
        else:
            _add(name, known, path, unknown)
    return kept


def _add(name: str, known: Mapping[str, Known], path: str, unknown: list[str]) -> None:
    where = f"{path}: " if path else ""
    if name not in _told and len(_told) < MAX_TOLD:
        _told.add(name)
        shown = f"{where}{_shown(name, known)}"
        logger.warning(f"a field that nobody here knows was left out of a request: {shown}; said once")
    unknown.append(f"{where}{_shown(name, known if len(unknown) < MAX_NAMED else {})}")


def _shown(name: str, known: Mapping[str, Known]) -> str:
    """known: where to look for a name like it, which takes half a millisecond."""
    near = [other for other in difflib.get_close_matches(name[:MAX_CHARS], known, n=1) if other != name]
    return f"{name[:MAX_CHARS]!a}{f' (did you mean {near[0]!r}?)' if near else ''}"


def warning_of(names: list[str]) -> str:
    """One line; "" if there are none."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"left out, because nobody here knows it: {', '.join(names[:MAX_NAMED])}{more}" if names else ""


def warning_headers(warning: str) -> dict[str, str]:
    """HTTP's field for it (RFC 7234, section 5.5)."""
    text = warning.replace("\\", "\\\\").replace('"', '\\"')
    return {"Warning": f'299 nanovllm "{text}"'} if warning else {}
