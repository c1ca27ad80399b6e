"""A choice as a grammar: what the engine asks of one (features/grammar/grammar.py), answered by a Python function.

llguidance is not needed for this: the function says which tokens may come, the class writes them down as bits.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chapters.patching import replaced
from nanovllm.features.grammar.base import GrammarPart
from nanovllm.features.grammar.grammar import GrammarCompiler
from nanovllm.features.grammar.params import StructuredOutputsParams

# (choices, generated, eos_token_id) -> the tokens that may come next; see exercise.py
AllowedTokens = Callable[[list[list[int]], list[int], int], list[int]]


class ChoiceGrammar(GrammarPart):
    """What one sequence may become: one of these lists of tokens. It keeps nothing between two questions."""

    def __init__(
        self, allowed_tokens: AllowedTokens, choices: list[list[int]], vocab_size: int, eos_token_ids: list[int]
    ) -> None:
        self.vocab_size, self.eos_token_ids = vocab_size, eos_token_ids
        self._allowed_tokens, self._choices = allowed_tokens, choices

    def allowed(self, token_ids: list[int]) -> list[int]:
        return self._allowed_tokens(self._choices, token_ids, self.eos_token_ids[0])

    def is_complete(self, token_ids: list[int]) -> bool:
        """Can nothing but EOS follow?"""
        return set(self.allowed(token_ids)) == {self.eos_token_ids[0]}

    def write_mask(self, token_ids: list[int], address: int, num_bytes: int) -> None:
        """Write the bits of the tokens that may follow: token t is bit t % 8 of byte t // 8."""
        bits = bytearray(num_bytes)
        for token_id in self.allowed(token_ids):
            bits[token_id // 8] |= 1 << token_id % 8
        ctypes.memmove(address, bytes(bits), num_bytes)


@contextmanager
def choices_by(allowed_tokens: AllowedTokens) -> Iterator[None]:
    """For a while, this function serves the engine's choices. Each has the tokens that the tokenizer makes of its text.

    (llguidance also allows any other tokens that spell the text.)
    """

    def compile(compiler: Any, params: StructuredOutputsParams) -> ChoiceGrammar:
        choices = [compiler.tokenizer(text, add_special_tokens=False).input_ids for text in params.choice or ()]
        return ChoiceGrammar(allowed_tokens, choices, compiler.vocab_size, compiler.eos_token_ids)

    with replaced(GrammarCompiler, "compile", compile):
        yield
