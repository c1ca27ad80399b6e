"""Grading of attend_in_parts: its result must have the same bits however many workers there are."""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chapters.ch10_optimization_stack.workers import PART, AttendInParts, Part, Range, Workers, paged_attention_in_parts
from chapters.expect import cases, differs, ensure, expect_form
from chapters.grading import Bench, Wrong
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.worker.kernels import TORCH_KERNELS

HEADS, GROUP, HEAD_DIM = 2, 3, 8
TOLERANCE = 1e-4
CUT = "where a row is cut must not depend on num_workers, nor on num_keys: the parts begin at multiples of PART"


class StrictWorkers(Workers):
    """Every part once, in fair shares."""

    def __init__(self, num_workers: int, rng: random.Random | None, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().__init__(q, k, v, rng)
        self.num_workers, self.parts = num_workers, parts_of(len(k))
        self.all_done: list[Part] = []

    def run(self, shares: list[list[Range]]) -> list[Part]:
        if self.all_done:
            raise Wrong("run was called twice; hand out all parts at once")
        if not isinstance(shares, list) or len(shares) != self.num_workers:
            got = len(shares) if isinstance(shares, list) else repr(shares)[:80]
            raise Wrong("shares has a list of ranges for each worker", expected=f"{self.num_workers} lists", got=got)
        given = [tuple(keys) for share in shares for keys in share]
        for keys in given:
            if keys not in self.parts:
                hint = f"with {self.num_workers} workers and {len(self.k)} keys: {keys} is not one of the parts. {CUT}"
                raise Wrong(hint, expected=self.parts, got=sorted(given))
        if sorted(given) != self.parts:
            raise Wrong("each part must be computed exactly once", expected=self.parts, got=sorted(given))
        most, fair = max(map(len, shares)), -(-len(self.parts) // self.num_workers)
        if most > fair:
            hint = (
                f"{self.num_workers} workers share {len(self.parts)} parts, and one of them computes {most}: then the "
            )
            raise Wrong(f"{hint}others wait for it", expected=f"at most {fair} each", got=[len(x) for x in shares])
        self.all_done = super().run([[(first, end) for first, end in share] for share in shares])
        return list(self.all_done)


def parts_of(num_keys: int) -> list[Range]:
    return [(first, min(first + PART, num_keys)) for first in range(0, num_keys, PART)]


def example(num_keys: int, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_keys)
    q = size * torch.randn(HEADS, GROUP, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, num_keys, HEADS, HEAD_DIM, generator=generator)
    return q, k, v


def that_cancel(num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Equal weights for values, and of these the parts have sums near 2^60, -2^60 and 1, in turn."""
    q, k, v = example(num_keys)
    sizes = torch.tensor([2.0**60, 1.0, -(2.0**60), 1.0]).repeat_interleave(PART).repeat(num_keys)[:num_keys]
    return q * 0, k, v.sign() * 0 + sizes[:, None, None]


def attended(
    function: AttendInParts, inputs: tuple[Tensor, Tensor, Tensor], num_workers: int, rng: random.Random | None
) -> Tensor:
    workers = StrictWorkers(num_workers, rng, *inputs)
    got = function(len(inputs[1]), num_workers, workers.run)
    if not workers.all_done:
        raise Wrong("run was never called: the workers have nothing to do")
    expect_form(torch.empty(HEADS, GROUP, HEAD_DIM), got, "the result is one row of each query head")
    return got


def compare_result(function: AttendInParts, num_keys: int, num_workers: int, size: float = 1.0) -> None:
    inputs = example(num_keys, size)
    got = attended(function, inputs, num_workers, None)
    parts = Workers(*inputs).run([parts_of(num_keys)])
    whole = Workers(*inputs).run([[(0, num_keys)]])[0]
    expected = whole.acc / whole.running_sum[..., None]
    if differs(expected, got, TOLERANCE, TOLERANCE).any():
        what = f"{num_keys} keys in {len(parts)} parts, {num_workers} workers: {_why_wrong(parts, whole, got)}"
        raise Wrong(what, expected=numbers(expected), got=numbers(got))


def numbers(x: Tensor) -> str:
    return f"{', '.join(f'{value:.5g}' for value in x.flatten()[:4].tolist())}, ... (of {list(x.shape)})"


def _why_wrong(parts: list[Part], whole: Part, got: Tensor) -> str:
    def is_near(x: Tensor) -> bool:
        return not differs(x, got, TOLERANCE, TOLERANCE).any()

    added = sum(part.acc for part in parts), sum(part.running_sum for part in parts)
    results = [part.acc / part.running_sum[..., None] for part in parts]
    causes = {
        "acc is still to be divided by running_sum": is_near(whole.acc),
        "each part is relative to its own maximum: bring both to the larger one before you add them": (
            is_near(added[0] / added[1][..., None])  # pyrefly: ignore[unsupported-operation]
        ),
        "that is the parts' mean; a part should count as much as its running_sum, relative to the common maximum": (
            is_near(torch.stack(results).mean(0))
        ),
        "that is one of the parts alone": any(map(is_near, results)),
    }
    otherwise = "rescale two parts' sums to the larger maximum, running_sum and acc alike, then add them"
    return next((why for why, is_it in causes.items() if is_it), otherwise)


def expect_same_bits(
    function: AttendInParts, inputs: tuple[Tensor, Tensor, Tensor], shuffled: bool, cause: str
) -> None:
    """For several numbers of workers, and, if shuffled, for several orders in which the parts are done."""
    num_keys = len(inputs[1])
    expected = attended(function, inputs, 1, None)
    for num_workers in (2, 3, 5, 8):
        for seed in range(3 if shuffled else 1):
            got = attended(function, inputs, num_workers, random.Random(seed) if shuffled else None)
            differ = int((got != expected).sum())
            if differ:
                first = tuple(int(i[0]) for i in (got != expected).nonzero(as_tuple=True))
                hint = f"{num_keys} keys: {differ} of {got.numel()} numbers have different bits with {num_workers} "
                hint += f"workers than with one. {cause}"
                raise Wrong(hint, expected=f"{expected[first].item():.9g}", got=f"{got[first].item():.9g}")


def check_numbers_of_workers(function: AttendInParts, bench: Bench) -> None:
    """The same bits for 1, 2, 3, 5 and 8 workers, parts done in the order of the row"""
    cause = (
        "the parts came in the same order both times: how you group them, or what else you do, depends on the shares"
    )
    for num_keys in (3 * PART, 9 * PART + 5, 20 * PART):
        expect_same_bits(function, example(num_keys), False, cause)


def check_orders(function: AttendInParts, bench: Bench) -> None:
    """The same bits, whichever worker is done first"""
    cause = "only the order in which parts were done has changed: add them in the order of the row"
    for num_keys in (3 * PART, 9 * PART + 5, 20 * PART):
        expect_same_bits(function, example(num_keys), True, cause)


def check_cancelling(function: AttendInParts, bench: Bench) -> None:
    """The same bits, where large values cancel"""
    cause = "more digits make the difference rarer but do not remove it: the order of the parts must be that of the row"
    expect_same_bits(function, that_cancel(12 * PART), True, cause)


def check_engine(function: AttendInParts, bench: Bench) -> None:
    """The model's log probabilities have the same bits with 1, 2, 3 and 5 workers, alone, in company and in chunks"""
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "block_size": 16}
    llm, rng = LLM(bench.model, dtype="float32", **sizes), random.Random(10)
    runner, scheduler = llm.engine.model_runner, llm.engine.scheduler
    in_c = runner.kernels.library is not None  # PyTorch's products depend on the other rows
    others = [[rng.randrange(4, 300) for _ in range(9)] for _ in range(2)]
    question = [rng.randrange(4, 300) for _ in range(2 * PART + 10)]
    expected: Any = None
    for num_workers, company, chunk in ((1, [], 64), (2, others, 64), (3, [], 12), (5, [], 64)):
        attention = paged_attention_in_parts(function, num_workers, rng)
        kernels = replace(
            runner.kernels, paged_attention=attention, rotary_and_write=TORCH_KERNELS.rotary_and_write
        )  # slot by slot: PyTorch writes K and V as worker/attention.py reads them
        with replaced(runner, "kernels", kernels), replaced(scheduler, "max_num_batched_tokens", chunk if in_c else 64):
            llm.reset_prefix_cache()
            prompts = [*(company if in_c else []), question]
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
            completion = llm.generate(prompts, params, False)[-1].outputs[0]
        got = [
            {token_id: entry.logprob for token_id, entry in entries.items()} for entries in completion.logprobs or []
        ]
        ensure(len(got) == 4, "the model has no tokens to choose from: what attention returns holds NaN or infinity")
        expected = expected or got
        if got != expected:
            hint = f"the bits of the model's log probabilities with {num_workers} workers are not those with one"
            raise Wrong(hint, expected=expected[0], got=got[0])


ORDER_CHECKS = (
    *cases(
        compare_result,
        {
            "One part, one worker": [(1, 1), (PART - 3, 1), (PART, 1)],
            "Several parts, one worker": [(2 * PART, 1), (3 * PART + 1, 1), (10 * PART - 1, 1, 8.0)],
            "Several workers: each part once, in fair shares": [
                (2 * PART, 2),
                (7 * PART + 3, 2),
                (9 * PART, 4),
                (20 * PART - 1, 3, 8.0),
                (PART, 3),
            ],
        },
    ),
    check_numbers_of_workers,
    check_orders,
    check_cancelling,
    check_engine,
)
