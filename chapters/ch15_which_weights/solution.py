"""Our solutions of the exercises of chapter 15."""

from collections.abc import Callable

import torch
from torch import Tensor


def meet_experts(
    hidden: Tensor, scores: Tensor, experts: list[Callable[[Tensor], Tensor]], num_chosen: int, normalize: bool
) -> Tensor:
    """See exercise.py."""
    weights, chosen = scores.float().softmax(-1).topk(num_chosen)  # [T, num_chosen]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(hidden.shape)
    for e, expert in enumerate(experts):
        rows, places = (chosen == e).nonzero(as_tuple=True)
        if len(rows):
            out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
    return out.to(hidden.dtype)
