"""The bytes of a vocabulary's tokens, where a grammar has to begin in the middle of one."""

from functools import cache
from typing import Any


class Vocabulary:
    """tokens: llguidance's view of a tokenizer. Special tokens are the bytes of their texts."""

    def __init__(self, tokens: Any) -> None:
        self._tokens = tokens
        self.endings_of = cache(self._endings_of)

    def decode(self, token_ids: list[int]) -> bytes:
        return self._tokens.decode_bytes(token_ids)

    def encode(self, text: bytes) -> list[int]:
        return self._tokens.tokenize_bytes(text)

    def _endings_of(self, closing: bytes) -> dict[int, list[tuple[int, bytes]]]:
        """Tokens that end a closing text and go on: how many of its bytes have come before -> (token, what is carried).

        Of GPT-2's kind of vocabulary, ">{" and '>\\n' end "</think>" when its first seven bytes have come.
        """
        found: dict[int, list[tuple[int, bytes]]] = {}
        for token in range(self._tokens.vocab_size):
            piece = self.decode([token])
            if closing[-1] not in piece:
                continue
            _, whole, carried = piece.partition(closing)
            if whole and carried:
                found.setdefault(0, []).append((token, carried))
            for num in range(1, len(closing)):
                ending = closing[num:]
                if piece.startswith(ending) and len(piece) > len(ending):
                    found.setdefault(num, []).append((token, piece[len(ending) :]))
        return found
