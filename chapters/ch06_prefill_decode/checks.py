"""Grading of the exercises of chapter 6."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from chapters.ch06_prefill_decode import solution
from chapters.ch06_prefill_decode.roofline import Machine, StepCost
from chapters.expect import Wrong, expect
from chapters.grading import Bench, Task
from chapters.patching import our_engine, replaced
from chapters.stage import Stage
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import Batch
from nanovllm.worker.layers import Linear
from nanovllm.worker.model import Attention
from nanovllm.worker.model_runner import ModelRunner, Sampled

OUR_RUN = ModelRunner.run
OUR_FROM_SCHEDULER_OUTPUT = Batch.from_scheduler_output


def make_chunks(*sizes: tuple[int, int, int]) -> list[ScheduledChunk]:
    """(start, end, tokens of the sequence) for each chunk."""
    return [ScheduledChunk(Sequence(list(range(num_tokens))), start, end, start) for start, end, num_tokens in sizes]


def show(chunks: list[ScheduledChunk]) -> str:
    return ", ".join(f"positions {c.start}-{c.end - 1} of {len(c.seq.tokens)}" for c in chunks)


def random_steps() -> Iterator[list[ScheduledChunk]]:
    rng = random.Random(0)
    for _ in range(200):
        sizes = []
        for _ in range(rng.randint(1, 6)):
            start, num_tokens = rng.randint(0, 40), rng.randint(1, 9)
            sizes.append((start, start + num_tokens, start + num_tokens + rng.choice((0, 0, 5))))
        yield make_chunks(*sizes)


# -- step_cost --------------------------------------------------------------------------------------------------------

Cost = Callable[[ModelConfig, int, list[ScheduledChunk]], StepCost]

# The docstring's example: 920 weights a layer, 4,600 in all layers, 1,200 in the output matrix.
SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=120,
    hidden_size=10,
    intermediate_size=20,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=2,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling={"rope_type": "default"},
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


@contextmanager
def use_step_cost(function: Cost) -> Iterator[None]:
    """Each step of the engine is predicted before it runs, and counted while it runs."""

    def run(runner: ModelRunner, output: SchedulerOutput) -> Sampled:
        predicted = ask_cost(function, runner.model_config, runner.dtype.itemsize, output.chunks)
        counted = Meter()
        hook = register_module_forward_hook(counted)
        try:
            # A step that is replayed from a CUDA graph runs no Python: nothing could be counted in it.
            with replaced(runner, "_graphs", None):
                sampled = OUR_RUN(runner, output)
        finally:
            hook.remove()
        expect_cost(predicted, counted.cost(), f"a step of the engine with {show(output.chunks)}, counted while it ran")
        return sampled

    with replaced(ModelRunner, "run", run):
        yield


class Meter:
    """Called by PyTorch after each module of the model. Adds up what the matrix products and the attention did."""

    def __init__(self) -> None:
        self.linear_flops = self.attention_flops = self.weight_bytes = self.kv_bytes = 0

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        if isinstance(module, Linear):
            num_rows, in_size = inputs[0].shape
            self.linear_flops += 2 * num_rows * in_size * output.shape[1]
            if num_rows:
                self.weight_bytes += in_size * output.shape[1] * output.element_size()
        elif isinstance(module, Attention):
            _, (k_cache, _), context = inputs
            for num_rows, num_keys in zip(context.batch.query_lens, context.batch.key_lens, strict=True):
                # The last row attends to all keys, each row before it to one fewer than the next.
                pairs = num_rows * num_keys - num_rows * (num_rows - 1) // 2
                self.attention_flops += 4 * pairs * module.num_heads * module.head_dim
                self.kv_bytes += num_keys * 2 * module.num_kv_heads * module.head_dim * k_cache.element_size()

    def cost(self) -> StepCost:
        return StepCost(**vars(self))


def ask_cost(function: Cost, config: ModelConfig, itemsize: int, chunks: list[ScheduledChunk]) -> StepCost:
    got = function(config, itemsize, chunks)
    if not isinstance(got, StepCost):
        raise Wrong("return a StepCost", got=repr(got))
    if not all(isinstance(value, int) for value in asdict(got).values()):
        raise Wrong("the numbers of a StepCost are whole: use //, or no division at all", got=got)
    return got


def expect_cost(got: StepCost, expected: StepCost, step: str, hints: dict[tuple[str, int], str] | None = None) -> None:
    """hints: what to say of a usual mistake, by the name of the number and the value that the mistake gives."""
    for name, value in asdict(expected).items():
        wrong = getattr(got, name)
        if wrong != value:
            hint = (hints or {}).get((name, wrong), "")
            raise Wrong(f"{name} of {step}" + (f": {hint}" if hint else ""), expected=f"{value:,}", got=f"{wrong:,}")


def check_cost(
    function: Cost, chunks: list[ScheduledChunk], hints: dict[tuple[str, int], str], itemsize: int = 2
) -> None:
    """Compare with a count row by row, for the sizes of SMALL."""
    linear_flops = attention_flops = num_keys = 0
    for chunk in chunks:
        for position in range(chunk.start, chunk.end):
            linear_flops += 2 * 4600
            attention_flops += 4 * (position + 1) * 6 * 2 * 5
        linear_flops += 2 * 1200 * chunk.samples
        num_keys += chunk.end
    weights = 5800 if any(chunk.samples for chunk in chunks) else 4600
    expected = StepCost(linear_flops, attention_flops, weights * itemsize, num_keys * 2 * 2 * 2 * 5 * itemsize)
    step = f"a step with {show(chunks)} (the example's sizes, itemsize {itemsize})"
    expect_cost(ask_cost(function, SMALL, itemsize, chunks), expected, step, hints)


def check_one_token(function: Cost, bench: Bench) -> None:
    """A prompt of one token: every weight, one key"""
    hints = {
        ("linear_flops", 5_800): "a multiplication and an addition: two FLOPs for each weight",
        ("linear_flops", 2 * (920 + 1200)): "that is one layer and the output matrix; there are 5 layers",
        ("linear_flops", 2 * 4600): "its row samples, so it meets the output matrix, too",
        ("linear_flops", 2 * (5 * 720 + 1200)): "an MLP has three matrices: gate_proj, up_proj and down_proj",
        ("linear_flops", 2 * (5 * 1080 + 1200)): "k_proj and v_proj have outputs for the KV heads only",
        (
            "linear_flops",
            2 * (5 * 880 + 1200),
        ): "q_proj has num_attention_heads * head_dim = 12 outputs, o_proj 12 inputs",
        ("attention_flops", 0): "a token meets its own key, too",
        ("attention_flops", 120): "4 FLOPs: two for the score q·k, two for adding up the weighted v",
        ("attention_flops", 80): "each query head has scores of its own, even if several share a KV head",
        ("attention_flops", 48): "that is one layer",
        ("weight_bytes", 5_800): "each weight has itemsize bytes",
        ("kv_bytes", 0): "the token's own K and V are read, too",
        ("kv_bytes", 240): "only the KV heads have K and V",
        ("kv_bytes", 40): "K and V both count, and each number has itemsize bytes",
        ("kv_bytes", 16): "that is one layer",
    }
    check_cost(function, make_chunks((0, 1, 1)), hints)


def check_decode(function: Cost, bench: Bench) -> None:
    """A decode: the keys of earlier steps"""
    hints = {
        ("attention_flops", 240): "its one row also meets the keys of the 4 tokens that earlier steps computed",
        ("kv_bytes", 80): "the K and V of the 4 tokens before it are read, too",
    }
    check_cost(function, make_chunks((4, 5, 5)), hints)


def check_prompt(function: Cost, bench: Bench) -> None:
    """A whole prompt: weights are read once, and one row samples"""
    hints = {
        ("linear_flops", 6 * 11_600): "only the row that samples, the last, meets the output matrix",
        ("attention_flops", 36 * 240): "attention is causal: the first row meets one key, the last one six",
        ("attention_flops", 6 * 240): "that is the last row alone; each of the 6 rows meets its own and all before it",
        ("weight_bytes", 6 * 11_600): "a weight is read once a step, however many rows it meets",
        ("kv_bytes", 21 * 80): "K and V are read once for all rows of the chunk",
        ("kv_bytes", 36 * 80): "K and V are read once for all rows of the chunk",
    }
    check_cost(function, make_chunks((0, 6, 6)), hints)


def check_chunk(function: Cost, bench: Bench) -> None:
    """The middle of a prompt: nobody samples"""
    hints = {
        ("linear_flops", 2 * (6 * 4600 + 1200)): "the chunk does not sample, so no row meets the output matrix",
        ("attention_flops", 21 * 240): "the rows also meet the keys of the 6 tokens that earlier steps computed",
        ("attention_flops", 72 * 240): "attention is causal: the first row, position 6, meets 7 keys",
        ("weight_bytes", 11_600): "nobody samples in this step, so the output matrix is not read",
        ("kv_bytes", 6 * 80): "the K and V of the 6 tokens before it are read, too",
        ("kv_bytes", 20 * 80): "the tokens behind the chunk have no K and V yet",
    }
    check_cost(function, make_chunks((6, 12, 20)), hints)


def check_batch(function: Cost, bench: Bench) -> None:
    """Two decodes and a chunk: the weights are shared, K and V are not"""
    hints = {
        ("linear_flops", 2 * (8 * 4600 + 1200)): "two rows sample, and each meets the output matrix",
        ("weight_bytes", 2 * 11_600 + 9_200): "the chunks of a step share one reading of the weights",
        ("weight_bytes", 3 * 11_600): "the chunks of a step share one reading of the weights",
        ("weight_bytes", 9_200): "two rows sample, so the output matrix is read, too",
        ("kv_bytes", 12 * 80): "each sequence has K and V of its own",
    }
    check_cost(function, make_chunks((3, 4, 4), (5, 6, 6), (6, 12, 20)), hints)


def check_itemsize(function: Cost, bench: Bench) -> None:
    """Four bytes a number: twice the bytes, the same FLOPs"""
    check_cost(function, make_chunks((4, 5, 5)), {}, itemsize=4)


def check_random_costs(function: Cost, bench: Bench) -> None:
    """200 random steps"""
    for chunks in random_steps():
        check_cost(function, chunks, {})


def check_engine_counts(function: Cost, bench: Bench) -> None:
    """The engine's own matrix products and attention, counted: whole prompts and chunks"""
    compare_tokens(bench, replaced(ModelRunner, "run", OUR_RUN))


def compare_tokens(bench: Bench, ours: AbstractContextManager) -> None:
    """With our tokens, in whole prompts and in chunks. ours: in which the engine has our code again."""
    bench.same_tokens()
    with replaced(bench.llm.engine.scheduler, "max_num_batched_tokens", 5):
        with ours:
            expected = bench.generate()
        bench.same_tokens(expected)


# -- pack -------------------------------------------------------------------------------------------------------------

Pack = Callable[[list[ScheduledChunk]], tuple[list[int], list[int], list[int]]]
NAMES = ("cu_seqlens_q", "seqlens_k", "logits_rows")


@contextmanager
def use_pack(function: Pack) -> Iterator[None]:
    def from_scheduler_output(cls: type[Batch], output: SchedulerOutput, block_size: int) -> Batch:
        ours = OUR_FROM_SCHEDULER_OUTPUT(output, block_size)
        cu_seqlens_q, seqlens_k, logits_rows = function(output.chunks)
        # Kernels trust these numbers and would read elsewhere in memory.
        if len(cu_seqlens_q) != len(ours.cu_seqlens_q) or cu_seqlens_q != ours.cu_seqlens_q.tolist():
            raise Wrong("cu_seqlens_q of a step", expected=ours.cu_seqlens_q.tolist(), got=cu_seqlens_q)
        if len(seqlens_k) != len(ours.seqlens_k) or not all(
            1 <= ask <= most for ask, most in zip(seqlens_k, ours.seqlens_k.tolist(), strict=True)
        ):
            raise Wrong("seqlens_k of a step", expected=ours.seqlens_k.tolist(), got=seqlens_k)
        if len(logits_rows) != len(ours.logits_rows) or not all(0 <= row < len(ours.input_ids) for row in logits_rows):
            raise Wrong("logits_rows of a step", expected=ours.logits_rows.tolist(), got=logits_rows)
        return replace(
            ours,
            cu_seqlens_q=torch.tensor(cu_seqlens_q, dtype=torch.int32),
            seqlens_k=torch.tensor(seqlens_k, dtype=torch.int32),
            logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
            max_key_len=max(seqlens_k),
        )

    with replaced(Batch, "from_scheduler_output", classmethod(from_scheduler_output)):
        yield


def compare_pack(function: Pack, chunks: list[ScheduledChunk]) -> None:
    """Raises Wrong, with a hint for the mistakes that are usual."""
    lens = [chunk.end - chunk.start for chunk in chunks]
    cu_seqlens_q = [sum(lens[:i]) for i in range(len(lens) + 1)]
    seqlens_k = [chunk.end for chunk in chunks]
    last_rows = [row - 1 for row in cu_seqlens_q[1:]]
    logits_rows = [row for row, chunk in zip(last_rows, chunks, strict=True) if chunk.samples]
    got = function(chunks)
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong("return three lists: cu_seqlens_q, seqlens_k, logits_rows", got=repr(got))
    for name, expected, answer in zip(NAMES, (cu_seqlens_q, seqlens_k, logits_rows), got, strict=True):
        if list(answer) == expected:
            continue
        hint = {
            ("cu_seqlens_q", tuple(lens)): "these are lengths; cu_seqlens is their running sum, from 0 on",
            ("cu_seqlens_q", (0, *lens)): "these are lengths; cu_seqlens is their running sum, from 0 on",
            ("cu_seqlens_q", tuple(cu_seqlens_q[1:])): "it lacks the leading 0: row 0 is where the first chunk begins",
            ("seqlens_k", tuple(lens)): "the last row attends to all tokens so far, also to those of earlier steps",
            ("seqlens_k", tuple(len(c.seq.tokens) for c in chunks)): "tokens behind the chunk are not there yet",
            ("seqlens_k", tuple(end - 1 for end in seqlens_k)): "a token attends to itself, too",
            ("logits_rows", tuple(last_rows)): "a chunk that ends in the middle of a prompt does not sample",
            ("logits_rows", tuple(row + 1 for row in logits_rows)): "that row is the next chunk's first",
        }.get((name, tuple(answer)), "look at each chunk alone: where does it begin, where does it end?")
        raise Wrong(f"{name} of a step with {show(chunks)}: {hint}", expected=expected, got=answer)


def check_one_prompt(function: Pack, bench: Bench) -> None:
    """One whole prompt"""
    compare_pack(function, make_chunks((0, 5, 5)))


def check_decodes(function: Pack, bench: Bench) -> None:
    """Three decodes: a row each, and all that came before in the cache"""
    compare_pack(function, make_chunks((7, 8, 8), (0, 1, 1), (30, 31, 31)))


def check_mixed(function: Pack, bench: Bench) -> None:
    """Two decodes and the middle of a prompt"""
    compare_pack(function, make_chunks((3, 4, 4), (5, 6, 6), (6, 12, 20)))


def check_random_steps(function: Pack, bench: Bench) -> None:
    """200 random steps"""
    for chunks in random_steps():
        compare_pack(function, chunks)


def check_pack_generates(function: Pack, bench: Bench) -> None:
    """The model gives the same tokens, whole prompts and chunks"""
    compare_tokens(bench, replaced(Batch, "from_scheduler_output", OUR_FROM_SCHEDULER_OUTPUT))


# -- token_budget -----------------------------------------------------------------------------------------------------

Budget = Callable[[Scheduler, Machine, float], int]
MACHINE = Machine(weight_bytes=4e9, flops_per_token=4e9, bytes_per_s=1e11, flops_per_s=2e13)  # 40 ms, 0.2 ms a token


@contextmanager
def use_budget(function: Budget, limit_s: float = 0.0501) -> Iterator[None]:
    """Each step gets the budget that the function wants for it."""

    def schedule(scheduler: Scheduler) -> SchedulerOutput:
        budget = ask(function, scheduler, MACHINE, limit_s)
        with our_engine(), replaced(scheduler, "max_num_batched_tokens", budget):
            return scheduler.schedule()

    with replaced(Scheduler, "schedule", schedule):
        yield


def ask(function: Budget, scheduler: Scheduler, machine: Machine, limit_s: float) -> int:
    before = scheduler.max_num_batched_tokens, list(scheduler.running), list(scheduler.waiting)
    got = function(scheduler, machine, limit_s)
    if not isinstance(got, int) or got < 1:
        raise Wrong("a budget is a whole number, at least 1: with less the engine stands still", got=repr(got))
    if before != (scheduler.max_num_batched_tokens, list(scheduler.running), list(scheduler.waiting)):
        raise Wrong("token_budget only answers: the scheduler's queues and its limit must stay as they were")
    return got


def make_stage(num_decoding: int, num_prompt: int = 0, max_num_batched_tokens: int = 2048) -> Stage:
    """So many sequences that decode, and one in the middle of a prompt that is so long."""
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


def check_fits(function: Budget, bench: Bench) -> None:
    """The largest step that ends in time"""
    for limit_s, expected in ((0.0501, 250), (0.0999, 499), (0.0401, 200)):
        got = ask(function, make_stage(0).scheduler, MACHINE, limit_s)
        hint = f"reading takes 0.04 s, each token 0.0002 s of arithmetic, the step may take {limit_s} s"
        if got == int((limit_s - 0.04) / 0.0002):
            hint += "; both happen at the same time, so the slower one counts, and not their sum"
        elif got == expected + 1:
            hint += "; with that many it takes longer"
        expect(expected, got, hint)


def check_decodes_fit(function: Budget, bench: Bench) -> None:
    """Every decode gets its token, and a prompt moves on"""
    for num_decoding, num_prompt, limit_s, expected in ((6, 0, 0.0003, 7), (6, 50, 0.03, 7), (0, 0, 0.03, 1)):
        scheduler = make_stage(num_decoding, num_prompt).scheduler
        got = ask(function, scheduler, MACHINE, limit_s)
        hint = f"{num_decoding} sequences decode, {1 if num_prompt else 0} is in the middle of its prompt"
        if got == int(limit_s * 5000) and got != expected:
            hint += "; the weights alone take 0.04 s to read, longer than the limit: no number of tokens fits"
        elif got == num_decoding:
            hint += "; one token more, or the prompt stands still as long as they decode"
        elif got == len(scheduler.running) + 1:
            hint += "; a sequence in the middle of its prompt does not decode"
        expect(expected, got, f"{hint} (limit {limit_s} s)")


def check_waiting(function: Budget, bench: Bench) -> None:
    """Who waits does not decode"""
    stage = make_stage(2)
    for _ in range(5):
        stage.add(1)
    got = ask(function, stage.scheduler, MACHINE, 0.03)
    expect(3, got, "2 sequences decode, 5 with prompts of one token are waiting; no T fits")


def check_cap(function: Budget, bench: Bench) -> None:
    """Never more than max_num_batched_tokens"""
    for num_decoding, limit_s in ((0, 0.0501), (20, 0.03)):
        got = ask(function, make_stage(num_decoding, 0, 16).scheduler, MACHINE, limit_s)
        expect(16, got, "max_num_batched_tokens is 16; it has the last word")


def check_arrival(function: Budget, bench: Bench) -> None:
    """A prompt of 1,000 tokens arrives while 10 sequences decode"""
    stage = make_stage(10)
    newcomer = stage.add(1000)
    sizes: list[int] = []
    while newcomer.num_generated_tokens == 0 and len(sizes) < 50:
        sizes.append(stage.step().num_tokens)  # with the student's budget
    expect([250, 250, 250, 250, 50], sizes, "tokens of each step until its first token, limit 0.0501 s")


def check_budget_generates(function: Budget, bench: Bench) -> None:
    """The model gives the same tokens, with time enough and with far too little"""
    for limit_s in (0.0501, 0.001):
        with use_budget(solution.token_budget, limit_s):
            expected = bench.generate()
        with use_budget(function, limit_s):
            bench.same_tokens(expected)


TASKS = [
    Task(
        "step_cost",
        "What a step reads and what it computes",
        use_step_cost,
        (
            check_one_token,
            check_decode,
            check_prompt,
            check_chunk,
            check_batch,
            check_itemsize,
            check_random_costs,
            check_engine_counts,
        ),
    ),
    Task(
        "pack",
        "One batch for everybody",
        use_pack,
        (check_one_prompt, check_decodes, check_mixed, check_random_steps, check_pack_generates),
    ),
    Task(
        "token_budget",
        "A budget for each step",
        use_budget,
        (check_fits, check_decodes_fit, check_waiting, check_cap, check_arrival, check_budget_generates),
    ),
]
