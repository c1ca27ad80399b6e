"""Log probabilities of tokens under the raw logits: of those that are generated, and of a prompt's (chapter 8).

A prompt's need the logits of all its positions, not only the last. Those of 2,048 tokens over 150,000 words would be
1.2 GB, so they are computed and used up a few rows at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.core.scheduler import SchedulerOutput

ROWS_AT_A_TIME = 64

Wanted = int | list[int] | None  # of a position: how many of the top tokens, or which tokens; None: nothing at all


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token, and of the top tokens at its position, or of those that were asked for."""

    logprob: float
    rank: int  # 1 is the most likely token
    top_token_ids: list[int]
    top_logprobs: list[float]
    top_ranks: list[int] | None = None  # None: 1, 2, 3, ...


def token_logprobs(raw: Tensor, chosen: list[int], wanted: Sequence[Wanted]) -> list[TokenLogprobs | None]:
    """raw: logits [R, vocab_size]. chosen: a token of each row. wanted: of each row, see Wanted."""
    result: list[TokenLogprobs | None] = [None] * len(chosen)
    rows = [row for row, k in enumerate(wanted) if k is not None]
    if not rows:
        return result
    logprobs = raw[rows].log_softmax(-1)
    least = logprobs.topk(max([1, *(k for k in wanted if isinstance(k, int))])).values[:, -1]
    of_chosen = logprobs[torch.arange(len(rows)), [chosen[row] for row in rows]]
    ranks = (logprobs > of_chosen[:, None]).sum(-1) + 1
    for i, row in enumerate(rows):
        k = wanted[row]
        if isinstance(k, list):
            values = logprobs[i, k]
            top_ranks = [int((logprobs[i] > value).sum()) + 1 for value in values]
            others: tuple[Any, ...] = k, values.tolist(), top_ranks
        else:
            # Of equally likely tokens the first: topk takes any, in another batch another one.
            token_ids = (logprobs[i] >= least[i]).nonzero().squeeze(1)
            values, order = logprobs[i, token_ids].sort(descending=True, stable=True)
            others = token_ids[order[:k]].tolist(), values[:k].tolist()
        result[row] = TokenLogprobs(float(of_chosen[i]), int(ranks[i]), *others)
    return result


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a step that know the prompt's next token, and how probable they make it.

    rows            [P] in the batch
    token_ids       P tokens: those that follow
    num_logprobs    P times, how many of the top tokens are wanted
    places          P times (seq_id, position of that token)
    """

    rows: Tensor
    token_ids: list[int]
    num_logprobs: list[int | None]
    places: list[tuple[int, int]]

    @classmethod
    def from_scheduler_output(cls, output: SchedulerOutput) -> "PromptRows | None":
        rows, places, token_ids, wanted, first = list[int](), list[tuple[int, int]](), list[int](), [], 0
        for chunk in output.chunks:
            seq = chunk.seq
            if seq.skip_prefix_cache:
                positions = range(chunk.start + 1, min(chunk.end + 1, seq.num_prompt_tokens))
                rows += range(first, first + len(positions))
                places += ((seq.seq_id, position) for position in positions)
                token_ids += seq.tokens[positions.start : positions.stop]
                wanted += [seq.sampling_params.prompt_logprobs] * len(positions)
            first += chunk.end - chunk.start
        return cls(torch.tensor(rows), token_ids, wanted, places) if rows else None

    def score(self, logits_of: Callable[[Tensor], Tensor], hidden: Tensor) -> "PromptLogprobs":
        """hidden: of these rows [P, hidden_size]. logits_of: the output head; on a rank that gets no logits, [0, n]."""
        found: PromptLogprobs = []
        for start in range(0, len(hidden), ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            if len(logits := logits_of(hidden[part])):
                of_rows = token_logprobs(logits, self.token_ids[part], self.num_logprobs[part])
                found.extend((*place, each) for place, each in zip(self.places[part], of_rows, strict=True) if each)
        return found


PromptLogprobs = list[tuple[int, int, TokenLogprobs]]  # (seq_id, position, of the token there)
