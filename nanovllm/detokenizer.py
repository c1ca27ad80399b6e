"""Detokenizer: token ids -> text as it grows, and the stop strings in it.

A token is not a piece of text: one character can span several tokens (an emoji is four bytes), and a token's text can
depend on the one before it. So new text is the difference between two decodings of the last few tokens, and bytes
that may still become a character are held back, and left out if the sequence ends there. Otherwise the text is, in the
end, what the tokenizer makes of all its tokens.
"""

from typing import Any

from nanovllm.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are not a character, or not yet
MAX_HELD_TOKENS = 32  # bytes that are not a character after so many tokens will not become one


class Detokenizer:
    """Text of one sample. `text` grows by append() and never changes what it showed. token_ids: those taken so far."""

    def __init__(self, tokenizer: Any, params: SamplingParams = SamplingParams()) -> None:
        self.tokenizer, self.params = tokenizer, params
        self._stop: tuple[str, ...] = tuple(params.stop or ())
        self.restart([])

    def decode(self, token_ids: list[int]) -> str:
        """The tokenizer's text for these ids."""
        skip, spaces = self.params.skip_special_tokens, self.params.spaces_between_special_tokens
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)

    def whole_text(self, token_ids: list[int]) -> str:
        """The text of a sequence that has ended with these tokens."""
        text = self.decode(token_ids)
        if text.endswith(REPLACEMENT) or self._was_forced:
            self.restart(token_ids)
            return self.text
        return text

    def restart(self, token_ids: list[int]) -> None:
        """Begin anew with these tokens."""
        self.token_ids: list[int] = []
        self._context = 0  # token_ids[_context:_read] are decoded only to see what the next ones add to them
        self._read = 0
        self._was_forced = False  # bytes were shown that might still have become a character
        self._context_text = ""
        self._searched = 0  # no stop string ends before this character
        self.text = ""
        self.append(token_ids)

    def append(self, token_ids: list[int]) -> str | None:
        """Take the next tokens. Returns the stop string that ends the text, if one does; the text is cut there."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            self._grow()
            if len(self.token_ids) <= self.params.min_tokens:
                self._searched = len(self.text)
            elif (stop := self._find_stop()) is not None:
                return stop
        return None

    def visible_text(self) -> str:
        """The text without an ending that may turn out to be the beginning of a stop string."""
        longest = 1 if self.params.include_stop_str_in_output else max(map(len, self._stop), default=1)
        for length in range(min(longest - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return self.text[:-length]
        return self.text

    def _grow(self) -> None:
        window = self.decode(self.token_ids[self._context :])
        undecided = window.endswith(REPLACEMENT) and len(self.token_ids) - self._read < MAX_HELD_TOKENS
        self._was_forced |= window.endswith(REPLACEMENT) and not undecided
        if undecided or len(window) <= len(self._context_text):
            return
        self.text += window[len(self._context_text) :]
        self._context, self._read = self._read, len(self.token_ids)
        self._context_text = self.decode(self.token_ids[self._context :])

    def _find_stop(self) -> str | None:
        """The stop string that ends first in what is new."""
        found = [
            (at + len(stop), stop)
            for stop in self._stop
            if (at := self.text.find(stop, max(0, self._searched - len(stop) + 1))) >= 0
        ]
        self._searched = len(self.text)
        if not found:
            return None
        end, stop = min(found, key=lambda each: each[0])
        self.text = self.text[: end if self.params.include_stop_str_in_output else end - len(stop)]
        return stop
