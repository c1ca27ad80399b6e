"""Masks: what happens to logits before a token is chosen, penalties apart (chapter 8).

Some tokens must not come (a grammar, allowed and banned ones), some shall come more often (a bias). A grammar's mask
needs the newest token, so it is worked out while the model computes with that token: by a thread that begins when the
step is packed and has to be done only when its logits are there.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import to_device


@dataclass(slots=True)
class Masks:
    """For some rows of the logits, by number.

    allowed        (row, the tokens that it may get)
    banned         (row, tokens that it must not get, unless it may get no other)
    bias           (row, tokens, what is added to their logits)
    grammar_rows   those that have a grammar
    pending        to be waited for: the bits of the tokens that they may get [grammar_rows, vocab_size / 32]
    """

    allowed: list[tuple[int, Tensor]]
    banned: list[tuple[int, Tensor]]
    bias: list[tuple[int, Tensor, Tensor]]
    grammar_rows: list[int]
    pending: "PendingBits | None" = None

    @classmethod
    def from_sequences(cls, seqs: Seq[Sequence], eos_token_ids: frozenset[int]) -> "Masks":
        masks, grammars = cls([], [], [], []), []
        for row, seq in enumerate(seqs):
            p = seq.sampling_params
            if seq.grammar is not None:
                masks.grammar_rows.append(row)
                grammars.append((seq.grammar, seq.generated_token_ids))
            if p.allowed_token_ids is not None:
                masks.allowed.append((row, torch.tensor(p.allowed_token_ids)))
            if p.bad_words and (last := _last_tokens(seq)):
                masks.banned.append((row, torch.tensor(last)))
            if p.logit_bias:
                masks.bias.append((row, torch.tensor(list(p.logit_bias)), torch.tensor(list(p.logit_bias.values()))))
            if seq.num_generated_tokens < p.min_tokens:  # this token must not end the sequence
                stop_token_ids = [*p.stop_token_ids, *eos_token_ids]  # type: ignore[misc]
                masks.banned.append((row, torch.tensor(stop_token_ids, dtype=torch.int64)))
        if grammars:
            masks.pending = PendingBits(_worker().submit(_bits, grammars))
        return masks

    def apply_grammars(self, logits: Tensor) -> None:
        """Let the rows' logits be -inf where the grammar allows no token. Changes them in place, as apply() does."""
        if self.pending is not None:
            added = _unpack(to_device(self.pending.wait(), logits.device))[:, : logits.shape[1]]
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


class PendingBits:
    """Bits that another thread is working out; in another process, that the driver sends when they are done."""

    receive: Callable[[], Tensor]  # set where steps are received (parallel.py)

    def __init__(self, future: "Future[Tensor] | None" = None) -> None:
        self._future = future

    def wait(self) -> Tensor:
        return self.receive() if self._future is None else self._future.result()

    def __reduce__(self) -> tuple:
        return PendingBits, ()


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "grammar-masks")


def _bits(grammars: list[tuple[Any, list[int]]]) -> Tensor:
    """[rows, vocab_size / 32], of each grammar's next token."""
    bits = torch.zeros(len(grammars), -(-grammars[0][0].vocab_size // 32), dtype=torch.int32)
    for row, (grammar, token_ids) in zip(bits, grammars, strict=True):
        grammar.write_mask(token_ids, row.data_ptr(), row.nbytes)
    return bits


@cache
def _added_by_byte(device: torch.device) -> Tensor:
    """[256, 8]: 0 for each bit of a byte that is set, -inf for the others."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)


def _unpack(bits: Tensor) -> Tensor:
    """[rows, vocab_size]: what to add to the logits. A sum takes a twentieth of masked_fill_()'s time on a CPU."""
    flat = bits.view(torch.uint8).int().flatten()
    return _added_by_byte(bits.device).index_select(0, flat).view(len(bits), -1)


def _last_tokens(seq: Sequence) -> list[int]:
    """The tokens that would complete one of the sequence's bad words now."""
    generated = [None, *seq.generated_token_ids]  # None: a word may be longer than the output
    return [word[-1] for word in seq.bad_word_ids if generated[len(generated) - len(word) + 1 :] == word[:-1]]
