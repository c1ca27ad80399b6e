"""A grammar that begins where a model's reasoning ends: what it thinks may be any text (chapter 8)."""

import ctypes
from copy import copy
from typing import TYPE_CHECKING, Any

from nanovllm.features.grammar.base import GrammarPart

if TYPE_CHECKING:
    from nanovllm.features.grammar.grammar import Grammar


class AfterReasoning(GrammarPart):
    """Asked as a Grammar is. Nothing of it is known before the reasoning has ended.

    opening, closing   texts around the reasoning; opening is "" where the prompt has opened it
    A model that may open it itself does so with its first token, or not at all. What the token that ends the closing
    text carries beyond it (`>{"`) is the grammar's: such a token is possible only if the grammar can begin like that.
    """

    def __init__(self, grammar: "Grammar", tokenizer: Any, opening: str, closing: str) -> None:
        self.grammar, self.tokenizer, self.opening, self.closing = grammar, tokenizer, opening, closing
        self.vocab_size, self.eos_token_ids = grammar.vocab_size, grammar.eos_token_ids
        opens = tokenizer.encode(opening, add_special_tokens=False) if opening else []
        self._opening_id = opens[0] if len(opens) == 1 else None
        self._closing = closing.encode()
        self._endings = grammar.vocabulary.endings_of(self._closing)
        # Tokens that were looked at, and those that the grammar has to take in; None: they are reasoning.
        self._known: tuple[list[int], list[int] | None] = [], None

    def __copy__(self) -> "AfterReasoning":
        return AfterReasoning(copy(self.grammar), self.tokenizer, self.opening, self.closing)

    @property
    def error(self) -> str:  # pyrefly: ignore[bad-override]  # the grammar sets it
        return self.grammar.error

    def is_complete(self, token_ids: list[int]) -> bool:
        part = self._part(token_ids)
        return part is not None and self.grammar.is_complete(part)

    def write_mask(self, token_ids: list[int], address: int, num_bytes: int) -> None:
        if (part := self._part(token_ids)) is not None:
            self.grammar.write_mask(part, address, num_bytes)
            if not token_ids and self._opening_id is not None:
                _byte_of(self._opening_id, address).value |= 1 << self._opening_id % 8
            return
        ctypes.memset(address, 0xFF, num_bytes)
        # With EOS, the answer would end without what it has to have.
        for token in (*self.eos_token_ids, *self._wrong_endings(token_ids)):
            _byte_of(token, address).value &= ~(1 << token % 8)

    def possible(self, token_ids: list[int], draft: list[int]) -> list[int]:
        for n, token_id in enumerate(draft):
            before = token_ids + draft[:n]
            if not before and self.opening and token_id == self._opening_id:
                continue
            if (part := self._part(before)) is not None:
                return draft[:n] + self.grammar.possible(part, draft[n:])
            if token_id in self._wrong_endings(before):
                return draft[:n]
        return draft

    def _part(self, token_ids: list[int]) -> list[int] | None:
        """What the grammar has to take in; None while the reasoning goes on."""
        vocabulary = self.grammar.vocabulary
        if self.opening and (not token_ids or token_ids[0] != self._opening_id):
            return token_ids
        known, part = self._known
        if part is not None and token_ids[: len(known)] == known:
            return part + token_ids[len(known) :]
        # Back to what both share: a rejected draft may be at its end. No token but its last may end the reasoning.
        start = min(len(known) - (part is not None), len(token_ids))
        while token_ids[:start] != known[:start]:
            start -= 1
        most = len(self._closing)  # tokens that it may come in
        for end in range(start + 1, len(token_ids) + 1):
            _, closed, carried = vocabulary.decode(token_ids[max(0, end - most) : end]).partition(self._closing)
            if closed:
                part = vocabulary.encode(carried)
                self._known = token_ids[:end], part
                return part + token_ids[end:]
        self._known = list(token_ids), None
        return None

    def _wrong_endings(self, token_ids: list[int]) -> list[int]:
        """Tokens that would end the reasoning and carry what the grammar cannot begin with."""
        tail = self.grammar.vocabulary.decode(token_ids[-len(self._closing) :])
        endings = [e for num, those in self._endings.items() if tail.endswith(self._closing[:num]) for e in those]
        return [token for token, carried in endings if not self._fits(self.grammar.vocabulary.encode(carried))]

    def _fits(self, token_ids: list[int]) -> bool:
        """Can the grammar begin like that?"""
        return self.grammar.possible([], token_ids) == token_ids


def _byte_of(token: int, address: int) -> ctypes.c_ubyte:
    """That of a mask which has the token's bit."""
    return ctypes.c_ubyte.from_address(address + token // 8)
