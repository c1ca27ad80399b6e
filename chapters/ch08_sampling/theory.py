"""What samples are compared with: probabilities in plain Python over the whole sorted vocabulary, and a test of fit.

It shares no line with the engine's sampler.
"""

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from nanovllm import SamplingParams


class Reshaped(NamedTuple):
    """Three lists over the vocabulary. cut_by names the first filter that cut a token; "" means that it is left."""

    before: list[float]  # softmax of the raw logits
    after: list[float]
    cut_by: list[str]

    @property
    def num_left(self) -> int:
        return self.cut_by.count("")


@lru_cache(maxsize=8)  # the same beginning and temperature come again, with other filters
def probabilities(logits: tuple[float, ...], temperature: float) -> list[float]:
    return softmax([x / temperature for x in logits])


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def reshape(logits: list[float], params: SamplingParams) -> Reshaped:
    """Temperature, min_p, top_k, top_p. A token that is as likely as the last one kept is kept, too."""
    before, cut_by = probabilities(tuple(logits), 1.0), [""] * len(logits)
    if params.temperature == 0:
        best = logits.index(max(logits))  # of several, the first
        cut_by = ["greedy" if i != best else "" for i in range(len(logits))]
        return Reshaped(before, [float(i == best) for i in range(len(logits))], cut_by)
    probs = probabilities(tuple(logits), params.temperature)
    left = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)

    def keep(num: int, name: str) -> list[int]:
        """The first `num` of those left, and any that are tied with the last of them."""
        while num < len(left) and probs[left[num]] == probs[left[num - 1]]:
            num += 1
        for i in left[num:]:
            cut_by[i] = name
        return left[:num]

    least = params.min_p * probs[left[0]]
    left = keep(sum(probs[i] >= least for i in left), "min_p")
    asked = left[: params.top_k] if params.top_k > 0 else left  # top_p looks at these, without further ties
    left = keep(len(asked), "top_k")
    if params.top_p < 1.0:
        mass, num, wanted = 0.0, 0, params.top_p * math.fsum(probs[i] for i in asked)
        while num < len(asked) and (num == 0 or mass < wanted):
            mass += probs[asked[num]]
            num += 1
        left = keep(num, "top_p")
    total = math.fsum(probs[i] for i in left)
    return Reshaped(before, [0.0 if name else p / total for p, name in zip(probs, cut_by, strict=True)], cut_by)


def effective_number(probs: list[float]) -> float:
    """e to the entropy: a fair die with so many faces would be as uncertain."""
    return math.exp(-math.fsum(p * math.log(p) for p in probs if p > 0))


class Fit(NamedTuple):
    """How well counts fit probabilities. chance: how often would luck alone give such a chi-square, or a larger one?"""

    chi_square: float
    freedom: int
    chance: float
    largest: float  # deviation of one count, in standard errors
    num_impossible: int  # draws of tokens that have probability 0


def compare(counts: Counter[int], probs: list[float]) -> Fit:
    """Tokens that are expected less than five times share a cell."""
    num = sum(counts.values())
    cells = [(counts[i], p) for i, p in enumerate(probs) if p * num >= 5]
    rest = sum(counts[i] for i, p in enumerate(probs) if p * num < 5), math.fsum(p for p in probs if p * num < 5)
    cells += [rest] if rest[1] > 1e-12 else []
    chi_square = math.fsum((count - num * p) ** 2 / (num * p) for count, p in cells)
    errors = [abs(count - num * p) / math.sqrt(num * p * (1 - p)) for count, p in cells if p < 1 - 1e-12]
    freedom, chance = len(cells) - 1, 1.0
    if freedom > 0:  # the cube root of chi-square is nearly normal (Wilson and Hilferty, 1931)
        spread = 2 / (9 * freedom)
        chance = math.erfc(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread)) / 2
    num_impossible = sum(count for i, count in counts.items() if probs[i] == 0)
    return Fit(chi_square, freedom, chance, max(errors, default=0.0), num_impossible)
