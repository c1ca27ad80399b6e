"""Structural tags: a form for parts of a text, such as the calls of functions in an answer (chapter 8).

A tag is a beginning, a content that has to fit something, and an end. The words are those of XGrammar, which vLLM's
structural_tag uses; here they become a grammar in Lark's notation, as llguidance extends it.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from nanovllm.checks.values import check_text, shorten
from nanovllm.features.grammar.lark import NO_FORCING, nested, quoted
from nanovllm.features.grammar.notations import lark_of_grammar, lark_of_regex
from nanovllm.features.grammar.schemas import lark_of_json

TEXT = "TAGS_TEXT: /(.|\\n)*/"
MAX_PARTS = 2000  # of a structural tag: each is a rule
# Of each type, the fields that are heeded. fits and strict_mode are not XGrammar's.
FIELDS = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "strict_mode"},
    "qwen_xml_parameter": {"json_schema", "strict_mode"},
    "any_text": {"excludes", "fits"},
    "regex": {"pattern"},
    "grammar": {"grammar"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    "triggered_tags": {"triggers", "tags", "excludes", "at_least_one", "stop_after_first"},
}
STYLES = {"json": "json", "qwen_xml": "parameters"}  # of a JSON schema's texts
# Texts, one of which comes after a format. It is translated together with them, as any text goes on until one of them
# comes. None: the answer ends there. (): something else comes, and any text would never end.
Ends = tuple[str, ...] | None


def lark_of(
    given: Any, is_closed: bool = False, options: dict[str, Any] | None = None, token_ids: dict[str, int] | None = None
) -> str:
    """A structural tag, as an object or as JSON text, as a grammar. Raises ValueError.

    {"format": FORMAT}, or in the older form {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}.
    is_closed: objects have only the properties that their schema names. options: of llguidance's JSON. token_ids: of
    texts for which the model has one token; llguidance tells such a token from the same text in pieces.
    """
    try:
        tag = json.loads(given if isinstance(given, str) else json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}; found {shorten(given)}") from error
    if isinstance(tag, dict) and "structures" in tag:
        tags = []
        for part in _objects(tag, "structures"):
            content = {"type": "json_schema", "json_schema": part.get("schema")}
            others = {name: value for name, value in part.items() if name != "schema"}
            tags.append({"begin": part.get("begin"), "content": content} | others)
        form: Any = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    else:
        form = tag.get("format") if isinstance(tag, dict) else None
    rules = Rules(is_closed, options or {}, token_ids or {})
    try:
        beginning = rules.of(form)
    except RecursionError:
        raise ValueError("its formats are nested too deeply") from None
    return "\n".join([f"start: {beginning}", *rules.lines, TEXT]) + NO_FORCING * rules.may_swallow


class Rules:
    """lines: the rules that what has been translated refers to. may_swallow: whether NO_FORCING has to follow them."""

    def __init__(self, is_closed: bool, options: dict[str, Any], token_ids: dict[str, int]) -> None:
        self.is_closed, self.options, self.token_ids = is_closed, options, token_ids
        longest_first = sorted(filter(None, token_ids), key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self.lines: list[str] = []
        self.may_swallow = False
        self._names: dict[str, str] = {}  # of rules, by what they are

    def of(self, form: Any, ends: Ends = None) -> str:
        """An expression for a format and its ends. Raises ValueError."""
        kinds = {
            "const_string": lambda: self._ended(self._literal(_text(form, "value")), ends),
            "json_schema": lambda: self._ended(self._json(form, form.get("style", "json")), ends),
            "qwen_xml_parameter": lambda: self._ended(self._json(form, "qwen_xml"), ends),
            "any_text": lambda: self._any_text(ends, _texts(form, "excludes"), _texts(form, "fits")),
            "regex": lambda: self._regex(_text(form, "pattern"), ends),
            "grammar": lambda: self._grammar(_text(form, "grammar"), ends),
            "sequence": lambda: self._sequence(_objects(form, "elements"), ends),
            "or": lambda: " | ".join(self.of(part, ends) for part in _objects(form, "elements")),
            "tag": lambda: self._ended(self._tag(form, _text(form, "begin")), ends),
            "tags_with_separator": lambda: self._ended(self._separated(form), ends),
            "triggered_tags": lambda: self._triggered(form, ends),
        }
        if not isinstance(form, dict) or form.get("type") not in list(kinds):  # a list is no key of a dict
            raise ValueError(f"a format is an object with a type ({', '.join(kinds)}), found {shorten(form)}")
        _check_fields(form, form["type"])
        return self._rule(kinds[form["type"]]())

    def _rule(self, expression: str, kind: str = "") -> str:
        """The name of the expression's rule. kind: "[lazy]" for one that ends at the first place where it can."""
        key = f"{kind}: {expression}"
        if key not in self._names:
            self._names[key] = name = f"tags_{len(self.lines)}"
            self._add(f"{name}{key}")
        return self._names[key]

    def _terminal(self, expression: str) -> str:
        """The name of a terminal, which takes all the text that it can."""
        name = f"TAGS_{len(self.lines)}"
        self._add(f"{name}: {expression}")
        return name

    def _add(self, line: str) -> None:
        if len(self.lines) == MAX_PARTS:
            raise ValueError(f"a structural tag has at most {MAX_PARTS} parts, found more")
        self.lines.append(line)

    def _literal(self, text: str) -> str:
        parts = ((self.token_ids.get(part), part) for part in self._tokens.split(text) if part)
        return " ".join(quoted(part) if token_id is None else f"<[{token_id}]>" for token_id, part in parts)

    def _json(self, form: dict[str, Any], style: Any) -> str:
        if style not in list(STYLES):
            raise ValueError(f"style must be {' or '.join(STYLES)}, found {shorten(style)}")
        given = form.get("json_schema")
        is_closed = self.is_closed or form.get("strict_mode") is True
        return nested(lark_of_json({} if given is True else given, is_closed, self.options, STYLES[style]))

    def _regex(self, pattern: str, ends: Ends) -> str:
        """Any text that fits, up to the first place where an end can come after it, and the end."""
        self.may_swallow = True
        text = self._terminal(lark_of_regex(pattern).removeprefix("start: "))
        return self._one_of(self._up_to(text, end) for end in ends) if ends else text

    def _grammar(self, grammar: str, ends: Ends) -> str:
        """Its last terminal takes all the text that it can, which an end has no part in."""
        self.may_swallow = True
        return self._ended(nested(lark_of_grammar(grammar)), ends)

    def _ended(self, expression: str, ends: Ends) -> str:
        return f"{expression} {self._one_of(map(self._literal, ends))}" if ends else expression

    def _one_of(self, expressions: Iterable[str]) -> str:
        first, *others = expressions
        return self._rule(" | ".join([first, *others])) if others else first

    def _sequence(self, elements: list[dict[str, Any]], ends: Ends) -> str:
        """A const_string is an end of the element before it."""
        parts = []
        rest = list(elements)
        while rest:
            element = rest.pop(0)
            if rest and rest[0].get("type") == "const_string" and rest[0].get("value"):
                _check_fields(end := rest.pop(0), "const_string")
                parts.append(self.of(element, (_text(end, "value"),)))
                if not rest:
                    parts.append(self._ended("", ends))
            else:
                parts.append(self.of(element, () if rest else ends))
        return " ".join(parts)

    def _tag(self, form: dict[str, Any], begin: str) -> str:
        _check_fields(form, "tag")
        ends = form.get("end", "")
        if not isinstance(ends, list):
            ends = [_text(form, "end")] if ends != "" else []
        elif not ends or not all(isinstance(end, str) and end for end in ends):
            raise ValueError(f"end must be a text, or a list of texts, none of them empty, found {shorten(ends)}")
        return f"{self._literal(begin)} {self.of(form.get('content'), tuple(ends))}"

    def _any_text(self, ends: Ends, excludes: Iterable[str] = (), fits: Iterable[str] = ()) -> str:
        """Any text up to the first place where an end comes, and the end.

        excludes: texts that do not come in it. fits: regular expressions for all of it.
        """
        if ends == ():
            remedy = "its tag has an end, or a const_string follows in its sequence, or it is the last of the answer"
            raise ValueError(f"the text of any_text and triggered_tags must say where it ends: {remedy}")
        text = "TAGS_TEXT"
        if fits or excludes:
            stops = [end for end in ends or () if not self._tokens.search(end)]  # no text has a token
            parts = ["TAGS_TEXT", *(f"/{in_regex(pattern)}/" for pattern in fits)]
            if others := "|".join(in_regex(re.escape(other)) for other in [*excludes, *stops]):
                parts.append(f"~/(?s:.*)({others})(?s:.*)/")
            text = self._terminal(" & ".join(parts))
        return self._one_of(self._up_to(text, end) for end in ends) if ends else text

    def _up_to(self, text: str, end: str) -> str:
        """A terminal of texts, and the end at the first place where it comes."""
        head = self._tokens.split(end)[0]  # a token after it, or in its place, ends a text by itself
        if head == end:
            return self._rule(f"{text} {quoted(head)}", "[lazy]")
        if head:  # the text may have it elsewhere, too: only the token that follows tells that this is the end
            text = self._terminal(f"{text} {quoted(head)}")
        return self._rule(f"{text} {self._literal(end[len(head) :])}")

    def _tags(self, form: dict[str, Any], trigger: str | None = None) -> str:
        """One of the tags; of those that begin with a trigger, what follows it."""
        begins = [(_text(tag, "begin"), tag) for tag in _objects(form, "tags")]
        fitting = [(begin, tag) for begin, tag in begins if trigger is None or begin.startswith(trigger)]
        return self._rule(" | ".join(self._rule(self._tag(tag, begin[len(trigger or "") :])) for begin, tag in fitting))

    def _separated(self, form: dict[str, Any]) -> str:
        tags, separator = self._tags(form), self._literal(_text(form, "separator") if "separator" in form else "")
        some = tags if form.get("stop_after_first") else f"{tags} ({separator} {tags})*"
        return some if form.get("at_least_one") else f"({some})?"

    def _triggered(self, form: dict[str, Any], ends: Ends) -> str:
        """Text in which tags may stand: where a trigger comes, one of those that begin with it follows."""
        triggers = form.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(t and isinstance(t, str) for t in triggers):
            raise ValueError(f"triggers must be a list of texts, none of them empty, found {shorten(triggers)}")
        if lost := [tag for tag in _objects(form, "tags") if not _text(tag, "begin").startswith(tuple(triggers))]:
            raise ValueError(f"a tag must begin with one of the triggers, found {shorten(lost[0])}")
        first = self._tags(form) if form.get("at_least_one") else ""  # no text before it
        if first and form.get("stop_after_first"):
            return self._ended(first, ends)
        excludes, calls = _texts(form, "excludes"), []
        for trigger in triggers:
            calls.append(self._rule(f"{self._any_text((trigger,), excludes)} {self._tags(form, trigger)}"))
        call, text = self._rule(" | ".join(calls)), self._any_text(ends, excludes)
        return f"{self._ended(call, ends)} | {text}" if form.get("stop_after_first") else f"{first} {call}* {text}"


def in_regex(pattern: str) -> str:
    """As it may stand between two slashes, on one line."""
    return pattern.replace("/", "\\/").replace("\\\n", "\n").replace("\n", "\\n").replace("\r", "\\r")


def _text(form: Any, name: str) -> str:
    return check_text(name, form.get(name))


def _texts(form: dict[str, Any], name: str) -> list[str]:
    found = [] if form.get(name) is None else form[name]
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise ValueError(f"{name} must be a list of texts, none of them empty, found {shorten(found)}")
    return found


def _check_fields(form: dict[str, Any], kind: str) -> None:
    """Raises ValueError for what would be dropped. Null, false and [], as clients write defaults, say nothing."""
    if form.get("type", kind) != kind:
        raise ValueError(f"this must be a {kind}, found {shorten(form)}")
    said = {name for name, value in form.items() if not (value is None or value is False or value == [])}
    if unknown := sorted(said - FIELDS[kind] - {"type"}):
        raise ValueError(f"{kind} has no {shorten(unknown[0])} here; it has {', '.join(sorted(FIELDS[kind]))}")


def _objects(form: Any, name: str) -> list[dict[str, Any]]:
    found = form.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(part, dict) for part in found):
        raise ValueError(f"{name} must be a list of objects, not empty, found {shorten(found)}")
    return found
