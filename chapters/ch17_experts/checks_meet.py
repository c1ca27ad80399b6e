"""Grading of meet_experts: small examples, random ones, then a model with experts in the engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chapters.ch17_experts.small import check_generates
from chapters.expect import Wrong, cases, differs, expect, expect_form, unchanged
from chapters.grading import Bench
from chapters.patching import replaced
from nanovllm.features.experts.layer import Experts
from nanovllm.features.experts.rows import kernels_for
from nanovllm.worker.layers import ForwardContext

NOBODY = -1  # in a place of a row that meets fewer experts than others
MeetExperts = Callable[[Tensor, Tensor, Tensor, list[Callable[[Tensor], Tensor]]], Tensor]


class Calls:
    """Experts that note how often, and with which rows, they are called. Expert e computes function(e, rows)."""

    def __init__(self, num_experts: int, function: Callable[[int, Tensor], Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rows: list[list[Tensor]] = [[] for _ in range(num_experts)]
        self.experts = [self._expert(e, function) for e in range(num_experts)]

    def _expert(self, e: int, function: Callable[[int, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def expert(rows: Tensor) -> Tensor:
            if not isinstance(rows, Tensor) or rows.dim() != 2:
                got = list(rows.shape) if isinstance(rows, Tensor) else repr(rows)
                raise Wrong(f"expert {e} is called with rows [n, hidden_size], even if there is only one row", got=got)
            if rows.dtype != self.dtype:
                raise Wrong(f"expert {e} takes rows in the dtype of hidden", expected=self.dtype, got=rows.dtype)
            self.rows[e].append(rows.clone())
            return function(e, rows)

        return expert


def slowly(hidden: Tensor, weights: Tensor, chosen: Tensor, function: Callable[[int, Tensor], Tensor]) -> Tensor:
    """What must come out, in float32: row by row, every expert for itself."""
    out = torch.zeros(hidden.shape)
    for t in range(len(hidden)):
        for weight, e in zip(weights[t].tolist(), chosen[t].tolist(), strict=True):
            if e == NOBODY:
                continue
            out[t] += weight * function(e, hidden[t : t + 1])[0].float()
    return out


def times(e: int, rows: Tensor) -> Tensor:
    """Expert 0 gives 1 times the row, expert 1 gives 10 times, ..."""
    return rows * 10.0**e


def bent(e: int, rows: Tensor) -> Tensor:
    return (rows + 0.3 * e).tanh() * (e + 1)


def ask(
    function: MeetExperts,
    hidden: Tensor,
    weights: Tensor,
    chosen: Tensor,
    num_experts: int,
    hint: str,
    compute: Callable[[int, Tensor], Tensor] = bent,
) -> Calls:
    """Compares, and returns who was called."""
    calls = Calls(num_experts, compute, hidden.dtype)
    with unchanged("hidden, weights or chosen, which you were given, have been changed", hidden, weights, chosen):
        got: Any = function(hidden, weights, chosen, calls.experts)
    expect_form(hidden, got, "return a row for each row of hidden; the result has the dtype of hidden")
    expected = slowly(hidden, weights, chosen, compute)
    tolerance = 0.02 if hidden.dtype is torch.bfloat16 else 1e-4
    size = expected.abs().amax().clamp_min(1.0)
    wrong = differs(expected, got.float(), tolerance * size).any(1).nonzero().flatten().tolist()
    if wrong:
        t = wrong[0]
        shown = [[round(x, 3) for x in row[t].float().tolist()[:4]] for row in (expected, got)]
        raise Wrong(f"row {t} of {len(hidden)}: {hint}", expected=shown[0], got=shown[1])
    return calls


def choices(num_rows: int, num_experts: int, num_chosen: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random weights, not scaled, and the experts they belong to."""
    return torch.rand(num_rows, num_experts, generator=generator).topk(num_chosen)


def check_grouped(function: MeetExperts, bench: Bench) -> None:
    """An expert is called once, with all its rows; one that nobody has chosen is not called"""
    generator = torch.Generator().manual_seed(5)
    weights, chosen = choices(12, 5, 2, generator)
    chosen += chosen >= 2  # nobody has chosen expert 2 of six
    calls = ask(function, torch.randn(12, 4, generator=generator), weights, chosen, 6, "its experts")
    for e, found in enumerate(calls.rows):
        wanted = int((chosen == e).sum())
        expect(int(wanted > 0), len(found), f"expert {e} was chosen by {wanted} rows of 12; how often is it called?")
        if found:
            expect(wanted, len(found[0]), f"expert {e} was chosen by {wanted} rows; how many does it get?")


def check_few(function: MeetExperts, bench: Bench) -> None:
    """A row may meet fewer experts than others, or none"""
    weights, chosen = torch.tensor([[0.7, 0.3], [0.6, 0.0], [0.0, 0.0]]), torch.tensor([[2, 0], [1, -1], [-1, -1]])
    hint = "-1 is no expert, not even the last one of the list"
    calls = ask(function, ROWS[:3], weights, chosen, 3, hint)
    for e, found in enumerate(calls.rows):
        expect(1, sum(map(len, found)), f"rows that expert {e} of 3 gets, where chosen is {chosen.tolist()}: {hint}")


def check_bfloat16(function: MeetExperts, bench: Bench) -> None:
    """In bf16 the sum is made in float32, and the result is bf16"""
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(9, 8, generator=generator).bfloat16()
    ask(function, hidden, *choices(9, 16, 4, generator), 16, "weigh in float32")
    hint = "four experts make 1024, 2, -1024 and 2, a quarter each: bf16 has no 256.5, so sum up in float32"
    one, quarters, all_four = torch.ones(1, 4).bfloat16(), torch.full((1, 4), 0.25), torch.arange(4).view(1, 4)
    ask(function, one, quarters, all_four, 4, hint, lambda e, rows: rows * (1024, 2, -1024, 2)[e])
    hint = "three experts make 256, 256, -1024 and count 0.7, 0.1, 0.2: bf16 has no such weights; multiply in float32"
    tenths, all_three = torch.tensor([[0.7, 0.1, 0.2]]), torch.arange(3).view(1, 3)
    ask(function, one, tenths, all_three, 3, hint, lambda e, rows: rows * (256, 256, -1024)[e])


def check_random(function: MeetExperts, bench: Bench) -> None:
    """60 random steps agree with the slow way: one row, many, all with the same expert"""
    generator = torch.Generator().manual_seed(7)
    for number in range(60):
        num_experts = int(torch.randint(1, 9, (), generator=generator))
        num_chosen = int(torch.randint(1, num_experts + 1, (), generator=generator))
        num_rows = int(torch.randint(1, 20, (), generator=generator))
        weights, chosen = choices(num_rows, num_experts, num_chosen, generator)
        if number % 5 == 0:
            chosen[:] = chosen[:1].clone()
        hint = f"{num_experts} experts, {num_chosen} chosen"
        ask(function, torch.randn(num_rows, 4, generator=generator), weights, chosen, num_experts, hint)


def use_meet_experts(function: MeetExperts) -> AbstractContextManager[None]:
    def forward(self: Any, hidden: Tensor, context: ForwardContext) -> Tensor:
        experts: list[Any] = [partial(mlp, context=context) for mlp in self.experts]
        choice = kernels_for(context.kernels).route(self.gate(hidden), self.num_chosen, self.normalize)
        return function(hidden, *choice, experts)

    return replaced(Experts, "forward", forward)


ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
ONE, ONE_AND_THREE = torch.tensor([[1]]), torch.tensor([[1, 3]])
ADD_UP_TO_1, AS_THEY_ARE = torch.tensor([[0.625, 0.375]]), torch.tensor([[0.5, 0.3]])
BEST, BOTH = torch.tensor([[2], [0], [1], [1]]), torch.tensor([[2, 1], [0, 1], [1, 0], [1, 2]])
OF_BEST, OF_BOTH = torch.ones(4, 1), torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2], [0.5, 0.3]])
GIVEN = "(the row is [1, 2]; expert e returns 10^e times the row)"
CHECKS = (
    *cases(
        ask,
        {
            "One row meets its experts": [
                (ROWS[:1], torch.ones(1, 1), ONE, 4, f"expert 1 alone, with weight 1 {GIVEN}", times),
                (ROWS[:1], ADD_UP_TO_1, ONE_AND_THREE, 4, f"expert 1 counts 0.625, expert 3 0.375 {GIVEN}", times),
                (ROWS[:1], AS_THEY_ARE, ONE_AND_THREE, 4, f"weights are taken as they are: 0.5, 0.3 {GIVEN}", times),
            ],
            "The weight belongs to what comes out of an expert": [
                (-ROWS[1:2], OF_BOTH[2:3], BOTH[2:3], 3, "an expert is not linear: weigh its output, not its input")
            ],
            "Every row gets back what its own experts made of it": [
                (ROWS, OF_BEST, BEST, 3, "the row has its own expert; results go back to the places of their rows"),
                (ROWS, OF_BOTH, BOTH, 3, "what several experts make of a row is added up"),
            ],
        },
    ),
    check_grouped,
    check_few,
    check_bfloat16,
    check_random,
    check_generates,
)
