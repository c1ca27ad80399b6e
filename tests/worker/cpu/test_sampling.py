"""Tokens drawn in C, and log probabilities found in C (cpu/sampling.c), against the same in PyTorch.

draw() promises the tokens of worker/sampler.py, whatever the logits: so most rows here are hostile ones.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import NO_TOKEN, Sequence
from nanovllm.features.logprobs import c_scores, scores
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.worker import model_runner
from nanovllm.worker.cpu import threads
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.sampler import SamplingBatch, logit_threshold, sample_rows, weights_of
from tests.faults import plant
from tests.marks import by_night
from tests.short_requests import TEXT, token_logprobs
from tests.worker.cpu.test_kernels import kernels
from tests.worker.test_sampler import LOGITS, chi_square, chi_square_limit, exact_probs

BLOCK, MAX_BLOCKS = 256, 2048  # as cpu/sampling.c has them
MOST_EXACT = BLOCK * MAX_BLOCKS  # tokens, of which all sums are exact; more than these make larger blocks
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module")
def c() -> Kernels:
    return kernels(torch.float32, 4, 2, 16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- hostile rows ------------------------------------------------------------------------------------------------------


def plain(x: Tensor, g: torch.Generator) -> Tensor:
    return x


def ties(x: Tensor, g: torch.Generator) -> Tensor:
    return (x * 2).round()


def in_bf16(x: Tensor, g: torch.Generator) -> Tensor:
    """As a model in bfloat16 computes them: few values, at any distance."""
    return (x * 3).bfloat16().float()


def all_equal(x: Tensor, g: torch.Generator) -> Tensor:
    return torch.zeros_like(x) - 3


def tiny_spread(x: Tensor, g: torch.Generator) -> Tensor:
    return x * 1e-6 + 1


def wide_spread(x: Tensor, g: torch.Generator) -> Tensor:
    return x * 30


def huge(x: Tensor, g: torch.Generator) -> Tensor:
    """Some, divided by a small temperature, leave the range of float32."""
    return x * 10.0 ** torch.randint(-38, 38, (len(x), 1), generator=g)


def quantum_weights(x: Tensor, g: torch.Generator) -> Tensor:
    """Weights of a few times 2^-34, which are rounded to a multiple of it or to 0, and one that outweighs them all."""
    x = x * 0.5 - 23.5
    x[:, int(torch.randint(x.shape[1], (), generator=g))] = 0
    return x


def mostly_forbidden(x: Tensor, g: torch.Generator) -> Tensor:
    return x.masked_fill(torch.rand(x.shape, generator=g) < 0.98, -INF)


def no_numbers(x: Tensor, g: torch.Generator) -> Tensor:
    """In some rows infinity or NaN, in one nothing but -infinity."""
    for bad in (INF, NAN):
        x = x.masked_fill(torch.rand(x.shape, generator=g) < 0.3 / x.shape[1], bad)
    x[0] = -INF
    return x


def signed_zeros(x: Tensor, g: torch.Generator) -> Tensor:
    zeros = torch.where(x < 0, -0.0, 0.0)
    return torch.where(x > 2, x.round(), zeros)


def smallest_numbers(x: Tensor, g: torch.Generator) -> Tensor:
    """Around 0, where keys of negative and of positive numbers meet; most are denormal."""
    return x.round() * 1.4e-45


def descending(x: Tensor, g: torch.Generator) -> Tensor:
    """The first block has all that matters."""
    return x.sort(-1, descending=True).values


KINDS = (
    plain, ties, in_bf16, all_equal, tiny_spread, wide_spread, huge, quantum_weights, mostly_forbidden, no_numbers,
    signed_zeros, smallest_numbers, descending,
)  # fmt: skip
# Around vectors of 8 and 16, and around blocks; 1,024 are the candidates that PyTorch looks at first.
SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 100, 255, 256, 257, 512, 1000, 1024, 1025, 4096, 4099, 5000, 33_001, 40_000)


def pick(values: list[float], count: int, g: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """[count] of these values."""
    return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (count,), generator=g)]


def hostile_batch(logits: Tensor, g: torch.Generator) -> SamplingBatch:
    """Of all rows or of some, in any order: parameters at their limits, and such that something is just equal."""
    num_rows, size = logits.shape
    rows = torch.randperm(num_rows, generator=g)
    rows = rows[: max(1, int(pick([num_rows, num_rows, num_rows * 2 // 3], 1, g)))]
    count, num_blocks = len(rows), -(-size // BLOCK)
    near = [0, 0, 1, 2, 5, 40, num_blocks - 1, num_blocks, num_blocks + 1, size - 1, size, size + 1, size // 2]
    batch = SamplingBatch(
        rows_per_chunk=[1] * num_rows,
        logprob_rows=None,
        processors=None,
        random_rows=rows,
        temperature=pick([1e-5, 1e-3, 0.01, 0.3, 0.7, 1, 1, 1, 1.5, 5, 50], count, g),
        top_k=pick([max(0, k) for k in near], count, g, torch.int64),
        top_p=pick([1, 1, 1, 0.999, 0.95, 0.8, 0.75, 0.5, 0.25, 0.1, 0.001, 1e-6], count, g),
        min_p=pick([0, 0, 0, 1e-30, 1e-6, 0.01, 0.1, 0.5, 1], count, g),
        noise=torch.rand(count, generator=g, dtype=torch.float64),
        has_filters=True,
    )
    # Some top_p are the share of a token and of all that are larger, or the float32 beside that.
    at_border = torch.rand(count, generator=g) < 0.2
    sums = kept_weights(logits, replace(batch, top_p=torch.ones(count))).sort(-1, descending=True).values.cumsum(-1)
    batch.top_p = torch.where(at_border, one_of(sums.nan_to_num(1), g).float().clamp(1e-6, 1), batch.top_p)
    # Some noise is the share of a token and of all in front of it, or the float64 beside that.
    batch.noise = torch.where(
        torch.rand(count, generator=g) < 0.2, pick([0, 1 - 2**-53], count, g, torch.float64), batch.noise
    )
    at_border = torch.rand(count, generator=g) < 0.3
    border = one_of(kept_weights(logits, batch).cumsum(-1).nan_to_num(1), g).clamp(0, 1 - 2**-53)
    batch.noise = torch.where(at_border, border, batch.noise)
    return batch


def kept_weights(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[random rows, size], float64."""
    size = logits.shape[1]
    scaled = logits[batch.random_rows] / batch.temperature[:, None]
    top_k = torch.where(batch.top_k > 0, batch.top_k, size).clamp(max=size)
    threshold = logit_threshold(scaled, top_k, batch.top_p, batch.min_p)
    return weights_of(scaled - scaled.amax(-1, keepdim=True)).masked_fill(scaled < threshold[:, None], 0)


def one_of(sums: Tensor, g: torch.Generator) -> Tensor:
    """One of each row's sums as a share of the last one, or the number beside that."""
    at = torch.randint(sums.shape[1], (len(sums), 1), generator=g)
    share = (sums.gather(1, at) / sums[:, -1:]).squeeze(1)
    return torch.nextafter(share, pick([-1, 2], len(share), g, torch.float64)).where(
        torch.rand(len(share), generator=g) < 0.5, share
    )


def hostile(seed: int, sizes: tuple[int, ...], numbers: int) -> Iterator[tuple[str, Tensor, SamplingBatch]]:
    """(name, logits, batch) for each kind and size: about so many numbers each, but no more than 1,000 rows."""
    g = generator(seed)
    for size in sizes:
        for kind in KINDS:
            num_rows = max(1, min(1000, numbers // size))
            logits = kind(torch.randn(num_rows, size, generator=g), g)
            yield f"{kind.__name__}, {size} tokens", logits, hostile_batch(logits, g)


def chosen(kernels: Kernels, logits: Tensor, batch: SamplingBatch) -> list[int]:
    return kernels.choose_tokens(logits, batch).tolist()


def check_tokens(c: Kernels, name: str, logits: Tensor, batch: SamplingBatch) -> None:
    found, expected = (chosen(each, logits, batch) for each in (c, TORCH_KERNELS))
    if found == expected:
        return
    row = next(row for row, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    of_row = [at for at, drawn in enumerate(batch.random_rows.tolist()) if drawn == row]
    options = {n: [getattr(batch, n)[at].item() for at in of_row] for n in ("temperature", "top_k", "top_p", "min_p")}
    noise = [batch.noise[at].item().hex() for at in of_row]
    pytest.fail(f"{name}: row {row} has {found[row]} in C and {expected[row]} in PyTorch; {options}, noise {noise}")


# -- the same tokens as in PyTorch -------------------------------------------------------------------------------------


def test_draws_what_pytorch_draws(c):
    for name, logits, batch in hostile(0, SIZES, numbers=20_000):
        check_tokens(c, name, logits, batch)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 5))
def test_draws_what_pytorch_draws_a_million_times(c, seed):
    num_rows = 0
    while num_rows < 250_000:
        for name, logits, batch in hostile(seed + 100 * num_rows, SIZES, numbers=150_000):
            check_tokens(c, name, logits, batch)
            num_rows += len(batch.random_rows)


@pytest.mark.parametrize("size", [MOST_EXACT, MOST_EXACT + 1, by_night(600_011)])
def test_a_vocabulary_of_half_a_million_tokens_and_more(c, size):
    """From 524,289 tokens on, blocks are larger. Sums stay exact while few tokens weigh much."""
    g = generator(size)
    for kind in (plain, ties, wide_spread, mostly_forbidden):
        logits = kind(torch.randn(3, size, generator=g), g)
        check_tokens(c, kind.__name__, logits, hostile_batch(logits, g))


def test_sums_that_are_not_exact_have_an_end(c):
    """550,000 tokens that weigh 1 have a sum to which 2^-34 adds nothing, though a block of such tokens does."""
    logits = torch.zeros(1, 600_000)
    logits[:, 550_000:] = -34 * math.log(2)
    batch = SamplingBatch.from_sequences([Sequence([1], SamplingParams())])
    for noise in (0.0, 0.5, 1 - 2**-53):
        batch.noise.fill_(noise)
        assert 0 <= chosen(c, logits, batch)[0] < 600_000


def test_the_last_token_that_top_p_keeps(c):
    """Each row descends, and noise of nearly 1 takes the last token that is kept.

    top_p is the share of all that lie above some distance from the largest logit, or up to eight float32s beside it.
    """
    g = generator(0)
    for distance in (0.5, 1, 2, 3.5, 6, 9, 15):
        logits = torch.randn(15, 3000, generator=g).mul(4).sub(12).clamp(max=-0.01)
        logits[:, 0] = 0
        logits = descending(logits, g)
        weights = weights_of(logits)
        share = weights.masked_fill(logits <= -distance, 0).sum(-1) / weights.sum(-1)
        ulps = torch.tensor([-8, -4, -2, -1, 0, 1, 2, 4, 8]).mul(2**-24).add(1)
        seqs = [Sequence([1], SamplingParams(top_p=0.5))] * (15 * len(ulps))
        batch = SamplingBatch.from_sequences(seqs)
        batch.top_p = (share.float()[:, None] * ulps).flatten()
        batch.noise.fill_(1 - 2**-53)
        check_tokens(c, f"up to {distance}", logits.repeat_interleave(len(ulps), 0), batch)


def test_a_token_that_may_not_be_drawn_is_not_drawn(c):
    """At the borders of noise, the only tokens with a weight are first, last, or beside others in a vector."""
    for size in (1, 9, 16, 300, 5000):
        for kept in {0, size // 2, size - 1}:
            logits = torch.full((3, size), -INF)
            logits[:, kept] = 5
            seqs = [Sequence([1], SamplingParams(temperature=t)) for t in (0.01, 1, 50)]
            batch = SamplingBatch.from_sequences(seqs)
            batch.noise = torch.tensor([0, 1 - 2**-53, 0.5], dtype=torch.float64)
            assert chosen(c, logits, batch) == [kept] * 3


def test_random_and_greedy_rows_side_by_side(c):
    logits = torch.randn(7, 1000, generator=generator(0)).mul(2).round()  # several are the largest
    logits[4, 3], logits[5] = NAN, -INF
    params = [SamplingParams(temperature=i % 2, seed=i, top_k=i) for i in range(7)]
    batch = SamplingBatch.from_sequences([Sequence([1], each) for each in params])
    found = chosen(c, logits, batch)
    assert found == chosen(TORCH_KERNELS, logits, batch) and found[4] == found[5] == NO_TOKEN
    assert found[::2] == [int(logits[0].argmax()), int(logits[2].argmax()), NO_TOKEN, int(logits[6].argmax())]


# -- the distribution --------------------------------------------------------------------------------------------------

CASES = {
    "plain": dict(),
    "cold": dict(temperature=0.4),
    "hot": dict(temperature=2.5),
    "top_k": dict(top_k=5),
    "top_p": dict(top_p=0.7),
    "min_p": dict(min_p=0.2),
    "all of them": dict(temperature=1.3, top_k=6, top_p=0.85, min_p=0.03),
}
NUM_DRAWS = 100_000


@pytest.mark.nightly  # by day C draws PyTorch's tokens, and tests/worker/test_sampler.py looks at their distribution
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [len(LOGITS), 600])
def test_distribution(c, name, size):
    """Of few tokens, and of as many as make three blocks."""
    row = LOGITS if size == len(LOGITS) else torch.rand(size, generator=generator(1)).mul(3).tolist()
    params = SamplingParams(**CASES[name])
    batch = SamplingBatch.from_sequences([Sequence([1], params)] * 1000)
    logits, g = torch.tensor(row).repeat(1000, 1), generator(2)
    counts = torch.zeros(size, dtype=torch.int64)
    for _ in range(NUM_DRAWS // 1000):
        batch.noise = torch.rand(1000, generator=g, dtype=torch.float64)
        counts += c.choose_tokens(logits, batch).bincount(minlength=size)
    assert counts.sum() == NUM_DRAWS
    statistic, freedom = chi_square(counts.tolist(), exact_probs(row, params))
    assert freedom > 0 and statistic <= chi_square_limit(freedom)


# -- whatever else is in the batch -------------------------------------------------------------------------------------


def part_of(batch: SamplingBatch, at: list[int]) -> SamplingBatch:
    """The same parameters for some of the random rows, whose logits are rows 0, 1, 2, ..."""
    chosen = torch.tensor(at)
    tensors = {name: getattr(batch, name)[chosen] for name in ("temperature", "top_k", "top_p", "min_p", "noise")}
    return replace(batch, rows_per_chunk=[1] * len(at), random_rows=torch.arange(len(at)), **tensors)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_token_and_scores_in_any_company(c, num_threads):
    g = generator(num_threads)
    pool = threads.load_pool()
    for size in (300, 5001, 32_000):
        logits = torch.randn(64, size, generator=g).mul(2)
        logits[::2] = logits[::2].round()
        batch = part_of(hostile_batch(logits, g), [i % 40 for i in range(64)])
        tokens = torch.randint(size, (64,), generator=g)
        expected = chosen(TORCH_KERNELS, logits, batch)
        try:
            pool.set_threads(num_threads, None)
            assert chosen(c, logits, batch) == expected
            together = c_scores.score_rows(c.library, logits, torch.arange(64), tokens, 5)
            alone = [chosen(c, logits[i : i + 1], part_of(batch, [i]))[0] for i in range(64)]
            assert alone == expected
            order = torch.randperm(64, generator=g)
            shuffled = chosen(c, logits[order], part_of(batch, order.tolist()))
            assert shuffled == [expected[i] for i in order.tolist()]
            # The other way round: the rows stay where they are, and are listed in another order.
            listed = replace(part_of(batch, order.tolist()), random_rows=order)
            assert chosen(c, logits, listed) == expected
            for at, all_of_them in zip(
                c_scores.score_rows(c.library, logits, order, tokens[order], 5), together, strict=True
            ):
                assert torch.equal(at, all_of_them[order])
            for i in (0, 1, 63):
                one = c_scores.score_rows(c.library, logits, torch.tensor([i]), tokens[i : i + 1], 5)
                assert all(torch.equal(x[0], y[i]) for x, y in zip(one, together, strict=True))
        finally:
            pool.set_threads(threads.num_threads(), None)


# -- log probabilities -------------------------------------------------------------------------------------------------


def check_scores(c: Kernels, logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> None:
    totals, ranks, top = c_scores.score_rows(c.library, logits, rows, tokens, num_top)
    expected = scores.score_rows(logits, rows, tokens, num_top)
    torch.testing.assert_close(totals, expected[0], atol=3e-7, rtol=1e-7)
    assert torch.equal(ranks, expected[1]) and torch.equal(top, expected[2])
    logprobs = logits[rows].double().log_softmax(-1)
    found = logits[rows].double() - totals[:, None]
    torch.testing.assert_close(found, logprobs, atol=3e-7, rtol=1e-7)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (huge, no_numbers)])
def test_scores_are_what_pytorch_finds(c, kind):
    """Of some rows, in any order, one of them twice; chosen tokens lie anywhere, the first and the last among them."""
    g = generator(KINDS.index(kind))
    for size in (*SIZES, MOST_EXACT + 17) if kind in (plain, descending) else SIZES:
        num_rows = max(1, min(40, 200_000 // size))
        logits = kind(torch.randn(num_rows, size, generator=g), g)
        logits[:, size // 3] = 0  # never all of them are -infinity
        rows = torch.randperm(num_rows, generator=g)[: max(1, num_rows * 2 // 3)]
        rows = torch.cat([rows, rows[:1]])
        chosen = torch.randint(size, (len(rows),), generator=g)
        chosen[0], chosen[-1] = 0, size - 1
        for num_top in {0, 1, min(size, 64), min(size, int(torch.randint(2, 64, (), generator=g)))}:
            check_scores(c, logits, rows, chosen, num_top)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 63, 64])
def test_top_tokens_may_be_all_of_them(c, size):
    logits = torch.randn(30, size, generator=generator(size)).mul(2).round()
    logits[:10, 1:] = -INF
    check_scores(c, logits, torch.arange(30), torch.arange(30) % size, size)
    found = token_logprobs(logits, [0] * 30, [size] * 30, c.library)
    expected = token_logprobs(logits, [0] * 30, [size] * 30)
    assert [each.top_token_ids for each in found] == [each.top_token_ids for each in expected]


def test_ranks_of_tokens_that_are_equally_likely(c):
    """The rank says how many are more likely; of the equally likely ones, the first are among the top ones."""
    logits = torch.tensor([[1.0, 3, 2, 3, 2, 2, -0.0, 0.0] + [0.5] * 1000])
    rows, chosen = torch.zeros(8, dtype=torch.int64), torch.arange(8)
    _, ranks, top = c_scores.score_rows(c.library, logits, rows, chosen, 8)
    assert ranks.tolist() == [6, 1, 3, 1, 3, 3, 1007, 1007]
    assert top.tolist() == [[1, 3, 2, 4, 5, 0, 8, 9]] * 8


def test_what_others_ask_for_changes_no_logprob(c):
    """A row that wants more top tokens than are found for all together gets a search of its own."""
    logits = torch.randn(200, 5000, generator=generator(3)) * 3
    alone = [token_logprobs(logits[i : i + 1], [i], [3], c.library)[0] for i in range(200)]
    for most in (scores.MOST_TOP, scores.MOST_TOP + 1, 5000, [1, 2]):
        *beside, other = token_logprobs(
            torch.cat([logits, logits[:1]]), [*range(200), 0], [3] * 200 + [most], c.library
        )
        assert beside == alone
        assert len(other.top_token_ids) == (most if isinstance(most, int) else len(most))


@pytest.mark.parametrize("size", [7, 300, 150_001])
def test_the_only_token_that_is_allowed_is_certain(c, size):
    """As where a grammar leaves one token: the others weigh nothing, not even a little each."""
    logits = torch.full((1, size), -INF)
    logits[:, 5] = 2
    [found] = token_logprobs(logits, [5], [2], c.library)
    assert (found.logprob, found.rank, found.top_token_ids) == (0.0, 1, [5, 0])
    assert found.top_logprobs == [0.0, -INF]


@pytest.mark.parametrize("wanted", [65, 200, [3, 0, 199], None])
def test_what_c_does_not_find_pytorch_finds_beside_it(c, wanted):
    """More top tokens than C keeps, tokens that are named, or nothing, beside rows that want a few."""
    logits = torch.randn(4, 200, generator=generator(0)).mul(2).round()
    asked = [2, wanted, 0, None]
    found = token_logprobs(logits, [1, NO_TOKEN, 7, 0], asked, c.library)
    expected = token_logprobs(logits, [1, NO_TOKEN, 7, 0], asked)
    assert found[3] is None and (found[1] is None) == (wanted is None)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is theirs is None or same_logprobs(ours, theirs)


def same_logprobs(ours: scores.TokenLogprobs, theirs: scores.TokenLogprobs) -> bool:
    return (
        (ours.rank, ours.top_token_ids, ours.top_ranks) == (theirs.rank, theirs.top_token_ids, theirs.top_ranks)
        and ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
        and ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-6)
    )


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rows_that_hold_no_numbers_are_scored_without_harm(c, bad):
    """Such a sequence ends with an error. Rows beside it get what they get without it."""
    logits = torch.randn(3, 500, generator=generator(0))
    good = c_scores.score_rows(c.library, logits, torch.arange(3), torch.tensor([1, 2, 3]), 4)
    logits[1, 3 if bad > 0 or bad != bad else slice(None)] = bad
    found = c_scores.score_rows(c.library, logits, torch.arange(3), torch.tensor([1, 2, 3]), 4)
    assert found[0][1].isnan() and found[1][1] == 1 and found[2][1].tolist() == [0] * 4
    for ours, theirs in zip(found, good, strict=True):
        assert torch.equal(ours[::2], theirs[::2])


# -- through the front door --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[None, "ngram"], ids=["one by one", "draft tokens"])
def llm(request, c, checkpoint):
    speculative = None
    if request.param:
        speculative = {"method": request.param, "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    return LLM(str(checkpoint("llama")), dtype="float32", block_size=4, speculative_config=speculative)


REQUESTS = [
    dict(seed=1),
    dict(seed=2, temperature=0.7, top_p=0.9, logprobs=3),
    dict(seed=3, temperature=1.4, top_k=40, min_p=0.02, n=4, logprobs=1),
    dict(temperature=0, logprobs=64),
    dict(temperature=0, prompt_logprobs=5),
    dict(seed=9, logprobs=-1, max_tokens=3),  # all 320: while it runs, PyTorch scores all rows of a step
    dict(seed=4, top_k=7, frequency_penalty=1.2, presence_penalty=0.3, repetition_penalty=1.2, logprobs=0),
    dict(seed=5, top_p=0.5, logit_bias={7: 4.0}, allowed_token_ids=list(range(4, 300)), logprobs=2, prompt_logprobs=0),
    dict(seed=6, temperature=0.3, logprob_token_ids=[4, 9, 300]),
    dict(seed=7, temperature=5.0, min_tokens=12),
]


def generate(llm: LLM, requests: list[dict]) -> list:
    """Prompts with repetitions, for which draft tokens are found."""
    assert llm.reset_prefix_cache()
    prompts = [f"{TEXT} {TEXT} {TEXT[i:]}" for i in range(len(requests))]
    params = [SamplingParams(**{"max_tokens": 16, "ignore_eos": True} | options) for options in requests]
    return llm.generate(prompts, params, use_tqdm=False)


def assert_same_outputs(found: list, expected: list) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in theirs.outputs]
        rows = zip(all_logprobs(ours), all_logprobs(theirs), strict=True)
        for row, other in rows:
            assert (row is None) == (other is None)
            if row is None:
                continue
            assert list(row) == list(other)
            for token_id, entry in row.items():
                assert entry.rank == other[token_id].rank
                assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-6)


def all_logprobs(output) -> Iterator:
    return chain(output.prompt_logprobs or [], *(o.logprobs or [] for o in output.outputs))


def requests_and_grammar() -> list[dict]:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return REQUESTS
    fitting = StructuredOutputsParams(regex="[a-z]{3,9} [a-z ]{5,20}")
    return [*REQUESTS, dict(seed=8, structured_outputs=fitting, logprobs=3, ignore_eos=False)]


def test_requests_get_what_pytorch_would_give_them(llm, monkeypatch):
    """In every step C and PyTorch choose from the same logits, and the next step goes on with PyTorch's tokens."""
    requests = requests_and_grammar()
    scored_in_c = plant(monkeypatch, c_scores, "score_rows", [])
    found = generate(llm, requests)
    assert scored_in_c.num_calls > 4
    num_steps = num_drawn = 0
    score = scores.PromptRows.score

    def sample_both(logits: Tensor, batch: SamplingBatch, used: Kernels):
        nonlocal num_steps, num_drawn
        assert used is llm.engine.model_runner.kernels and used.library is not None
        num_steps, num_drawn = num_steps + 1, num_drawn + len(batch.random_rows)
        sampled = sample_rows(logits.clone(), batch, used), sample_rows(logits, batch)
        (ours, our_logprobs), (tokens, logprobs) = map(batch.to_lists, sampled)
        assert ours == tokens
        for row, other in zip(our_logprobs, logprobs, strict=True):
            assert row is other is None or same_logprobs(row, other)
        return sampled[1]

    monkeypatch.setattr(model_runner, "sample_rows", sample_both)
    monkeypatch.setattr(
        scores.PromptRows, "score", lambda rows, logits_of, hidden, library: score(rows, logits_of, hidden)
    )
    expected = generate(llm, requests)
    assert num_steps >= 4 and num_drawn > 100
    assert_same_outputs(found, expected)
    llm.engine.scheduler.check_integrity()
