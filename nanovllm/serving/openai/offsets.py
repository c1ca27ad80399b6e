"""Where tokens begin in the text that was returned: text_offset of a completion's logprobs.

Tokens are bytes and the text is characters: a token may be a part of a character, have no text (a special token), or
stand for bytes that are none. An offset depends on the token and on those before it, so a stream has the same.
"""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterable

from nanovllm.files.token_bytes import TokenBytes

REACH = 16  # characters of a text in which a token is looked for that is not where it should be


def text_offsets(known: TokenBytes, token_ids: Iterable[int], text: str, is_whole: bool) -> list[int]:
    """In characters: of the first one that the token has, or has a part of. is_whole: no more text comes."""
    offsets: list[int] = []
    at = 0  # where the text goes on after the characters that are complete
    is_first = True
    decoder = getincrementaldecoder("utf-8")("replace")
    for token_id in token_ids:
        own = known.of(token_id, is_first)
        if token_id in known.special_ids and not text.startswith(own.decode(), at + _has_begun(decoder)):
            offsets.append(at)  # it is not shown
            continue
        is_first = is_first and not known.of(token_id)
        first = decoder.decode(own[:1])
        num_before = max(0, len(first) - (not _has_begun(decoder)))  # a character that it has broken off
        new = first + decoder.decode(own[1:])
        start = _place(text, at, new, is_whole)
        offsets.append(max(at, start + num_before))
        at = start + len(new)
    return [min(offset, len(text)) for offset in offsets] if is_whole else offsets


def _has_begun(decoder: IncrementalDecoder) -> bool:
    """Is there a character of which it has the first bytes, and no more yet?"""
    return bool(decoder.getstate()[0])


def _place(text: str, at: int, shown: str, is_whole: bool) -> int:
    """Where this comes in the text, if not before `at`."""
    if text.startswith(shown, at) or (not is_whole and shown.startswith(text[at:])):
        return at
    without_space = shown.lstrip(" ")
    if without_space and text.startswith(without_space, at):
        return at - (len(shown) - len(without_space))
    found = text.find(shown, at, at + len(shown) + REACH)
    return at if found < 0 else found


def is_text(token: bytes) -> bool:
    """False for a part of a character."""
    return token.decode(errors="replace").encode() == token


def byte_name(token: bytes) -> str:
    """OpenAI's way to write a token that is no text."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
