"""What a chat template reads, found out by rendering: short chats whose words are marks, looked for in the text.

A template's source does not say it. Content that is read as a list of parts, through a variable, a macro or a filter,
leaves a text out without a word; one that is read as a text shows a list as Python writes it.
"""

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

from nanovllm.features.chat_template.messages import OBJECT, ONE_PART, PARTS, STRING, TEXT, Message, as_parts
from nanovllm.features.chat_template.renderer import render

ID = "a1b2c3d4e"  # of a call; Mistral's templates take nine letters and digits
FIRST, SECOND, KEY = "qzfirstzq", "qzsecondzq", "qzkeyzq"  # no template has these words
DUMPED = "qzpartzq"  # a key of parts: seen only where a whole part is written out
SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": FIRST, "description": "x", "parameters": SCHEMA}}
ARGUMENTS: dict[str, Any] = {OBJECT: {KEY: "x"}, TEXT: json.dumps({KEY: "x"})}


@dataclass(frozen=True, slots=True)
class Reads:
    """content: role -> the forms that are shown, as they should be: STRING, PARTS, ONE_PART (the first of a list).

    A role that is refused or left out has none.
    arguments         of calls, the forms that are shown as they should be: OBJECT, TEXT
    tools, calls, results   are they shown?
    developer         is that a role of its own?
    none              is a content of None as good as an empty one, in a message with calls, in one without?
    """

    content: dict[str, frozenset[str]] = field(default_factory=dict)
    arguments: frozenset[str] = frozenset()
    tools: bool = False
    calls: bool = False
    results: bool = False
    developer: bool = False
    none: frozenset[bool] = frozenset()

    def forms(self, role: str) -> frozenset[str]:
        """The forms that a role's content may have; a role that was not tried has the user's."""
        return self.content.get(role) or self.content.get("user", frozenset())

    def describe(self) -> dict[str, str]:
        """For a person, who wants to know how a checkpoint's template is read."""
        names = {STRING: "text", PARTS: "parts", ONE_PART: "one part"}
        shown = {
            role: " or ".join(names[form] for form in names if form in forms) or "not shown"
            for role, forms in self.content.items()
        }
        return {
            "content": ", ".join(f"{role}: {forms}" for role, forms in shown.items()) or "not shown",
            "tools": "shown" if self.tools else "not shown: they are described as text",
            "calls": "shown, arguments as " + " or ".join(sorted(self.arguments)) if self.calls else "not shown",
            "results": "shown" if self.results else "not shown",
            "developer": "a role of its own" if self.developer else "told as system",
        }


def reads_of(template: str, special: dict[str, Any], kwargs: dict[str, Any]) -> Reads:
    """special: the tokenizer's special tokens, by their names. kwargs: what the template asks for by name."""
    try:
        plain = json.dumps(special)
        return _found(template, plain) or _found(template, json.dumps(special | kwargs)) or Reads()
    except (TypeError, ValueError, RecursionError):
        return Reads()


@lru_cache(maxsize=256)
def _found(template: str, options: str) -> Reads | None:
    """None for a template that takes none of these chats: it asks for something else by name."""
    trial = _Trial(template, json.loads(options))
    before = trial.find_beginning()
    if before is None:
        return None
    user = trial.user
    content = {
        "user": user,
        "system": trial.forms(lambda told: [{"role": "system", "content": told}, trial.question]),
        "assistant": trial.forms(
            lambda told: [*before, trial.question, {"role": "assistant", "content": told}, trial.question]
        ),
    }
    tools = trial.render([*before, trial.question], tools=[TOOL])
    calls = _calls_of(trial, before, content["assistant"])
    knows_developer = re.search("['\"]developer['\"]", template) is not None and bool(
        trial.forms(lambda told: [{"role": "developer", "content": told}, trial.question])
    )
    return Reads(
        content | {"tool": calls.results},
        arguments=calls.arguments,
        tools=tools is not None and FIRST in tools,
        calls=calls.are_shown,
        results=bool(calls.results),
        developer=knows_developer,
        none=frozenset(has_calls for has_calls in (True, False) if trial.takes_none(before, has_calls)),
    )


def written_call(template: str, special: dict[str, Any], call: dict[str, Any]) -> str | None:
    """What a template makes of a call, and what comes with it. None if it shows no calls."""
    reads = reads_of(template, special, {})
    if not reads.calls:
        return None
    arguments = call["arguments"] if OBJECT in reads.arguments else json.dumps(call["arguments"])
    properties = {name: {"type": "string", "description": "x"} for name in call["arguments"]}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    tool = {"type": "function", "function": {"name": call["name"], "description": "x", "parameters": schema}}
    made = {"id": ID, "type": "function", "function": {"name": call["name"], "arguments": arguments}}
    question, words = (_in_form(text, reads.forms(role)) for text, role in ((FIRST, "user"), ("", "assistant")))
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": words, "tool_calls": [made]}]
    try:
        return render(template, chat, special | {"tools": [tool]}).rpartition(FIRST)[2]
    except ValueError:
        return None


def _in_form(text: str, forms: frozenset[str]) -> Any:
    return text if STRING in forms or not forms else as_parts(text)


class _Trial:
    """Short chats for one template.

    question: a user's message of one word, in a form that the template shows. user: the forms that it shows.
    """

    def __init__(self, template: str, options: dict[str, Any]) -> None:
        self.template, self.options = template, options
        self.question: Message = {}
        self.user: frozenset[str] = frozenset()

    def render(self, conversation: list[Message], **options: Any) -> str | None:
        """None for a chat that is refused."""
        try:
            return render(self.template, conversation, self.options | {"add_generation_prompt": True} | options)
        except ValueError:
            return None

    def find_beginning(self) -> list[Message] | None:
        """What has to come before a user's message: mostly nothing, and tools only where a template insists on them.

        None if no user's message is shown.
        """
        systems: list[list[Message]] = [[{"role": "system", "content": content}] for content in ("x", as_parts("x"))]
        for tools, before in product((None, [TOOL]), ([], *systems)):
            self.options["tools"] = tools
            self.user = self.forms(lambda told, before=before: [*before, {"role": "user", "content": told}])
            if self.user:
                self.question = {"role": "user", "content": "x" if STRING in self.user else as_parts("x")}
                return before
        return None

    def forms(self, chat: Any) -> frozenset[str]:
        """chat: a content -> a conversation with it."""
        first, second = ({"type": "text", "text": text, DUMPED: ""} for text in (FIRST, SECOND))
        found = set()
        for form, content in ((STRING, FIRST), (PARTS, [first, second]), (ONE_PART, [first])):
            text = self.render(chat(content))
            if text is None or FIRST not in text or DUMPED in text or (form == PARTS and SECOND not in text):
                continue
            found.add(form)
        return frozenset(found)

    def takes_none(self, before: list[Message], has_calls: bool) -> bool:
        call = {"id": ID, "type": "function", "function": {"name": FIRST, "arguments": {KEY: "x"}}}
        calls = {"tool_calls": [call]} if has_calls else {}
        texts = [
            self.render([*before, self.question, {"role": "assistant", "content": content, **calls}, self.question])
            for content in (None, "")
        ]
        none, empty = texts
        return none is not None and (empty is None or none.count("None") == empty.count("None"))


@dataclass(frozen=True, slots=True)
class _Calls:
    are_shown: bool
    arguments: frozenset[str]
    results: frozenset[str]


def _calls_of(trial: _Trial, before: list[Message], assistant: frozenset[str]) -> _Calls:
    """A call and its result, with arguments and content in each form."""
    words = as_parts("") if STRING not in assistant and assistant else ""
    first, second = ({"type": "text", "text": text, DUMPED: ""} for text in (FIRST, SECOND))
    contents = {STRING: FIRST, PARTS: [first, second], ONE_PART: [first]}
    called = {"type": "function", "function": TOOL["function"] | {"name": "f"}}
    arguments_found, results, are_shown = set(), set(), False
    for (kind, arguments), (form, content) in product(ARGUMENTS.items(), contents.items()):
        call = {"id": ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "tool", "tool_call_id": ID, "name": "f", "content": content}
        chat = [*before, trial.question, {"role": "assistant", "content": words, "tool_calls": [call]}, answer]
        text = trial.render(chat, tools=[called])
        if text is None:
            continue
        if KEY in text:
            are_shown = True
            if not re.search(rf"\\\"{KEY}|'{KEY}'", text):  # a text as JSON, an object as Python writes it
                arguments_found.add(kind)
        if FIRST in text and DUMPED not in text and (form != PARTS or SECOND in text):
            results.add(form)
    return _Calls(are_shown, frozenset(arguments_found), frozenset(results))
