"""Detokenizer: token ids -> text as it grows, and the stop strings in it.

A token is not a piece of text: one character can span several tokens (an emoji is four bytes), so bytes that may still
become a character are held back, and left out if the sequence ends there. What was shown never changes, and the text of
a whole answer is the text of its stream.
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from nanovllm.files.token_bytes import TokenBytes, token_bytes
from nanovllm.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # shown for bytes that are not a character
MAX_HELD_TOKENS = 32  # bytes that are not a character after this many tokens will not become one
NUM_BEFORE = 6  # tokens of the prompt on which those of an answer may depend


class Detokenizer:
    """Text of one sample. append() adds to `text`, or cuts it at a stop string. token_ids: all tokens so far.

    The text goes on from that of the prompt, if this has any: SentencePiece's vocabularies leave out a first space, and
    an answer's first token is not the first one.
    A sequence with stop strings has it as its stop_checker: the scheduler appends each token that it accepts.
    """

    def __init__(
        self, tokenizer: Any, params: SamplingParams | None = None, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.params = params or SamplingParams()
        self._is_first = not token_bytes(tokenizer).has_text(prompt_token_ids)
        self._before = list(prompt_token_ids[-NUM_BEFORE:])
        self._stop: tuple[str, ...] = tuple(self.params.stop)
        self.restart([])

    def whole_text(self, token_ids: list[int]) -> str:
        """The text of a sequence that has ended with these tokens."""
        if self.token_ids != token_ids:
            self.restart(token_ids)
        return self.text

    def restart(self, token_ids: list[int]) -> None:
        """Forget all tokens and start over with these."""
        known = token_bytes(self.tokenizer)
        self._source: BytesText | WindowedText
        if known.is_exact:
            self._source = BytesText(known, self.params.skip_special_tokens, self._is_first)
        else:
            self._source = WindowedText(self.tokenizer, self.params, self._before)
        self.token_ids: list[int] = []
        self._searched = 0  # no stop string ends before this character
        self._shown = 0  # no stop string that may still come begins before this character
        self.text = ""
        self.append(token_ids)

    def append(self, token_ids: list[int]) -> str | None:
        """Take the next tokens. Returns the stop string that ends the text, if one does; the text is cut there."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            self.text += self._source.add(token_id)
            if len(self.token_ids) <= self.params.min_tokens:
                self._searched = len(self.text)
                continue
            stop = self._find_stop()
            if stop is not None:
                return stop
        return None

    def visible_text(self) -> str:
        """The text without an ending that may turn out to be the beginning of a stop string."""
        if self.params.include_stop_str_in_output:
            return self.text
        longest = max(map(len, self._stop), default=1)
        self._shown = max(self._shown, len(self.text) - longest + 1)
        # It only grows: what has gone on otherwise than a stop string will not become one.
        while self._shown < len(self.text) and not any(s.startswith(self.text[self._shown :]) for s in self._stop):
            self._shown += 1
        return self.text[: self._shown]

    def _find_stop(self) -> str | None:
        """The stop string that ends first in the text that has not been searched. Cuts the text there."""
        ends = {}  # stop string -> where it ends in the text
        for stop in self._stop:
            start = self.text.find(stop, max(0, self._searched - len(stop) + 1))
            if start >= 0:
                ends[stop] = start + len(stop)
        self._searched = len(self.text)
        if not ends:
            return None
        first = min(ends, key=lambda stop: ends[stop])
        end = ends[first] if self.params.include_stop_str_in_output else ends[first] - len(first)
        self.text = self.text[:end]
        return first


class BytesText:
    """The text of tokens that each stand for certain bytes, as in nearly all vocabularies."""

    def __init__(self, known: TokenBytes, skip_special_tokens: bool, is_first: bool) -> None:
        self._known = known
        self._skipped = known.special_ids if skip_special_tokens else set[int]()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._is_first = is_first

    def add(self, token_id: int) -> str:
        """Take the next token. Returns the text that it adds."""
        if token_id in self._skipped:
            return ""
        piece = self._known.of(token_id, self._is_first)
        if self._is_first and self._known.of(token_id):  # an id without bytes does not begin the text
            self._is_first = False
        return self._decoder.decode(piece)


class WindowedText:
    """The same for other vocabularies: the difference between two decodings of the last few tokens."""

    def __init__(self, tokenizer: Any, params: SamplingParams, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._token_ids = list(before)
        # token_ids[prefix_offset:read_offset] are decoded only to see what the tokens from read_offset on add to them.
        self._prefix_offset = 0
        self._read_offset = len(before)
        self._shown = self._decode(before)  # the part of the text of token_ids[prefix_offset:] that has been returned

    def add(self, token_id: int) -> str:
        """Take the next token. Returns the text that it adds."""
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
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
        )
