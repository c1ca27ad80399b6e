"""Our solutions of the exercises of chapter 12."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.features.quantization.formats import GROUP_SIZE, Format, QuantizedRows

Dpbusd = Callable[[int, list[int], list[int]], int]


def quantize(groups: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """See exercise.py."""
    if format.has_minimum:
        minimums, first, last = groups.amin(-1).half(), 0, 2**format.bits - 1
        scales = ((groups.amax(-1) - minimums.float()) / last).half()
        groups = groups - minimums.float()[..., None]
    else:
        top = 2 ** (format.bits - 1) - 1
        minimums, first, last = None, format.zero - top, format.zero + top
        scales = (groups.abs().amax(-1) / top).half()
    divisors = torch.where(scales == 0, 1, scales.float())  # 0 / 0 is nan
    codes = (groups / divisors[..., None]).round().add(format.zero).clamp(first, last)
    return codes.to(torch.uint8), scales, minimums


def restore(groups: QuantizedRows) -> Tensor:
    """See exercise.py."""
    codes = groups.codes
    if groups.format.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    weight = (codes.float() - groups.format.zero) * groups.scales.float()[..., None]
    if groups.minimums is not None:
        weight = weight + groups.minimums.float()[..., None]
    return weight.flatten(1)[:, : groups.k]


def group_dot(
    activations: list[int],
    activation_scale: float,
    codes: list[int],
    scale: float,
    minimum: float,
    zero: int,
    dpbusd: Dpbusd,
) -> float:
    """See exercise.py."""
    total = 0
    for i in range(0, 32, 4):
        total = dpbusd(total, codes[i : i + 4], activations[i : i + 4])
    activation_sum = sum(activations)
    return activation_scale * (scale * (total - zero * activation_sum) + minimum * activation_sum)


def quantized_linear(x: Tensor, weight: QuantizedRows, bias: Tensor | None) -> Tensor:
    """See exercise.py."""
    groups = F.pad(x.float(), (0, -x.shape[1] % GROUP_SIZE)).unflatten(1, (-1, GROUP_SIZE))  # [T, num_groups, 32]
    activation_scales = groups.abs().amax(-1) / 127  # [T, num_groups]
    activations = torch.where(activation_scales[..., None] == 0, 0, groups / activation_scales[..., None]).round()
    activation_sums = activations.sum(-1)
    codes = weight.codes
    if weight.format.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    y = x.new_zeros(len(x), len(codes), dtype=torch.float32)
    for g in range(codes.shape[1]):
        total = activations[:, g] @ codes[:, g].float().T  # [T, n]; whole numbers, far below 2**24: exact in float32
        total -= weight.format.zero * activation_sums[:, g, None]
        group_y = total * weight.scales[:, g].float()
        if weight.minimums is not None:
            group_y += activation_sums[:, g, None] * weight.minimums[:, g].float()
        y += activation_scales[:, g, None] * group_y
    return (y if bias is None else y + bias.float()).to(x.dtype)
