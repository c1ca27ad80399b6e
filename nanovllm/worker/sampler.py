"""Sampler: logits -> token ids (chapter 8).

One uniform number decides each token: it is thrown at the cumulative distribution, laid out in vocabulary order, and
the token it falls on is taken. The number is a hash of (seed, sample index, position in the output), so the same
request draws the same numbers whatever else is in the batch and however often it was preempted.
"""

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from nanovllm.core.sequence import Sequence

# top_p looks at this many tokens before it sorts the whole vocabulary.
NUM_CANDIDATES = 1024


@dataclass(frozen=True)
class Penalties:
    """Row `row` of the logits is changed at the tokens of its prompt and output."""

    row: int
    prompt_token_ids: torch.Tensor
    output_token_ids: torch.Tensor
    repetition: float
    presence: float
    frequency: float


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of R rows. The [R] tensors are None when every row is greedy and none is needed.

    noise      [R] float64 in [0, 1)
    forbidden  (row, token ids) that may not be sampled yet, because of min_tokens
    logprobs   how many top tokens each row reports; None: none
    """

    temperature: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    noise: torch.Tensor | None
    penalties: list[Penalties]
    forbidden: list[tuple[int, list[int]]]
    logprobs: list[int | None]

    @classmethod
    def from_sequences(
        cls, seqs: Seq[Sequence], eos_token_ids: frozenset[int], device: torch.device
    ) -> "SamplingBatch":
        params = [seq.sampling_params for seq in seqs]

        def tensor(values: list, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        def ids(values: list[int]) -> torch.Tensor:
            return tensor(values, torch.int64)

        all_greedy = all(p.temperature == 0 for p in params)
        return cls(
            temperature=None if all_greedy else tensor([p.temperature for p in params]),
            top_k=None if all_greedy else ids([max(p.top_k, 0) for p in params]),
            top_p=None if all_greedy else tensor([p.top_p for p in params]),
            min_p=None if all_greedy else tensor([p.min_p for p in params]),
            noise=None if all_greedy else tensor([uniform_noise(seq) for seq in seqs], torch.float64),
            penalties=[
                Penalties(
                    row,
                    ids(seq.tokens[: seq.num_prompt_tokens]),
                    ids(seq.generated_token_ids),
                    p.repetition_penalty,
                    p.presence_penalty,
                    p.frequency_penalty,
                )
                for row, (seq, p) in enumerate(zip(seqs, params, strict=True))
                if p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
            ],
            forbidden=[
                (row, [*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids)])  # type: ignore[misc]
                for row, (seq, p) in enumerate(zip(seqs, params, strict=True))
                # The token sampled now is number num_generated_tokens + 1.
                if seq.num_generated_tokens + 1 < p.min_tokens
            ],
            logprobs=[p.logprobs for p in params],
        )


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


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Choose a token for each row of logits [R, vocab_size] (float32; changed in place)."""
    raw = logits.clone() if any(k is not None for k in batch.logprobs) else logits
    for penalties in batch.penalties:
        _apply_penalties(logits, penalties)
    for row, token_ids in batch.forbidden:
        logits[row, token_ids] = -torch.inf

    tokens = logits.argmax(-1)
    if batch.temperature is not None:
        tokens = torch.where(batch.temperature == 0, tokens, _sample_randomly(logits, batch))
    chosen = tokens.tolist()
    return chosen, _logprobs(raw, chosen, batch.logprobs)


def _apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    row = logits[penalties.row]
    seen = torch.cat((penalties.prompt_token_ids, penalties.output_token_ids)).unique()
    row[seen] = torch.where(row[seen] > 0, row[seen] / penalties.repetition, row[seen] * penalties.repetition)
    tokens, counts = penalties.output_token_ids.unique(return_counts=True)
    row[tokens] -= penalties.frequency * counts + penalties.presence


def _sample_randomly(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    assert batch.temperature is not None and batch.noise is not None
    # Greedy rows ride along at temperature 1; their result is not used.
    scaled = logits / torch.where(batch.temperature == 0, 1.0, batch.temperature)[:, None]
    threshold = _threshold(scaled, batch)
    if threshold is not None:
        scaled = scaled.masked_fill(scaled < threshold[:, None], -torch.inf)
    # Summed in float64: a token of probability 1e-8 keeps its share of the line.
    cumulative = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    target = batch.noise * cumulative[:, -1]
    # The first token whose cumulative probability exceeds the target; tokens of probability 0 never do.
    token_ids = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return token_ids.clamp(max=logits.shape[1] - 1)


def _threshold(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """[R]: the least scaled logit that min_p, top_k and top_p, in this order, let pass. Ties at the border pass."""
    assert batch.top_k is not None and batch.top_p is not None and batch.min_p is not None
    vocab_size = scaled.shape[1]
    use_k, use_p = (batch.top_k > 0) & (batch.top_k < vocab_size), batch.top_p < 1.0
    use_min_p = batch.min_p > 0
    if not bool((use_k | use_p | use_min_p).any()):
        return None
    threshold = scaled.amax(-1) + batch.min_p.log()  # p >= min_p * p_max, in the language of logits
    rows = (use_k | use_p).nonzero().squeeze(1)
    if len(rows) == 0:
        return threshold

    scaled, min_p_border = scaled[rows], threshold[rows]
    use_k, use_p, use_min_p = use_k[rows], use_p[rows], use_min_p[rows]
    top_k = torch.where(use_k, batch.top_k[rows], vocab_size)
    log_total = scaled.logsumexp(-1, keepdim=True)
    num_candidates = min(vocab_size, max(NUM_CANDIDATES, int(top_k[use_k].max()) if bool(use_k.any()) else 0))
    while True:
        values = scaled.topk(num_candidates).values  # [rows, num_candidates], descending
        probs = (values - log_total).exp()
        kept = (values >= min_p_border[:, None]) & (torch.arange(num_candidates, device=values.device) < top_k[:, None])
        # top_p is a share of the mass that min_p and top_k let pass. If neither cuts within the candidates, that is
        # everything, and the candidates are enough only if they hold top_p of it.
        cut = use_k | ~kept[:, -1]
        total = torch.where(cut, (probs * kept).sum(-1), 1.0)
        mass_before = (probs * kept).cumsum(-1) - probs * kept
        wanted = torch.where(use_p, batch.top_p[rows], 2.0) * total
        enough = cut | (~use_min_p & (mass_before[:, -1] + probs[:, -1] >= wanted))
        if bool(enough.all()) or num_candidates == vocab_size:
            break
        num_candidates = vocab_size
    kept &= mass_before < wanted[:, None]
    threshold[rows] = values.masked_fill(~kept, torch.inf).amin(-1)
    return threshold


def _logprobs(raw: torch.Tensor, chosen: list[int], wanted: list[int | None]) -> list[TokenLogprobs | None]:
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
