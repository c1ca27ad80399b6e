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
from nanovllm.features.logprobs import c_scores

ROWS_AT_A_TIME = 64
MOST_TOP = (
    64  # top tokens that are found for all rows together, as in cpu/sampling.c; who wants more gets its own search
)

Wanted = int | list[int] | None  # of a position: how many of the top tokens, or which tokens; None: nothing at all


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token, and of the top tokens at its position, or of those that were asked for."""

    logprob: float
    rank: int  # 1 is the most likely token
    top_token_ids: list[int]
    top_logprobs: list[float]
    top_ranks: list[int] | None = None  # None: 1, 2, 3, ...


def token_logprobs(
    raw: Tensor, chosen: list[int], wanted: Sequence[Wanted], library: Any = None
) -> list[TokenLogprobs | None]:
    """raw: logits [R, vocab_size]. chosen: a token of each row. wanted: of each row, see Wanted.

    library: of the C kernels, if there is one (worker/kernels.py).
    """
    result: list[TokenLogprobs | None] = [None] * len(chosen)
    asked = [(row, k) for row, k in enumerate(wanted) if k is not None]
    if not asked:
        return result
    vocab_size = raw.shape[1]
    num_top = min(max((k for _, k in asked if isinstance(k, int) and k <= MOST_TOP), default=0), vocab_size)
    rows = torch.tensor([row for row, _ in asked], device=raw.device)
    # NO_TOKEN stands for the last one: the sequence ends with an error.
    tokens = torch.tensor([chosen[row] for row, _ in asked], device=raw.device) % vocab_size
    if library is not None:
        totals, ranks, top = c_scores.of_rows(library, raw, rows, tokens, num_top)
    else:
        totals, ranks, top = of_rows(raw, rows, tokens, num_top)
    of_chosen = (raw[rows, tokens].double() - totals).float()
    of_top = (raw[rows[:, None], top].double() - totals[:, None]).float()
    found = zip(asked, of_chosen.tolist(), ranks.tolist(), top.tolist(), of_top.tolist(), strict=True)
    for i, ((row, k), logprob, rank, top_ids, top_logprobs) in enumerate(found):
        if isinstance(k, int) and k <= num_top:
            result[row] = TokenLogprobs(logprob, rank, top_ids[:k], top_logprobs[:k])
            continue
        token_ids = k if isinstance(k, list) else top_tokens(raw[row], min(k, vocab_size)).tolist()
        values = raw[row, token_ids]
        logprobs = (values.double() - totals[i]).float().tolist()
        top_ranks = [int((raw[row] > value).sum()) + 1 for value in values] if isinstance(k, list) else None
        result[row] = TokenLogprobs(logprob, rank, token_ids, logprobs, top_ranks)
    return result


def of_rows(logits: Tensor, rows: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of n rows of logits [R, vocab_size], each with a chosen token.

    (float64 [n], the logarithms of the sums of exp(logit); ranks of the chosen tokens [n]; the num_top most likely ones
    [n, num_top], of equally likely ones the first first)
    """
    logits = logits[rows]
    ranks = (logits > logits.gather(1, chosen[:, None])).sum(-1) + 1
    return logits.double().logsumexp(-1), ranks, torch.stack([top_tokens(row, num_top) for row in logits])


def top_tokens(row: Tensor, num_top: int) -> Tensor:
    """topk() takes any of equally likely tokens, in another batch another one. A row with NaN has no order."""
    row = row.nan_to_num(0.0, torch.inf, -torch.inf)
    least = row.topk(max(num_top, 1)).values[-1]
    token_ids = (row >= least).nonzero().squeeze(1)
    return token_ids[row[token_ids].sort(descending=True, stable=True).indices[:num_top]]


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

    def score(self, logits_of: Callable[[Tensor], Tensor], hidden: Tensor, library: Any = None) -> "PromptLogprobs":
        """hidden: of these rows [P, hidden_size]. logits_of: the output head; on a rank that gets no logits, [0, n]."""
        found: PromptLogprobs = []
        for start in range(0, len(hidden), ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            if len(logits := logits_of(hidden[part])):
                of_rows = token_logprobs(logits, self.token_ids[part], self.num_logprobs[part], library)
                found.extend((*place, each) for place, each in zip(self.places[part], of_rows, strict=True) if each)
        return found


PromptLogprobs = list[tuple[int, int, TokenLogprobs]]  # (seq_id, position, of the token there)
