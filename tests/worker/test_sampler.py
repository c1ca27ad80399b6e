"""The sampler against the exact distribution, computed the slow way on a small vocabulary."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.polynomial import chebyshev

from nanovllm.core.sequence import NO_TOKEN, Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker import exact
from nanovllm.worker.sampler import SamplingBatch, sample, uniform_noise

LOGITS = [2.0, -1.0, 0.5, 1.5, 0.0, -3.0, 1.0, 0.25]
NUM_DRAWS, NUM_PENALIZED_DRAWS = 10_000, 4_000  # penalties are computed one row at a time


def exact_probs(logits: list[float], p: SamplingParams, prompt=(), output=()) -> list[float]:
    """Penalties, temperature, min_p, top_k, top_p, in plain Python."""
    logits = list(logits)
    for t in set(prompt) | set(output):
        logits[t] = logits[t] / p.repetition_penalty if logits[t] > 0 else logits[t] * p.repetition_penalty
    for t in set(output):
        logits[t] -= p.frequency_penalty * list(output).count(t) + p.presence_penalty
    weights = [math.exp(x / p.temperature) for x in logits]
    total, largest = sum(weights), max(weights)
    kept = {i: w / total for i, w in enumerate(weights) if w >= p.min_p * largest}
    order = sorted(kept, key=lambda i: -kept[i])
    if p.top_k > 0:
        order = order[: p.top_k]
    total, mass, nucleus = sum(kept[i] for i in order), 0.0, set()
    for i in order:
        if p.top_p == 1 or mass < p.top_p * total:
            nucleus.add(i)
        mass += kept[i]
    total = sum(kept[i] for i in nucleus)
    return [kept[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


def draw(logits: list[list[float]] | torch.Tensor, seqs: list[Sequence], eos=frozenset()) -> list[int]:
    return sample(torch.as_tensor(logits), SamplingBatch.from_sequences(seqs, eos))[0]


def chi_square(counts: list[int], probs: list[float]) -> tuple[float, int]:
    num = sum(counts)
    assert all(c == 0 for c, p in zip(counts, probs, strict=True) if p == 0), "a token was sampled that may not be"
    cells = [(c, p * num) for c, p in zip(counts, probs, strict=True) if p > 0]
    return sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1


def chi_square_limit(freedom: int) -> float:
    """The 99.99 % quantile, by Wilson and Hilferty: without scipy."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 0.0


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-38, 1e-300])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature):
    """Divided by 1e-38, logits leave the range of float32, and a softmax of infinities says nothing."""
    seqs = [Sequence([0], SamplingParams(temperature=temperature, seed=seed)) for seed in range(20)]
    assert draw([LOGITS] * 20, seqs) == [LOGITS.index(max(LOGITS))] * 20


CASES = {
    "plain": dict(),
    "cold": dict(temperature=0.5),
    "hot": dict(temperature=1.7),
    "top_k": dict(top_k=3),
    "top_p": dict(top_p=0.7),
    "min_p": dict(min_p=0.2),
    "all three": dict(temperature=1.3, top_k=6, top_p=0.8, min_p=0.05),
    "min_p before top_p": dict(min_p=0.3, top_p=0.95),
    "top_k before top_p": dict(top_k=4, top_p=0.75),
    "top_p keeps at least one": dict(top_p=0.01),
    "repetition": dict(repetition_penalty=1.8),
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=0.7),
    "penalties before temperature": dict(frequency_penalty=0.7, repetition_penalty=1.3, temperature=0.6),
}


@pytest.mark.parametrize("name", CASES)
def test_distribution(name):
    params = SamplingParams(**CASES[name], max_tokens=None)
    prompt, output = [0, 1, 1], [3, 3, 6]
    seqs = []
    is_penalized = any("penalty" in option for option in CASES[name])
    for seed in range(NUM_PENALIZED_DRAWS if is_penalized else NUM_DRAWS):
        seq = Sequence(prompt, params)
        seq.tokens += output
        seq.seed = seed
        seqs.append(seq)
    counts = [0] * len(LOGITS)
    for token_id in draw([LOGITS] * len(seqs), seqs):
        counts[token_id] += 1
    statistic, freedom = chi_square(counts, exact_probs(LOGITS, params, prompt, output))
    assert statistic <= chi_square_limit(freedom)


def test_greedy_and_top_k_1_take_the_most_likely_token():
    params = [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=0, top_p=0.1)]
    assert draw([LOGITS] * 3, [Sequence([1], p) for p in params]) == [0, 0, 0]


def test_same_seed_same_token_whatever_else_is_in_the_batch():
    def seq(seed, **options):
        return Sequence([1], SamplingParams(seed=seed, **options))

    logits = torch.randn(5, 2000, generator=torch.Generator().manual_seed(1)).tolist()
    alone = draw(logits[:1], [seq(42, top_p=0.9)])
    others = [seq(1), seq(2, temperature=0), seq(3, top_k=1500, min_p=0.001), seq(4, repetition_penalty=2.0)]
    for place in range(5):
        rows = [*logits[1:]]
        rows.insert(place, logits[0])
        batch = [*others]
        batch.insert(place, seq(42, top_p=0.9))
        assert draw(rows, batch)[place] == alone[0]


def test_noise_depends_on_seed_sample_and_position():
    def noise(seed, sample_index, num_generated):
        seq = Sequence([1], SamplingParams(seed=seed))
        seq.sample_index, seq.tokens = sample_index, [1] * (1 + num_generated)
        return uniform_noise(seq)

    values = [noise(s, i, n) for s in (0, 1, -1, 2**64 - 1) for i in range(5) for n in range(50)]
    assert len(set(values)) == len(values) and all(0 <= v < 1 for v in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.05
    assert noise(3, 1, 4) == noise(3, 1, 4)


def test_min_tokens_forbids_what_would_stop():
    seq = Sequence([1], SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3]))
    assert draw([LOGITS], [seq], frozenset([0])) == [6], "0 is EOS, 3 a stop token"
    seq.append(6)
    assert draw([LOGITS], [seq], frozenset([0])) == [6], "the second token may not stop either"
    seq.append(6)
    assert draw([LOGITS], [seq], frozenset([0])) == [0], "the third may"


def test_logprobs_are_of_the_raw_logits():
    params = SamplingParams(temperature=0, logprobs=3, repetition_penalty=5.0)
    seq, silent = Sequence([0], params), Sequence([0], SamplingParams(temperature=0))
    tokens, [found, nothing] = sample(torch.tensor([LOGITS, LOGITS]), SamplingBatch.from_sequences([seq, silent]))
    exact = torch.tensor(LOGITS).log_softmax(0)
    assert tokens[0] == 3 and nothing is None
    assert (found.rank, found.top_token_ids) == (2, [0, 3, 6])
    assert found.logprob == pytest.approx(float(exact[3]))
    assert found.top_logprobs == pytest.approx(exact[[0, 3, 6]].tolist())


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("vocab_size", [8, 7, 1024])
@pytest.mark.parametrize(
    "options",
    [dict(temperature=0), dict(), dict(top_p=0.9), dict(top_k=2), dict(min_p=0.1), dict(repetition_penalty=1.5)],
    ids=str,
)
def test_logits_that_are_no_numbers_give_no_token(options, vocab_size):
    """NaN or +infinity anywhere, or nothing but -infinity. Rows beside such a row get what they get without it."""
    torch.manual_seed(0)
    bad = torch.randn(7, vocab_size)
    bad[0, 0] = bad[1, -1] = bad[2] = NAN
    bad[3, 3] = bad[4] = INF
    bad[5] = -INF
    bad[6, 2], bad[6, 4] = INF, NAN
    good = torch.randn(3, vocab_size)
    good[0, 2:] = -INF
    logits = torch.cat([good[:1], bad, good[1:]])
    seqs = [Sequence([1, 3], SamplingParams(**options, seed=i, logprobs=2)) for i in range(10)]
    sound = [*draw(good[:1].clone(), seqs[:1]), *draw(good[1:].clone(), seqs[8:])]
    assert draw(logits, seqs) == [sound[0], *[NO_TOKEN] * 7, *sound[1:]] and NO_TOKEN not in sound


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("options", [dict(allowed_token_ids=[1, 2]), dict(bad_words=["x"])], ids=str)
def test_masks_do_not_hide_it(options, bad):
    seq = Sequence([0], SamplingParams(temperature=0, **options))
    seq.parts["bad_words"] = SimpleNamespace(banned=lambda generated: [4], changes_logits=True)
    assert draw([[1.0, 2.0, 3.0, 0.0, 5.0]], [seq]) == [2]
    assert draw([[1.0, 2.0, 3.0, 0.0, bad]], [seq]) == [NO_TOKEN]


def test_logits_too_large_for_their_temperature():
    seqs = [Sequence([0], SamplingParams(temperature=1e-3)), Sequence([0], SamplingParams(temperature=0))]
    assert draw([[1e36, 0.0, -1e38], [1e36, 0.0, -1e38]], seqs) == [NO_TOKEN, 0]


def test_where_the_coefficients_of_exp_come_from():
    half = math.log(2) / 2

    def rest(t: np.ndarray) -> np.ndarray:
        """(exp(f) - 1 - f) / f^2 for f = half * t, by its own series."""
        return sum((half * t) ** k / math.factorial(k + 2) for k in range(20))

    series = chebyshev.cheb2poly(chebyshev.chebinterpolate(rest, 30)[:5]) / half ** np.arange(5)
    found = np.array(exact.EXP_COEFFICIENTS[::-1])
    assert np.abs(found - series).max() < 1e-8
    x = torch.linspace(-29, 0, 10001)
    assert (exact.exp_in_steps(x).double() / x.double().exp() - 1).abs().max() < 2e-7
