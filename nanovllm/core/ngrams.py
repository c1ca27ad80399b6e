"""Guesses from the text itself: it goes on as it did where its last tokens stood before (chapter 13).

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), and arXiv:2304.04487 before it. Good at
quotes, at edits and at what repeats itself; it costs nothing but the lookup.
"""

from weakref import WeakKeyDictionary

from nanovllm.core.sequence import Sequence


class NgramProposer:
    """Guesses that a text goes on as it did where its last tokens stood before, the longest n-gram counting first.

    prompt_lookup_max, prompt_lookup_min: tokens of an n-gram. The newest place counts. (arXiv:2304.04487; the names are
    vLLM's.)
    """

    draft_s = 0.0

    def __init__(self, prompt_lookup_max: int, prompt_lookup_min: int) -> None:
        self.lengths = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        found = []
        for seq, num_guesses in wanted:
            index = self._indexes.setdefault(seq, NgramIndex(self.lengths))
            found.append(index.guess(seq.tokens, num_guesses))
        return found


class NgramIndex:
    """What followed each n-gram of one sequence. It grows with the sequence: O(1) a token, and no search."""

    def __init__(self, lengths: range) -> None:
        self.lengths = lengths  # descending
        self.follower: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token that followed it last
        self.num_tokens = 0

    def guess(self, tokens: list[int], num_guesses: int) -> list[int]:
        if len(tokens) < self.num_tokens:  # a step has failed: its tokens are gone
            self.follower, self.num_tokens = {}, 0
        for position in range(self.num_tokens, len(tokens)):
            for n in self.lengths:
                if n <= position:
                    self.follower[tuple(tokens[position - n : position])] = position
        self.num_tokens = len(tokens)
        for n in self.lengths:
            start = self.follower.get(tuple(tokens[-n:]))
            if start is not None:
                text = tokens[start : start + num_guesses]
                while len(text) < num_guesses:  # it overlaps what it continues: the text repeats itself
                    text += text[: num_guesses - len(text)]
                return text
        return []
