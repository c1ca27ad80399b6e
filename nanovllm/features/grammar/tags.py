"""Structural tags: a form for parts of a text, such as the calls of functions in an answer (chapter 8).

A tag is a beginning, a content that has to fit something, and an end. The words are those of XGrammar, which vLLM's
structural_tag uses; here they become a grammar in Lark's notation, as llguidance extends it.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from nanovllm.checks.values import check_text, shorten
from nanovllm.features.grammar.lark import nested, quoted
from nanovllm.features.grammar.schemas import lark_of_json

TEXT = "TAGS_TEXT: /(.|\\n)*/"
MAX_PARTS = 2000  # of a structural tag: each is a rule


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
        tags = [
            {"begin": part.get("begin"), "content": {"type": "json_schema", "json_schema": part.get("schema")}} | part
            for part in _objects(tag, "structures")
        ]
        form: Any = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    else:
        form = tag.get("format") if isinstance(tag, dict) else None
    rules = Rules(is_closed, options or {}, token_ids or {})
    try:
        beginning = rules.of(form)
    except RecursionError:
        raise ValueError("its formats are nested too deeply") from None
    return "\n".join([f"start: {beginning}", *rules.lines, TEXT])


class Rules:
    """lines: the rules that what has been translated refers to."""

    def __init__(self, is_closed: bool, options: dict[str, Any], token_ids: dict[str, int]) -> None:
        self.is_closed, self.options, self.token_ids = is_closed, options, token_ids
        longest_first = sorted(filter(None, token_ids), key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self.lines: list[str] = []
        self._names: dict[str, str] = {}  # of rules, by what they are

    def of(self, form: Any) -> str:
        """An expression for a format. Raises ValueError."""
        kinds = {
            "const_string": lambda: self._literal(_text(form, "value")),
            "json_schema": lambda: self._json(form, "json"),
            "qwen_xml_parameter": lambda: self._json(form, "parameters"),
            "any_text": lambda: "TAGS_TEXT",
            "sequence": lambda: " ".join(map(self.of, _objects(form, "elements"))),
            "or": lambda: " | ".join(map(self.of, _objects(form, "elements"))),
            "tag": lambda: self._tag(form, _text(form, "begin")),
            "tags_with_separator": lambda: self._separated(form),
            "triggered_tags": lambda: self._triggered(form),
        }
        if not isinstance(form, dict) or form.get("type") not in list(kinds):  # a list is no key of a dict
            raise ValueError(f"a format is an object with a type ({', '.join(kinds)}), found {shorten(form)}")
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

    def _json(self, form: dict[str, Any], written: str) -> str:
        given = form.get("json_schema")
        is_closed = self.is_closed or form.get("strict_mode") is True
        return nested(lark_of_json({} if given is True else given, is_closed, self.options, written))

    def _tag(self, form: dict[str, Any], begin: str) -> str:
        content = form.get("content")
        end = _text(form, "end") if "end" in form else ""
        if isinstance(content, dict) and content.get("type") == "any_text":
            if not end:
                raise ValueError("the content of a tag must say where it ends; any_text does not, without an end")
            fits = content.get("fits", [])
            if not isinstance(fits, list) or not all(isinstance(pattern, str) for pattern in fits):
                raise ValueError(f"fits must be a list of regular expressions, found {shorten(fits)}")
            return f"{self._literal(begin)} {self._text_until(end, fits)}"
        return f"{self._literal(begin)} {self.of(content)} {self._literal(end)}"

    def _text_until(self, end: str, fits: Iterable[str] = ()) -> str:
        """Any text up to the first place where this end comes, and the end. fits: regular expressions for all of it."""
        head = self._tokens.split(end)[0]  # a token after it, or in its place, ends a text by itself
        is_whole = head == end
        text = "TAGS_TEXT"
        if fits:
            others = [f"~/(?s:.*){in_regex(re.escape(head))}(?s:.*)/"] if is_whole else []
            text = self._terminal(" & ".join([*(f"/{in_regex(pattern)}/" for pattern in fits), *others]))
        if is_whole:
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

    def _triggered(self, form: dict[str, Any]) -> str:
        """Text in which tags may stand: where a trigger comes, one of those that begin with it follows."""
        triggers = form.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(t and isinstance(t, str) for t in triggers):
            raise ValueError(f"triggers must be a list of texts, none of them empty, found {shorten(triggers)}")
        if lost := [tag for tag in _objects(form, "tags") if not _text(tag, "begin").startswith(tuple(triggers))]:
            raise ValueError(f"a tag must begin with one of the triggers, found {shorten(lost[0])}")
        calls = []
        for trigger in triggers:
            calls.append(self._rule(f"{self._text_until(trigger)} {self._tags(form, trigger)}"))
        call = self._rule(" | ".join(calls))
        if form.get("stop_after_first"):
            return call if form.get("at_least_one") else f"{call} | TAGS_TEXT"
        return f"{call}{'+' if form.get('at_least_one') else '*'} TAGS_TEXT"


def in_regex(pattern: str) -> str:
    """As it may stand between two slashes, on one line."""
    return pattern.replace("/", "\\/").replace("\\\n", "\n").replace("\n", "\\n").replace("\r", "\\r")


def _text(form: Any, name: str) -> str:
    return check_text(name, form.get(name))


def _objects(form: Any, name: str) -> list[dict[str, Any]]:
    found = form.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(part, dict) for part in found):
        raise ValueError(f"{name} must be a list of objects, not empty, found {shorten(found)}")
    return found
