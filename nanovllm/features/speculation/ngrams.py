"""Draft tokens from the text itself: it may go on as it did where its last tokens occurred before (chapter 13).

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), and arXiv:2304.04487 before it. Good at
quotes, at edits and at what repeats itself; it costs nothing but the lookup.
"""

from weakref import WeakKeyDictionary

from nanovllm.core.sequence import Sequence

AT_ONCE = 4096  # tokens of all sequences that are indexed in a step: some 10 ms for n-grams of two to four


class NgramProposer:
    """Proposes that a text goes on as it did where its last tokens occurred before, the longest n-gram counting first.

    prompt_lookup_max, prompt_lookup_min: tokens of an n-gram. The newest place counts. (arXiv:2304.04487; the names are
    vLLM's.) Long prompts are indexed over several steps, and have their first drafts after them: no step waits for all.
    """

    first_acceptance, draft_s = 0.5, 0.0

    def __init__(self, prompt_lookup_max: int, prompt_lookup_min: int) -> None:
        self.lengths = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def kinds(self, seqs: list[Sequence]) -> list[int | None]:
        """Tokens of the n-gram that was found for each: the longer, the better the draft.

        None also while an index has not caught up with its sequence. Those with few new tokens come first.
        """
        kinds = dict[Sequence, int | None].fromkeys(seqs)
        num_left = AT_ONCE
        for seq in sorted(seqs, key=lambda seq: len(seq.tokens) - self._index(seq).num_tokens):
            index = self._index(seq)
            num_new = len(seq.tokens) - index.num_tokens
            if num_new <= num_left:
                found = index.find(seq.tokens)
                kinds[seq] = found and found[0]
                num_left -= num_new
            elif num_left > 0:
                index.find(seq.tokens[: index.num_tokens + num_left])
                num_left = 0
        return [*kinds.values()]

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._index(seq).propose(seq.tokens, num_tokens) for seq, num_tokens in wanted]

    def _index(self, seq: Sequence) -> "NgramIndex":
        if seq not in self._indexes:
            self._indexes[seq] = NgramIndex(self.lengths)
        return self._indexes[seq]


class NgramIndex:
    """What followed each n-gram of one sequence. It grows with the sequence: O(1) a token, and no search."""

    def __init__(self, lengths: range) -> None:
        self.lengths = lengths  # descending
        self.follower: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token that followed it last
        self.num_tokens = 0

    def find(self, tokens: list[int]) -> tuple[int, int] | None:
        """(n, the position after it) of the longest n-gram that the tokens end with and that was there before."""
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
                return n, start
        return None

    def propose(self, tokens: list[int], num_tokens: int) -> list[int]:
        """What followed the longest n-gram that the tokens end with: so many tokens, or none."""
        found = self.find(tokens)
        text = tokens[found[1] : found[1] + num_tokens] if found else []
        while text and len(text) < num_tokens:  # it overlaps what it continues: the text repeats itself
            text += text[: num_tokens - len(text)]
        return text
