"""Detokenizer: token ids -> text as it grows, and the stop strings in it.

A token is not a piece of text: one character can span several tokens (an emoji is four bytes), and a token's text can
depend on the one before it. So new text is the difference between two decodings of the last few tokens, and bytes
that may still become a character are held back. When the sequence is over, the text is what the tokenizer makes of
all its tokens.
"""

from typing import Any

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are not a character, or not yet
MAX_HELD_TOKENS = 32  # bytes that are not a character after so many tokens will not become one


class Detokenizer:
    """Text of one sample. `text` grows by append() and never changes what it showed."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self.restart([])

    def restart(self, token_ids: list[int]) -> None:
        """Begin anew with these tokens."""
        self._token_ids: list[int] = []
        self._context = 0  # token_ids[_context:_read] are decoded only to see what the next ones add to them
        self._read = 0
        self._context_text = ""
        self._search_from = 0  # no stop string begins before this character
        self.text = ""
        self.append(token_ids)

    def append(self, token_ids: list[int]) -> str | None:
        """Take the next tokens. Returns the stop string that ends the text, if one does; it is cut off the text."""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._grow()
            if len(self._token_ids) < self._min_tokens:
                self._search_from = len(self.text)
            elif (stop := self._find_stop()) is not None:
                return stop
        return None

    def visible_text(self) -> str:
        """The text without an ending that may turn out to be the beginning of a stop string."""
        for length in range(max(map(len, self._stop), default=1) - 1, 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return self.text[:-length]
        return self.text

    def _grow(self) -> None:
        window = decode(self.tokenizer, self._token_ids[self._context :])
        undecided = window.endswith(REPLACEMENT) and len(self._token_ids) - self._read < MAX_HELD_TOKENS
        if undecided or len(window) <= len(self._context_text):
            return
        self.text += window[len(self._context_text) :]
        self._context, self._read = self._read, len(self._token_ids)
        self._context_text = decode(self.tokenizer, self._token_ids[self._context :])

    def _find_stop(self) -> str | None:
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, self._search_from)) >= 0]
        if not found:
            longest = max(map(len, self._stop), default=1)
            self._search_from = max(self._search_from, len(self.text) - longest + 1)
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        return stop


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """The tokenizer's text for these ids, special tokens left out."""
    return tokenizer.decode(token_ids, skip_special_tokens=True)
