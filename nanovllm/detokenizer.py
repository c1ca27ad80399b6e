"""Detokenizer: token ids -> text as it grows, and the stop strings in it.

A token is not a piece of text: one character can span several tokens (an emoji is four bytes), so bytes that may still
become a character are held back, and left out if the sequence ends there. What was shown never changes, and the text of
a whole answer is the text of its stream.
"""

from codecs import getincrementaldecoder
from typing import Any

from nanovllm.files.token_bytes import TokenBytes, token_bytes
from nanovllm.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # shown for bytes that are not a character
MAX_HELD_TOKENS = 32  # bytes that are not a character after so many tokens will not become one


class Detokenizer:
    """Text of one sample. `text` grows by append() and never changes what it showed. token_ids: those taken so far.

    A sequence with stop strings has it as its stop_checker: the scheduler appends each token that it accepts.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams = SamplingParams()) -> None:
        self.tokenizer, self.params = tokenizer, params
        self._stop: tuple[str, ...] = tuple(params.stop or ())
        self.restart([])

    def whole_text(self, token_ids: list[int]) -> str:
        """The text of a sequence that has ended with these tokens."""
        if self.token_ids != token_ids:
            self.restart(token_ids)
        return self.text

    def restart(self, token_ids: list[int]) -> None:
        """Begin anew with these tokens."""
        known = token_bytes(self.tokenizer)
        self._source: BytesText | WindowedText
        if known.is_exact:
            self._source = BytesText(known, self.params.skip_special_tokens)
        else:
            self._source = WindowedText(self.tokenizer, self.params)
        self.token_ids: list[int] = []
        self._searched = 0  # no stop string ends before this character
        self.text = ""
        self.append(token_ids)

    def append(self, token_ids: list[int]) -> str | None:
        """Take the next tokens. Returns the stop string that ends the text, if one does; the text is cut there."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            self.text += self._source.add(token_id)
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


class BytesText:
    """The text of tokens of which each stands for some bytes: nearly all vocabularies."""

    def __init__(self, known: TokenBytes, skip_special_tokens: bool) -> None:
        self._known = known
        self._skipped = known.special_ids if skip_special_tokens else set[int]()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._is_first = True

    def add(self, token_id: int) -> str:
        """The text that is there now, and was not before."""
        if token_id in self._skipped:
            return ""
        piece = self._known.of(token_id, self._is_first)
        if self._is_first and self._known.of(token_id):  # an id without a token begins no text
            self._is_first = False
        return self._decoder.decode(piece)


class WindowedText:
    """The same for other vocabularies: the difference between two decodings of the last few tokens."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._token_ids: list[int] = []
        # token_ids[prefix_offset:read_offset] are decoded only to see what the tokens from read_offset on add to them.
        self._prefix_offset = 0
        self._read_offset = 0
        self._shown = ""  # of the text of token_ids[prefix_offset:]

    def add(self, token_id: int) -> str:
        """The text that is there now, and was not before."""
        self._token_ids.append(token_id)
        window = self._decode(self._token_ids[self._prefix_offset :])
        is_held = window.endswith(REPLACEMENT) and len(self._token_ids) - self._read_offset < MAX_HELD_TOKENS
        if is_held:
            window = window.rstrip(REPLACEMENT)
        if len(window) <= len(self._shown):
            return ""
        new = window[len(self._shown) :]
        self._shown = window
        if not is_held:
            self._prefix_offset = self._read_offset
            self._read_offset = len(self._token_ids)
            self._shown = self._decode(self._token_ids[self._prefix_offset :])
        return new

    def _decode(self, token_ids: list[int]) -> str:
        skip, spaces = self._params.skip_special_tokens, self._params.spaces_between_special_tokens
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
