"""Rounding weights to 4 bits: scale and minimum of a group by search (chapter 12).

Nearest rounding takes 16 steps from a group's smallest weight to its largest. But few weights lie at the ends, and
inputs are not alike: the larger an input, the more the errors of its weights matter. What is made small here is

    sum over the group of importance * (scale * code + minimum - weight) ** 2

where an input's importance is its mean square (importance.py). For given codes, the best scale and minimum are those
of a straight line through the points (code, weight), for which there is a formula. For given scale and minimum, the
best codes are the nearest ones. The two take turns. Which error they end at depends on where they begin, so many ranges
are tried, cut a little at both ends. llama.cpp makes its K-quants in this way (make_qkx3_quants in ggml-quants.c).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.features.quantization.formats import GROUP_SIZE, Q4_1, QuantizedRows, in_groups

# Cuts, parts of the distance from smallest to largest. quantize.c has the same.
COARSE = [(-0.01 + 0.05 * below, -0.01 + 0.05 * above) for below in range(4) for above in range(4)]
FINE = [(0.025 * below, 0.025 * above) for below in (-1, 0, 1) for above in (-1, 0, 1)]
NUM_REFINEMENTS = 2


def quantize_q4_1(weight: Tensor) -> QuantizedRows:
    """Nearest rounding of a weight [n, k]: 16 steps from a group's smallest number to its largest."""
    groups = in_groups(weight)
    return _pack(groups, *_whole_range(groups), weight.shape[1])


def search_q4_1(weight: Tensor, importance: Tensor) -> QuantizedRows:
    """A weight [n, k] of finite numbers within float16's range, with the importance [k] of its inputs, all positive.

    No group's weighted error is larger than with nearest rounding. quantize.c does the same, ten times as fast.
    """
    groups = in_groups(weight)
    importance = F.pad(importance, (0, -weight.shape[1] % GROUP_SIZE)).view(-1, GROUP_SIZE)
    ranges = [_whole_range(groups), search_ranges(groups, importance)]
    errors = [_weighted_error(groups, importance, *chosen) for chosen in ranges]
    better = errors[1] < errors[0]
    scales, minimums = (torch.where(better, found, whole) for whole, found in zip(*ranges, strict=True))
    return _pack(groups, scales, minimums, weight.shape[1])


def _whole_range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums, float32 [n, num_groups]."""
    minimums = groups.amin(-1)
    return (groups.amax(-1) - minimums) / 15, minimums


def _pack(groups: Tensor, scales: Tensor, minimums: Tensor, k: int) -> QuantizedRows:
    codes = _nearest_codes(groups, scales.half(), minimums.half()).to(torch.uint8)
    return QuantizedRows(Q4_1, k, codes[..., :16] | codes[..., 16:] << 4, scales.half(), minimums.half())


def _nearest_codes(groups: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    steps = scales.float().clamp_min(2**-24)[..., None]
    return ((groups - minimums.float()[..., None]) / steps).round_().clamp_(0, 15)


def _weighted_error(groups: Tensor, importance: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """[n, num_groups], with scales and minimums as they are stored."""
    scales, minimums = scales.half(), minimums.half()
    restored = _nearest_codes(groups, scales, minimums).mul_(scales.float()[..., None])
    return (restored.add_(minimums.float()[..., None]).sub_(groups).square_() * importance).sum(-1)


def search_ranges(groups: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """float32 groups [n, num_groups, 32], importance [num_groups, 32] -> scales, minimums, float32 [n, num_groups].

    importance is positive somewhere in each group.
    """
    total = importance.sum(-1, keepdim=True)
    mean = (groups * importance).sum(-1, keepdim=True) / total
    x = groups - mean  # sums of products with small numbers lose less
    weighted = x * importance
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    width = high - low
    best = [torch.zeros_like(width), width / 15, low]  # gain, scale, minimum

    def consider(scale: Tensor, minimum: Tensor) -> Tensor:
        """Where the line through the codes of this range is the best one so far."""
        nonlocal best
        steps = scale.clamp_min(1e-30)
        zero = -minimum / steps  # the code that would stand for the mean
        q = (x / steps).add_(zero).round_().clamp_(0, 15).sub_(zero)
        sums, products = (q * importance).sum(-1, keepdim=True), (q * weighted).sum(-1, keepdim=True)
        squares = (q.square_() * importance).sum(-1, keepdim=True)
        variance = squares - sums.square() / total
        scale = products / variance
        gain = scale * products  # how far the error is below that of the mean alone
        better = (variance > 1e-5 * squares) & (gain > best[0])  # no variance: all codes are the same
        line = gain, scale, -scale * (sums / total + zero)
        best = [torch.where(better, new, old) for new, old in zip(line, best, strict=True)]
        return better

    cut = [torch.zeros_like(width)] * 2
    for cuts in COARSE:
        better = consider(width * ((1 - sum(cuts)) / 15), low + width * cuts[0])
        cut = [torch.where(better, new, old) for new, old in zip(cuts, cut, strict=True)]
    for more_below, more_above in FINE:
        below, above = cut[0] + more_below, cut[1] + more_above
        consider(width * (1 - below - above) / 15, low + width * below)
    for _ in range(NUM_REFINEMENTS):
        consider(*best[1:])
    _, scale, minimum = best
    return scale.squeeze(-1), (minimum + mean).squeeze(-1)
