"""Grading of the exercises of chapter 6. What runs no model needs no torch: a browser grades it, too."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

from chapters.ch06_prefill_decode.roofline import Machine, StepCost
from chapters.expect import cases, ensure, expect
from chapters.grading import Bench, Task
from chapters.patching import our_engine, replaced
from chapters.stage import Stage
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence

Size = tuple[int, int, int]  # of a chunk: start, end, tokens of its sequence
Hints = dict[tuple[str, Any], str]  # what to say about a common mistake: (name, value that it gives) -> what


def make_chunks(sizes: list[Size]) -> list[ScheduledChunk]:
    return [ScheduledChunk(Sequence(list(range(num_tokens))), start, end, start) for start, end, num_tokens in sizes]


def show(chunks: list[ScheduledChunk]) -> str:
    return ", ".join(f"positions {c.start}-{c.end - 1} of {len(c.seq.tokens)}" for c in chunks)


def random_steps() -> Iterator[list[Size]]:
    rng = random.Random(0)
    for _ in range(200):
        sizes = []
        for _ in range(rng.randint(1, 6)):
            start, num_tokens = rng.randint(0, 40), rng.randint(1, 9)
            sizes.append((start, start + num_tokens, start + num_tokens + rng.choice((0, 0, 5))))
        yield sizes


# -- step_cost --------------------------------------------------------------------------------------------------------

Cost = Callable[[ModelConfig, int, list[ScheduledChunk]], StepCost]

# The docstring's example: 920 weights a layer, 4,600 in all layers, 1,200 in the output matrix.
SIZES: dict[str, Any] = {"vocab_size": 120, "hidden_size": 10, "intermediate_size": 20, "num_hidden_layers": 5}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 2, "max_position_embeddings": 100}
NO_BIASES: Any = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False, "tie_word_embeddings": True}
FURTHER: Any = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}, "dtype": "bfloat16"}
SMALL = ModelConfig("LlamaForCausalLM", **SIZES, **NO_BIASES, **FURTHER)


def ask_cost(function: Cost, config: ModelConfig, itemsize: int, chunks: list[ScheduledChunk]) -> StepCost:
    got = function(config, itemsize, chunks)
    ensure(isinstance(got, StepCost), "return a StepCost", got=repr(got))
    are_whole = all(isinstance(value, int) for value in asdict(got).values())
    ensure(are_whole, "the numbers of a StepCost are whole: use //, or no division at all", got=got)
    return got


def expect_cost(got: StepCost, expected: StepCost, step: str, hints: Hints | None = None) -> None:
    for name, value in asdict(expected).items():
        wrong = getattr(got, name)
        hint = (hints or {}).get((name, wrong), "")
        expect(f"{value:,}", f"{wrong:,}", f"{name} of {step}" + (f": {hint}" if hint else ""))


def compare_cost(function: Cost, sizes: list[Size], hints: Hints, itemsize: int = 2) -> None:
    """With a count row by row, for the sizes of SMALL."""
    chunks = make_chunks(sizes)
    linear_flops = attention_flops = num_keys = 0
    for chunk in chunks:
        for position in range(chunk.start, chunk.end):
            linear_flops += 2 * 4600
            attention_flops += 4 * (position + 1) * 6 * 2 * 5
        linear_flops += 2 * 1200 * chunk.reaches_end
        num_keys += chunk.end
    weights = 5800 if any(chunk.reaches_end for chunk in chunks) else 4600
    expected = StepCost(linear_flops, attention_flops, weights * itemsize, num_keys * 2 * 2 * 2 * 5 * itemsize)
    step = f"a step with {show(chunks)} (the example's sizes, itemsize {itemsize})"
    expect_cost(ask_cost(function, SMALL, itemsize, chunks), expected, step, hints)


ONE_TOKEN: Hints = {
    ("linear_flops", 5_800): "a multiplication and an addition: two FLOPs for each weight",
    ("linear_flops", 2 * (920 + 1200)): "that is one layer and the output matrix; there are 5 layers",
    ("linear_flops", 2 * 4600): "its row samples, so it is multiplied by the output matrix, too",
    ("linear_flops", 2 * (5 * 720 + 1200)): "an MLP has three matrices: gate_proj, up_proj and down_proj",
    ("linear_flops", 2 * (5 * 1080 + 1200)): "k_proj and v_proj have outputs for the KV heads only",
    ("linear_flops", 2 * (5 * 880 + 1200)): "q_proj has num_attention_heads * head_dim = 12 outputs, o_proj 12 inputs",
    ("attention_flops", 0): "a token meets its own key, too",
    ("attention_flops", 120): "4 FLOPs: two for the score q·k, two for adding up the weighted v",
    ("attention_flops", 200): "num_attention_heads * head_dim is 12 here: it need not be hidden_size, which is 10",
    ("attention_flops", 80): "each query head has scores of its own, even if several share a KV head",
    ("attention_flops", 48): "that is one layer",
    ("weight_bytes", 5_800): "each weight has itemsize bytes",
    ("kv_bytes", 0): "the token's own K and V are read, too",
    ("kv_bytes", 240): "only the KV heads have K and V",
    ("kv_bytes", 40): "K and V both count, and each number has itemsize bytes",
    ("kv_bytes", 16): "that is one layer",
}
DECODE: Hints = {
    ("attention_flops", 240): "its one row also meets the keys of the 4 tokens that earlier steps computed",
    ("kv_bytes", 80): "the K and V of the 4 tokens before it are read, too",
}
PROMPT: Hints = {
    ("linear_flops", 6 * 11_600): "only the row that samples, the last, is multiplied by the output matrix",
    ("attention_flops", 36 * 240): "attention is causal: the first row meets one key, the last one six",
    ("attention_flops", 6 * 240): "that is the last row alone; each of the 6 rows meets its own and all before it",
    ("weight_bytes", 6 * 11_600): "a weight is read once a step, however many rows there are",
    ("kv_bytes", 21 * 80): "K and V are read once for all rows of the chunk",
    ("kv_bytes", 36 * 80): "K and V are read once for all rows of the chunk",
}
CHUNK: Hints = {
    ("linear_flops", 2 * (6 * 4600 + 1200)): "the chunk does not sample, so no row is multiplied by the output matrix",
    ("attention_flops", 21 * 240): "the rows also meet the keys of the 6 tokens that earlier steps computed",
    ("attention_flops", 72 * 240): "attention is causal: the first row, position 6, meets 7 keys",
    ("weight_bytes", 11_600): "nobody samples in this step, so the output matrix is not read",
    ("kv_bytes", 6 * 80): "the K and V of the 6 tokens before it are read, too",
    ("kv_bytes", 20 * 80): "the tokens after the chunk have no K and V yet",
}
BATCH: Hints = {
    ("linear_flops", 2 * (8 * 4600 + 1200)): "two rows sample, and each is multiplied by the output matrix",
    ("weight_bytes", 2 * 11_600 + 9_200): "the chunks of a step share one read of the weights",
    ("weight_bytes", 3 * 11_600): "the chunks of a step share one read of the weights",
    ("weight_bytes", 9_200): "two rows sample, so the output matrix is read, too",
    ("kv_bytes", 12 * 80): "each sequence has K and V of its own",
}
MIXED = [(3, 4, 4), (5, 6, 6), (6, 12, 20)]
COSTS = cases(
    compare_cost,
    {
        "A prompt of one token: every weight, one key": [([(0, 1, 1)], ONE_TOKEN)],
        "A decode: the keys of earlier steps": [([(4, 5, 5)], DECODE)],
        "A whole prompt: weights are read once, and one row samples": [([(0, 6, 6)], PROMPT)],
        "The middle of a prompt: nobody samples": [([(6, 12, 20)], CHUNK)],
        "Two decodes and a chunk: the weights are shared, K and V are not": [(MIXED, BATCH)],
        "Four bytes a number: twice the bytes, the same FLOPs": [([(4, 5, 5)], {}, 4)],
        "200 random steps": [(sizes, {}) for sizes in random_steps()],
    },
)


def engine_counts(function: Cost, bench: Bench) -> None:
    """The engine's own matrix products and attention are counted, with whole prompts and with chunks"""
    _ = bench.model  # where there is none there is no torch either
    from chapters.ch06_prefill_decode.checks_engine import generate_with_step_cost

    generate_with_step_cost(function, bench)


# -- pack -------------------------------------------------------------------------------------------------------------

Pack = Callable[[list[ScheduledChunk]], tuple[list[int], list[int], list[int]]]


def compare_pack(function: Pack, *sizes: Size) -> None:
    chunks = make_chunks(list(sizes))
    lens = [chunk.end - chunk.start for chunk in chunks]
    sums = [sum(lens[:i]) for i in range(len(lens) + 1)]
    ends = [chunk.end for chunk in chunks]
    rows = [row - 1 for row, chunk in zip(sums[1:], chunks, strict=True) if chunk.reaches_end]
    got = function(chunks)
    is_triple = isinstance(got, tuple | list) and len(got) == 3
    ensure(is_triple, "return three lists: cu_seqlens_q, seqlens_k, logits_rows", got=repr(got))
    hints: Hints = {
        ("cu_seqlens_q", tuple(lens)): "these are lengths; cu_seqlens is their running sum, from 0 on",
        ("cu_seqlens_q", (0, *lens)): "these are lengths; cu_seqlens is their running sum, from 0 on",
        ("cu_seqlens_q", tuple(sums[1:])): "it lacks the leading 0: row 0 is where the first chunk begins",
        ("seqlens_k", tuple(lens)): "the last row attends to all tokens so far, also to those of earlier steps",
        ("seqlens_k", tuple(len(c.seq.tokens) for c in chunks)): "tokens after the chunk are not there yet",
        ("seqlens_k", tuple(end - 1 for end in ends)): "a token attends to itself, too",
        ("logits_rows", tuple(row - 1 for row in sums[1:])): "a chunk that ends inside a prompt does not sample",
        ("logits_rows", tuple(row + 1 for row in rows)): "that row is the next chunk's first",
    }
    names = "cu_seqlens_q", "seqlens_k", "logits_rows"
    for name, expected, answer in zip(names, (sums, ends, rows), map(list, got), strict=True):
        hint = hints.get((name, tuple(answer)), "look at each chunk alone: where does it begin, and where does it end?")
        expect(expected, answer, f"{name} of a step with {show(chunks)}: {hint}")


PACKS = cases(
    compare_pack,
    {
        "One whole prompt": [((0, 5, 5),)],
        "Three decodes: a row each, and all that came before in the cache": [((7, 8, 8), (0, 1, 1), (30, 31, 31))],
        "Two decodes and the middle of a prompt": [(*MIXED,)],
        "200 random steps": map(tuple, random_steps()),
    },
)


def pack_generates(function: Pack, bench: Bench) -> None:
    """The model gives the same tokens, with whole prompts and with chunks"""
    _ = bench.model
    from chapters.ch06_prefill_decode.checks_engine import generate_with_pack

    generate_with_pack(function, bench)


# -- token_budget -----------------------------------------------------------------------------------------------------

Budget = Callable[[Scheduler, Machine, float], int]
MACHINE = Machine(weight_bytes=4e9, flops_per_token=4e9, bytes_per_s=1e11, flops_per_s=2e13)  # 40 ms, 0.2 ms a token


@contextmanager
def use_budget(function: Budget, limit_s: float = 0.0501) -> Iterator[None]:
    """Each step gets the budget that the function wants for it."""

    def schedule(scheduler: Scheduler, drafts: Mapping[int, list[int]] = {}) -> SchedulerOutput:
        budget = ask(function, scheduler, MACHINE, limit_s)
        with our_engine(), replaced(scheduler, "max_num_batched_tokens", budget):
            return scheduler.schedule(drafts)

    with replaced(Scheduler, "schedule", schedule):
        yield


def ask(function: Budget, scheduler: Scheduler, machine: Machine, limit_s: float) -> int:
    before = scheduler.max_num_batched_tokens, list(scheduler.running), list(scheduler.waiting)
    got = function(scheduler, machine, limit_s)
    is_budget = isinstance(got, int) and got >= 1
    ensure(is_budget, "a budget is a whole number, at least 1: with less the engine stands still", got=repr(got))
    after = scheduler.max_num_batched_tokens, list(scheduler.running), list(scheduler.waiting)
    ensure(before == after, "token_budget only answers: the scheduler's queues and its limit must stay as they were")
    return got


def make_stage(num_decoding: int, num_prompt: int = 0, max_num_batched_tokens: int = 2048) -> Stage:
    """num_decoding sequences that decode, and one in the middle of a prompt of num_prompt tokens (0: none)."""
    limits: Any = {"max_num_seqs": 100, "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": 2000}
    stage = Stage(1000, block_size=16, checking=False, **limits)
    for _ in range(num_decoding):
        stage.add(2)
    with our_engine(), replaced(stage.scheduler, "max_num_batched_tokens", 1000):
        stage.step()
    if num_prompt:
        stage.add(num_prompt)
        with our_engine(), replaced(stage.scheduler, "max_num_batched_tokens", num_decoding + 2):
            stage.step()
    return stage


def compare_budget(
    function: Budget, mistakes: dict[int, str], expected: int, limit_s: float, scene: tuple[int, ...], waiting: int = 0
) -> None:
    """mistakes: what to say about a common one, by its answer. scene: as make_stage() takes it."""
    stage = make_stage(*scene)
    for _ in range(waiting):
        stage.add(1)
    got = ask(function, stage.scheduler, MACHINE, limit_s)
    facts = (
        f"decoding sequences: {scene[0]}; in the middle of a prompt: {int(scene[1] > 0)}; waiting with prompts of one "
        f"token: {waiting}; reading takes 0.04 s, each token 0.0002 s of arithmetic, and the step may take {limit_s} s"
    )
    expect(expected, got, f"{mistakes.get(got, 'that is not the budget')} ({facts})")


LONGER = "with that many it takes longer"
IN_TURN = "both happen at the same time, so the slower one counts, and not their sum"
SLOW = "the weights alone take longer to read than the limit: no number of tokens fits"
MORE = {6: "one more token, or the prompt stands still as long as they decode"}
MIDDLE = {150: SLOW, 8: "a sequence in the middle of its prompt does not decode"}
CAP = "max_num_batched_tokens is 16; it has the last word"
BUDGETS = cases(
    compare_budget,
    {
        "The largest step that ends in time": [
            ({50: IN_TURN, 251: LONGER}, 250, 0.0501, (0, 0)),
            ({299: IN_TURN, 500: LONGER}, 499, 0.0999, (0, 0)),
            ({201: LONGER}, 200, 0.0401, (0, 0)),
        ],
        "Every decode gets its token, and a prompt moves on": [
            (MORE, 7, 0.0003, (6, 0)),
            (MORE | MIDDLE, 7, 0.03, (6, 50)),
            ({150: SLOW}, 1, 0.03, (0, 0)),
            ({1: "a prompt with one token left to compute is like a decode"}, 2, 0.03, (0, 3)),
        ],
        "A waiting sequence does not decode": [({8: "who waits does not decode"}, 3, 0.03, (2, 0), 5)],
        "Never more than max_num_batched_tokens": [
            ({250: CAP}, 16, 0.0501, (0, 0, 16)),
            ({21: CAP}, 16, 0.03, (20, 0, 16)),
        ],
    },
)


def arrival(function: Budget, bench: Bench) -> None:
    """A prompt of 1,000 tokens arrives while 10 sequences decode"""
    stage = make_stage(10)
    newcomer = stage.add(1000)
    sizes: list[int] = []
    while newcomer.num_generated_tokens == 0 and len(sizes) < 50:
        sizes.append(stage.step().num_tokens)  # with the student's budget
    expect([250, 250, 250, 250, 50], sizes, "tokens of each step until its first token, limit 0.0501 s")


def budget_generates(function: Budget, bench: Bench) -> None:
    """The model gives the same tokens, with enough time and with far too little"""
    for limit_s, steps in ((0.0501, large_steps()), (0.001, smallest_steps())):
        with steps:
            expected = bench.generate()
        with use_budget(function, limit_s):
            bench.same_tokens(expected)


@contextmanager
def large_steps() -> Iterator[None]:
    """Steps of up to 250 tokens, which MACHINE does within 0.0501 s."""

    def schedule(scheduler: Scheduler, drafts: Mapping[int, list[int]] = {}) -> SchedulerOutput:
        most = min(250, scheduler.max_num_batched_tokens)
        with our_engine(), replaced(scheduler, "max_num_batched_tokens", most):
            return scheduler.schedule(drafts)

    with replaced(Scheduler, "schedule", schedule):
        yield


@contextmanager
def smallest_steps() -> Iterator[None]:
    """Steps with a token for everybody whom the step before has left with one to compute, and one more."""
    with_one: list[Sequence] = []

    def schedule(scheduler: Scheduler, drafts: Mapping[int, list[int]] = {}) -> SchedulerOutput:
        num_decoding = sum(seq in scheduler.running for seq in with_one)
        with our_engine(), replaced(scheduler, "max_num_batched_tokens", num_decoding + 1):
            output = scheduler.schedule(drafts)
        # A prompt's last token is one, and so is the token that is sampled from it.
        with_one[:] = [chunk.seq for chunk in output.chunks if chunk.end >= len(chunk.seq.tokens) - 1]
        return output

    with replaced(Scheduler, "schedule", schedule):
        yield


TASKS = [
    Task("step_cost", "What a step reads and what it computes", nullcontext, (*COSTS, engine_counts)),
    Task("pack", "One batch for everybody", nullcontext, (*PACKS, pack_generates)),
    Task("token_budget", "A budget for each step", use_budget, (*BUDGETS, arrival, budget_generates)),
]
