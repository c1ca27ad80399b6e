"""Checks of chapter 1's exercises."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chapters.ch01_inference.lab import next_logits_of, rows_of
from chapters.expect import read_again
from chapters.grading import PROMPTS, Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import SamplingParams
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker import attention
from nanovllm.worker.batch import Batch

# Logits in bf16 are this far apart where real ones lie (16 to 32): two tokens so close are a tie, and either may win.
TIE = 0.13
TOLERANCE = 1e-4

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def same_up_to_ties(bench: Bench, answers: list[list[int]]) -> None:
    """Each answer is the engine's, up to a token that the model itself finds as likely as the engine's."""
    text = bench.llm.get_tokenizer().decode
    for prompt, expected, got in zip(PROMPTS, bench.expected_tokens, answers, strict=True):
        at = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got))
        )
        if expected == got or (at < len(got) and at < len(expected) and _is_tie(bench, prompt, expected[:at], got[at])):
            continue
        raise Wrong(
            f"the model answers {prompt!r} with other tokens, from token {at} on",
            expected=text(expected),
            got=text(got),
        )


def _is_tie(bench: Bench, prompt: str, before: list[int], token_id: int) -> bool:
    token_ids = bench.llm.get_tokenizer()(prompt).input_ids + before
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    [best] = bench.llm.generate([token_ids], params, False)[0].outputs[0].logprobs or []
    top = max(entry.logprob for entry in best.values())
    return token_id in best and top - best[token_id].logprob < TIE


# -- causal_attention -------------------------------------------------------------------------------------------------


@contextmanager
def attention_by(function: Attention, bench: Bench) -> Iterator[None]:
    """The engine computes its attention with this function, for one sequence of a step after the other."""

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        outs = []
        for b, rows in enumerate(q.split(batch.query_lens)):
            k, v = (rows_of(cache, batch, b).float() for cache in (k_cache, v_cache))
            outs.append(function(rows.float().clone(), k, v).to(q.dtype))
        return torch.cat(outs)

    runner = bench.llm.engine.model_runner
    kernels = replace(runner.kernels, paged_attention=paged_attention)
    with replaced(runner, "kernels", kernels), replaced(runner, "_graphs", None):
        yield


def engines_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The engine's own paged attention, with K and V in a cache of one large block."""
    seq = Sequence([0] * len(k))
    seq.block_table = [0]
    step = SchedulerOutput([ScheduledChunk(seq, len(k) - len(q), len(k), 0)], [], len(q))
    return attention.paged_attention(q, k[None], v[None], Batch.from_scheduler_output(step, block_size=len(k)))


def random_qkv(n: int, m: int, num_heads: int, num_kv_heads: int, head_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + m)
    shapes = (n, num_heads, head_dim), (m, num_kv_heads, head_dim), (m, num_kv_heads, head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def compare(function: Attention, q: Tensor, k: Tensor, v: Tensor, hint: str) -> None:
    """Raises Wrong with the numbers of the first row and head that differ from the engine's, from the first such on."""
    expected = engines_attention(q, k, v)
    got = function(q.clone(), k.clone(), v.clone())
    if not isinstance(got, Tensor) or got.shape != q.shape:
        shape = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise Wrong("the result must have the shape of q", expected=list(q.shape), got=shape)
    far = ~((got - expected).abs() <= TOLERANCE)  # not "> TOLERANCE": NaN is far from everything
    if far.any():
        row, head, at = far.nonzero()[0].tolist()
        where = f"q {list(q.shape)}, k and v {list(k.shape)}: row {row}, head {head}, from number {at}"
        raise Wrong(f"{hint} ({where})", expected=_numbers(expected[row, head, at:]), got=_numbers(got[row, head, at:]))


def _numbers(x: Tensor) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in x[:4].tolist())}{', ...' if len(x) > 4 else ''}]"


def one_position(function: Attention, bench: Bench) -> None:
    """a single token gets its own value back"""
    hint = "with one position to see, its weight is 1 and the result is its value"
    compare(function, *random_qkv(n=1, m=1, num_heads=1, num_kv_heads=1), hint)


def three_tokens(function: Attention, bench: Bench) -> None:
    """the last of three tokens, the chapter's example by hand"""
    q = torch.tensor([2.0, 0.0, 1.0, 0.0]).view(1, 1, 4)
    k = torch.tensor([[0.0, 1.0, 0.0, 1.0], [2.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]).view(3, 1, 4)
    v = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]).view(3, 1, 4)
    got = function(q.clone(), k.clone(), v.clone())
    weights = got.flatten()[:3].tolist() if isinstance(got, Tensor) and got.shape == q.shape else []
    hint = "the first three numbers are the weights: "
    if weights == [1.0, 0.0, 0.0]:
        hint += "the query is that of the last position and sees all three, yours sees only the first"
    elif weights and weights[2] == 0.0:
        hint += "a position sees itself, too, yours does not"
    else:
        hint += "is each dot product divided by sqrt(head_dim), here 2, before the softmax, and is that over the keys?"
    compare(function, q, k, v, hint)


def whole_prompt(function: Attention, bench: Bench) -> None:
    """a prompt: no position sees what lies behind it"""
    hint = "row i must not see positions behind its own, and must see its own"
    compare(function, *random_qkv(n=5, m=5, num_heads=1, num_kv_heads=1), hint)


def last_positions(function: Attention, bench: Bench) -> None:
    """queries of the last positions only, as when one token is added"""
    hint = "the n queries belong to the last n positions: row i sees positions 0 to m - n + i"
    for n, m in ((1, 6), (3, 7)):
        compare(function, *random_qkv(n, m, num_heads=1, num_kv_heads=1), hint)


def several_heads(function: Attention, bench: Bench) -> None:
    """several heads, each with keys and values of its own"""
    hint = (
        "each head has its own dot products and its own softmax. The group size is num_heads // num_kv_heads, here 1: "
    )
    hint += "head h reads KV head h // group_size, not h // num_kv_heads"
    compare(function, *random_qkv(n=4, m=4, num_heads=3, num_kv_heads=3), hint)


def grouped_heads(function: Attention, bench: Bench) -> None:
    """query heads that share KV heads"""
    hint = "head h reads KV head h // group_size, with group_size = num_heads // num_kv_heads: neighbours share"
    for num_heads, num_kv_heads in ((4, 1), (8, 2), (6, 3)):
        compare(function, *random_qkv(2, 5, num_heads, num_kv_heads), hint)


@read_again("The loop that writes")
def large_scores(function: Attention, bench: Bench) -> None:
    """large dot products: no overflow"""
    q, k, v = random_qkv(n=3, m=3, num_heads=2, num_kv_heads=1)
    hint = "exp() of a large score is infinite: take torch.softmax, or subtract the row's largest score first"
    compare(function, q * 40, k * 40, v, hint)


def arguments_kept(function: Attention, bench: Bench) -> None:
    """q, k and v are left as they were"""
    given = random_qkv(n=3, m=5, num_heads=4, num_kv_heads=2)
    copies = [x.clone() for x in given]
    function(*given)
    for name, x, copy in zip("qkv", given, copies, strict=True):
        if not torch.equal(x, copy):
            raise Wrong(
                f"{name} was changed in place; work on a new tensor",
                expected=_numbers(copy[0, 0]),
                got=_numbers(x[0, 0]),
            )


@read_again("Attention in the engine")
def in_the_engine(function: Attention, bench: Bench) -> None:
    """the real model answers as before, with your attention in every layer"""
    _ = bench.expected_tokens
    with attention_by(function, bench):
        answers = bench.generate()
    same_up_to_ties(bench, answers)


# -- greedy_loop ------------------------------------------------------------------------------------------------------


class ToyModel:
    """Likes best a token that depends on all tokens so far; notes what it is asked."""

    def __init__(self, favourites: list[int] | None = None) -> None:
        self.favourites, self.asked = favourites, []  # type: ignore[var-annotated]

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


def expect(got: Any, expected: list[int], hint: str) -> None:
    if isinstance(got, list) and got and not all(type(t) is int for t in got):
        raise Wrong(
            "the result must be a list of Python ints; int(...) makes one of a tensor",
            expected=expected,
            got=f"a list with {next(type(t).__name__ for t in got if type(t) is not int)}",
        )
    if got != expected:
        raise Wrong(hint, expected=expected, got=got)


def first_token(function: Any, bench: Bench) -> None:
    """one token: the one with the largest logit"""
    got = function(ToyModel([42]), [7, 8, 9], 1, set())
    if got == []:
        raise Wrong("max_tokens counts generated tokens, not those of the prompt", expected=[42], got=got)
    expect(got, [42], "the most likely token is the index of the largest logit")


def feeds_back(function: Any, bench: Bench) -> None:
    """each call gets the whole text so far"""
    model, prompt = ToyModel([11, 12, 13]), [7, 8]
    got = function(model, list(prompt), 3, set())
    expected = [[7, 8], [7, 8, 11], [7, 8, 11, 12]]
    if model.asked[:3] != expected:
        hint = "the model remembers nothing: each call needs the prompt and all that was generated"
        raise Wrong(hint, expected=expected, got=model.asked[:3])
    expect(got, [11, 12, 13], "the result is what was generated, without the prompt")


def ends_by_length(function: Any, bench: Bench) -> None:
    """max_tokens tokens, and no call more than that"""
    model = ToyModel()
    got = function(model, [3, 1, 4], 6, set())
    if isinstance(got, list) and len(got) != 6:
        raise Wrong("max_tokens counts generated tokens, not those of the prompt", expected="6 tokens", got=len(got))
    if len(model.asked) != 6:
        raise Wrong("the last token need not go through the model", expected="6 calls", got=f"{len(model.asked)} calls")
    expect(got, [int(ToyModel()([3, 1, 4, *got[:i]]).argmax()) for i in range(6)], "a token depends on all before it")


def ends_by_eos(function: Any, bench: Bench) -> None:
    """an EOS token ends the text and is part of the result"""
    model = ToyModel([5, 9, 2, 6])
    expect(function(model, [1], 10, {2, 3}), [5, 9, 2], "the token that ended the text is the last of the result")
    if len(model.asked) != 3:
        raise Wrong("behind EOS nothing is to be asked", expected="3 calls", got=f"{len(model.asked)} calls")
    expect(function(ToyModel([2]), [1], 10, {2}), [2], "the very first token may be EOS")


def eos_in_the_prompt(function: Any, bench: Bench) -> None:
    """an EOS token in the prompt ends nothing"""
    got = function(ToyModel([5, 6, 7]), [1, 2, 8, 2], 3, {2})
    expect(got, [5, 6, 7], "only a generated token ends the text: conversations have EOS between their turns")


def prompt_kept(function: Any, bench: Bench) -> None:
    """the caller's prompt is left as it was"""
    prompt = [7, 8, 9]
    function(ToyModel(), prompt, 4, set())
    if prompt != [7, 8, 9]:
        raise Wrong("the list prompt_token_ids was changed: append to a copy", expected=[7, 8, 9], got=prompt)


def real_model(function: Any, bench: Bench) -> None:
    """the real model: the same tokens as the engine"""
    _ = bench.expected_tokens
    next_logits, tokenizer = next_logits_of(bench.llm), bench.llm.get_tokenizer()
    same_up_to_ties(bench, [function(next_logits, tokenizer(prompt).input_ids, 12, set()) for prompt in PROMPTS])


def no_context(function: Any) -> AbstractContextManager:
    """Nothing of the engine to replace for all checks: they hand the function over, or put it in, themselves."""
    return nullcontext()


TASKS = [
    Task(
        "causal_attention",
        "Attention by hand",
        no_context,
        (
            one_position,
            three_tokens,
            whole_prompt,
            last_positions,
            several_heads,
            grouped_heads,
            large_scores,
            arguments_kept,
            in_the_engine,
        ),
    ),
    Task(
        "greedy_loop",
        "The loop that writes",
        no_context,
        (first_token, feeds_back, ends_by_length, ends_by_eos, eos_in_the_prompt, prompt_kept, real_model),
    ),
]
