"""Where tokens begin in the text that was returned: text_offset of a completion's logprobs.

Tokens are bytes and the text is characters: a token may be a part of a character, have no text (a special token), or
stand for bytes that are none. An offset depends on the token and on those before it, so a stream has the same.
"""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterable

from nanovllm.files.token_bytes import TokenBytes

NOTHING_LEFT = (b"", 0)
REACH = 16  # characters of a text in which a token is looked for that is not where it should be
MAX_OPEN = 64  # tokens without text after them that may still move: each call looks at all of these again


class TextOffsets:
    """Those of an answer that grows. num_before: characters before it. prompt_token_ids: see Detokenizer.

    What has come far enough after a token, text or MAX_OPEN tokens, decides where it is, whatever else may come.
    """

    def __init__(self, known: TokenBytes, num_before: int = 0, prompt_token_ids: Iterable[int] = ()) -> None:
        self._known, self._num_before = known, num_before
        self._num_settled = 0  # tokens, and what is known after them:
        self._at = 0  # where the text goes on after the characters that are complete
        self._is_first = not known.has_text(prompt_token_ids)
        self._bytes_left = NOTHING_LEFT  # of a character, the decoder's state

    def of(self, token_ids: list[int], text: str, is_whole: bool, first: int = 0) -> list[int]:
        """In characters: of the first one that a token has, or has a part of; of the tokens from `first` on.

        is_whole: no more text comes. token_ids, text: all so far. first: no smaller than in the calls before.
        """
        offsets: list[int] = []
        at, is_first, begin = self._at, self._is_first, self._num_settled
        decoder = getincrementaldecoder("utf-8")("replace")
        decoder.setstate(self._bytes_left)
        is_settled = True
        for place, token_id in enumerate(token_ids[begin:], begin):
            own = self._known.of(token_id, is_first)
            is_far = len(text) >= at + len(own) + REACH + 2 or place + MAX_OPEN <= len(token_ids)
            is_settled = is_settled and is_far
            if token_id in self._known.special_ids and not text.startswith(own.decode(), at + _has_begun(decoder)):
                offsets.append(at)  # it is not shown
            else:
                is_first = is_first and not self._known.of(token_id)
                head = decoder.decode(own[:1])
                num_broken = max(0, len(head) - (not _has_begun(decoder)))  # a character that it has broken off
                new = head + decoder.decode(own[1:])
                start = _place(text, at, new, is_whole)
                offsets.append(max(at, start + num_broken))
                at = start + len(new)
            if is_settled:
                self._num_settled, self._at, self._is_first = place + 1, at, is_first
                self._bytes_left = decoder.getstate()
        asked = offsets[first - begin :]
        return [self._num_before + (min(offset, len(text)) if is_whole else offset) for offset in asked]


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
