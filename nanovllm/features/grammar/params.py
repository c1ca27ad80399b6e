"""StructuredOutputsParams: what the text of an answer has to fit, as a request says it (chapter 8)."""

from dataclasses import dataclass, fields
from typing import Any

from nanovllm.checks.names import names_checked
from nanovllm.checks.values import list_of, shorten


@names_checked("StructuredOutputsParams")
@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of json, regex, choice, grammar, json_object=True or structural_tag; names and meanings are vLLM's.

    json:          a JSON schema, as a dict or as text
    regex:         a regular expression for the whole text (Rust's syntax: no look-around, no back references)
    choice:        texts, one of which is generated
    grammar:       a context-free grammar in Lark's notation or in GBNF (llama.cpp's); the start symbol is called start
        in the one and root in the other. Lark's terminals take all that they can; GBNF's language is of characters.
        GBNF's tokens (<think>) are not supported
    json_object:   any JSON object
    structural_tag: forms for parts of the text, as an object or as JSON (tags.py)
    disable_any_whitespace:        JSON without line breaks and indentation
    disable_additional_properties: objects of a schema have only the properties that it names
    reasoning: (opening, closing), texts around reasoning that may come first and is free; opening is "" where the
        prompt has opened it. What has to fit begins after it. vLLM takes this from its reasoning parser

    A server's clients may send a grammar that takes 2 s of a processor and 32 MB to compile: 30,000 short choices do,
    100,000 take more. A script's own has no such limit. An answer whose masks take too long ends with finish_reason
    "error".
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        known = [f.name for f in fields(self)[:6]]
        kinds = [name for name in known if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none"
            raise ValueError(f"structured outputs need one of {', '.join(known)}; found {found}")
        if isinstance(self.choice, str) or "" in list_of(self.choice, str, "texts", "choice") or self.choice == []:
            raise ValueError(f"choice must be a list of texts, none of them empty, found {shorten(self.choice)}")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} must be a string, found {shorten(getattr(self, name))}")
        if self.reasoning is not None:
            texts = list_of(self.reasoning, str, "texts", "reasoning")
            if len(texts) != 2 or not texts[1]:
                raise ValueError(f"reasoning must be two texts, its opening and its closing, found {shorten(texts)}")
