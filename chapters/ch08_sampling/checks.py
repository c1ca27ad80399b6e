"""Grading of the exercises of chapter 8."""

import builtins
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chapters.ch01_inference.lab import next_logits_of
from chapters.ch08_sampling.choices import choices_by
from chapters.ch08_sampling.company import generate_in_order, preemptions_watched
from chapters.ch08_sampling.theory import compare
from chapters.expect import read_again
from chapters.grading import PROMPTS, Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.outputs import CompletionOutput
from nanovllm.worker import sampler
from nanovllm.worker.sampler import SamplingBatch

OUR_THRESHOLD, OUR_SAMPLE_RANDOMLY = sampler.logit_threshold, sampler.sample_randomly
OUR_FROM_SEQUENCES = SamplingBatch.from_sequences.__func__  # type: ignore[attr-defined]


# -- the student's function in the sampler ----------------------------------------------------------------------------


def filtered(logits: Tensor, batch: SamplingBatch, *, with_top_p: bool) -> Tensor:
    """Probabilities [R, vocab_size] after the engine's filters: zeros where they cut, not renormalised."""
    scaled = logits / batch.temperature[:, None]
    top_k = torch.where(batch.top_k > 0, batch.top_k, logits.shape[1]).clamp(max=logits.shape[1])
    top_p = batch.top_p if with_top_p else torch.ones_like(batch.top_p)
    threshold = OUR_THRESHOLD(scaled, top_k, top_p, batch.min_p)
    return scaled.softmax(-1).masked_fill(scaled < threshold[:, None], 0.0)


def without(batch: SamplingBatch, *names: str) -> SamplingBatch:
    """The same batch with these settings where they do nothing."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    settings: dict[str, Any] = {name: torch.full_like(getattr(batch, name), off[name]) for name in names}
    return replace(batch, **settings)


@contextmanager
def use_top_p(function: Callable[[Tensor, float], Tensor]) -> Iterator[None]:
    def sample_randomly(logits: Tensor, batch: SamplingBatch) -> Tensor:
        probs = filtered(logits, batch, with_top_p=False)
        kept = [ask_top_p(function, row, float(p)) for row, p in zip(probs, batch.top_p, strict=True)]
        logits = logits.masked_fill(~torch.stack(kept), -torch.inf)
        return OUR_SAMPLE_RANDOMLY(logits, without(batch, "top_k", "top_p", "min_p"))

    with replaced(sampler, "sample_randomly", sample_randomly):
        yield


@contextmanager
def use_min_p(function: Callable[[Tensor, float, float], Tensor]) -> Iterator[None]:
    def sample_randomly(logits: Tensor, batch: SamplingBatch) -> Tensor:
        settings = zip(logits, batch.temperature, batch.min_p, strict=True)
        probs = [ask_min_p(function, row, float(t), float(p)) for row, t, p in settings]
        return OUR_SAMPLE_RANDOMLY(torch.stack(probs).log(), without(batch, "temperature", "min_p"))

    with replaced(sampler, "sample_randomly", sample_randomly):
        yield


@contextmanager
def use_draw(function: Callable[[Tensor, list[Sequence]], list[int]]) -> Iterator[None]:
    """The sampler is told of numbers only, so the sequences are noted where the engine packs them."""
    packed: list[Sequence] = []

    def from_sequences(cls: type, seqs: Any, *args: Any) -> SamplingBatch:
        packed[:] = seqs
        return OUR_FROM_SEQUENCES(cls, seqs, *args)

    def sample_randomly(logits: Tensor, batch: SamplingBatch) -> Tensor:
        probs = filtered(logits, batch, with_top_p=True).double()
        return torch.tensor(ask_draw(function, probs, [packed[row] for row in batch.random_rows.tolist()]))

    packs = replaced(SamplingBatch, "from_sequences", classmethod(from_sequences))
    with packs, replaced(sampler, "sample_randomly", sample_randomly):
        yield


def ask_top_p(function: Callable, probs: Tensor, top_p: float) -> Tensor:
    before = probs.clone()
    kept = function(probs, top_p)
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != probs.shape:
        got = f"{kept.dtype} {list(kept.shape)}" if isinstance(kept, Tensor) else repr(kept)
        raise Wrong("return a tensor of bools, one for each token", expected=f"bool {list(probs.shape)}", got=got)
    if not torch.equal(probs, before):
        raise Wrong("probs must stay as it is: the caller still needs it. Work on a copy")
    if not kept.any():
        raise Wrong(f"top_p={top_p:g} keeps no token at all; the one that crosses the border stays")
    return kept


def ask_min_p(function: Callable, logits: Tensor, temperature: float, min_p: float) -> Tensor:
    before = logits.clone()
    probs = function(logits, temperature, min_p)
    if not isinstance(probs, Tensor) or probs.shape != logits.shape or not probs.is_floating_point():
        got = f"{probs.dtype} {list(probs.shape)}" if isinstance(probs, Tensor) else repr(probs)
        raise Wrong("return a tensor of probabilities, one for each token", expected=list(logits.shape), got=got)
    if not torch.equal(logits, before):
        raise Wrong("logits must stay as it is: the caller still needs it. Work on a copy")
    return probs.float()


def ask_draw(function: Callable, probs: Tensor, seqs: list[Sequence]) -> list[int]:
    before, states = probs.clone(), (random.getstate(), torch.get_rng_state())
    token_ids = function(probs, list(seqs))
    if not isinstance(token_ids, list) or len(token_ids) != len(seqs):
        raise Wrong(
            "return a list of token ids, one for each row", expected=f"{len(seqs)} of them", got=repr(token_ids)
        )
    if not torch.equal(probs, before):
        raise Wrong("probs must stay as it is: work on a copy")
    if random.getstate() != states[0] or not torch.equal(torch.get_rng_state(), states[1]):
        hint = (
            "the global random state has moved: what the function draws next depends on who else has drawn. "
            "Compute the number from the three; or give each row a generator of its own, made from the three"
        )
        raise Wrong(hint)
    for row, token_id in enumerate(token_ids):
        if not 0 <= int(token_id) < probs.shape[1]:
            hint = "there is no such token; the target is u times the sum of the row, and the sum may be below 1"
            raise Wrong(hint, expected=f"0 to {probs.shape[1] - 1}", got=int(token_id))
        if probs[row, int(token_id)] == 0:
            hint = "a token with probability 0 was taken: its cumulative probability does not exceed that before it"
            raise Wrong(hint, got=f"token {int(token_id)} of {_row(probs[row])}")
    return [int(token_id) for token_id in token_ids]


@contextmanager
def use_choices(function: Callable[[list[list[int]], list[int], int], list[int]]) -> Iterator[None]:
    def allowed_tokens(choices: list[list[int]], generated: list[int], eos_token_id: int) -> list[int]:
        return ask_choices(function, choices, generated, eos_token_id)

    with choices_by(allowed_tokens):
        yield


def ask_choices(function: Callable, choices: list[list[int]], generated: list[int], eos_token_id: int) -> list[int]:
    before = [list(choice) for choice in choices], list(generated)
    token_ids = function(choices, generated, eos_token_id)
    if not isinstance(token_ids, list) or not all(isinstance(token_id, int) for token_id in token_ids):
        raise Wrong("return a list of token ids", got=repr(token_ids))
    if (choices, generated) != before:
        raise Wrong("choices and generated must stay as they are: the next question is about the same lists")
    if not token_ids:
        hint = (
            "no token is allowed at all. Where a choice is complete, EOS may come; and if this was right when one "
            "sequence was asked about at a time: does anything stay from one call to the next?"
        )
        raise Wrong(hint, expected="at least one token", got=f"[] after {generated} for {choices}")
    return token_ids


def _row(values: Tensor) -> str:
    return "[" + ", ".join(f"{x:.4g}" for x in values[:8].tolist()) + (", ...]" if len(values) > 8 else "]")


# -- keep_top_p -------------------------------------------------------------------------------------------------------


def compare_top_p(function: Callable, probs: list[float], top_p: float, hint: str) -> None:
    """Raises Wrong, with a hint for the usual mistakes and otherwise this one."""
    row = torch.tensor(probs)
    got = ask_top_p(function, row, top_p).nonzero().flatten().tolist()
    expected = exact_top_p(probs, top_p)
    if got == expected:
        return
    wanted = top_p * sum(probs)
    in_order = {"ids": list(range(len(probs))), "ascending": sorted(range(len(probs)), key=probs.__getitem__)}
    reached = math.fsum(probs[i] for i in expected) == wanted
    border = min(probs[i] for i in expected)
    if any(probs[i] == 0 for i in got):
        hint = "a token with probability 0 was cut by a filter before this one; it must not come back"
    elif sum(probs) < 1 and got == exact_top_p(probs, top_p, wanted=top_p):
        hint = f"top_p is a share of what is there: the wanted mass is {top_p:g} x {sum(probs):g}"
    elif got == [i for i, p in enumerate(probs) if p > border]:
        hint = "the token that reaches or crosses the border is missing: it is kept, and the next one is not"
    elif {probs[i] for i in got} == {probs[i] for i in expected}:
        hint = "tokens that are exactly as likely as the last one kept are kept, too"
    elif got == kept_in_order(probs, wanted, in_order["ids"]):
        hint = "these are added up in the order of the ids: sort first, from the most likely token downwards"
    elif got == kept_in_order(probs, wanted, in_order["ascending"]):
        hint = "these are added up from the least likely one upwards: begin with the most likely token"
    elif any(probs[i] < probs[j] for i in got for j in set(expected) - set(got)):
        hint = "a less likely token is kept and a likelier one is not: do the places in your mask belong to the ids?"
    elif got == [i for i, p in enumerate(probs) if p >= min(top_p, max(probs))]:
        hint = "top_p is compared with the sum of the tokens kept so far, not with the probability of a single one"
    elif set(got) > set(expected) and reached:
        hint = "one token too many: when the mass is reached exactly, the next token is not kept"
    elif set(got) > set(expected):
        hint = (
            f"too many tokens: those expected have {math.fsum(probs[i] for i in expected):g} of the wanted {wanted:g}"
        )
    raise Wrong(f"probs {_row(row)}, top_p={top_p:g}: {hint}", expected=f"tokens {expected}", got=f"tokens {got}")


def kept_in_order(probs: list[float], wanted: float, order: list[int]) -> list[int]:
    kept, mass = [], 0.0
    for i in order:
        if mass < wanted and probs[i] > 0:
            kept.append(i)
        mass += probs[i]
    return sorted(kept)


def exact_top_p(probs: list[float], top_p: float, wanted: float | None = None) -> list[int]:
    wanted = top_p * math.fsum(probs) if wanted is None else wanted
    border, mass = 0.0, 0.0
    for p in sorted(probs, reverse=True):
        if mass >= wanted or p == 0:
            break
        border, mass = p, mass + p
    return [i for i, p in enumerate(probs) if p >= border and p > 0]


def check_sorted(function: Callable, bench: Bench) -> None:
    """The token that crosses the border is kept, in a row that is sorted"""
    for top_p in (0.8, 0.6, 0.9, 0.3):
        compare_top_p(function, [0.5, 0.25, 0.125, 0.09375, 0.03125], top_p, "add up until the mass is there")


def check_unsorted(function: Callable, bench: Bench) -> None:
    """A row in the order of the ids"""
    for top_p in (0.6, 0.8, 0.2):
        compare_top_p(
            function, [0.09375, 0.25, 0.125, 0.5, 0.03125], top_p, "add up from the most likely one downwards"
        )


def check_border(function: Callable, bench: Bench) -> None:
    """The mass is reached exactly; and top_p=1"""
    for top_p in (0.5, 0.75, 1.0):
        compare_top_p(function, [0.09375, 0.25, 0.125, 0.5, 0.03125], top_p, "top_p=1 keeps whatever is not 0")


@read_again("One bar for three filters")
def check_ties(function: Callable, bench: Bench) -> None:
    """Equals pass together"""
    for probs, top_p in (([0.125, 0.5, 0.0, 0.25, 0.125], 0.8), ([0.25, 0.25, 0.25, 0.25], 0.3)):
        compare_top_p(function, probs, top_p, "equals pass together")


@read_again("One bar for three filters")
def check_not_normalised(function: Callable, bench: Bench) -> None:
    """Other filters were there before: zeros, and a sum below 1"""
    for top_p in (0.6, 0.5, 0.9, 1.0):
        compare_top_p(function, [0.0, 0.125, 0.0, 0.25, 0.0625, 0.0625], top_p, "top_p is a share of what is there")


def check_random_rows(function: Callable, bench: Bench) -> None:
    """200 random rows"""
    rng = random.Random(8)
    for _ in range(200):
        counts = [rng.choice((0, 1, 1, 2, 3, 5, 9)) for _ in range(rng.randint(1, 12))] + [1]
        rng.shuffle(counts)
        top_p = rng.choice((0.125, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0))
        compare_top_p(function, [count / 128 for count in counts], top_p, "go through it by hand")


TOP_P_PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.6, top_k=50, seed=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.95, min_p=0.02, seed=3, max_tokens=12, ignore_eos=True),
]
MIN_P_PARAMS = [
    SamplingParams(temperature=1.0, min_p=0.1, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.5, min_p=0.05, top_k=50, seed=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, min_p=0.01, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True),
]


def same_samples(bench: Bench, params: list[SamplingParams], names: tuple[str, str]) -> None:
    """What is generated with the student's function, and with ours put back for a moment, from an empty cache."""

    def generate() -> list[list[int]]:
        bench.llm.reset_prefix_cache()
        return [output.outputs[0].token_ids for output in bench.llm.generate(PROMPTS, params, False)]

    theirs = generate()
    with replaced(sampler, "sample_randomly", OUR_SAMPLE_RANDOMLY):
        ours = generate()
    for prompt, p, expected, got in zip(PROMPTS, params, ours, theirs, strict=True):
        if expected != got:
            text = bench.llm.get_tokenizer().decode
            settings = ", ".join(f"{name}={getattr(p, name):g}" for name in ("temperature", *names) if getattr(p, name))
            hint = f"{prompt!r} with {settings}, seed={p.seed} continues otherwise than with our filter"
            raise Wrong(hint, expected=text(expected), got=text(got))


@read_again("One bar for three filters")
def check_top_p_generates(function: Callable, bench: Bench) -> None:
    """A model samples the same tokens with it, also behind top_k and min_p"""
    same_samples(bench, TOP_P_PARAMS, ("top_p", "top_k"))


# -- min_p_probs ------------------------------------------------------------------------------------------------------


def exact_min_p(logits: list[float], temperature: float, min_p: float) -> list[float]:
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    weights = [w if w >= min_p * max(weights) else 0.0 for w in weights]
    return [w / math.fsum(weights) for w in weights]


def compare_min_p(function: Callable, logits: list[float], temperature: float, min_p: float) -> None:
    row, expected = torch.tensor(logits), exact_min_p(logits, temperature, min_p)
    probs = ask_min_p(function, row, temperature, min_p)
    got = probs.tolist()
    if torch.allclose(probs, torch.tensor(expected), atol=1e-5):
        return
    whole = exact_min_p(logits, temperature, 0.0)
    kept, should = ([p > 0 for p in x] for x in (got, expected))
    alone = exact_min_p(logits, 1.0, min_p)
    absolute = [p >= min_p for p in whole]
    if any(math.isnan(p) for p in got) and min_p == 1:
        hint = "no token is left: exactly min_p times the largest probability is enough"
    elif any(math.isnan(p) for p in got):
        hint = "not a number: exp() of a large number is inf, so a softmax takes the largest logit off first"
    elif min_p == 0 and sum(kept) < sum(should):
        hint = "min_p=0 cuts nothing; is it compared with probabilities, and not with logits?"
    elif kept == should and abs(sum(got) - 1) > 1e-5:
        hint = f"the right tokens are left, but their probabilities add up to {sum(got):.4g}: scale what is left to 1"
    elif kept == absolute and kept != should:
        hint = "min_p is a share of the largest probability, not a probability"
    elif (
        temperature != 1
        and min_p > 0
        and (kept == [p > 0 for p in alone] or torch.allclose(probs, torch.tensor(alone), atol=1e-5))
    ):
        hint = "temperature comes first: the filter looks at the probabilities after it"
    elif temperature != 1 and kept == should:
        hint = "the right tokens, but other probabilities: the logits are divided by the temperature, then softmax"
    elif kept == should:
        hint = "the right tokens are left; their shares of what is left are others"
    elif sum(kept) < sum(should):
        hint = "too few tokens are left: exactly min_p times the largest probability is enough"
    else:
        hint = "too many tokens are left: below min_p times the largest probability a token gets 0"
    settings = f"logits {_row(row)}, temperature {temperature:g}, min_p {min_p:g}"
    shown = (_row(torch.tensor(x)) for x in (expected, got))
    raise Wrong(f"{settings}: {hint}", expected=next(shown), got=next(shown))


@read_again("Temperature: the same order, other distances")
def check_min_p_plain(function: Callable, bench: Bench) -> None:
    """min_p=0: a softmax and nothing else"""
    compare_min_p(function, [1.0, 3.0, 2.0, -1.0], 1.0, 0.0)
    compare_min_p(function, [1.0, 3.0, 2.0, -1.0], 0.5, 0.0)


def check_min_p_relative(function: Callable, bench: Bench) -> None:
    """A share of the largest probability"""
    compare_min_p(function, [0.0, math.log(8), math.log(2)], 1.0, 0.2)
    compare_min_p(function, [0.1 * i for i in range(30)], 1.0, 0.3)  # the largest probability is about 0.1
    compare_min_p(function, [5.0, 0.0, 4.0, -2.0], 1.0, 0.1)


def check_min_p_temperature(function: Callable, bench: Bench) -> None:
    """Temperature before the filter"""
    for temperature, min_p in ((2.0, 0.3), (0.5, 0.2), (1.5, 0.1)):
        compare_min_p(function, [2.0, 4.0, 3.0, 1.0], temperature, min_p)


@read_again("One bar for three filters")
def check_min_p_border(function: Callable, bench: Bench) -> None:
    """min_p=1, ties, and a token that must not come"""
    compare_min_p(function, [2.0, 5.0, 5.0, 1.0], 1.0, 1.0)
    compare_min_p(function, [3.0, 1.0], 0.7, 1.0)
    compare_min_p(function, [-math.inf, 1.0, 2.0, -math.inf], 1.0, 0.05)


def check_min_p_large_logits(function: Callable, bench: Bench) -> None:
    """Logits far from 0, a small temperature"""
    for logits, temperature in (([1000.0, 999.0, 990.0], 1.0), ([-1000.0, -1001.0], 1.0), ([20.0, 19.5, 3.0], 0.01)):
        compare_min_p(function, logits, temperature, 0.1)


def check_min_p_generates(function: Callable, bench: Bench) -> None:
    """A model samples the same tokens with it, also before top_k and top_p"""
    same_samples(bench, MIN_P_PARAMS, ("min_p", "top_k"))


# -- draw -------------------------------------------------------------------------------------------------------------


def make_seq(seed: int | None, sample_index: int = 0, position: int = 0) -> Sequence:
    """A sequence that has generated `position` tokens."""
    seq = Sequence([1, 2, 3], SamplingParams(seed=seed))
    seq.sample_index, seq.tokens = sample_index, seq.tokens + [4] * position
    return seq


def flat(num_rows: int, vocab_size: int = 10_000) -> Tensor:
    return torch.full((num_rows, vocab_size), 1 / vocab_size, dtype=torch.float64)


@read_again("One number, one token")
def check_where_it_falls(function: Callable, bench: Bench) -> None:
    """One token that can be; tokens with probability 0; a row that does not add up to 1"""
    for probs, allowed in (([0.0, 0.0, 1.0, 0.0], {2}), ([0.0, 0.25, 0.0, 0.25, 0.0], {1, 3}), ([0.001, 0.0], {0})):
        seqs = [make_seq(seed) for seed in range(64)]
        rows = torch.tensor([probs], dtype=torch.float64).repeat(64, 1)
        found = set(ask_draw(function, rows, seqs))
        if found != allowed:
            hint = f"64 rows {probs} with seeds 0 to 63; u is compared with shares of the row's sum, {sum(probs):g}"
            if len(found) == 1:
                hint = f"64 rows {probs} with seeds 0 to 63 all get the same token: what does u depend on?"
            raise Wrong(hint, expected=f"tokens {sorted(allowed)}", got=f"tokens {sorted(found)}")


def hash_of_numbers(value: Any, hash: Callable[[Any], int] = hash) -> int:
    """Python's, but not of a text."""
    if isinstance(value, str | bytes) or (isinstance(value, tuple) and any(isinstance(x, str | bytes) for x in value)):
        hint = "Python's hash() of a text is another one in each process; hashlib's functions always give the same"
        raise Wrong(hint, got=f"hash({value!r})")
    return hash(value)


def check_alone_and_together(function: Callable, bench: Bench) -> None:
    """The same alone, in company, in another order, and called again"""
    seqs = [make_seq(seed, position=seed % 3) for seed in range(20)]
    with replaced(builtins, "hash", hash_of_numbers):
        together = ask_draw(function, flat(20), seqs)
    again = ask_draw(function, flat(20), seqs)
    if together != again:
        raise Wrong("called twice with the same rows it gives other tokens", expected=together, got=again)
    alone = [ask_draw(function, flat(1), [seq])[0] for seq in seqs]
    if together != alone:
        hint = "20 sequences in one batch, and each alone: does the row's place in the batch enter the number?"
        raise Wrong(hint, expected=f"{alone} (alone)", got=together)
    backwards = ask_draw(function, flat(20), seqs[::-1])[::-1]
    if together != backwards:
        raise Wrong("the same rows in the reverse order give other tokens", expected=together, got=backwards)
    twins = [make_seq(seed, position=seed % 3) for seed in range(20)]
    if together != (got := ask_draw(function, flat(20), twins)):
        hint = "another Sequence with the same three numbers gets another token: what else enters, its seq_id?"
        raise Wrong(hint, expected=together, got=got)


def check_three_numbers(function: Callable, bench: Bench) -> None:
    """Seed, sample index and position each make a difference"""
    cases = {
        "the position in the output": [make_seq(5, 0, position) for position in range(40)],
        "the sample index (n=40 would give the same text 40 times)": [make_seq(5, index) for index in range(40)],
        "the seed": [make_seq(seed) for seed in range(40)],
    }
    for name, seqs in cases.items():
        found = ask_draw(function, flat(40), seqs)
        if len(set(found)) < 20:
            hint = f"40 rows of 10,000 equally likely tokens, which differ only in {name}"
            raise Wrong(hint, expected="about 40 different tokens", got=f"{len(set(found))}: {sorted(set(found))[:8]}")


def check_unrelated(function: Callable, bench: Bench) -> None:
    """Neighbours are unrelated: no copy that is shifted, no sum or product of the three"""
    places = [(s, i, p) for s in (1, 2, 11, -1, 2**63 - 1) for i in (0, 1, 2, 11) for p in (0, 1, 2, 3, 11, 12)]
    rows = flat(len(places), 50_000)
    found = dict(zip(places, ask_draw(function, rows, [make_seq(*place) for place in places]), strict=True))
    same: dict[int, list[tuple[int, int, int]]] = {}
    for place, token_id in found.items():
        same.setdefault(token_id, []).append(place)
    if len(same) < len(places) - 4:
        pair = next(group for group in same.values() if len(group) > 1)
        hint = "two (seed, index, position) share a number, which luck does not explain: are the three told apart?"
        raise Wrong(hint, expected="a number for each", got=f"the same for {pair[0]} and {pair[1]}")


def check_no_seed(function: Callable, bench: Bench) -> None:
    """Requests without a seed of their own: the engine has given them one"""
    seqs = [make_seq(None) for _ in range(20)]
    for number, seq in enumerate(seqs):
        seq.seed = 1000 + number
    found = ask_draw(function, flat(20), seqs)
    if len(set(found)) < 15:
        hint = "20 requests with seed=None get the same number: seq.seed is an int, seq.sampling_params.seed is None"
        raise Wrong(hint, expected="about 20 different tokens", got=found)


@read_again("Does it draw what it should?")
def check_distribution(function: Callable, bench: Bench) -> None:
    """6,000 draws are spread as they should be, over seeds and over positions"""
    probs = [0.05, 0.0, 0.2, 0.4, 0.02, 0.08, 0.05]  # adds up to 0.8
    shares = [p / 0.8 for p in probs]
    for name, seqs in {
        "seeds": [make_seq(seed) for seed in range(6000)],
        "positions": [make_seq(3, 0, position) for position in range(6000)],
    }.items():
        rows = torch.tensor([probs], dtype=torch.float64).repeat(6000, 1)
        counts = Counter(ask_draw(function, rows, seqs))
        fit = compare(counts, shares)
        if fit.chance < 1e-5:
            hint = f"6,000 draws over {name}: chi-square {fit.chi_square:.0f} with {fit.freedom} degrees of freedom"
            by_rank = sorted(shares)
            if max(counts.values()) == 6000:
                hint += "; it is always the same token"
            elif sorted(counts[i] for i in range(7))[-1] < 2400:
                hint += "; the likeliest token comes too rarely: a token's share of the line is its probability"
            elif compare(Counter({i: counts[i] for i in counts}), by_rank).chance > 1e-3:
                hint += "; the token ids are places in a sorted list: they must be places in the row"
            expected = [round(6000 * p) for p in shares]
            raise Wrong(hint, expected=expected, got=[counts[i] for i in range(len(probs))])


def check_draw_generates(function: Callable, bench: Bench) -> None:
    """A model: the same tokens alone, in a batch, in another order, and preempted; n=3 gives three texts"""
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 12, "block_size": 8}
    llm = LLM(bench.model, dtype="float32", **sizes)
    watched, text = PROMPTS[0], llm.get_tokenizer().decode

    def run(prompts: list[str]) -> tuple[list[int], int]:
        params = [
            SamplingParams(seed=5 if prompt == watched else None, max_tokens=20, ignore_eos=True) for prompt in prompts
        ]
        with preemptions_watched() as preempted:
            outputs = generate_in_order(llm, prompts, params)
        return outputs[prompts.index(watched)].outputs[0].token_ids, sum(seq.seed == 5 for seq in preempted)

    alone, _ = run([watched])
    for company, prompts in {
        "behind another request": [PROMPTS[1], watched],
        "behind three others, in a pool that is too small": [PROMPTS[1], PROMPTS[2], "I", watched],
    }.items():
        got, num_preempted = run(prompts)
        if got != alone:
            company += f" (it was preempted {num_preempted} times)" if num_preempted else ""
            raise Wrong(f"{company} the request gets other tokens than alone", expected=text(alone), got=text(got))
    assert num_preempted, "the pool of this check is too large"
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    [output] = generate_in_order(llm, [watched], [params])
    samples = [completion.token_ids for completion in output.outputs]
    if len(set(map(tuple, samples))) < 3:
        raise Wrong("n=3 gives the same text more than once", expected="three texts", got=[text(s) for s in samples])
    if samples[0] != alone[:8]:
        raise Wrong("sample 0 of n=3 is the request that was alone", expected=text(alone[:8]), got=text(samples[0]))


# -- allowed_tokens ---------------------------------------------------------------------------------------------------

EOS = 2  # of the checks without a model


def exact_allowed(choices: list[list[int]], generated: list[int], eos_token_id: int) -> set[int]:
    allowed = set()
    for choice in choices:
        if choice == generated:
            allowed.add(eos_token_id)
        elif choice[: len(generated)] == generated:
            allowed.add(choice[len(generated)])
    return allowed


def compare_choices(function: Callable, choices: list[list[int]], generated: list[int]) -> None:
    expected, at = exact_allowed(choices, generated, EOS), len(generated)
    got = set(ask_choices(function, choices, generated, EOS))
    if got == expected:
        return
    fitting = [choice for choice in choices if choice[:at] == generated]
    more, less = got - expected, expected - got
    if EOS in less:
        hint = "the output is a whole choice and may end: EOS is missing"
    elif EOS in more:
        hint = "EOS would end the output in the middle of a choice"
    elif got == {EOS}:
        hint = "a choice is complete here, and is the beginning of a longer one: the output may also go on"
    elif more & {choice[at] for choice in choices if len(choice) > at}:
        hint = "one of these comes next in a choice that begins otherwise: compare all that was generated"
    elif more & {token_id for choice in fitting for token_id in choice}:
        hint = "one of these is in a choice that fits, and not next in it: the place counts, a token may occur twice"
    elif more:
        hint = "one of these is in no choice that fits"
    else:
        hint = "several choices begin like this, and the next token of each of them may come"
    raise Wrong(f"choices {choices}, generated {generated}: {hint}", expected=sorted(expected), got=sorted(got))


def walk(function: Callable, *choices: list[int]) -> None:
    """One sequence after the other, each token by token from its beginning."""
    for choice in choices:
        for num_generated in range(len(choice) + 1):
            compare_choices(function, [list(each) for each in choices], choice[:num_generated])


@read_again("Where a mask comes from")
def check_one_choice(function: Callable, bench: Bench) -> None:
    """One choice: its tokens one by one, then EOS"""
    walk(function, [7, 8, 9])


@read_again("Where a mask comes from")
def check_alike(function: Callable, bench: Bench) -> None:
    """Choices that begin alike, and choices that meet again"""
    walk(function, [7, 8, 9], [7, 8, 4], [3, 8, 5], [6, 1, 9, 4])


@read_again("Where a mask comes from")
def check_beginning_of_another(function: Callable, bench: Bench) -> None:
    """One choice is the beginning of another: the output may end, and may go on"""
    walk(function, [7], [7, 8], [7, 8, 9, 5], [3])


@read_again("Where a mask comes from")
def check_twice(function: Callable, bench: Bench) -> None:
    """A token twice in a choice, a choice twice, and token 0"""
    walk(function, [5, 6, 5, 7], [5, 5], [0, 5, 0, 0], [5, 5])


@read_again("Where a mask comes from")
def check_random_choices(function: Callable, bench: Bench) -> None:
    """100 random sets of choices"""
    rng = random.Random(8)
    for _ in range(100):
        walk(
            function, *([rng.choice((0, 1, 3, 4)) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 6)))
        )


TEXTS = [" a red boat", " a red boat in the fog", " a boat", " the lazy dog", " gulls"]  # the first begins the second
LONG_TEXTS = [" two gulls circled above a red boat", " two gulls jumps over the quick brown fox in the fog"]
SHORT_PROMPTS = ["the dog", "a boat", "the fox", "red"]


def choose(texts: list[str], **options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(choice=texts), max_tokens=24, **options)


def chosen(bench: Bench, texts: list[str], completion: CompletionOutput) -> int:
    """Which of the texts was generated. Raises Wrong if none was."""
    tokenizer = bench.llm.get_tokenizer()
    token_ids = completion.token_ids
    if token_ids and token_ids[-1] in bench.llm.engine.model_config.eos_token_ids:
        token_ids = token_ids[:-1]
    choices = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    if token_ids not in choices or completion.finish_reason != "stop":
        hint = (
            f"the engine generates what is none of the choices {texts}, finish_reason {completion.finish_reason!r}. "
            "It asks about several sequences in turn: does anything stay from one call to the next?"
        )
        raise Wrong(hint, expected=choices, got=f"{token_ids}, {tokenizer.decode(token_ids)!r}")
    return choices.index(token_ids)


def check_choices_generate(function: Callable, bench: Bench) -> None:
    """A model gives one of the choices: greedy, sampled, four samples of one request, others beside it"""
    params = [choose(TEXTS, temperature=0), choose(TEXTS, n=4, seed=1, temperature=1.5), choose(TEXTS[2:], seed=2)]
    for output, p in zip(bench.llm.generate(PROMPTS, params, False), params, strict=True):
        assert p.structured_outputs is not None and p.structured_outputs.choice is not None
        for completion in output.outputs:
            chosen(bench, p.structured_outputs.choice, completion)


def share_of_each(bench: Bench, prompt: str, texts: list[str], temperature: float) -> list[float]:
    """By theory: at each step the softmax over what is allowed, multiplied along the way."""
    tokenizer, next_logits = bench.llm.get_tokenizer(), next_logits_of(bench.llm)
    prompt_ids, eos = tokenizer(prompt).input_ids, min(bench.llm.engine.model_config.eos_token_ids)
    choices = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    shares = []
    for choice in choices:
        share = 1.0
        for at, token_id in enumerate([*choice, eos]):
            allowed = sorted(exact_allowed(choices, choice[:at], eos))
            if len(allowed) > 1:
                probs = (next_logits(prompt_ids + choice[:at])[allowed] / temperature).softmax(-1)
                share *= float(probs[allowed.index(token_id)])
        shares.append(share)
    return shares


def check_renormalised(function: Callable, bench: Bench) -> None:
    """128 samples: how often each choice comes is what the softmax makes of the logits that are left"""
    prompt, n, temperature = PROMPTS[1], 128, 2.0
    shares = share_of_each(bench, prompt, TEXTS, temperature)
    [output] = bench.llm.generate([prompt], [choose(TEXTS, n=n, seed=4, temperature=temperature)], False)
    counts = Counter(chosen(bench, TEXTS, completion) for completion in output.outputs)
    if (fit := compare(counts, shares)).chance < 1e-5:
        hint = f"{n} samples of {TEXTS}: chi-square {fit.chi_square:.0f} with {fit.freedom} degrees of freedom"
        raise Wrong(hint, expected=[round(n * share) for share in shares], got=[counts[i] for i in range(len(TEXTS))])


@read_again("Where a mask comes from")
def check_choices_preempted(function: Callable, bench: Bench) -> None:
    """Preempted: the tokens that are there already count, and the answer is the same as alone"""
    sizes = {"max_model_len": 40, "max_num_seqs": 4, "num_gpu_blocks_override": 5, "block_size": 8}
    llm = LLM(bench.model, dtype="float32", **sizes)
    params = [choose(LONG_TEXTS, seed=seed, temperature=1.5) for seed in range(len(SHORT_PROMPTS))]
    alone = [generate_in_order(llm, [prompt], [p])[0] for prompt, p in zip(SHORT_PROMPTS, params, strict=True)]
    with preemptions_watched() as preempted:
        together = generate_in_order(llm, SHORT_PROMPTS, params)
    assert preempted, "the pool of this check is too large"
    for ours, theirs in zip(alone, together, strict=True):
        expected, got = (chosen(bench, LONG_TEXTS, output.outputs[0]) for output in (ours, theirs))
        if expected != got:
            hint = f"{ours.prompt!r} gets another choice among others, some preempted, than alone"
            raise Wrong(hint, expected=LONG_TEXTS[expected], got=LONG_TEXTS[got])


TASKS = [
    Task(
        "keep_top_p",
        "Three ways to cut",
        use_top_p,
        (
            check_sorted,
            check_unsorted,
            check_border,
            check_ties,
            check_not_normalised,
            check_random_rows,
            check_top_p_generates,
        ),
    ),
    Task(
        "min_p_probs",
        "Three ways to cut",
        use_min_p,
        (
            check_min_p_plain,
            check_min_p_relative,
            check_min_p_temperature,
            check_min_p_border,
            check_min_p_large_logits,
            check_min_p_generates,
        ),
    ),
    Task(
        "draw",
        "Where the number comes from",
        use_draw,
        (
            check_where_it_falls,
            check_alone_and_together,
            check_three_numbers,
            check_unrelated,
            check_no_seed,
            check_distribution,
            check_draw_generates,
        ),
    ),
    Task(
        "allowed_tokens",
        "A mask is one more thing that happens to logits",
        use_choices,
        (
            check_one_choice,
            check_alike,
            check_beginning_of_another,
            check_twice,
            check_random_choices,
            check_choices_generate,
            check_renormalised,
            check_choices_preempted,
        ),
    ),
]
