"""Our solutions of the exercises of chapter 17."""

from collections.abc import Callable

import torch
from torch import Tensor


def assign_experts(scores: Tensor, num_chosen: int, normalize: bool, capacity: int) -> tuple[Tensor, Tensor]:
    """See exercise.py."""
    probabilities = scores.float().softmax(-1)
    num_rows, num_experts = probabilities.shape
    weights = torch.zeros(num_rows, num_chosen)
    chosen = torch.full((num_rows, num_chosen), -1)
    num_met, num_taken = [0] * num_rows, [0] * num_experts
    # The largest probability first: whoever is refused has been refused by rows that are ahead.
    for pair in probabilities.flatten().argsort(descending=True, stable=True).tolist():
        row, expert = divmod(pair, num_experts)
        if num_met[row] < num_chosen and num_taken[expert] < capacity:
            weights[row, num_met[row]] = probabilities[row, expert]
            chosen[row, num_met[row]] = expert
            num_met[row] += 1
            num_taken[expert] += 1
    if normalize:
        total = weights.sum(-1, keepdim=True)
        weights = torch.where(total > 0, weights / total, weights)
    return weights, chosen


def meet_experts(hidden: Tensor, weights: Tensor, chosen: Tensor, experts: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """See exercise.py."""
    out = torch.zeros(hidden.shape)
    for e, expert in enumerate(experts):
        rows, places = (chosen == e).nonzero(as_tuple=True)
        if len(rows):
            out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
    return out.to(hidden.dtype)
