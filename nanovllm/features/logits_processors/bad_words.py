"""bad_words: texts that are not generated, in whatever tokens (chapter 8).

A word has many tokenizations: "sorry" and " sorry", "(s" "orry", and, of a model that was sampled, "sor" "ry". So the
bytes are looked at: a token is banned if it would complete the word. Within a token the word stands for itself, with no
letter or digit beside it: "Theory" is another word than "The". In scripts without spaces between words it may stand
anywhere. A special token is no text: it is banned by a word that is all of it, such as "<|im_end|>".
"""

from bisect import bisect_left
from functools import lru_cache
from typing import Any
from unicodedata import category

import torch
from torch import Tensor

from nanovllm.core.sequence import SequencePart
from nanovllm.files.token_bytes import token_bytes


class BadWord:
    """One word, in one vocabulary.

    alone   int64, tokens that have all of it
    rests   n -> int64, tokens that begin with all but its first n bytes, and so complete a text that ends with these;
            no entry where there are none, as nearly everywhere in a long word: each step tries them all
    """

    def __init__(self, text: str, vocabulary: "Vocabulary") -> None:
        self.bytes = text.encode()
        self.alone = vocabulary.with_word(self.bytes)
        rests = ((n, vocabulary.beginning_with(self.bytes[n:])) for n in range(1, len(self.bytes)))
        self.rests = {n: tokens for n, tokens in rests if len(tokens)}


class BadWords(SequencePart):
    """The bad_words of one request. Raises ValueError for what is no text."""

    changes_logits = True

    def __init__(self, tokenizer: Any, words: list[str], vocab_size: int) -> None:
        self._bytes = token_bytes(tokenizer)
        self._words = []
        for word in words:
            try:
                word.encode()
            except UnicodeEncodeError:
                raise ValueError(f"bad_words: {word!r} is not valid Unicode text") from None
            vocabulary = vocabulary_of(tokenizer, vocab_size)
            self._words.append(vocabulary.word(word.lstrip(" ") or word))  # with a space before it or without
        self._longest = max((len(word.bytes) for word in self._words), default=0)

    def banned(self, generated: list[int]) -> Tensor:
        """The tokens that would complete one of the words now, some perhaps twice."""
        ends, starts = self._ending(generated)
        found = [word.alone for word in self._words]
        for word in self._words:
            for num, tokens in word.rests.items():
                if ends.endswith(word.bytes[:num]) and _may_begin(ends, len(ends) - num, starts, word.bytes):
                    found.append(tokens)
        return torch.cat(found)

    def _ending(self, generated: list[int]) -> tuple[bytes, set[int]]:
        """What was generated last, as long as a word may be, and where its tokens start."""
        ending, lengths = b"", list[int]()
        for token_id in reversed(generated):
            if len(ending) >= self._longest or token_id in self._bytes.special_ids:
                break
            ending = self._bytes.of(token_id) + ending
            lengths.append(len(ending))
        return ending, {len(ending) - length for length in lengths}


class Vocabulary:
    """Tokens by their bytes: sorted, and one after the other."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        known = token_bytes(tokenizer)
        ids = [i for i, text in enumerate(known.all[:vocab_size]) if text and i not in known.special_ids]
        self._special = {known.of(token_id): token_id for token_id in known.special_ids if token_id < vocab_size}
        self._ids = sorted(ids, key=known.all.__getitem__)
        self._texts = [known.all[i] for i in self._ids]
        self._blob = b"".join(self._texts)
        self._starts = [0]
        for text in self._texts:
            self._starts.append(self._starts[-1] + len(text))
        self.word = lru_cache(1000)(lambda text: BadWord(text, self))
        # The words of a request may share a rest, such as a space, that half of all tokens begin with.
        self.beginning_with = lru_cache(1000)(self._beginning_with)

    def with_word(self, word: bytes) -> Tensor:
        found = [self._special[word]] if word in self._special else []
        at = self._blob.find(word)
        while at >= 0:
            place = bisect_left(self._starts, at + 1) - 1
            token, start = self._texts[place], at - self._starts[place]
            if start + len(word) <= len(token) and _may_begin(token, start, {0}, word) and _may_end(token, start, word):
                found.append(self._ids[place])
            at = self._blob.find(word, at + 1)
        return torch.tensor(sorted(set(found)), dtype=torch.int64, device="cpu")

    def _beginning_with(self, rest: bytes) -> Tensor:
        found = []
        for place in range(bisect_left(self._texts, rest), len(self._texts)):
            if not self._texts[place].startswith(rest):
                break
            if _may_end(self._texts[place], 0, rest):
                found.append(self._ids[place])
        return torch.tensor(sorted(found), dtype=torch.int64, device="cpu")


@lru_cache(4)
def vocabulary_of(tokenizer: Any, vocab_size: int) -> Vocabulary:
    """Sorted once: half a second for 150,000 tokens."""
    return Vocabulary(tokenizer, vocab_size)


def _may_begin(text: bytes, at: int, starts: set[int], word: bytes) -> bool:
    """Is what begins there a word of its own? starts: of tokens; what comes before is not looked at there."""
    return at in starts or not (_letter_before(text[:at]) and _letter_after(word))


def _may_end(text: bytes, start: int, word: bytes) -> bool:
    return not (_letter_before(text[: start + len(word)]) and _letter_after(text[start + len(word) :]))


def _letter_before(text: bytes) -> bool:
    return _is_letter(text[-4:].decode(errors="ignore")[-1:])


def _letter_after(text: bytes) -> bool:
    return _is_letter(text[:4].decode(errors="ignore")[:1])


def _is_letter(character: str) -> bool:
    """Is it a letter of a script that has spaces between words, or a digit?"""
    return character.isalnum() and category(character) != "Lo"
