"""LogitsProcessors: what happens to logits before a token is chosen (chapter 8).

Some tokens must not come (a grammar, allowed and banned ones), some shall come more often (a bias) or less often than
they would again (penalties). Applied in the order of the methods below; log-probabilities are of the logits between
the two.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.core.sequence import Sequence
from nanovllm.features.grammar.masks import PendingBits, compute_bits, unpack
from nanovllm.features.logits_processors.top_k_top_p import logit_threshold
from nanovllm.worker.batch import to_device


@dataclass(slots=True)
class LogitsProcessors:
    """For some rows of the logits, by number.

    allowed        (row, the tokens that it may get)
    banned         (row, tokens that it must not get, unless it may get no other)
    bias           (row, tokens, what is added to their logits)
    functions      (row, the sequence whose own functions change its logits)
    penalties      (row, tokens seen, their factor, tokens generated, what is subtracted from their logits)
    grammar_rows   those that have a grammar
    pending        to be waited for: the bits of the tokens that they may get [grammar_rows, vocab_size / 32]
    """

    allowed: list[tuple[int, Tensor]]
    banned: list[tuple[int, Tensor]]
    bias: list[tuple[int, Tensor, Tensor]]
    functions: list[tuple[int, Sequence]]
    penalties: list[tuple[int, Tensor, float, Tensor, Tensor]]
    grammar_rows: list[int]
    pending: PendingBits | None = None
    threshold = staticmethod(logit_threshold)

    @classmethod
    def from_sequences(cls, seqs: Seq[Sequence], eos_token_ids: frozenset[int]) -> "LogitsProcessors":
        made, grammars = cls([], [], [], [], [], []), []
        for row, seq in enumerate(seqs):
            p = seq.sampling_params
            if seq.grammar is not None:
                made.grammar_rows.append(row)
                grammars.append((seq.grammar, seq.generated_token_ids))
            if p.allowed_token_ids is not None:
                made.allowed.append((row, torch.tensor(p.allowed_token_ids)))
            if p.bad_words and (last := _last_tokens(seq)):
                made.banned.append((row, torch.tensor(last)))
            if p.logit_bias:
                made.bias.append((row, torch.tensor(list(p.logit_bias)), torch.tensor(list(p.logit_bias.values()))))
            if seq.functions is not None:
                made.functions.append((row, seq))
            if seq.num_generated_tokens < p.min_tokens:  # this token must not end the sequence
                stop_token_ids = [*p.stop_token_ids, *eos_token_ids]  # type: ignore[misc]
                made.banned.append((row, torch.tensor(stop_token_ids, dtype=torch.int64)))
            if p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
                tokens = torch.tensor(seq.tokens)
                generated, counts = tokens[seq.num_prompt_tokens :].unique(return_counts=True)
                taken_off = p.frequency_penalty * counts + p.presence_penalty
                made.penalties.append((row, tokens.unique(), p.repetition_penalty, generated, taken_off))
        if grammars:
            made.pending = compute_bits(grammars)
        return made

    def __bool__(self) -> bool:
        """Does anything happen to any row?"""
        return any((self.allowed, self.banned, self.bias, self.functions, self.penalties, self.grammar_rows))

    def apply_grammars(self, logits: Tensor) -> None:
        """Let the rows' logits be -inf where the grammar allows no token. Changes them in place, as apply() does."""
        if self.pending is not None:
            added = unpack(to_device(self.pending.wait(), logits.device))[:, : logits.shape[1]]
            for row, values in zip(self.grammar_rows, added, strict=True):
                logits[row].add_(values)

    def apply(self, logits: Tensor) -> None:
        for row, token_ids in self.allowed:
            token_ids = to_device(token_ids, logits.device)
            values = logits[row, token_ids]
            logits[row] -= torch.inf  # not `=`: a row with NaN or +infinity stays one that nothing is sampled from
            logits[row, token_ids] = values
        narrow = {*self.grammar_rows, *(row for row, _ in self.allowed)}
        for row, token_ids in self.banned:
            token_ids = to_device(token_ids, logits.device)
            values = logits[row, token_ids]
            logits[row, token_ids] = values - torch.inf
            if row in narrow and bool(logits[row].amax() == -torch.inf):
                logits[row, token_ids] = values
        for row, token_ids, added in self.bias:
            logits[row, to_device(token_ids, logits.device)] += to_device(added, logits.device)
        for row, seq in self.functions:
            logits[row] = seq.functions.apply(seq, logits[row])
        for row, *numbers in self.penalties:
            seen, factor, generated, taken_off = (to_device(x, logits.device) for x in numbers)
            values = logits[row, seen]
            logits[row, seen] = torch.where(values > 0, values / factor, values * factor)
            logits[row, generated] -= taken_off


def _last_tokens(seq: Sequence) -> list[int]:
    """The tokens that would complete one of the sequence's bad words now."""
    generated = [None, *seq.generated_token_ids]  # None: a word may be longer than the output
    return [word[-1] for word in seq.bad_word_ids if generated[len(generated) - len(word) + 1 :] == word[:-1]]
