"""Sampler: logits -> token ids (chapter 8).

One uniform number chooses each token: the first one, in vocabulary order, whose cumulative probability exceeds it. The
number is a hash of (seed, sample index, position in the output), so a request draws the same numbers whatever else is
in the batch and however often it was preempted.
"""

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nanovllm.core.scheduler import SchedulerOutput, split_rows
from nanovllm.core.sequence import NO_TOKEN, Sequence
from nanovllm.worker.batch import fetch_together, move_together
from nanovllm.worker.exact import argmax, log_of, weights_of

if TYPE_CHECKING:
    from nanovllm.features.logits_processors.processors import LogitsProcessors
    from nanovllm.features.logprobs.scores import LogprobRows, PromptRows, Scores, TokenLogprobs
    from nanovllm.worker.kernels import Kernels

Row = TypeVar("Row")

# The fields of a SamplingBatch that are tensors in every batch.
TENSORS = ("random_rows", "temperature", "top_k", "top_p", "min_p", "noise")
# Made once, for steps that draw nothing: to make one in every step takes time.
EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")
NUM_CANDIDATES = 1024  # tokens that are looked at before the whole vocabulary is sorted
MIN_TEMPERATURE = 1e-5  # less counts as 0: divided by less, logits leave the range of float32


def uniform_noise(seq: Sequence) -> float:
    """A number in [0, 1) that depends on the seed, the sample index and the position in the output alone."""
    key = f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    upper_53_bits = int.from_bytes(digest, "little") >> 11  # as many as a float64 holds
    return upper_53_bits * 2.0**-53


@dataclass(slots=True)
class SamplingBatch:
    """What the sampler needs to know of R sequences, without the sequences: it may run in another process.

    rows_per_chunk  how many rows sample, of each chunk of the step
    logprob_rows    those of whose tokens the logprobs are wanted (features/logprobs/scores.py); None: none
    processors      what happens to the logits before a token is chosen; None: nothing
    random_rows     rows with a temperature: their token is drawn. The other rows take the most likely token
    has_filters     does any of them set top_k, top_p or min_p?
    prompt_rows     rows of prompts whose tokens' logprobs are wanted, too

    temperature, top_k, top_p, min_p and noise have an entry for each of random_rows. noise is a uniform random number;
    top_k 0 keeps all tokens.
    """

    rows_per_chunk: list[int]
    logprob_rows: "LogprobRows | None"
    processors: "LogitsProcessors | None"
    random_rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise: Tensor
    has_filters: bool
    prompt_rows: "PromptRows | None" = None

    @classmethod
    def from_scheduler_output(cls, output: SchedulerOutput, eos_token_ids: frozenset[int]) -> "SamplingBatch":
        """What the sampler needs to know of a step's rows that sample, and of prompts whose logprobs are wanted."""
        seqs = [seq for chunk in output.chunks for seq in chunk.sampled_seqs()]
        prompt_rows = None
        if any(chunk.seq.scores_prompt for chunk in output.chunks):
            from nanovllm.features.logprobs.scores import PromptRows

            prompt_rows = PromptRows.from_scheduler_output(output)
        rows_per_chunk = [chunk.num_logits for chunk in output.chunks]
        return cls.from_sequences(seqs, eos_token_ids, rows_per_chunk, prompt_rows)

    @classmethod
    def from_sequences(
        cls,
        seqs: Seq[Sequence],
        eos_token_ids: frozenset[int] = frozenset(),
        rows_per_chunk: list[int] | None = None,
        prompt_rows: "PromptRows | None" = None,
    ) -> "SamplingBatch":
        """The same of one row of each of these sequences. rows_per_chunk: None: each row is in a chunk of its own."""
        all_params = [seq.sampling_params for seq in seqs]
        logprob_rows = None
        wanted = [params.logprob_token_ids or params.logprobs for params in all_params]
        if any(k is not None for k in wanted):
            from nanovllm.features.logprobs.scores import LogprobRows

            logprob_rows = LogprobRows.of(wanted)
        random_rows = [row for row, params in enumerate(all_params) if params.temperature >= MIN_TEMPERATURE]
        random_params = [all_params[row] for row in random_rows]
        processors = None
        if any(changes_logits(seq) for seq in seqs):
            from nanovllm.features.logits_processors.processors import LogitsProcessors

            processors = LogitsProcessors.from_sequences(seqs, eos_token_ids)

        def tensor(values: list, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device="cpu") if values else EMPTY

        return cls(
            rows_per_chunk=[1] * len(seqs) if rows_per_chunk is None else rows_per_chunk,
            logprob_rows=logprob_rows,
            processors=processors,
            random_rows=tensor(random_rows, torch.int64),
            temperature=tensor([params.temperature for params in random_params]),
            top_k=tensor([max(params.top_k, 0) for params in random_params], torch.int64),
            top_p=tensor([params.top_p for params in random_params]),
            min_p=tensor([params.min_p for params in random_params]),
            noise=tensor([uniform_noise(seqs[row]) for row in random_rows], torch.float64),
            has_filters=any(params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 for params in random_params),
            prompt_rows=prompt_rows,
        )

    @property
    def num_rows(self) -> int:
        return sum(self.rows_per_chunk)

    def per_chunk(self, rows: list[Row]) -> list[list[Row]]:
        """Split a list with an entry for each row that samples into one for each chunk. See split_rows()."""
        return split_rows(rows, self.rows_per_chunk)

    def to(self, device: torch.device) -> "SamplingBatch":
        """The same in a device's memory, moved by one non-blocking copy."""
        return self if device.type == "cpu" else self.with_tensors(move_together(self.tensors(), device))

    def tensors(self) -> dict[str, Any]:
        """What sampling on a device reads there."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in TENSORS}
        fields["logprob_rows"] = self.logprob_rows
        fields["processors"] = None if self.processors is None else self.processors.tensors()
        fields["prompt_rows"] = None if self.prompt_rows is None else {"token_ids": self.prompt_rows.token_ids}
        return fields

    def with_tensors(self, tensors: dict[str, Any]) -> "SamplingBatch":
        """The same with what tensors() has named in a device's memory."""
        processors, prompt_rows = self.processors, self.prompt_rows
        if processors is not None:
            processors = replace(processors, **tensors["processors"])
        if prompt_rows is not None:
            prompt_rows = replace(prompt_rows, **tensors["prompt_rows"])
        return replace(self, **tensors | {"processors": processors, "prompt_rows": prompt_rows})

    def to_lists(self, sampled: "Sampled") -> tuple[list[int], list["TokenLogprobs | None"]]:
        """(a token of each row, its logprobs if asked for). sampled: of sample_rows(), in the CPU's memory."""
        found = {}
        if self.logprob_rows is not None and sampled.scores is not None:
            found = self.logprob_rows.logprobs(sampled.scores)
        return sampled.token_ids.tolist(), [found.get(row) for row in range(self.num_rows)]


class Sampled(NamedTuple):
    """What was found for R rows of logits, in the memory that holds these.

    token_ids   [R], NO_TOKEN for a row that holds NaN or +infinity, or nothing but -infinity
    scores      of the tokens whose logprobs are wanted; None: of none
    """

    token_ids: Tensor
    scores: "Scores | None"


def changes_logits(seq: Sequence) -> bool:
    """Does anything happen to a sequence's logits before a token is chosen? See LogitsProcessors.from_sequences."""
    params = seq.sampling_params
    return (
        any(part.changes_logits for part in seq.parts.values())
        or params.allowed_token_ids is not None
        or bool(params.logit_bias)
        or seq.num_generated_tokens < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def sample(
    logits: Tensor, batch: SamplingBatch, kernels: "Kernels | None" = None
) -> tuple[list[int], list["TokenLogprobs | None"]]:
    """sample_rows(), and what it finds on the host. batch: in the CPU's memory."""
    batch = batch.to(logits.device)
    return batch.to_lists(fetch_together(sample_rows(logits, batch, kernels)))


def sample_rows(logits: Tensor, batch: SamplingBatch, kernels: "Kernels | None" = None) -> Sampled:
    """A token for each row of logits [R, vocab_size] (float32; changed in place), and its logprobs if asked for.

    batch: on the logits' device. Nothing waits for that device. kernels: None: PyTorch chooses.
    """
    raw = logits
    if batch.processors is not None:
        batch.processors.apply_grammars(logits)
        if batch.logprob_rows is not None:
            raw = logits.clone()
        batch.processors.apply(logits)
    token_ids = choose_tokens(logits, batch) if kernels is None else kernels.choose_tokens(logits, batch)
    if batch.logprob_rows is None:
        return Sampled(token_ids, None)
    library = None if kernels is None else kernels.library
    return Sampled(token_ids, batch.logprob_rows.score(raw, token_ids, library))


def choose_tokens(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[R]: a token for each row of logits [R, vocab_size]: drawn for random_rows, otherwise the most likely one."""
    chosen = argmax(logits)
    best = logits.gather(1, chosen[:, None]).squeeze(1)  # NaN if the row holds one: argmax takes NaN for the largest
    if len(batch.random_rows):
        chosen[batch.random_rows] = sample_randomly(logits[batch.random_rows], batch)
    return chosen.masked_fill_(~best.isfinite(), NO_TOKEN)


def sample_randomly(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """A token for each of batch.random_rows. logits: [len(random_rows), vocab_size]."""
    scaled = logits / batch.temperature[:, None]
    if batch.has_filters:
        vocab_size = logits.shape[1]
        top_k = torch.where(batch.top_k > 0, batch.top_k, vocab_size).clamp(max=vocab_size)
        threshold = logit_threshold(scaled, top_k, batch.top_p, batch.min_p)
        scaled = scaled.masked_fill(scaled < threshold[:, None], -torch.inf)
    cumulative = weights_of(scaled - scaled.amax(-1, keepdim=True)).cumsum(-1)
    target = batch.noise * cumulative[:, -1]  # less than the total: noise is at most 1 - 2^-53
    # The first token whose cumulative weight exceeds the target; tokens of weight 0 never do.
    token_ids = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    # A finite logit may overflow float32 when it is divided by the temperature. Then the total is NaN: no token.
    return token_ids.clamp(max=logits.shape[1] - 1).masked_fill(target.isnan(), NO_TOKEN)


def logit_threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[R]: the least scaled logit that min_p, top_k and top_p, in this order, let pass. Ties at the border pass.

    top_p keeps a share of what min_p and top_k leave, so it needs the logits sorted, down to where it ends. The largest
    NUM_CANDIDATES nearly always suffice; rows for which they do not are decided over the whole vocabulary.
    """
    vocab_size = scaled.shape[1]
    largest = scaled.amax(-1)
    threshold = largest + log_of(min_p)  # p >= min_p * p_max, in logits
    weight_of_all = weights_of(scaled - largest[:, None]).sum(-1)

    def look_at(num_candidates: int, rows: Any) -> tuple[Tensor, Tensor]:
        """The rows' thresholds if only the largest num_candidates are looked at, and for which rows that is enough."""
        values = scaled[rows].topk(num_candidates).values  # [rows, num_candidates], descending
        kth = values.gather(1, top_k[rows, None].clamp(max=num_candidates) - 1)
        kept = (values >= threshold[rows, None]) & (values >= kth)
        weights = weights_of(values - largest[rows, None]) * kept
        # Where neither min_p nor top_k cuts within the candidates, later tokens have weights, too.
        cut = ~kept[:, -1]
        total = torch.where(cut, weights.sum(-1), weight_of_all[rows])
        wanted = torch.where(top_p[rows] < 1.0, top_p[rows] * total, torch.inf)
        kept &= weights.cumsum(-1) - weights < wanted[:, None]
        # Only there is weight_of_all the right total; it is enough if top_p ends within the candidates.
        whole = (min_p[rows] == 0) & (top_k[rows] == vocab_size)
        return values.masked_fill(~kept, torch.inf).amin(-1), cut | (whole & ~kept[:, -1])

    if scaled.device.type != "cpu":  # sorting all of it is faster than asking the device which rows need it
        return look_at(vocab_size, slice(None))[0]
    rows = ((top_k < vocab_size) | (top_p < 1.0)).nonzero().squeeze(1)
    for num_candidates in (min(NUM_CANDIDATES, vocab_size), vocab_size):
        if len(rows):
            found, decided = look_at(num_candidates, rows)
            decided |= num_candidates == vocab_size
            threshold[rows[decided]] = found[decided]
            rows = rows[~decided]
    return threshold
