"""The bytes that a vocabulary's tokens stand for. A tokenizer's decode() has none for a part of a character."""

import json
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

WORD_BEGIN = "\u2581"  # a space, in SentencePiece's vocabularies


def _bytes_of_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: the printable ones of Latin-1 stand for themselves, 256 and above for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _bytes_of_alphabet()


class TokenBytes:
    """Of one tokenizer. Special tokens have the bytes of their texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._convert, self._decode, self._size = tokenizer.convert_ids_to_tokens, tokenizer.decode, len(tokenizer)
        special = set(tokenizer.all_special_ids)
        for token_id, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
            special |= {token_id} if added.special else set()  # others are words like those of the vocabulary
        texts = tokenizer.get_added_vocab().items()
        self._special = {token_id: text.encode() for text, token_id in texts if token_id in special}
        self._decoders = set(_decoders(tokenizer))

    def of(self, token_id: int) -> bytes:
        """b"" for an id that no token has."""
        if (special := self._special.get(token_id)) is not None:
            return special
        try:
            piece = self._convert(token_id)
        except (IndexError, OverflowError):
            return b""
        if isinstance(piece, bytes) or not piece:
            return piece or b""
        if "ByteLevel" in self._decoders:
            if BYTE_OF.keys() >= set(piece):
                return bytes(BYTE_OF[letter] for letter in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        if "WordPiece" in self._decoders:
            return piece[2:].encode() if piece.startswith("##") else f" {piece}".encode()
        return piece.replace(WORD_BEGIN, " ").encode(errors="replace")

    @cached_property
    def all(self) -> list[bytes]:
        return [self.of(token_id) for token_id in range(self._size)]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


_known: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> TokenBytes:
    """Made once for a tokenizer."""
    if tokenizer not in _known:
        _known[tokenizer] = TokenBytes(tokenizer)
    return _known[tokenizer]


def _decoders(tokenizer: Any) -> list[str]:
    """The types of the steps by which its pieces become a text."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    steps = [json.loads(decoder.__getstate__())]
    for step in steps:
        steps.extend(step.get("decoders", ()))
    return [step["type"] for step in steps]
