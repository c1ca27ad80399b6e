"""Grading of assign_experts: known scores, rows that could complain, then a model with experts."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chapters.ch17_experts.small import answers, check_generates
from chapters.expect import Wrong, cases, differs, ensure, expect, expect_form, unchanged
from chapters.grading import Bench
from chapters.patching import replaced
from nanovllm.features.experts import layer, rows

AssignExperts = Callable[[Tensor, int, bool, int], tuple[Tensor, Tensor]]
CHOICE = "An expert for every token"  # heading
OF_LETTERS = ["12 + 30 = ", "the keeper mends the ", "if(x[i]<j){", "x = 4; y", "gulls"]  # no two begin alike


def ask(
    function: AssignExperts, scores: Tensor, num_chosen: int, normalize: bool, capacity: int, hint: str = ""
) -> list[dict[int, float]]:
    """Compares, and returns for each row its experts and their weights."""
    told = f"{len(scores)} rows, {num_chosen} of {scores.shape[1]} experts each, capacity {capacity}"
    with unchanged("scores, which you were given, have been changed", scores):
        got: Any = function(scores, num_chosen, normalize, capacity)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong("return two tensors: the weights, and the numbers of the experts", got=type(got).__name__)
    shape = len(scores), num_chosen
    expect_form(torch.zeros(shape), got[0], "weights: float32, one for each place of a row")
    expect_form(torch.zeros(shape, dtype=torch.int64), got[1], "chosen: int64, one for each place of a row")
    probabilities = scores.float().softmax(-1).tolist()
    weights, chosen = (tensor.tolist() for tensor in got)
    found = [met_by(t, weights[t], chosen[t], scores.shape[1]) for t in range(len(scores))]
    check_capacity(found, scores.shape[1], capacity, told)
    check_complaints(found, probabilities, num_chosen, capacity, f"{told}: {hint}" if hint else told)
    for t, experts in enumerate(found):
        total = sum(probabilities[t][e] for e in experts) if normalize else 1.0
        expected = {e: probabilities[t][e] / total for e in experts}
        if any(differs(weight, experts[e], 1e-4) for e, weight in expected.items()):
            told = hint or "a row's weights are its experts' probabilities" + ", scaled to add up to 1" * normalize
            shown = [{e: round(each[e], 3) for e in expected} for each in (expected, experts)]
            raise Wrong(f"row {t}: {told} (the weights)", expected=shown[0], got=shown[1])
    return found


def met_by(t: int, weights: list[float], experts: list[int], num_experts: int) -> dict[int, float]:
    """A row's experts and their weights; empty places left out."""
    found: dict[int, float] = {}
    for weight, e in zip(weights, experts, strict=True):
        if e == -1:
            no_number = ", but 0 / 0 is no number" if math.isnan(weight) else ""
            ensure(weight == 0, f"row {t}: a place that stays empty has number -1 and weight 0{no_number}", got=weight)
            continue
        ensure(0 <= e < num_experts, f"row {t}: there are experts 0 to {num_experts - 1}, and -1 for none", got=experts)
        ensure(e not in found, f"row {t} meets an expert twice", got=experts)
        found[e] = weight
    return found


def check_capacity(found: list[dict[int, float]], num_experts: int, capacity: int, told: str) -> None:
    for e in range(num_experts):
        num_taken = sum(e in experts for experts in found)
        if num_taken > capacity:
            raise Wrong(f"{told}: expert {e} takes too many rows", expected=f"at most {capacity}", got=num_taken)


def check_complaints(
    found: list[dict[int, float]], probabilities: list[list[float]], num_chosen: int, capacity: int, told: str
) -> None:
    """Raises Wrong for the first row that has a reason to complain."""
    for t, experts in enumerate(found):
        of_row = probabilities[t]
        for e in sorted(set(range(len(of_row))) - experts.keys()):
            clearly_less = of_row[e] - 1e-6  # whoever computes a softmax differently rounds differently
            worse = [other for other in experts if of_row[other] < clearly_less]
            if len(experts) == num_chosen and not worse:
                continue
            taken = [row for row, theirs in enumerate(found) if e in theirs]
            behind = [row for row in taken if probabilities[row][e] < clearly_less]
            why = (
                f"meets only {len(experts)}" if not worse else f"meets expert {worse[0]}, with {of_row[worse[0]]:.3f},"
            )
            complaint = f"row {t} complains: expert {e} has probability {of_row[e]:.3f} for it. It {why} "
            if len(taken) < capacity:
                complaint += f"although expert {e} has room"
            elif behind:
                complaint += (
                    f"and expert {e} has taken row {behind[0]}, for which it has {probabilities[behind[0]][e]:.3f}"
                )
            else:
                continue
            raise Wrong(f"{told}: {complaint}", got=[sorted(each) for each in found])


def logs(*rows: list[float]) -> Tensor:
    """Scores whose softmax is these probabilities."""
    return torch.tensor(rows).log()


def check_bfloat16(function: AssignExperts, bench: Bench) -> None:
    """Scores in bf16: their probabilities are computed in float32"""
    scores = torch.zeros(1, 16).bfloat16()
    scores[0, [2, 5, 9, 12]] = 0.001
    hint = "probabilities that differ in float32 are the same number in bf16: then it is the wrong experts"
    ask(function, scores, 4, True, 1, hint)
    scores = torch.randn(9, 16, generator=torch.Generator().manual_seed(6)).bfloat16()
    ask(function, scores, 4, True, 9, "probabilities of bf16 are too coarse for weights")


def check_any_order(function: AssignExperts, bench: Bench) -> None:
    """The same rows in a different order meet the same experts"""
    generator = torch.Generator().manual_seed(8)
    for _ in range(20):
        scores = torch.randn(10, 6, generator=generator)
        order = torch.randperm(10, generator=generator)
        found, shuffled = (ask(function, each, 2, True, 4) for each in (scores, scores[order]))
        for place, t in enumerate(order.tolist()):
            hint = (
                f"ten rows meet two of six experts each, capacity 4; row {t} comes as row {place} instead: its experts"
            )
            expect(sorted(found[t]), sorted(shuffled[place]), hint)


def check_random(function: AssignExperts, bench: Bench) -> None:
    """80 random steps, with much room, just enough, and too little: nobody can complain"""
    generator = torch.Generator().manual_seed(7)
    for number in range(80):
        num_rows, num_experts = (int(torch.randint(1, 12, (), generator=generator)) for _ in range(2))
        num_chosen = int(torch.randint(1, num_experts + 1, (), generator=generator))
        enough = -(-num_rows * num_chosen // num_experts)
        capacity = (num_rows, enough + 1, enough, max(1, enough // 2))[number % 4]
        popular = torch.linspace(2, 0, num_experts)  # the first experts are wanted most
        scores = 2 * torch.randn(num_rows, num_experts, generator=generator) + popular
        ask(function, scores, num_chosen, bool(number % 3), capacity)


def with_capacity(function: AssignExperts, capacity_of: Callable[[int], int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """As the engine calls route(). capacity_of(the number of rows)."""

    def route(scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
        weights, chosen = function(scores, num_chosen, normalize, capacity_of(len(scores)))
        return weights, chosen.clamp_min(0)  # the engine knows no empty places: expert 0 then counts 0

    return route


def use_route(route: Callable[..., tuple[Tensor, Tensor]]) -> AbstractContextManager[None]:
    return replaced(layer, "kernels_for", lambda kernels: replace(rows.kernels_for(kernels), route=route))


def use_assign_experts(function: AssignExperts) -> AbstractContextManager[None]:
    """With room for all rows, which is what the engine does."""
    return use_route(with_capacity(function, lambda num_rows: num_rows))


def check_company(function: AssignExperts, bench: Bench) -> None:
    """With little capacity the engine's answers do not depend on the order of a step's rows"""

    def backwards(scores: Tensor, num_chosen: int, normalize: bool, capacity: int) -> tuple[Tensor, Tensor]:
        weights, chosen = function(scores.flip(0), num_chosen, normalize, capacity)
        return weights.flip(0), chosen.flip(0)

    found = []
    for each in (function, backwards):
        with use_route(with_capacity(each, lambda num_rows: -(-num_rows // 3))):
            found.append(answers(OF_LETTERS))
    for prompt, forwards, other in zip(OF_LETTERS, *found, strict=True):
        ensure(bool(forwards), f"the model with experts does not answer {prompt!r}: a weight is NaN, or infinite")
        hint = f"the model with experts answers {prompt!r} with different tokens if the rows of each step are reversed"
        expect(forwards, other, hint)


FOUR = logs([0.1, 0.5, 0.1, 0.3])
THREE_ROWS = logs([0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1])
CHAIN = logs([0.5, 0.4, 0.1], [0.6, 0.3, 0.1], [0.3, 0.36, 0.34])
SAME_WISH = logs([0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [0.6, 0.1, 0.3])
SHIFTS = torch.tensor([[5.0], [0.0], [-5.0]])  # change no probability
TWO_EACH = logs([0.4, 0.35, 0.15, 0.1], [0.45, 0.3, 0.2, 0.05], [0.5, 0.1, 0.15, 0.25])
SHORT = logs([0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.45, 0.35, 0.2])
CHECKS = (
    *cases(
        ask,
        {
            ("The best experts of one row, with weights that add up to 1", CHOICE): [
                (FOUR, 1, True, 1, "the best expert alone, with weight 1: number 1"),
                (FOUR, 2, True, 1, "experts 1 and 3 have 0.5 and 0.3; normalized 0.625 and 0.375"),
                (FOUR, 4, True, 1, "all four experts, by their probabilities"),
            ],
            ("Weights are probabilities over all experts; they are scaled only if that is wanted", CHOICE): [
                (FOUR, 2, False, 1, "without normalize the weights are 0.5 and 0.3: the rest is missing")
            ],
            ("With room for all rows every row chooses for itself", CHOICE): [
                (THREE_ROWS, 1, True, 3, "a row with one expert gives it weight 1, whatever the other rows have"),
                (THREE_ROWS, 2, True, 3, "a row's own weights add up to 1"),
                (THREE_ROWS, 2, False, 3, "the row has its own scores"),
            ],
            "All want the same expert": [
                (SAME_WISH, 1, False, 2, "two have room, and the one with the smallest probability yields"),
                (SAME_WISH, 1, False, 1, "who yields goes to the next expert"),
                (SAME_WISH[[1, 2, 0]], 1, False, 1, "who yields goes to the next expert"),
                (SAME_WISH + SHIFTS, 1, False, 1, "scores say nothing from row to row: compare probabilities"),
            ],
            "Whoever yields may make another one yield": [
                (CHAIN, 1, False, 1, "row 0 yields to row 1, and then row 2 yields to row 0"),
                (CHAIN[[2, 1, 0]], 1, False, 1, "the rows of the example, in reverse order"),
            ],
            "Two experts for each row": [
                (TWO_EACH, 2, False, 2, "a row that yields at one expert keeps the other"),
                (TWO_EACH, 2, True, 2, "weights are scaled by the sum of what a row has got, not of what it wanted"),
            ],
            "Too little room: places stay empty": [
                (SHORT, 2, False, 2, "six places are wanted, and there are six, but no row meets an expert twice"),
                (SHORT, 2, True, 1, "three places for three rows that want two each"),
                (SHORT[:, :2], 1, True, 1, "two places for three rows"),
            ],
        },
    ),
    check_bfloat16,
    check_random,
    check_any_order,
    check_generates,
    check_company,
)
