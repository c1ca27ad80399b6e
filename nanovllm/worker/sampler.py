"""Sampler: logits -> token ids (chapter 8).

One uniform number chooses each token: the first one, in vocabulary order, whose cumulative probability exceeds it. The
number is a hash of (seed, sample index, position in the output), so the same
request draws the same numbers whatever else is in the batch and however often it was preempted.
"""

import hashlib
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.core.sequence import NO_TOKEN, Sequence
from nanovllm.features.grammar.masks import Masks
from nanovllm.features.logprobs.scores import PromptRows, TokenLogprobs, token_logprobs
from nanovllm.worker.batch import to_device

# top_k and top_p look at this many tokens before they sort the whole vocabulary.
NUM_CANDIDATES = 1024
ARGMAX_BLOCK = 256  # at most
MIN_TEMPERATURE = 1e-5  # less counts as 0, as in vLLM: divided by it, logits leave the range of float32


def uniform_noise(seq: Sequence) -> float:
    """A number in [0, 1) that depends on the seed, the sample index and the position in the output alone."""
    key = f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}".encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the sampler needs to know of R sequences, without the sequences: it may run in another process.

    num_logprobs        for each row, how many of the top tokens' logprobs are wanted; None: not even its own
    penalties           (row, tokens seen, their factor, tokens generated, what is subtracted from their logits)
    masks               what happens to the logits before that
    random_rows         rows that are sampled; the others take the most likely token
    temperature, top_k, top_p, min_p, noise      [len(random_rows)] each; top_k 0 means all
    prompt              prompt tokens whose logprobs are wanted, too
    """

    num_logprobs: list[int | None]
    penalties: list[tuple[int, Tensor, float, Tensor, Tensor]]
    masks: Masks
    random_rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise: Tensor
    prompt: PromptRows | None = None

    @classmethod
    def from_sequences(
        cls, seqs: Seq[Sequence], eos_token_ids: frozenset[int] = frozenset(), prompt: PromptRows | None = None
    ) -> "SamplingBatch":
        penalties, random_rows = [], []
        for row, seq in enumerate(seqs):
            p = seq.sampling_params
            if p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
                tokens = torch.tensor(seq.tokens)
                generated, counts = tokens[seq.num_prompt_tokens :].unique(return_counts=True)
                taken_off = p.frequency_penalty * counts + p.presence_penalty
                penalties.append((row, tokens.unique(), p.repetition_penalty, generated, taken_off))
            if p.temperature >= MIN_TEMPERATURE:
                random_rows.append(row)
        chosen = [seqs[row] for row in random_rows]
        params = [seq.sampling_params for seq in chosen]
        return cls(
            [seq.sampling_params.logprobs for seq in seqs],
            penalties,
            Masks.from_sequences(seqs, eos_token_ids),
            torch.tensor(random_rows, dtype=torch.int64),
            torch.tensor([p.temperature for p in params]),
            torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int64),
            torch.tensor([p.top_p for p in params]),
            torch.tensor([p.min_p for p in params]),
            torch.tensor([uniform_noise(seq) for seq in chosen], dtype=torch.float64),
            prompt,
        )


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Choose a token for each row of logits [R, vocab_size] (float32; changed in place).

    NO_TOKEN for a row that holds NaN or +infinity, or nothing but -infinity.
    """
    batch.masks.apply_grammars(logits)
    raw = logits.clone() if any(k is not None for k in batch.num_logprobs) else logits
    batch.masks.apply(logits)
    for row, *numbers in batch.penalties:
        seen, factor, generated, taken_off = (to_device(x, logits.device) for x in numbers)
        values = logits[row, seen]
        logits[row, seen] = torch.where(values > 0, values / factor, values * factor)
        logits[row, generated] -= taken_off
    chosen = argmax(logits)
    best = logits.gather(1, chosen[:, None]).squeeze(1)  # PyTorch takes NaN for the largest number of all
    if len(batch.random_rows):
        rows = to_device(batch.random_rows, logits.device)
        chosen[rows] = sample_randomly(logits[rows], batch)
    chosen.masked_fill_(~best.isfinite(), NO_TOKEN)
    token_ids = chosen.tolist()  # the first time in a step that anything waits for the device
    return token_ids, token_logprobs(raw, token_ids, batch.num_logprobs)


def argmax(logits: Tensor) -> Tensor:
    """logits.argmax(-1), on a CPU several times as fast: PyTorch uses vector instructions for amax, not for argmax."""
    if logits.is_cuda:
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, math.gcd(logits.shape[1], ARGMAX_BLOCK)))  # [R, blocks, tokens of a block]
    best = blocks.amax(-1).argmax(-1)
    return best * blocks.shape[2] + blocks[torch.arange(len(logits)), best].argmax(-1)


def sample_randomly(logits: Tensor, batch: SamplingBatch) -> Tensor:
    temperature, top_p, min_p, noise = (
        to_device(x, logits.device) for x in (batch.temperature, batch.top_p, batch.min_p, batch.noise)
    )
    scaled = logits / temperature[:, None]
    if bool((batch.top_k > 0).any() or (batch.top_p < 1.0).any() or (batch.min_p > 0.0).any()):
        vocab_size = logits.shape[1]
        top_k = torch.where(batch.top_k > 0, batch.top_k, vocab_size).clamp(max=vocab_size)
        threshold = logit_threshold(scaled, to_device(top_k, logits.device), top_p, min_p)
        scaled = scaled.masked_fill(scaled < threshold[:, None], -torch.inf)
    # Summed in float64: in float32 a token of probability 1e-8 would add nothing to a sum near 1.
    cumulative = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    target = noise * cumulative[:, -1]
    # The first token whose cumulative probability exceeds the target; tokens of probability 0 never do.
    token_ids = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    # The total is NaN if a logit that was divided by the temperature is too large for float32.
    return token_ids.clamp(max=logits.shape[1] - 1).masked_fill(target.isnan(), NO_TOKEN)


def logit_threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[R]: the least scaled logit that min_p, top_k and top_p, in this order, let pass. Ties at the border pass.

    top_p keeps a share of what min_p and top_k leave, so it needs the logits sorted, down to where it ends. The largest
    NUM_CANDIDATES nearly always suffice; rows for which they do not are decided over the whole vocabulary.
    """
    vocab_size = scaled.shape[1]
    threshold = scaled.amax(-1) + min_p.log()  # p >= min_p * p_max, in logits
    log_total = scaled.logsumexp(-1, keepdim=True)

    def look_at(num_candidates: int, rows: Any) -> tuple[Tensor, Tensor]:
        """The rows' thresholds if only the largest num_candidates are looked at, and for which rows that is enough."""
        values = scaled[rows].topk(num_candidates).values  # [rows, num_candidates], descending
        rank = torch.arange(num_candidates, device=values.device)
        kept = (values >= threshold[rows, None]) & (rank < top_k[rows, None])
        probs = (values - log_total[rows]).exp() * kept
        # Where neither min_p nor top_k cuts within the candidates, the tokens behind them have probability, too.
        cut = (top_k[rows] <= num_candidates) | ~kept[:, -1]
        total = torch.where(cut, probs.sum(-1), 1.0)
        wanted = torch.where(top_p[rows] < 1.0, top_p[rows] * total, torch.inf)
        kept &= probs.cumsum(-1) - probs < wanted[:, None]
        whole = (min_p[rows] == 0) & (top_k[rows] == vocab_size)  # nothing is cut behind them: the total is 1
        return values.masked_fill(~kept, torch.inf).amin(-1), cut | (whole & ~kept[:, -1])

    if scaled.is_cuda:  # sorting all of it is faster than asking the device which rows need it
        return look_at(vocab_size, slice(None))[0]
    rows = ((top_k < vocab_size) | (top_p < 1.0)).nonzero().squeeze(1)
    for num_candidates in (min(NUM_CANDIDATES, vocab_size), vocab_size):
        if len(rows):
            found, decided = look_at(num_candidates, rows)
            threshold[rows[decided]] = found[decided]
            rows = rows[~decided]
    return threshold
