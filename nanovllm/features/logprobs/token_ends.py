"""Where in an answer's text its tokens end: which of them a piece of that text is made of."""

from typing import Any

from nanovllm.detokenizer import Detokenizer
from nanovllm.sampling_params import SamplingParams


class TokenEnds:
    """Grows with an answer. A token that adds no text of its own belongs to the text that comes next."""

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        decoding = SamplingParams(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._detokenizer = Detokenizer(tokenizer, decoding, prompt_token_ids)
        self._ends: list[int] = []  # of each token
        self._num_waiting = 0  # tokens at the end that have added no text
        self._num_given = 0

    def grow(self, token_ids: list[int], num_chars: int | None = None) -> None:
        """token_ids: all so far. num_chars: of the text, which is complete; tokens may have had more, a stop string."""
        for token_id in token_ids[len(self._ends) + self._num_waiting :]:
            before = len(self._detokenizer.text)
            self._detokenizer.append([token_id])
            self._num_waiting += 1
            if len(self._detokenizer.text) > before:
                self._ends += [len(self._detokenizer.text)] * self._num_waiting
                self._num_waiting = 0
        if num_chars is not None:
            self._ends = [min(end, num_chars) for end in self._ends] + [num_chars] * self._num_waiting
            self._num_waiting = 0

    def take(self, start: int, end: int) -> range:
        """Places of the tokens that end in text[start:end], and have not been asked for."""
        first = self._num_given
        while first < len(self._ends) and self._ends[first] <= start < end:
            first += 1
        self._num_given = first
        while self._num_given < len(self._ends) and self._ends[self._num_given] <= end:
            self._num_given += 1
        return range(first, self._num_given)
