"""Exercises of chapter 17. Edit this file, then:  python -m chapters check 17

You write two functions with which the real engine then computes: together they are a layer of experts. The tasks are
independent of each other.
"""

from collections.abc import Callable

import torch  # noqa: F401 (you will need it)
from torch import Tensor


def choose_experts(scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Which experts the rows of a step meet, and how much each of them counts.

        scores      [T, num_experts]  the router's scores for each row
        num_chosen  experts that each row meets
        normalize   scale the weights of a row's chosen experts so that they add up to 1?

    The probabilities of a row are the softmax of its scores, over all experts, in float32. The row meets the
    num_chosen most probable experts, and their probabilities are its weights (scaled, if normalize says so).

    Return two tensors [T, num_chosen]: the weights in float32, and the numbers of the experts as int64. A row's experts
    may come in any order, as long as its weights are in the same order. Do not change scores, which may be bf16.

    Example: with scores whose softmax is 0.1, 0.5, 0.1, 0.3 and num_chosen = 2, a row meets experts 1 and 3, with
    weights 0.5 and 0.3, or 0.625 and 0.375 if they are normalized.
    """
    raise NotImplementedError


def meet_experts(hidden: Tensor, weights: Tensor, chosen: Tensor, experts: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """The output of a layer of experts for the rows of a step.

        hidden   [T, hidden_size]
        weights  [T, num_chosen]  float32: how much each expert of a row counts
        chosen   [T, num_chosen]  the numbers of these experts
        experts  experts[e](rows) is the output of expert e for rows [n, hidden_size]; n at least 1

    For each row, the result is the sum of its experts' outputs, each multiplied by its weight.

    Call an expert once, with all rows that have chosen it, and only if there are any.

    Experts take rows in the dtype of hidden and return the same dtype. Multiply by the weights and sum up in float32.
    Return [T, hidden_size], in the dtype of hidden. Do not change the arguments.

    Example: a row with chosen = [1, 3] and weights = [0.625, 0.375] gets 0.625 * experts[1](row) + 0.375 *
    experts[3](row).
    """
    raise NotImplementedError
