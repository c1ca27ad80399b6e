"""Grading of choose_experts: scores whose best experts are known, random ones, then a model with experts."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chapters.ch17_experts.small import check_generates
from chapters.expect import Wrong, cases, expect_form, unchanged
from chapters.grading import Bench
from chapters.patching import replaced
from nanovllm.features.experts import layer, rows

ChooseExperts = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]


def slowly(scores: Tensor, num_chosen: int, normalize: bool) -> list[dict[int, float]]:
    """For each row its experts and their weights."""
    found = []
    for row in scores.float().softmax(-1).tolist():
        best = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:num_chosen]
        total = sum(row[e] for e in best) if normalize else 1.0
        found.append({e: row[e] / total for e in best})
    return found


def ask(function: ChooseExperts, scores: Tensor, num_chosen: int, normalize: bool, hint: str) -> None:
    with unchanged("scores, which you were given, have been changed", scores):
        got: Any = function(scores, num_chosen, normalize)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong("return two tensors: the weights, and the numbers of the experts", got=type(got).__name__)
    shape = len(scores), num_chosen
    expect_form(torch.zeros(shape), got[0], "weights: float32, one for each expert that a row meets")
    expect_form(torch.zeros(shape, dtype=torch.int64), got[1], "chosen: int64, one for each expert that a row meets")
    for t, expected in enumerate(slowly(scores, num_chosen, normalize)):
        pairs = dict(zip(got[1][t].tolist(), got[0][t].tolist(), strict=True))
        if pairs.keys() != expected.keys():
            raise Wrong(f"row {t}: {hint} (the experts)", expected=sorted(expected), got=got[1][t].tolist())
        if any(not abs(pairs[e] - weight) < 1e-4 for e, weight in expected.items()):
            shown = [{e: round(found[e], 3) for e in expected} for found in (expected, pairs)]
            raise Wrong(f"row {t}: {hint} (the weights)", expected=shown[0], got=shown[1])


def logs(*rows: list[float]) -> Tensor:
    """Scores whose softmax is these probabilities."""
    return torch.tensor(rows).log()


def check_bfloat16(function: ChooseExperts, bench: Bench) -> None:
    """Scores in bf16: their probabilities are computed in float32"""
    scores = torch.zeros(1, 16).bfloat16()
    scores[0, [2, 5, 9, 12]] = 0.001
    hint = "probabilities that differ in float32 are the same number in bf16: then it is the wrong experts"
    ask(function, scores, 4, True, hint)
    scores = torch.randn(9, 16, generator=torch.Generator().manual_seed(6)).bfloat16()
    ask(function, scores, 4, True, "probabilities of bf16 are too coarse for weights")


def check_random(function: ChooseExperts, bench: Bench) -> None:
    """60 random steps agree with the slow way"""
    generator = torch.Generator().manual_seed(7)
    for number in range(60):
        num_rows, num_experts = (int(torch.randint(1, 12, (), generator=generator)) for _ in range(2))
        num_chosen = int(torch.randint(1, num_experts + 1, (), generator=generator))
        scores = 2 * torch.randn(num_rows, num_experts, generator=generator)
        ask(function, scores, num_chosen, bool(number % 2), f"{num_experts} experts, {num_chosen} chosen")


def use_choose_experts(function: ChooseExperts) -> AbstractContextManager[None]:
    return replaced(layer, "kernels_for", lambda kernels: replace(rows.kernels_for(kernels), route=function))


FOUR = logs([0.1, 0.5, 0.1, 0.3])
THREE_ROWS = logs([0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1])
CHECKS = (
    *cases(
        ask,
        {
            "The best experts of one row, with weights that add up to 1": [
                (FOUR, 1, True, "the best expert alone, with weight 1: number 1"),
                (FOUR, 2, True, "experts 1 and 3 have 0.5 and 0.3; normalized 0.625 and 0.375"),
                (FOUR, 4, True, "all four experts, by their probabilities"),
            ],
            "Weights are probabilities over all experts; they are scaled only if that is wanted": [
                (FOUR, 2, False, "without normalize the weights are 0.5 and 0.3: the rest is missing")
            ],
            "Every row chooses for itself": [
                (THREE_ROWS, 1, True, "a row with one expert gives it weight 1, whatever the other rows have"),
                (THREE_ROWS, 2, True, "a row's own weights add up to 1"),
                (THREE_ROWS, 2, False, "the row has its own scores"),
            ],
        },
    ),
    check_bfloat16,
    check_random,
    check_generates,
)
