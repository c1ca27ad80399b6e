"""Log probabilities of tokens under the raw logits: of those that are generated, and of a prompt's (chapter 8).

A prompt's need the logits of all its positions, not only the last. Those of 2,048 tokens over 150,000 words would be
1.2 GB, so they are computed and used up a few rows at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.worker.batch import fetch_together

ROWS_AT_A_TIME = 64
MOST_TOP = 64  # top tokens that are found for all rows together, as in cpu/sampling.c; more are searched row by row
FLOAT32_BITS = 0x7FFFFFFF  # without the sign

Searched = tuple[Tensor, Tensor, Tensor | None]  # token ids, their log probabilities and, unless 1, 2, 3, ..., ranks


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token, and of the top tokens at its position, or of those that were asked for."""

    logprob: float
    rank: int  # 1 is the most likely token
    top_token_ids: list[int]
    top_logprobs: list[float]
    top_ranks: list[int] | None = None  # None: 1, 2, 3, ...


class Scores(NamedTuple):
    """Log probabilities at n rows of logits, in the memory that holds these.

    logprobs       float32 [n], of the row's token
    ranks          [n], of that token
    top            [n, num_top], the most likely tokens
    top_logprobs   float32 [n, num_top]
    searched       of rows that want more top tokens, or certain ones: what was found instead, by place in the n
    """

    logprobs: Tensor
    ranks: Tensor
    top: Tensor
    top_logprobs: Tensor
    searched: dict[int, Searched]


class LogprobRows(NamedTuple):
    """Rows of logits of whose tokens the log probabilities are wanted.

    rows     [n]; None: all rows
    wanted   of each of the n, by its row: how many of the top tokens, or which tokens [k]
    """

    rows: Tensor | None
    wanted: dict[int, int | Tensor]

    @classmethod
    def of(cls, all_wanted: Sequence[int | list[int] | None]) -> "LogprobRows | None":
        """all_wanted: of each row; None: nothing. None if that holds for all of them."""
        wanted = {row: _int64(k) if isinstance(k, list) else k for row, k in enumerate(all_wanted) if k is not None}
        if not wanted:
            return None
        return cls(None if len(wanted) == len(all_wanted) else _int64(list(wanted)), wanted)

    def score(self, logits: Tensor, token_ids: Tensor, library: Any = None) -> Scores:
        """logits: [R, vocab_size]. token_ids: [R], of all rows. Nothing waits for the device.

        But for rows that want more than MOST_TOP tokens: each of these brings its own to the host at once, for those of
        many rows would fill a device. library: of the C kernels, if there is one (worker/kernels.py).
        """
        vocab_size = logits.shape[1]
        num_top = max((k for k in self.wanted.values() if isinstance(k, int) and k <= MOST_TOP), default=0)
        num_top = min(num_top, vocab_size)
        rows = torch.arange(len(logits), device=logits.device) if self.rows is None else self.rows
        # NO_TOKEN stands for the last one: the sequence ends with an error.
        tokens = token_ids[rows] % vocab_size
        if library is not None:
            from nanovllm.features.logprobs import c_scores

            totals, ranks, top = c_scores.score_rows(library, logits, rows, tokens, num_top)
        else:
            totals, ranks, top = score_rows(logits, rows, tokens, num_top)
        searched = {
            place: search(logits[row], k, totals[place])
            for place, (row, k) in enumerate(self.wanted.items())
            if isinstance(k, Tensor) or k > num_top
        }
        return Scores(
            logprobs=(logits[rows, tokens].double() - totals).float(),
            ranks=ranks,
            top=top,
            top_logprobs=(logits[rows[:, None], top].double() - totals[:, None]).float(),
            searched=searched,
        )

    def logprobs(self, scores: Scores) -> dict[int, TokenLogprobs]:
        """{row: of its token}. scores: in the CPU's memory."""
        found: dict[int, TokenLogprobs] = {}
        lists = [x.tolist() for x in (scores.logprobs, scores.ranks, scores.top, scores.top_logprobs)]
        for place, (row, logprob, rank, top, top_logprobs) in enumerate(zip(self.wanted, *lists, strict=True)):
            if place in scores.searched:
                ids, values, ranks = scores.searched[place]
                all_ranks = None if ranks is None else ranks.tolist()
                found[row] = TokenLogprobs(logprob, rank, ids.tolist(), values.tolist(), all_ranks)
            else:
                k = self.wanted[row]
                found[row] = TokenLogprobs(logprob, rank, top[:k], top_logprobs[:k])
        return found


def score_rows(logits: Tensor, rows: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is asked of n rows of logits [R, vocab_size], each with a chosen token.

    (float64 [n], the logarithms of the sums of exp(logit); ranks of the chosen tokens [n]; the num_top most likely ones
    [n, num_top], of equally likely ones the first first)
    """
    logits = logits[rows]
    ranks = (logits > logits.gather(1, chosen[:, None])).sum(-1) + 1
    return logits.double().logsumexp(-1), ranks, top_tokens(logits, num_top)


def search(row: Tensor, wanted: int | Tensor, total: Tensor) -> Searched:
    """row: logits [vocab_size]. wanted: see LogprobRows. total: the logarithm of the sum of exp(logit)."""
    if isinstance(wanted, Tensor):
        values = row[wanted]
        return wanted, (values.double() - total).float(), (row > values[:, None]).sum(-1) + 1
    token_ids = top_tokens(row, min(wanted, len(row)))
    return fetch_together((token_ids, (row[token_ids].double() - total).float(), None))


def top_tokens(logits: Tensor, num_top: int) -> Tensor:
    """[..., num_top] most likely tokens of logits [..., vocab_size]. A row with NaN has no order.

    Of equally likely tokens topk() takes any, in another batch another one. So it looks at whole numbers that are in
    the order of the logits, and equal for no two tokens.
    """
    numbers = logits.nan_to_num(0.0, torch.inf, -torch.inf) + 0.0  # -0.0 becomes 0.0
    bits = numbers.view(torch.int32)
    in_order = torch.where(bits < 0, bits ^ FLOAT32_BITS, bits)
    vocab_size = logits.shape[-1]
    unique = in_order.long() * vocab_size - torch.arange(vocab_size, device=logits.device)
    return unique.topk(num_top).indices


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a step that know the prompt's next token, and how probable they make it.

    rows        [P] in the batch
    token_ids   [P], the tokens that follow
    parts       of ROWS_AT_A_TIME rows each, what is wanted
    places      P times (the chunk's index in the step, position of that token)
    """

    rows: Tensor
    token_ids: Tensor
    parts: list[LogprobRows]
    places: list[tuple[int, int]]

    @classmethod
    def from_scheduler_output(cls, output: SchedulerOutput) -> "PromptRows | None":
        rows, places, token_ids, wanted, first = list[int](), list[tuple[int, int]](), list[int](), list[int](), 0
        for index, chunk in enumerate(output.chunks):
            seq = chunk.seq
            num_top = seq.sampling_params.prompt_logprobs
            if seq.scores_prompt and num_top is not None:
                positions = range(chunk.start + 1, min(chunk.end + 1, seq.num_prompt_tokens))
                rows += range(first, first + len(positions))
                places += ((index, position) for position in positions)
                token_ids += seq.tokens[positions.start : positions.stop]
                wanted += [num_top] * len(positions)
            first += chunk.end - chunk.start
        if not rows:
            return None
        starts = range(0, len(rows), ROWS_AT_A_TIME)
        parts = [LogprobRows(None, dict(enumerate(wanted[start : start + ROWS_AT_A_TIME]))) for start in starts]
        return cls(_int64(rows), _int64(token_ids), parts, places)

    def score(self, logits_of: Callable[[Tensor], Tensor], hidden: Tensor, library: Any = None) -> list[Scores]:
        """The scores of each part; none on a rank that gets no logits.

        hidden: of these rows [P, hidden_size]. logits_of: the output head; on a rank that gets no logits, [0, n].
        """
        found: list[Scores] = []
        split = hidden.split(ROWS_AT_A_TIME), self.token_ids.split(ROWS_AT_A_TIME)
        for part, part_hidden, token_ids in zip(self.parts, *split, strict=True):
            if len(logits := logits_of(part_hidden)):
                found.append(part.score(logits, token_ids, library))
        return found

    def logprobs(self, scores: list[Scores]) -> "PromptLogprobs":
        """scores: of each part, in the CPU's memory."""
        pairs = zip(self.parts, scores, strict=True)
        found = (each for part, scores in pairs for each in part.logprobs(scores).values())
        return [(*place, each) for place, each in zip(self.places, found, strict=True)]


def _int64(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


PromptLogprobs = list[tuple[int, int, TokenLogprobs]]  # (chunk's index, position, of the token there)
