"""The bytes that each token of a vocabulary stands for. A text's bytes are those of its tokens, one after another.

A tokenizer's own decode() does not serve where bytes are no whole characters: of a run of byte tokens, the `tokenizers`
library makes replacement characters if any of them is broken, also of those that were characters before it came.
"""

import json
import re
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_made: "WeakKeyDictionary[Any, TokenBytes | None]" = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> "TokenBytes | None":
    """Made once for each tokenizer. None where a token's text depends on its neighbours, as in BERT's vocabularies."""
    if tokenizer not in _made:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        steps = _steps(getattr(backend, "decoder", None))
        _made[tokenizer] = TokenBytes(backend, steps) if _is_by_token(steps) else None
    return _made[tokenizer]


class TokenBytes:
    """special_ids: of the tokens that skip_special_tokens leaves out."""

    def __init__(self, backend: Any, steps: list[dict[str, Any]]) -> None:
        """steps: those of the tokenizer's decoder, as tokenizer.json has them."""
        self.special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._backend = backend
        self._steps = {step["type"]: step for step in steps}
        self._replaced = [step for step in steps if step["type"] == "Replace"]
        self._known: dict[int, bytes | None] = {}

    def of(self, token_id: int, is_first: bool = False) -> bytes | None:
        """None: there is no such token. is_first: of its text, where SentencePiece's vocabularies drop a space."""
        if is_first:
            return self._read(token_id, is_first=True)
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id, is_first=False)
        return self._known[token_id]

    def _read(self, token_id: int, is_first: bool) -> bytes | None:
        text = self._backend.id_to_token(token_id)
        if text is None:
            return None
        for step in self._replaced:
            text = re.sub(_pattern(step), step["content"].replace("\\", r"\\"), text)
        if "ByteFallback" in self._steps and (byte := BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        if "ByteLevel" in self._steps:
            values = _byte_of_sign()
            is_spelled = all(sign in values for sign in text)  # special tokens may be plain text
            return bytes(values[sign] for sign in text) if is_spelled else text.encode()
        if "Metaspace" in self._steps:
            metaspace = self._steps["Metaspace"]
            is_dropped = is_first and metaspace["prepend_scheme"] != "never"
            text = text.replace(metaspace["replacement"], "" if is_dropped else " ")
        if "Strip" in self._steps and is_first:
            text = text.removeprefix(" ")
        return text.encode()


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
        of_whole = [
            step for step in steps[at + 1 :] if step != {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ]
        return set(kinds[:at]) <= known and not of_whole
    return bool(kinds) and set(kinds) <= known


@cache
def _byte_of_sign() -> dict[str, int]:
    """Byte-level vocabularies have a visible sign for each byte: its own character, or one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
