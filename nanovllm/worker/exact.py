"""The sampler's arithmetic (chapter 8): the same bits in PyTorch, in C (cpu/sampling.c) and on a GPU.

A token is chosen by sums of probabilities, and sums of floats depend on the order in which they are added. So the
weights are rounded to multiples of one small number, and their sums are exact.
"""

import math

import torch
from torch import Tensor

QUANTUM = 2.0**-34  # of which all that weights_of() returns are multiples
TO_QUANTA = 1.5 * 2.0**52 * QUANTUM
# The Chebyshev series of (exp(f) - 1 - f) / f^2 for |f| <= ln(2)/2, up to f^4, which comes first; cpu/sampling.c, too.
EXP_COEFFICIENTS = (0.0013933647, 0.0083631802, 0.041666465, 0.16666577, 0.5)
ARGMAX_BLOCK = 256  # tokens whose largest logit is found together, at most
NUMBERS_IN_CACHE = 1 << 16  # of a CPU's core: what takes many operations is done for so many at once


def log_of(min_p: Tensor) -> Tensor:
    """How far a scaled logit may lie below the largest one. In float64, so that it is rounded alike everywhere."""
    return min_p.double().log().float()


def weights_of(x: Tensor) -> Tensor:
    """exp(x) for x <= 0, float64, rounded to multiples of QUANTUM.

    Sums of these are exact for any vocabulary of up to 2^19 tokens, so they do not depend on the order in which anybody
    adds: a GPU, a kernel in C and cumsum() agree.
    """
    if not x.is_cpu:
        return in_quanta(x.exp())
    rows_at_once = 1 + NUMBERS_IN_CACHE // x.shape[1]
    return torch.cat([in_quanta(exp_in_steps(rows)) for rows in x.split(rows_at_once)])


def in_quanta(weights: Tensor) -> Tensor:
    """The nearest multiples of QUANTUM, float64: near TO_QUANTA a float64 can be nothing else."""
    return weights.double().add_(TO_QUANTA).sub_(TO_QUANTA)


def exp_in_steps(x: Tensor) -> Tensor:
    """exp(x) for x <= 0, to about 1e-7, in operations that are rounded one by one: C gets the same bits.

    exp(x) = 2^n exp(f) with |f| <= ln(2)/2. n * ln(2) is taken off in two parts, those of Cephes' expf(): the first has
    so few bits that n times it is exact.
    """
    x = x.clamp(min=-30)  # exp(-30) counts as 0: it is less than half of QUANTUM
    n = (x * 1.44269504).sub_(0.5).to(torch.int32)
    whole = n.float()  # integers times a number would have the caller's default dtype
    f = x.sub_(whole * 0.693359375).add_(whole * 2.12194440e-4)
    highest, next_highest, *others = EXP_COEFFICIENTS
    p = (f * highest).add_(next_highest)
    for coefficient in others:
        p.mul_(f).add_(coefficient)
    p.mul_(f).mul_(f).add_(f).add_(1.0)
    return p.mul_(n.add_(127).bitwise_left_shift_(23).view(torch.float32))


def argmax(logits: Tensor) -> Tensor:
    """logits.argmax(-1); on a CPU several times as fast: PyTorch uses vector instructions for amax, not for argmax."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, math.gcd(logits.shape[1], ARGMAX_BLOCK)))  # [R, blocks, tokens of a block]
    best = blocks.amax(-1).argmax(-1)
    return best * blocks.shape[2] + blocks[torch.arange(len(logits), device="cpu"), best].argmax(-1)
