"""The bytes that each token of a vocabulary stands for. A text's bytes are those of its tokens, one after another.

A tokenizer's own decode() does not serve where bytes are no whole characters: of a run of byte tokens, the `tokenizers`
library makes replacement characters if any of them is broken, also of those that were characters before it came.
"""

import json
import re
from collections.abc import Iterable
from functools import cache, cached_property
from typing import Any

BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
WORD_BEGIN = "\u2581"  # a space, in SentencePiece's vocabularies
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}  # the whole text loses one space at its beginning


def token_bytes(tokenizer: Any) -> "TokenBytes":
    """Made once for each tokenizer, which keeps them."""
    if not hasattr(tokenizer, "_token_bytes"):
        tokenizer._token_bytes = TokenBytes(tokenizer)
    return tokenizer._token_bytes


class TokenBytes:
    """The bytes of each token of one tokenizer.

    is_exact     False where a token's text depends on its neighbours, as in BERT's vocabularies
    special_ids  of the tokens that skip_special_tokens leaves out; others that were added are text
    """

    def __init__(self, tokenizer: Any) -> None:
        steps = _steps(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
        self.is_exact = _is_by_token(steps)
        added = tokenizer.added_tokens_decoder
        self._added_ids = set(added)
        self.special_ids = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._convert = tokenizer.convert_ids_to_tokens
        self._size = len(tokenizer)
        self._steps = {step["type"]: step for step in steps}
        self._replaced = [step for step in steps if step["type"] == "Replace"]
        self._known: dict[int, bytes] = {}

    @cached_property
    def all(self) -> list[bytes]:
        return [self.of(token_id) for token_id in range(self._size)]

    def of(self, token_id: int, is_first: bool = False) -> bytes:
        """b"" for an id that no token has. is_first: of its text, where SentencePiece's vocabularies drop a space."""
        if is_first:
            own = self._read(token_id, is_first=True)
            return own.removeprefix(b" ") if self._steps.get("Strip") == STRIP else own
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id, is_first=False)
        return self._known[token_id]

    def has_text(self, token_ids: Iterable[int]) -> bool:
        """Not if all of them are special, or none."""
        return any(token_id not in self.special_ids and self.of(token_id) for token_id in token_ids)

    def _read(self, token_id: int, is_first: bool) -> bytes:
        try:
            text = self._convert(token_id)
        except (IndexError, OverflowError):
            return b""
        if isinstance(text, bytes) or not text:
            return text or b""
        for step in self._replaced:
            text = re.sub(_pattern(step), step["content"].replace("\\", r"\\"), text)
        if "ByteFallback" in self._steps and (byte := BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        if "ByteLevel" in self._steps:
            values = byte_of_sign()
            is_spelled = all(sign in values for sign in text)  # special tokens may be plain text
            return bytes(values[sign] for sign in text) if is_spelled else text.encode()
        if "Metaspace" in self._steps:
            metaspace = self._steps["Metaspace"]
            is_dropped = is_first and metaspace["prepend_scheme"] != "never"
            text = text.replace(metaspace["replacement"], "" if is_dropped else " ")
        if "WordPiece" in self._steps and token_id not in self._added_ids:
            text = text[2:] if text.startswith("##") else f" {text}"
        if not self._steps:  # a tokenizer of transformers' own code
            text = text.replace(WORD_BEGIN, " ")
        return text.encode(errors="replace")


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state.get("decoders", [state])


def _pattern(step: dict[str, Any]) -> str:
    pattern = step["pattern"]
    return re.escape(pattern["String"]) if "String" in pattern else pattern["Regex"]


def _is_by_token(steps: list[dict[str, Any]]) -> bool:
    """Does the decoder treat each token alone, and of the whole text at most drop the space that it begins with?"""
    kinds = [step["type"] for step in steps]
    known = {"ByteLevel", "Replace", "ByteFallback", "Metaspace"}
    if "Fuse" in kinds:
        at = kinds.index("Fuse")
        return set(kinds[:at]) <= known and all(step == STRIP for step in steps[at + 1 :])
    return bool(kinds) and set(kinds) <= known


@cache
def byte_of_sign() -> dict[str, int]:
    """Byte-level vocabularies have a visible sign for each byte: its own character, or one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
