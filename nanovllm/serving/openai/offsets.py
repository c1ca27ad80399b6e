"""Where tokens begin in the text that was returned: text_offset of a completion's logprobs.

Tokens are bytes and the text is characters: a token may be a part of a character, have no text (a special token), or
stand for bytes that are none. An offset depends on the token and on those before it, so a stream has the same.
"""

from collections.abc import Iterable

from nanovllm.files.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"  # in a text, for bytes that are no character
REACH = 16  # characters of a text in which a token is looked for that is not where it should be


def text_offsets(known: TokenBytes, token_ids: Iterable[int], text: str, is_whole: bool) -> list[int]:
    """In characters; of each part of a character the character's. is_whole: no more text comes."""
    offsets: list[int] = []
    at, undecided = 0, b""
    for token_id in token_ids:
        own = known.of(token_id)
        if token_id in known.special_ids:
            offsets.append(at)
            if text.startswith(own.decode(), at):
                at, undecided = at + len(own.decode()), b""
            continue
        undecided += own
        shown = undecided.decode(errors="replace")
        if shown.endswith(REPLACEMENT):
            offsets.append(at)
            continue
        start = _place(text, at, shown, is_whole)
        offsets.append(max(at, start + len(shown) - _num_chars_of(own)))
        at, undecided = start + len(shown), b""
    return [min(offset, len(text)) for offset in offsets] if is_whole else offsets


def _num_chars_of(token: bytes) -> int:
    """The characters that it has, or has a part of."""
    own = token.lstrip(bytes(range(0x80, 0xC0)))  # the rest of a character
    return (len(own) < len(token)) + len(own.decode(errors="replace"))


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
