"""A student's functions of chapter 3 in the real engine, and in caches made of tensors. Needs torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chapters.ch03_kv_cache.checks import Slots, show_call
from chapters.expect import ensure, expect
from chapters.grading import Bench, Wrong
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.core.scheduler import SchedulerOutput
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


def make_allowed_pool(bench: Bench) -> None:
    """A real engine that is given a number of bytes makes a KV pool of that size, and generates the same tokens."""
    runner = bench.llm.engine.model_runner
    per_block = runner.kv_cache.num_bytes // runner.num_blocks
    allowed = 40 * per_block + per_block // 2  # 40 blocks and a half
    llm = LLM(bench.model, max_model_len=128, max_num_seqs=8, block_size=16, kv_cache_memory_bytes=allowed)
    taken = llm.engine.model_runner.kv_cache.num_bytes
    hint = "the pool took more than it was allowed: you count too few bytes"
    ensure(taken <= allowed, hint, expected=allowed, got=taken)
    hint = "more blocks would have fit: you count too many bytes"
    ensure(taken + per_block > allowed, hint, expected=40 * per_block, got=taken)
    with replaced(bench, "llm", llm):
        bench.same_tokens()


@contextmanager
def use_slot_mapping(function: Slots) -> Iterator[None]:
    """Every Batch gets the student's slots. Slots of other sequences are refused: a kernel would write there."""
    ours = Batch.from_scheduler_output

    def from_scheduler_output(output: SchedulerOutput, block_size: int) -> Batch:
        batch, slots = ours(output, block_size), []
        for chunk in output.chunks:
            table = chunk.seq.block_table
            call = list(table), chunk.start, chunk.end, chunk.write_start, block_size
            got = function(*call)
            expect(chunk.end - chunk.start, len(got), f"{show_call(*call)}: one slot for each computed position")
            strange = [s for s in got if s != -1 and s // block_size not in table]
            ensure(not strange, f"{show_call(*call)}: slots {strange} are not in a block of this sequence", got=got)
            slots += got
        return replace(batch, slot_mapping=torch.tensor(slots, dtype=torch.int64))

    with replaced(Batch, "from_scheduler_output", staticmethod(from_scheduler_output)):
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

    def run(recorded: RecordedSteps, batch: Batch) -> None:
        """A recorded step would replay what was recorded, with our kernel."""

    with (
        replaced(ModelRunner, "forward", forward),
        replaced(RecordedStep, "run", run),
        replaced(DecodeGraphs, "run", run),
    ):
        yield


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
