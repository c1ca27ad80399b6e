"""Checks of chapter 1's exercises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chapters.ch01_inference.lab_parts import next_logits_of, rows_of
from chapters.expect import Table, cases, differs, expect, read_again, unchanged
from chapters.grading import PROMPTS, Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import SamplingParams
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker import attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import TORCH_KERNELS

# In the range of real logits (16 to 32), bf16 numbers are this far apart: two tokens so close are a tie.
TIE = 0.13
TOLERANCE = 1e-4
LOOP = "The loop that writes"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def is_tie(bench: Bench, prompt: str, before: list[int], token_id: int) -> bool:
    """Does the model itself find this token as likely as its best?"""
    token_ids = bench.llm.get_tokenizer()(prompt).input_ids + before
    bench.llm.reset_prefix_cache()  # attention_by() lays K and V out in another order than the kernels
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    [best] = bench.llm.generate([token_ids], params, False)[0].outputs[0].logprobs or []
    top = max(entry.logprob for entry in best.values())
    return token_id in best and top - best[token_id].logprob < TIE


# -- causal_attention -------------------------------------------------------------------------------------------------


@contextmanager
def attention_by(function: Attention, bench: Bench) -> Iterator[None]:
    """The engine computes its attention with this function, one sequence of a step after another."""

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        outs = []
        for b, rows in enumerate(q.split(batch.query_lens)):
            k, v = (rows_of(cache, batch, b).float() for cache in (k_cache, v_cache))
            outs.append(function(rows.float().clone(), k, v).to(q.dtype))
        return torch.cat(outs)

    runner = bench.llm.engine.model_runner
    # rows_of() reads the cache as PyTorch's functions lay it out; the C kernels have a layout of their own.
    write = TORCH_KERNELS.rotary_and_write
    kernels = replace(runner.kernels, paged_attention=paged_attention, rotary_and_write=write)
    with replaced(runner, "kernels", kernels), replaced(runner, "recorded_steps", None):
        yield


def engines_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The engine's own paged attention, with K and V in a cache of one large block."""
    seq = Sequence([0] * len(k))
    seq.block_table = [0]
    step = SchedulerOutput([ScheduledChunk(seq, len(k) - len(q), len(k), 0)], [], len(q))
    return attention.paged_attention(q, k[None], v[None], Batch.from_scheduler_output(step, block_size=len(k)))


def compare_qkv(function: Attention, hint: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises Wrong, with the numbers of the first row and head that differ from the engine's, if there are any."""
    expected = engines_attention(q, k, v)
    got = function(q.clone(), k.clone(), v.clone())
    shape = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
    expect(list(q.shape), shape, "the result must have the shape of q")
    far = differs(expected, got, TOLERANCE)
    if far.any():
        row, head, at = far.nonzero()[0].tolist()
        where = f"q {list(q.shape)}, k and v {list(k.shape)}: row {row}, head {head}, from number {at}"
        raise Wrong(f"{hint} ({where})", expected=_numbers(expected[row, head, at:]), got=_numbers(got[row, head, at:]))


def _numbers(x: Tensor) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in x[:4].tolist())}{', ...' if len(x) > 4 else ''}]"


def random_qkv(n: int, m: int, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + m)
    shapes = (n, num_heads, 8), (m, num_kv_heads, 8), (m, num_kv_heads, 8)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def compare(function: Attention, hint: str, *sizes: int, times: int = 1) -> None:
    q, k, v = random_qkv(*sizes)
    compare_qkv(function, hint, q * times, k * times, v)


def three_tokens(function: Attention, bench: Bench) -> None:
    """the last of three tokens, as in the chapter's example by hand"""
    q = torch.tensor([2.0, 0.0, 1.0, 0.0]).view(1, 1, 4)
    k = torch.tensor([[0.0, 1.0, 0.0, 1.0], [2.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]).view(3, 1, 4)
    v = torch.eye(3, 4).view(3, 1, 4)
    got = function(q.clone(), k.clone(), v.clone())
    weights = got.flatten()[:3].tolist() if isinstance(got, Tensor) and got.shape == q.shape else []
    hint = "is each dot product divided by sqrt(head_dim), here 2, before the softmax, and does that go over the keys?"
    if weights == [1.0, 0.0, 0.0]:
        hint = "the query is that of the last position and sees all three; yours sees only the first"
    elif weights and weights[2] == 0.0:
        hint = "a position sees itself, too, and yours does not"
    compare_qkv(function, f"the first three numbers are the weights: {hint}", q, k, v)


def arguments_kept(function: Attention, bench: Bench) -> None:
    """q, k and v are left unchanged"""
    given = random_qkv(3, 5, 4, 2)
    with unchanged("q, k or v was changed in place; work on new tensors", *given):
        function(*given)


@read_again("Attention in the engine")
def in_the_engine(function: Attention, bench: Bench) -> None:
    """the real model answers as before, with your attention in every layer"""
    _ = bench.expected_tokens
    with attention_by(function, bench):
        answers = bench.generate()
    bench.same_tokens(None, answers, partial(is_tie, bench))


# -- greedy_loop ------------------------------------------------------------------------------------------------------


class ToyModel:
    """Its most likely token depends on all tokens so far. It notes what it is asked."""

    def __init__(self, favourites: list[int] | None = None) -> None:
        self.favourites, self.asked = favourites, []

    def __call__(self, token_ids: list[int]) -> Tensor:
        if len(self.asked) == 50:
            raise Wrong("the model was asked 50 times for a few tokens: what ends the loop?")
        self.asked.append([int(t) for t in token_ids])
        favourite = sum((i + 1) * t for i, t in enumerate(self.asked[-1])) % 97
        if self.favourites is not None:
            favourite = self.favourites[len(self.asked) - 1] if len(self.asked) <= len(self.favourites) else 96
        logits = torch.linspace(-3, -2, 97)
        logits[favourite] = -1.0  # negative, as logits may be
        return logits


def expect_tokens(expected: list[int], got: Any, hint: str) -> None:
    if isinstance(got, list) and not all(type(t) is int for t in got):
        odd = f"a list with {next(type(t).__name__ for t in got if type(t) is not int)}"
        raise Wrong(
            "the result must be a list of Python ints; int(...) makes one of a tensor", expected=expected, got=odd
        )
    expect(expected, got, hint)


COUNTS = "max_tokens counts generated tokens, not those of the prompt"
ONLY_NEW = "the result is only what was generated, without the prompt"


def first_token(function: Any, bench: Bench) -> None:
    """one token: the one with the largest logit"""
    got = function(ToyModel([42]), [7, 8, 9], 1, set())
    hint = "the most likely token is the index of the largest logit"
    if isinstance(got, list) and len(got) != 1:
        hint = ONLY_NEW if got[:3] == [7, 8, 9] else COUNTS
    expect_tokens([42], got, hint)


def feeds_back(function: Any, bench: Bench) -> None:
    """each call gets the whole text so far"""
    model = ToyModel([11, 12, 13])
    got = function(model, [7, 8], 3, set())
    hint = "the model remembers nothing: each call needs the prompt and everything generated so far"
    expect([[7, 8], [7, 8, 11], [7, 8, 11, 12]], model.asked[:3], hint)
    expect_tokens([11, 12, 13], got, ONLY_NEW)


def ends_by_length(function: Any, bench: Bench) -> None:
    """max_tokens tokens, and not one call more"""
    model = ToyModel()
    got = function(model, [3, 1, 4], 6, set())
    expect("6 tokens", f"{len(got)} tokens", COUNTS)
    expect("6 calls", f"{len(model.asked)} calls", "the last token need not go through the model")
    expected = [int(ToyModel()([3, 1, 4, *got[:i]]).argmax()) for i in range(6)]
    expect_tokens(expected, got, "each token depends on all tokens before it")


def ends_by_eos(function: Any, bench: Bench) -> None:
    """an EOS token ends the text and is part of the result"""
    model, hint = ToyModel([5, 9, 2, 6]), "the token that ended the text is the last of the result"
    expect_tokens([5, 9, 2], function(model, [1], 10, {2, 3}), hint)
    expect("3 calls", f"{len(model.asked)} calls", "after EOS the model must not be asked again")
    expect_tokens([2], function(ToyModel([2]), [1], 10, {2}), "the very first token may be EOS")


def eos_in_the_prompt(function: Any, bench: Bench) -> None:
    """an EOS token in the prompt ends nothing"""
    got = function(ToyModel([5, 6, 7]), [1, 2, 8, 2], 3, {2})
    expect_tokens([5, 6, 7], got, "only a generated token ends the text: conversations have EOS between their turns")


def prompt_kept(function: Any, bench: Bench) -> None:
    """the caller's prompt is left unchanged"""
    prompt = [7, 8, 9]
    function(ToyModel(), prompt, 4, set())
    expect([7, 8, 9], prompt, "the list prompt_token_ids was changed: append to a copy")


def real_model(function: Any, bench: Bench) -> None:
    """the real model: the same tokens as the engine"""
    _ = bench.expected_tokens
    next_logits, tokenizer = next_logits_of(bench.llm), bench.llm.get_tokenizer()
    answers = [function(next_logits, tokenizer(prompt).input_ids, 12, set()) for prompt in PROMPTS]
    bench.same_tokens(None, answers, partial(is_tie, bench))


LAST = "the n queries belong to the last n positions: row i sees positions 0 to m - n + i"
OWN = (
    "each head has its own dot products and its own softmax. The group size is num_heads // num_kv_heads, here 1: "
    "head h reads KV head h // group_size, not h // num_kv_heads"
)
SHARE = "head h reads KV head h // group_size, with group_size = num_heads // num_kv_heads: neighbors share"
LARGE = "exp() of a large score is infinite: use torch.softmax, or subtract the row's largest score first"
ATTENDS: Table = {  # hint, n, m, num_heads, num_kv_heads
    "a prompt: no position sees later ones": [
        ("row i must not see positions later than its own, and must see its own", 5, 5, 1, 1)
    ],
    "queries of the last positions only, as when a token is added": [(LAST, 1, 6, 1, 1), (LAST, 3, 7, 1, 1)],
    "several heads, each with keys and values of its own": [(OWN, 4, 4, 3, 3)],
    "query heads that share KV heads": [(SHARE, 2, 5, 4, 1), (SHARE, 2, 5, 8, 2), (SHARE, 2, 5, 6, 3)],
}
ALONE = "with one position to see, its weight is 1 and the result is its value"
ATTENTION = (
    *cases(compare, {"a single token gets its own value back": [(ALONE, 1, 1, 1, 1)]}),
    three_tokens,
    *cases(compare, ATTENDS),
    *cases(partial(compare, times=40), {("large dot products: no overflow", LOOP): [(LARGE, 3, 3, 2, 1)]}),
    arguments_kept,
    in_the_engine,
)
LOOPS = (first_token, feeds_back, ends_by_length, ends_by_eos, eos_in_the_prompt, prompt_kept, real_model)
TASKS = [  # nullcontext: the checks call the function, or put it into the engine, themselves
    Task("causal_attention", "Attention by hand", nullcontext, ATTENTION),
    Task("greedy_loop", LOOP, nullcontext, LOOPS),
]
