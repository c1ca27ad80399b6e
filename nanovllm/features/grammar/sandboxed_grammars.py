"""What is asked about grammars: does this one compile? See checks/sandbox.py."""

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from


class Bytes:
    """A tokenizer whose tokens are bytes: what llguidance bounds badly does not depend on the tokens."""

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))
MAX_NAMES, MAX_STATES = 32, 200  # a pattern that fits more names, or longer ones, is taken to fit any number


def answer(kind: str, text: str, limits: dict[str, Any]) -> str:
    """ "convert": the grammar in Lark's notation. "compile": nothing, if it can be. Raises what is wrong with it.

    "names": for each of a list of patterns the names that fit it; null where they are many.
    """
    if kind == "convert":
        return grammar_from("grammar", text)
    if kind == "names":
        return json.dumps([names_of(pattern, limits) for pattern in json.loads(text)])
    matcher = LLMatcher(TOKENIZER, text, log_level=0, limits=LLParserLimits(**limits))
    if error := matcher.get_error():
        raise ValueError(error)
    matcher.compute_bitmask()  # a failure here is one of the first token: it is explained in the other process
    return ""


def names_of(pattern: str, limits: dict[str, Any]) -> list[str] | None:
    """All names of properties that fit a pattern, or None. What is wrong with a pattern is said when it is compiled."""
    schema = {"type": "object", "patternProperties": {pattern: {"const": 0}}, "additionalProperties": False}
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=LLParserLimits(**limits))
    matcher.consume_tokens(list(b"{"))
    beginnings, names = [(b"", matcher)], list[str]()
    for num_states, (text, state) in enumerate(beginnings):
        if num_states == MAX_STATES or len(names) > MAX_NAMES or matcher.is_error():
            return None
        allowed = [byte for byte, is_allowed in enumerate(bits(state)) if is_allowed]
        if not text:
            allowed = [byte for byte in allowed if byte == ord('"')]
        for byte in allowed:
            if text and byte == ord('"') and not ends_in_escape(text):
                names.append(json.loads(text + b'"'))
                continue
            following = state.deep_copy()
            following.consume_token(byte)
            beginnings.append((text + bytes([byte]), following))
    return names


def bits(matcher: LLMatcher) -> list[bool]:
    """Of the bytes that may follow."""
    mask = matcher.compute_bitmask()
    return [bool(mask[byte // 8] >> byte % 8 & 1) for byte in range(256)]


def ends_in_escape(text: bytes) -> bool:
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1
