"""A student's functions of chapter 3 in the real engine, and in caches made of tensors. Needs torch."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chapters.ch03_kv_cache.checks import PoolBlocks, WindowSlots, cut_slots, show_call
from chapters.expect import ensure, expect
from chapters.grading import Bench, Wrong
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.worker import model_runner
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu.recorded_step import RecordedStep
from nanovllm.worker.cuda.graphs import DecodeGraphs
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.platform import RecordedSteps

Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def ask_twice(bench: Bench) -> None:
    """A prompt that is fully cached computes one token and writes nothing."""
    # Exactly two blocks, asked twice for one token: the second time its last token has slot -1.
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompt, data = list(range(40, 72)), bench.llm.engine.model_runner.kv_cache.data
    bench.llm.reset_prefix_cache()
    bench.llm.generate(prompt, params, False)
    before = data.clone()
    (output,) = bench.llm.generate(prompt, params, False)
    assert output.num_cached_tokens == 31, output
    changed = (data != before).permute(2, 3, 0, 1, 4, 5).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
    expect([], changed, "the prompt is in the cache, but sending it again wrote to these slots of the pool")


def make_pools(bench: Bench) -> None:
    """Real engines make pools of these sizes, given and measured, and generate the same tokens."""
    runner = bench.llm.engine.model_runner
    per_block = runner.kv_cache.num_bytes // runner.num_blocks
    given = 40 * per_block + per_block // 2  # 40 blocks and a half
    options: dict[str, Any] = {"max_num_seqs": 8, "block_size": 16}
    llm = LLM(bench.model, max_model_len=128, kv_cache_memory_bytes=given, **options)
    taken = llm.engine.model_runner.kv_cache.num_bytes
    hint = "the pool took more than it was given: you count too few bytes"
    ensure(taken <= given, hint, expected=given, got=taken)
    hint = "more blocks would have fit: you count too many bytes"
    ensure(taken + per_block > given, hint, expected=40 * per_block, got=taken)
    with replaced(bench, "llm", llm):
        bench.same_tokens()
    measured = LLM(bench.model, max_model_len=100, **options)
    hint = "memory was measured: the pool has what 8 sequences of 100 tokens can use, in blocks of 16"
    expect(8 * 7, measured.engine.model_runner.num_blocks, hint)


@contextmanager
def use_pool_blocks(function: PoolBlocks) -> Iterator[None]:
    """An engine that is built has the student's number of blocks, unless it was told a number."""

    def num_blocks_for_pool(
        config: EngineConfig, model: ModelConfig, block_size: int, itemsize: int, max_model_len: int, free_bytes: int
    ) -> int:
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override
        given = config.kv_cache_memory_bytes
        return function(model, block_size, itemsize, given, free_bytes, config.max_num_seqs, max_model_len)

    with replaced(model_runner, "num_blocks_for_pool", num_blocks_for_pool):
        yield


WINDOW = 6  # of every second layer


def read_windows(function: WindowSlots, bench: Bench) -> None:
    """The real model, with a window in every second layer, reads these slots and answers the same as with ours."""
    model = bench.llm.engine.model_runner.model
    with ExitStack() as stack:
        for layer in model.layers[::2]:
            stack.enter_context(replaced(layer.self_attn, "window", WINDOW))
        with use_window_slots(cut_slots):
            expected = bench.generate()
        with use_window_slots(function):
            bench.same_tokens(expected)


@contextmanager
def use_window_slots(function: WindowSlots) -> Iterator[None]:
    """Each row attends to K and V in the slots that the function says, in PyTorch."""

    def slots_of_rows(block_table: list[int], start: int, end: int, window: int, block_size: int) -> list[list[int]]:
        table = block_table[: -(-end // block_size)]
        call = table, start, end, window, block_size
        ours, theirs = cut_slots(*call), function(list(table), start, end, window, block_size)
        expect(ours, theirs, f"in the engine: {show_call(*call)}")
        return ours

    def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        out, row, kv = torch.empty_like(q), 0, [cache.flatten(0, 1) for cache in (k_cache, v_cache)]
        tables = batch.block_tables.tolist()
        for table, num_rows, num_keys in zip(tables, batch.query_lens, batch.key_lens, strict=True):
            for slots in slots_of_rows(table, num_keys - num_rows, num_keys, window, k_cache.shape[1]):
                k, v = (cache[slots].transpose(0, 1) for cache in kv)  # [num_kv_heads, keys, head_dim]
                query = q[row].view(k.shape[0], -1, q.shape[2])
                out[row] = scaled_dot_product_attention(query, k, v).view(q.shape[1:])
                row += 1
        return out

    def forward(runner: ModelRunner, batch: Batch) -> Tensor:
        # PyTorch's layout of a block: the C kernels have one of their own.
        write = TORCH_KERNELS.rotary_and_write
        kernels = replace(runner.kernels, rotary_and_write=write, paged_attention=attention)
        return runner.model(batch, runner.rotary, runner.kv_cache, kernels)

    with replaced(ModelRunner, "forward", forward), nothing_recorded():
        yield


def run_nothing(recorded: RecordedSteps, batch: Batch) -> None:
    """A recorded step would replay what was recorded, with our kernels."""


@contextmanager
def nothing_recorded() -> Iterator[None]:
    with replaced(RecordedStep, "run", run_nothing), replaced(DecodeGraphs, "run", run_nothing):
        yield


@contextmanager
def use_write_kv(function: Write) -> Iterator[None]:
    """Every layer writes with the student's function. The engine's own kernel still rotates: it is given no slots."""

    def forward(runner: ModelRunner, batch: Batch) -> Tensor:
        ours = runner.kernels.rotary_and_write

        def rotary_and_write(q: Any, k: Any, v: Any, cos_sin: Any, kv_layer: Any, batch: Batch) -> None:
            ours(q, k, v, cos_sin, kv_layer, replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, -1)))
            function(kv_layer[0], kv_layer[1], k, v, batch.slot_mapping)

        # PyTorch's attention reads the cache as the student lays it out; the C kernels have a layout of their own.
        attention = TORCH_KERNELS.paged_attention
        kernels = replace(runner.kernels, rotary_and_write=rotary_and_write, paged_attention=attention)
        return runner.model(batch, runner.rotary, runner.kv_cache, kernels)

    with replaced(ModelRunner, "forward", forward), nothing_recorded():
        yield


def write_rows(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    is_kept = slots >= 0
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.flatten(0, 1)[slots[is_kept]] = rows[is_kept]


def compare_answers(bench: Bench) -> None:
    """Ours must come from PyTorch's attention, too: the C kernels round differently."""
    with use_write_kv(write_rows):
        expected = bench.generate()
    bench.same_tokens(expected)


def compare_write(function: Write, hint: str, slots: list[int], dtype: str) -> None:
    """Write random numbers into a cache of 4 blocks of 8 slots and compare it slot by slot.

    k and v are parts of a larger tensor, as the engine has them.
    """
    torch.manual_seed(3)
    numbers = partial(torch.randn, dtype=getattr(torch, dtype))
    caches = [numbers(4, 8, 2, 4) for _ in range(2)]
    new = [part.unflatten(-1, (2, 4)) for part in numbers(len(slots), 40)[:, 24:].split(8, dim=-1)]
    expected = [cache.clone() for cache in caches]
    for cache, rows in zip(expected, new, strict=True):
        for row, slot in zip(rows, slots, strict=True):
            if slot >= 0:
                cache.view(-1, 2, 4)[slot] = row
    before, given_slots = [rows.clone() for rows in new], torch.tensor(slots)
    function(caches[0], caches[1], new[0], new[1], given_slots)
    same = given_slots.tolist() == slots and all(torch.equal(a, b) for a, b in zip(before, new, strict=True))
    ensure(same, "k, v and slots must stay as they are")
    for name, want, cache in zip(("k_cache", "v_cache"), expected, caches, strict=True):
        wrong = (want != cache).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        if wrong:
            say = f"{name} is wrong at slots {wrong} after writing to slots {slots}"
            where = f"block {wrong[0] // 8}, offset {wrong[0] % 8}"
            at = wrong[0] // 8, wrong[0] % 8, 0, slice(2)
            raise Wrong(f"{hint} ({say})", expected=f"{want[at].tolist()} ... in {where}", got=cache[at].tolist())
