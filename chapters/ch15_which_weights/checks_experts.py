"""Grading of the exercise on experts: small examples, random ones, then a model with experts in the engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from chapters.ch15_which_weights.sparse import load_sparse
from chapters.expect import Wrong, cases, expect, expect_form, read_again, unchanged
from chapters.grading import Bench
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.features.experts.layer import Experts
from nanovllm.worker.layers import ForwardContext

MeetExperts = Callable[[Tensor, Tensor, list[Callable[[Tensor], Tensor]], int, bool], Tensor]
PROMPTS = ["12 + 30 = ", "the keeper mends the ", "if(x[i]<j){", "1 + 1 = 2; the gull", "x"]


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
                raise Wrong(f"expert {e} is called with rows [n, hidden_size], also if it is one row", got=got)
            if rows.dtype != self.dtype:
                raise Wrong(f"expert {e} takes rows in the dtype of hidden", expected=self.dtype, got=rows.dtype)
            self.rows[e].append(rows.clone())
            return function(e, rows)

        return expert


def slowly(
    hidden: Tensor, scores: Tensor, function: Callable[[int, Tensor], Tensor], num_chosen: int, normalize: bool
) -> Tensor:
    """What must come out, in float32: row by row, every expert for itself."""
    out = torch.zeros(hidden.shape)
    for t in range(len(hidden)):
        probabilities = scores[t].float().softmax(-1)
        chosen = probabilities.argsort(descending=True)[:num_chosen].tolist()
        total = sum(float(probabilities[e]) for e in chosen) if normalize else 1.0
        for e in chosen:
            out[t] += float(probabilities[e]) / total * function(e, hidden[t : t + 1])[0].float()
    return out


def times(e: int, rows: Tensor) -> Tensor:
    """Expert 0 gives 1 times the row, expert 1 gives 10 times, ..."""
    return rows * 10.0**e


def bent(e: int, rows: Tensor) -> Tensor:
    return (rows + 0.3 * e).tanh() * (e + 1)


def ask(
    function: MeetExperts,
    hidden: Tensor,
    scores: Tensor,
    hint: str,
    num_chosen: int,
    normalize: bool = True,
    compute: Callable[[int, Tensor], Tensor] = bent,
) -> Calls:
    """Compares, and returns who was called."""
    calls = Calls(scores.shape[1], compute, hidden.dtype)
    with unchanged("hidden or scores, which you were given, have been changed", hidden, scores):
        got: Any = function(hidden, scores, calls.experts, num_chosen, normalize)
    expect_form(hidden, got, "return a row for each row of hidden; the result has the dtype of hidden")
    expected = slowly(hidden, scores, compute, num_chosen, normalize)
    tolerance = 0.02 if hidden.dtype is torch.bfloat16 else 1e-4
    size = expected.abs().amax().clamp_min(1.0)
    wrong = ((got.float() - expected).abs() > tolerance * size).any(1).nonzero().flatten().tolist()
    if wrong or bool(got.isnan().any()):
        t = wrong[0] if wrong else 0
        shown = [[round(x, 3) for x in row[t].float().tolist()[:4]] for row in (expected, got)]
        raise Wrong(f"row {t} of {len(hidden)}: {hint}", expected=shown[0], got=shown[1])
    return calls


def logs(*rows: list[float]) -> Tensor:
    """Scores whose softmax is these probabilities."""
    return torch.tensor(rows).log()


def check_grouped(function: MeetExperts, bench: Bench) -> None:
    """An expert is called once, with all its rows; one that nobody has chosen is not called"""
    generator = torch.Generator().manual_seed(5)
    rows, scores = torch.randn(12, 4, generator=generator), torch.randn(12, 6, generator=generator)
    scores[:, 2] = -50.0
    calls = ask(function, rows, scores, "its experts", 2)
    chosen = scores.topk(2).indices
    for e, found in enumerate(calls.rows):
        wanted = int((chosen == e).sum())
        expect(int(wanted > 0), len(found), f"expert {e} was chosen by {wanted} rows of 12; how often is it called?")
        if found:
            expect(wanted, len(found[0]), f"expert {e} was chosen by {wanted} rows; how many does it get?")


@read_again("An expert for every token")
def check_bfloat16(function: MeetExperts, bench: Bench) -> None:
    """In bf16 the probabilities are computed in float32, and the result is bf16"""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(9, 8, generator=generator).bfloat16()
    scores = torch.randn(9, 16, generator=generator).bfloat16()
    for normalize in (True, False):
        ask(function, rows, scores, "weights in float32", 4, normalize)
    scores = torch.zeros(1, 16).bfloat16()
    scores[0, [2, 5, 9, 12]] = 0.001
    hint = "probabilities that differ in float32 are the same number in bf16: then it is the wrong experts"
    ask(function, torch.ones(1, 4).bfloat16(), scores, hint, 4, compute=lambda e, rows: rows * (e + 1))
    hint = "four experts make 1024, 2, -1024 and 2, a quarter each: bf16 has no 256.5, so sum up in float32"
    scores = torch.zeros(1, 4).bfloat16()
    ask(function, torch.ones(1, 4).bfloat16(), scores, hint, 4, compute=lambda e, rows: rows * (1024, 2, -1024, 2)[e])


def check_random(function: MeetExperts, bench: Bench) -> None:
    """60 random steps agree with the slow way: one row, many, all with the same expert"""
    generator = torch.Generator().manual_seed(7)
    for number in range(60):
        num_experts = int(torch.randint(1, 9, (), generator=generator))
        num_chosen = int(torch.randint(1, num_experts + 1, (), generator=generator))
        num_rows = int(torch.randint(1, 20, (), generator=generator))
        rows = torch.randn(num_rows, 4, generator=generator)
        scores = 2 * torch.randn(num_rows, num_experts, generator=generator)
        if number % 5 == 0:
            scores[:, 0] += 40.0
        hint = f"{num_experts} experts, {num_chosen} chosen"
        ask(function, rows, scores, hint, num_chosen, bool(number % 2))


@cache
def sparse_engine() -> LLM:
    return load_sparse(0)


def answers() -> list[list[int]]:
    llm = sparse_engine()
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@cache
def expected_answers() -> list[list[int]]:
    with replaced(Experts, "forward", OUR_FORWARD):
        return answers()


OUR_FORWARD = Experts.forward


def use_meet_experts(function: MeetExperts) -> AbstractContextManager[None]:
    def forward(self: Any, hidden: Tensor, context: ForwardContext) -> Tensor:
        experts: list[Any] = [partial(mlp, context=context) for mlp in self.experts]
        return function(hidden, self.gate(hidden), experts, self.num_chosen, self.normalize)

    return replaced(Experts, "forward", forward)


def check_experts_generate(function: MeetExperts, bench: Bench) -> None:
    """The engine generates with a model of three layers of experts: the same tokens"""
    for prompt, expected, got in zip(PROMPTS, expected_answers(), answers(), strict=True):
        expect(expected, got, f"the model with experts answers {prompt!r} with other tokens")


GIVEN = "(the row is [1, 2]; expert e makes 10^e times the row of it)"
FOUR = logs([0.1, 0.5, 0.1, 0.3])
ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
OF_ROWS = logs([0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.6, 0.3])
EXPERT = "An expert for every token"  # a heading
CHECKS = (
    *cases(
        ask,
        {
            ("One row meets its best experts", EXPERT): [
                (ROWS[:1], FOUR, f"{hint} {GIVEN}", num_chosen, True, times)
                for num_chosen, hint in (
                    (1, "the best expert alone, with weight 1: number 1"),
                    (2, "experts 1 and 3 have 0.5 and 0.3; normalized 0.625 and 0.375"),
                    (4, "all four experts, by their probabilities"),
                )
            ],
            ("Weights are probabilities over all experts; they are scaled only if that is wanted", EXPERT): [
                (ROWS[:1], FOUR, "without normalize the weights are 0.5 and 0.3: the rest is missing", 2, False, times)
            ],
            "The weight belongs to what comes out of an expert": [
                (-ROWS[1:2], OF_ROWS[2:3], "an expert is not linear: weigh its output, not its input", 2)
            ],
            "Every row gets back what its own experts made of it": [
                (ROWS, OF_ROWS, "the row has its own expert; results go back to the places of their rows", 1),
                (ROWS, OF_ROWS, "what several experts make of a row is added up", 2),
            ],
        },
    ),
    check_grouped,
    check_bfloat16,
    check_random,
    check_experts_generate,
)
