"""What llguidance says of a schema, or of a part of a grammar.

An answer may take much time and memory, so the process of a sandbox asks (sandboxed_grammars.py).
"""

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper


class Bytes:
    """A tokenizer whose tokens are bytes: what llguidance bounds badly does not depend on the tokens."""

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


class Oracle:
    """limits: llguidance's, for each grammar. Answers are remembered."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.limits = LLParserLimits(**limits)
        self._formats: dict[str, bool] = {}
        self._possible: dict[str, bool] = {}  # by the text of a schema
        self._patterns: dict[str, LLMatcher | None] = {}  # None: no text fits it

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at its beginning. Raises ValueError for a grammar that cannot be used."""
        matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=self.limits)
        if error := matcher.get_error():
            raise ValueError(error)
        return matcher

    def schema_matcher(self, schema: Any) -> LLMatcher:
        """A matcher of JSON that fits a schema, as llguidance itself compiles it. Raises ValueError."""
        return self.matcher(LLMatcher.grammar_from_json_schema(schema))

    def knows(self, format_name: str) -> bool:
        """Does it know this format of strings?"""
        if format_name not in self._formats:
            try:
                self.schema_matcher({"type": "string", "format": format_name})
                self._formats[format_name] = True
            except ValueError:
                self._formats[format_name] = False
        return self._formats[format_name]

    def is_possible(self, schema: Any) -> bool:
        """Does any value fit this schema? Raises ValueError for a schema that cannot be used."""
        text = json.dumps(schema)
        if text not in self._possible:
            try:
                self.schema_matcher(text)
                self._possible[text] = True
            except ValueError as error:
                if "Unsatisfiable" not in str(error):
                    raise
                self._possible[text] = False
        return self._possible[text]

    def has_text(self, lark: str) -> bool:
        """Does any text fit this grammar?"""
        matcher = self.matcher(lark)
        matcher.compute_bitmask()
        return not matcher.get_error().startswith("NoExtension")

    def fits(self, pattern: str, text: str) -> bool:
        """Does the pattern match somewhere in the text?"""
        if pattern not in self._patterns:
            schema = {"type": "string", "pattern": pattern}
            self._patterns[pattern] = self.schema_matcher(schema) if self.is_possible(schema) else None
        beginning = self._patterns[pattern]
        if beginning is None:
            return False
        matcher = beginning.deep_copy()
        written = list(json.dumps(text, ensure_ascii=False).encode())
        return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()
