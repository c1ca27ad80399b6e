"""The largest of many numbers (chapter 10). cpu/rows.c has the same for a CPU in C."""

import math

import torch
from torch import Tensor

from nanovllm.core.sequence import NO_TOKEN

BLOCK = 256  # numbers, at most


def most_likely(logits: Tensor) -> list[int]:
    """See worker/kernels.py."""
    chosen = argmax(logits)
    best = logits.gather(1, chosen[:, None]).squeeze(1)  # PyTorch takes NaN for the largest number of all
    return chosen.masked_fill_(~best.isfinite(), NO_TOKEN).tolist()


def argmax(logits: Tensor) -> Tensor:
    """logits.argmax(-1); on a CPU several times as fast: PyTorch uses vector instructions for amax, not for argmax."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, math.gcd(logits.shape[1], BLOCK)))  # [R, blocks, tokens of a block]
    best = blocks.amax(-1).argmax(-1)
    return best * blocks.shape[2] + blocks[torch.arange(len(logits)), best].argmax(-1)
