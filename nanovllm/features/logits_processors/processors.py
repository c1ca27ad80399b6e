"""LogitsProcessors: what happens to logits before a token is chosen (chapter 8).

Some tokens must not come (a grammar, allowed and banned ones), some should come more often (a bias) or
less often again (penalties). Applied in the order of the methods below; log-probabilities are of the logits between
the two.
"""

from array import array
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.core.sequence import Sequence
from nanovllm.features.logits_processors.prompt_ids import PromptIds
from nanovllm.worker.batch import move_together

if TYPE_CHECKING:
    from nanovllm.features.grammar.masks import PendingBits

EntriesOfRows = dict[int, tuple[Collection[int], Collection[float]]]  # row -> (token ids, as many values)


class Entries(NamedTuple):
    """Numbers for single logits: values[i] is for logits[rows[i], token_ids[i]]. No place comes twice."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, by_row: EntriesOfRows) -> "Entries | None":
        """None if there are none."""
        # From lists, torch.tensor() takes eight times as long; and operations that PyTorch's threads share leave them
        # spinning, in the way of the kernels' threads.
        rows, token_ids, values = array("q"), array("q"), array("f")
        for row, (row_ids, row_values) in by_row.items():
            rows.extend(array("q", [row]) * len(row_ids))
            token_ids.extend(row_ids)
            values.extend(row_values)
        if not rows:
            return None
        return cls(
            torch.frombuffer(rows, dtype=torch.int64),
            torch.frombuffer(token_ids, dtype=torch.int64),
            torch.frombuffer(values, dtype=torch.float32),
        )


@dataclass(slots=True)
class LogitsProcessors:
    """For some rows of the logits, by number.

    allowed        (row, the tokens that it may get)
    banned         (row, tokens that it must not get, unless it may get no other)
    bias           what is added to logits
    functions      (row, the sequence whose own functions change its logits)
    seen           factors of the tokens that a row has seen: a positive logit is divided, a negative one multiplied
    generated      what is subtracted from the logits of tokens that a row has generated
    grammar_rows   those that have a grammar
    pending        to be waited for: the bits of the tokens that they may get [grammar_rows, vocab_size / 32]
    """

    allowed: list[tuple[int, Tensor]]
    banned: list[tuple[int, Tensor]]
    bias: Entries | None
    functions: list[tuple[int, Sequence]]
    seen: Entries | None
    generated: Entries | None
    grammar_rows: list[int]
    pending: "PendingBits | None" = None

    @classmethod
    def from_sequences(cls, seqs: Seq[Sequence], eos_token_ids: frozenset[int]) -> "LogitsProcessors":
        made = cls(allowed=[], banned=[], bias=None, functions=[], seen=None, generated=None, grammar_rows=[])
        grammars = list[tuple[Any, list[int]]]()
        bias: EntriesOfRows = {}
        seen: EntriesOfRows = {}
        generated: EntriesOfRows = {}
        for row, seq in enumerate(seqs):
            p = seq.sampling_params
            if (grammar := seq.parts.get("grammar")) is not None:
                made.grammar_rows.append(row)
                grammars.append((grammar, seq.generated_token_ids))
            if p.allowed_token_ids is not None:
                made.allowed.append((row, torch.tensor(p.allowed_token_ids, dtype=torch.int64, device="cpu")))
            bad_words = seq.parts.get("bad_words")
            if bad_words is not None and len(banned := bad_words.banned(seq.generated_token_ids)):
                made.banned.append((row, banned))
            if p.logit_bias:
                bias[row] = p.logit_bias.keys(), p.logit_bias.values()
            if "functions" in seq.parts:
                made.functions.append((row, seq))
            if seq.num_generated_tokens < p.min_tokens:  # this token must not end the sequence
                stop_token_ids = [*p.stop_token_ids, *eos_token_ids]
                made.banned.append((row, torch.tensor(stop_token_ids, dtype=torch.int64, device="cpu")))
            if p.repetition_penalty != 1.0:
                prompt_ids = seq.parts.get("prompt_ids") or PromptIds()
                token_ids = prompt_ids.with_generated(seq)
                seen[row] = token_ids, array("f", [p.repetition_penalty]) * len(token_ids)
            if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
                counts = Counter(seq.generated_token_ids)
                amounts = [p.frequency_penalty * count + p.presence_penalty for count in counts.values()]
                generated[row] = counts.keys(), amounts
        made.bias = Entries.of(bias)
        made.seen = Entries.of(seen)
        made.generated = Entries.of(generated)
        if grammars:
            from nanovllm.features.grammar.masks import compute_bits

            made.pending = compute_bits(grammars)
        return made

    def tensors(self) -> dict[str, Any]:
        """The fields that hold tensors, so that all of them can go to a device together."""
        return {name: getattr(self, name) for name in ("allowed", "banned", "bias", "seen", "generated")}

    def apply_grammars(self, logits: Tensor) -> None:
        """Let the rows' logits be -inf where the grammar allows no token. Changes them in place, as apply() does."""
        if self.pending is not None:
            from nanovllm.features.grammar.masks import unpack

            added = unpack(move_together(self.pending.wait(), logits.device))[:, : logits.shape[1]]
            for row, values in zip(self.grammar_rows, added, strict=True):
                logits[row].add_(values)

    def apply(self, logits: Tensor) -> None:
        """All tensors lie where the logits do, and nothing waits for them."""
        for row, token_ids in self.allowed:
            values = logits[row, token_ids]
            logits[row] -= torch.inf  # not `=`: a row with NaN or +infinity stays one that nothing is sampled from
            logits[row, token_ids] = values
        narrow = {*self.grammar_rows, *(row for row, _ in self.allowed)}
        for row, token_ids in self.banned:
            values = logits[row, token_ids]
            logits[row, token_ids] = values - torch.inf
            if row in narrow:
                has_no_other = logits[row].amax() == -torch.inf
                logits[row, token_ids] = torch.where(has_no_other, values, values - torch.inf)
        if self.bias is not None:
            rows, token_ids, added = self.bias
            logits[rows, token_ids] += added
        for row, seq in self.functions:
            logits[row] = seq.parts["functions"].apply(seq, logits[row])
        if self.seen is not None:
            rows, token_ids, factors = self.seen
            values = logits[rows, token_ids]
            logits[rows, token_ids] = torch.where(values > 0, values / factors, values * factors)
        if self.generated is not None:
            rows, token_ids, amounts = self.generated
            logits[rows, token_ids] -= amounts
