"""Sampler: logits -> token ids (chapter 8).

One uniform number decides each token: it is thrown at the cumulative distribution, laid out in vocabulary order, and
the token it falls on is taken. The number is a hash of (seed, sample index, position in the output), so the same
request draws the same numbers whatever else is in the batch and however often it was preempted.
"""

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.core.sequence import Sequence

# top_k and top_p look at this many tokens before they sort the whole vocabulary.
NUM_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one sampled token and of the top tokens at its position, under the raw logits."""

    logprob: float
    rank: int  # 1 is the most likely token
    top_token_ids: list[int]
    top_logprobs: list[float]


def uniform_noise(seq: Sequence) -> float:
    """A number in [0, 1) that depends on the seed, the sample index and the position in the output alone."""
    key = f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}".encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the sampler needs to know of R sequences, without the sequences: it may run in another process.

    num_logprobs        for each row, how many of the top tokens' logprobs are wanted; None: not even its own
    penalties           (row, tokens so far, of those the prompt's, repetition, presence and frequency penalty)
    banned              (row, token ids it must not get)
    random_rows         rows that are sampled; the others take the most likely token
    temperature, top_k, top_p, min_p, noise      [len(random_rows)] each; top_k 0 means all
    """

    num_logprobs: list[int | None]
    penalties: list[tuple[int, Tensor, int, float, float, float]]
    banned: list[tuple[int, list[int]]]
    random_rows: list[int]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise: Tensor

    @classmethod
    def from_sequences(cls, seqs: Seq[Sequence], eos_token_ids: frozenset[int] = frozenset()) -> "SamplingBatch":
        penalties, banned, random_rows = [], [], []
        for row, seq in enumerate(seqs):
            p = seq.sampling_params
            if p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
                numbers = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
                penalties.append((row, torch.tensor(seq.tokens), seq.num_prompt_tokens, *numbers))
            if seq.num_generated_tokens + 1 < p.min_tokens:  # nothing may end the sequence with this token
                banned.append((row, [*(p.stop_token_ids or ()), *(() if p.ignore_eos else eos_token_ids)]))
            if p.temperature > 0:
                random_rows.append(row)
        chosen = [seqs[row] for row in random_rows]
        params = [seq.sampling_params for seq in chosen]
        return cls(
            [seq.sampling_params.logprobs for seq in seqs],
            penalties,
            banned,
            random_rows,
            torch.tensor([p.temperature for p in params]),
            torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int64),
            torch.tensor([p.top_p for p in params]),
            torch.tensor([p.min_p for p in params]),
            torch.tensor([uniform_noise(seq) for seq in chosen], dtype=torch.float64),
        )


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Choose a token for each row of logits [R, vocab_size] (float32; changed in place)."""
    raw = logits.clone() if any(k is not None for k in batch.num_logprobs) else logits
    for row, tokens, num_prompt_tokens, *penalties in batch.penalties:
        _apply_penalties(logits[row], tokens.to(logits.device), num_prompt_tokens, *penalties)
    for row, token_ids in batch.banned:
        logits[row, token_ids] = -torch.inf
    chosen = logits.argmax(-1)
    if batch.random_rows:
        chosen[batch.random_rows] = _sample_randomly(logits[batch.random_rows], batch)
    token_ids = chosen.tolist()
    return token_ids, _logprobs(raw, token_ids, batch.num_logprobs)


def _apply_penalties(
    row: Tensor, tokens: Tensor, num_prompt_tokens: int, repetition: float, presence: float, frequency: float
) -> None:
    seen = tokens.unique()
    row[seen] = torch.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
    generated, counts = tokens[num_prompt_tokens:].unique(return_counts=True)
    row[generated] -= frequency * counts + presence


def _sample_randomly(logits: Tensor, batch: SamplingBatch) -> Tensor:
    def on_device(x: Tensor) -> Tensor:
        return x.to(logits.device, non_blocking=True)

    scaled = logits / on_device(batch.temperature)[:, None]
    if bool((batch.top_k > 0).any() or (batch.top_p < 1.0).any() or (batch.min_p > 0.0).any()):
        vocab_size = logits.shape[1]
        top_k = torch.where(batch.top_k > 0, batch.top_k, vocab_size).clamp(max=vocab_size)
        threshold = _threshold(scaled, on_device(top_k), on_device(batch.top_p), on_device(batch.min_p))
        scaled = scaled.masked_fill(scaled < threshold[:, None], -torch.inf)
    # Summed in float64: a token of probability 1e-8 keeps its share of the line.
    cumulative = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    target = on_device(batch.noise) * cumulative[:, -1]
    # The first token whose cumulative probability exceeds the target; tokens of probability 0 never do.
    token_ids = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return token_ids.clamp(max=logits.shape[1] - 1)


def _threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[R]: the least scaled logit that min_p, top_k and top_p, in this order, let pass. Ties at the border pass.

    top_p is a share of the mass that min_p and top_k let pass, so it needs the logits in order, down to where it ends.
    A thousand are nearly always enough; the rows for which they are not decide over the whole vocabulary.
    """
    vocab_size = scaled.shape[1]
    threshold = scaled.amax(-1) + min_p.log()  # p >= min_p * p_max, in the language of logits
    log_total = scaled.logsumexp(-1, keepdim=True)
    rows = ((top_k < vocab_size) | (top_p < 1.0)).nonzero().squeeze(1)
    for num_candidates in (min(NUM_CANDIDATES, vocab_size), vocab_size):
        if len(rows) == 0:
            break
        values = scaled[rows].topk(num_candidates).values  # [rows, num_candidates], descending
        rank = torch.arange(num_candidates, device=values.device)
        kept = (values >= threshold[rows, None]) & (rank < top_k[rows, None])
        probs = (values - log_total[rows]).exp() * kept
        # Where neither min_p nor top_k cuts within the candidates, what lies behind them has mass, too.
        cut = (top_k[rows] <= num_candidates) | ~kept[:, -1]
        total = torch.where(cut, probs.sum(-1), 1.0)
        wanted = torch.where(top_p[rows] < 1.0, top_p[rows] * total, torch.inf)
        kept &= probs.cumsum(-1) - probs < wanted[:, None]
        decided = cut | ((min_p[rows] == 0) & ~kept[:, -1])
        threshold[rows[decided]] = values.masked_fill(~kept, torch.inf).amin(-1)[decided]
        rows = rows[~decided]
    return threshold


def _logprobs(raw: Tensor, chosen: list[int], wanted: list[int | None]) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(chosen)
    rows = [row for row, k in enumerate(wanted) if k is not None]
    if not rows:
        return result
    logprobs = raw[rows].log_softmax(-1)
    top = logprobs.topk(max(1, max(wanted[row] or 0 for row in rows)))
    of_chosen = logprobs[torch.arange(len(rows)), [chosen[row] for row in rows]]
    ranks = (logprobs > of_chosen[:, None]).sum(-1) + 1
    for i, row in enumerate(rows):
        k = wanted[row] or 0
        result[row] = TokenLogprobs(
            float(of_chosen[i]), int(ranks[i]), top.indices[i, :k].tolist(), top.values[i, :k].tolist()
        )
    return result
