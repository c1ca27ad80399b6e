"""A grammar that begins where a model's reasoning ends: what it thinks may be any text (chapter 8)."""

import ctypes
from copy import copy
from typing import TYPE_CHECKING, Any

from nanovllm.features.reasoning.think import end_of_reasoning

if TYPE_CHECKING:
    from nanovllm.features.grammar.grammar import Grammar


class AfterReasoning:
    """Asked as a Grammar is. Nothing of it is known before the reasoning has ended.

    opening, closing   texts around the reasoning; opening is "" where the prompt has opened it
    A model that may open it itself does so with its first token, or not at all.
    """

    def __init__(self, grammar: "Grammar", tokenizer: Any, opening: str, closing: str) -> None:
        self.grammar, self.tokenizer, self.opening, self.closing = grammar, tokenizer, opening, closing
        self.vocab_size, self.eos_token_ids = grammar.vocab_size, grammar.eos_token_ids
        opens = tokenizer.encode(opening, add_special_tokens=False) if opening else []
        self._opening_id = opens[0] if len(opens) == 1 else None
        self._known: tuple[list[int], int | None] = [], None  # tokens that were looked at, and how many are reasoning

    def __copy__(self) -> "AfterReasoning":
        return AfterReasoning(copy(self.grammar), self.tokenizer, self.opening, self.closing)

    @property
    def error(self) -> str:
        return self.grammar.error

    def is_complete(self, token_ids: list[int]) -> bool:
        begins = self._begins(token_ids)
        return begins is not None and self.grammar.is_complete(token_ids[begins:])

    def write_mask(self, token_ids: list[int], address: int, num_bytes: int) -> None:
        if (begins := self._begins(token_ids)) is None:
            ctypes.memset(address, 0xFF, num_bytes)
            for token in self.eos_token_ids:  # the answer would end without what it has to have
                _byte_of(token, address).value &= ~(1 << token % 8)
            return
        self.grammar.write_mask(token_ids[begins:], address, num_bytes)
        if not token_ids and self._opening_id is not None:
            _byte_of(self._opening_id, address).value |= 1 << self._opening_id % 8

    def possible(self, token_ids: list[int], guesses: list[int]) -> list[int]:
        for n in range(len(guesses)):
            if (begins := self._begins(token_ids + guesses[:n])) is not None:
                before = (token_ids + guesses[:n])[begins:]
                return guesses[:n] + self.grammar.possible(before, guesses[n:])
        return guesses

    def _begins(self, token_ids: list[int]) -> int | None:
        """How many tokens are reasoning; None while it goes on."""
        if self.opening and (not token_ids or token_ids[0] != self._opening_id):
            return 0
        known, begins = self._known
        num = len(known)
        if token_ids[:num] != known:
            num, begins = 0, None
        if begins is None:
            begins = end_of_reasoning(self.tokenizer, token_ids, self.closing, num)
        self._known = token_ids[:begins], begins
        return begins


def _byte_of(token: int, address: int) -> ctypes.c_ubyte:
    """That of a mask which has the token's bit."""
    return ctypes.c_ubyte.from_address(address + token // 8)
