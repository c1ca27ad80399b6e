"""A text cut to so many tokens: a piece of the text itself, so that it can be put into a template."""

from bisect import bisect_right
from typing import Any

from nanovllm.prompts import tokenize


class Cut:
    """One text's tokens, without special ones, as places in it. Raises ValueError for what is no text.

    side   "right": the first tokens are kept; "left": the last
    """

    def __init__(self, tokenizer: Any, text: str, side: str) -> None:
        self.tokenizer, self.text, self.side = tokenizer, text, side
        self.num_tokens = self._count(text)
        try:
            spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        except (NotImplementedError, TypeError, KeyError):  # of a tokenizer that is written in Python
            spans = None
        self._spans: list[tuple[int, int]] | None = spans if spans and len(spans) == self.num_tokens else None

    def keep(self, num_tokens: int) -> str:
        """At most so many of its tokens, and no part of a character."""
        if num_tokens <= 0:
            return ""
        if num_tokens >= self.num_tokens:
            return self.text
        if self._spans is None:
            return self._keep_by_counting(num_tokens)
        if self.side == "left":
            return self.text[max(self._spans[-num_tokens][0], self._spans[-num_tokens - 1][1]) :]
        return self.text[: min(self._spans[num_tokens - 1][1], self._spans[num_tokens][0])]

    def _keep_by_counting(self, num_tokens: int) -> str:
        def piece(length: int) -> str:
            return self.text[len(self.text) - length :] if self.side == "left" else self.text[:length]

        lengths = range(len(self.text))
        return piece(bisect_right(lengths, num_tokens, key=lambda length: self._count(piece(length))) - 1)

    def _count(self, text: str) -> int:
        return len(tokenize(self.tokenizer, text, add_special_tokens=False))
