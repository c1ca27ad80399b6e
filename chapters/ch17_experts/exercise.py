"""Exercises of chapter 17. Edit this file, then:  python -m chapters check 17

You write two functions with which the real engine then computes: together they are a layer of experts. The tasks are
independent of each other.
"""

from collections.abc import Callable

import torch  # noqa: F401 (you will need it)
from torch import Tensor


def assign_experts(scores: Tensor, num_chosen: int, normalize: bool, capacity: int) -> tuple[Tensor, Tensor]:
    """Which experts the rows of a step meet, and how much each counts, if an expert takes at most `capacity` rows.

        scores      [T, num_experts]  the router's scores for each row
        num_chosen  experts that each row wants to meet
        normalize   scale the weights of a row's experts so that they add up to 1?
        capacity    rows that an expert takes at most; 1 or more

    The probabilities of a row are the softmax of its scores, over all experts, in float32. The probabilities of the
    experts that a row meets are its weights (scaled, if normalize says so). Where no expert is too popular, a row meets
    its num_chosen most probable ones.

    Where one is, some rows have to yield and meet others instead. You decide who yields, and so fairly that no row can
    complain. A row complains about an expert that it does not meet if it would rather meet it (because it meets fewer
    than num_chosen, or because one of those that it meets is less probable for it), and if the expert could take this
    row: the expert has room, or it has taken another row whose probability for it is smaller. It does not matter in
    which order the rows of a step come. (Where probabilities are equal, it may, and nobody complains.)

    Return two tensors [T, num_chosen]: the weights in float32, and the numbers of the experts as int64. A row's experts
    may come in any order, as long as its weights are in the same order. A place of a row that meets fewer experts has
    weight 0 and number -1. Do not change scores, which may be bf16.

    Example: three rows have probabilities 0.5, 0.4, 0.1 and 0.6, 0.3, 0.1 and 0.3, 0.36, 0.34; num_chosen and capacity
    are 1. Rows 0 and 1 want expert 0, and it is row 0 that yields. Then it wants expert 1, and has a larger
    probability there than row 2, so row 2 yields, too. Rows 0, 1 and 2 meet experts 1, 0 and 2.
    """
    raise NotImplementedError


def meet_experts(hidden: Tensor, weights: Tensor, chosen: Tensor, experts: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """The output of a layer of experts for the rows of a step.

        hidden   [T, hidden_size]
        weights  [T, num_chosen]  float32: how much each expert of a row counts
        chosen   [T, num_chosen]  the numbers of these experts; -1, with weight 0, where a row meets fewer
        experts  experts[e](rows) is the output of expert e for rows [n, hidden_size]; n at least 1

    For each row, the result is the sum of its experts' outputs, each multiplied by its weight.

    Call an expert once, with all rows that have chosen it, and only if there are any.

    Experts take rows in the dtype of hidden and return the same dtype. Multiply by the weights and sum up in float32.
    Return [T, hidden_size], in the dtype of hidden. Do not change the arguments.

    Example: a row with chosen = [1, 3] and weights = [0.625, 0.375] gets 0.625 * experts[1](row) + 0.375 *
    experts[3](row).
    """
    raise NotImplementedError
