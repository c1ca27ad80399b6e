"""Lab 10: what each optimization of this engine saves on this machine, and FlashAttention built up in six steps.

One engine serves every measurement: its weights are laid out and its kernels swapped between steps. The attention
steps work on the K and V that the engine wrote.
"""

import logging
import math
import os
import random
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.text import Text
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chapters import draw
from chapters.patching import replaced
from chapters.story import Story
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker import attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu.kernels import load_cpu_kernels
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import Linear, reorder_weights

TILE = 32  # keys that are looked at together
TILE_ROWS = 16  # query rows that are
CONTEXT = 256  # tokens of a sequence when its decode steps begin to be timed
PROMPT = 256  # tokens of the prompt that is timed
BATCH = 16
ROUNDS, STEPS = 2, 3  # every setup gets its turn ROUNDS times, each time with STEPS timed decode steps
PATIENCE_S = 2  # a measurement's rounds end when this is over
BAR = 40  # cells of the longest bar


# -- setups -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """How the engine computes a step: the layout of its weights ("plain", "oneDNN" or "C") and its kernels."""

    name: str
    weights: str
    kernels: Kernels


def setups(c_kernels: Kernels | None) -> tuple[list[Setup], list[Setup]]:
    """(plain, then each optimization alone; plain, then one after another on top). They share what they can. Without C
    kernels two are left of each."""
    plain = Setup("plain PyTorch", "plain", TORCH_KERNELS)
    reordered = Setup("reordered weights (oneDNN)", "oneDNN", TORCH_KERNELS)
    alone, in_order = [plain, reordered], [plain, reordered]
    if c_kernels is None:
        return alone, in_order
    alone.append(Setup("C: matrix products", "C", TORCH_KERNELS))
    in_order.append(alone[-1])
    swaps = {"attention": "paged_attention", "rotary + write": "rotary_and_write", "add + norm": "add_rms_norm"}
    for title, field in (swaps | {"silu * up": "silu_and_mul"}).items():
        swap: dict[str, Any] = {field: getattr(c_kernels, field)}
        alone.append(Setup(f"C: {title}", "plain", replace(TORCH_KERNELS, **swap)))
        in_order.append(Setup(f"C: {title}", "C", replace(in_order[-1].kernels, **swap)))
    return alone, in_order


class World:
    """An engine whose way to compute can be changed between two steps."""

    def __init__(self, story: Story) -> None:
        sizes = {"max_num_seqs": BATCH, "max_num_batched_tokens": 2048, "max_model_len": 1024}
        self.llm: LLM = story.load(
            **sizes, num_gpu_blocks_override=512, block_size=16, optimizations=("c_kernels",), dtype="auto"
        )
        self.engine, self.rng = self.llm.engine, random.Random(10)
        self.runner = self.engine.model_runner
        self.config, self.itemsize = self.engine.model_config, self.runner.dtype.itemsize
        self.c_kernels = None if self.runner.kernels is TORCH_KERNELS else self.runner.kernels
        self.linears = [module for module in self.runner.model.modules() if isinstance(module, Linear)]
        self.layouts = {"plain": [(layer.weight, layer.product) for layer in self.linears]}
        for name, kernels in (("oneDNN", TORCH_KERNELS), ("C", self.c_kernels)):
            if kernels is not None and self.runner.device.type == "cpu":
                self._lay_out("plain")
                reorder_weights(self.runner.model, kernels)
                self.layouts[name] = [(layer.weight, layer.product) for layer in self.linears]
        self.alone, self.in_order = setups(self.c_kernels)

    @property
    def all_on(self) -> Setup:
        return self.in_order[-1]

    @property
    def c_products(self) -> bool:
        """Whether the products are C's: cpu/linear.c leaves some dtypes and processors to oneDNN."""
        return self.c_kernels is not None and any(product is self.c_kernels.linear for _, product in self.layouts["C"])

    def use(self, setup: Setup) -> None:
        self._lay_out(setup.weights)
        self.runner.kernels = setup.kernels

    def _lay_out(self, name: str) -> None:
        for layer, (weight, product) in zip(self.linears, self.layouts.get(name, self.layouts["plain"]), strict=True):
            del layer.weight
            layer.weight, layer.product = weight, product

    def random_prompt(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(self.config.vocab_size) for _ in range(num_tokens)]

    def add(self, prompt: list[int], num_output: int) -> str:
        return self.engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True))

    def step_ms(self) -> float:
        started = time.perf_counter()
        self.engine.step()
        return (time.perf_counter() - started) * 1e3

    @contextmanager
    def decoding(self, num_seqs: int) -> Iterator[None]:
        """With so many sequences in the middle of their answers, each with a context of CONTEXT tokens and more."""
        self.use(self.all_on)
        ids = [self.add(self.random_prompt(CONTEXT), 500) for _ in range(num_seqs)]
        while any(seq.num_generated_tokens == 0 for seq in self.engine.scheduler.running) or self.waiting():
            self.engine.step()
        yield
        for request_id in ids:
            self.engine.abort_request(request_id)

    def waiting(self) -> int:
        return len(self.engine.scheduler.waiting)

    def decode_ms(self, num_seqs: int) -> dict[int, float]:
        """Milliseconds of a decode step in each setup (by id): its fastest."""
        with self.decoding(num_seqs):
            return self._in_turn(lambda: [self.step_ms() for _ in range(STEPS + 1)][1:])

    def prefill_ms(self) -> dict[int, float]:
        def once() -> list[float]:
            self.add(self.random_prompt(PROMPT), 1)
            return [self.step_ms()]

        return self._in_turn(once)

    def _in_turn(self, measure: Callable[[], list[float]]) -> dict[int, float]:
        """In turn, so that a busy moment of the machine does not hit one setup alone."""
        everything = {id(setup): setup for setup in [*self.alone, *self.in_order]}
        times: dict[int, list[float]] = {key: [] for key in everything}
        started = time.perf_counter()
        for number in range(ROUNDS):
            if number and time.perf_counter() - started > PATIENCE_S:
                break
            for key, setup in everything.items():
                self.use(setup)
                times[key] += measure()
        return {key: min(values) for key, values in times.items()}

    def num_operations(self, setup: Setup) -> int:
        """PyTorch operations in the next step. A C kernel is none; what makes room for its result is one."""
        self.use(setup)
        with CountedOperations() as counted:
            self.engine.step()
        return counted.num_operations

    def workload_s(self, setup: Setup, *, at_once: int, caching: bool) -> tuple[float, int]:
        """Eight questions about one text: seconds, and tokens computed."""
        self.use(setup)
        self.llm.reset_prefix_cache()
        text, before = self.random_prompt(208), self.computed()
        manager, scheduler = self.engine.scheduler.block_manager, self.engine.scheduler
        for _ in range(8):
            self.add(text + self.random_prompt(16), 8)
        started = time.perf_counter()
        with replaced(manager, "enable_prefix_caching", caching), replaced(scheduler, "max_num_seqs", at_once):
            while self.engine.has_unfinished_requests():
                self.engine.step()
        return time.perf_counter() - started, self.computed() - before

    def computed(self) -> int:
        return self.engine.stats.num_prefill_tokens + self.engine.stats.num_decode_tokens


class CountedOperations(TorchDispatchMode):
    """Counts the PyTorch operations that run inside it."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


# -- on paper ---------------------------------------------------------------------------------------------------------


def bytes_of_parts(config: ModelConfig, itemsize: int, num_seqs: int, rows: int, keys: int) -> dict[str, list[float]]:
    """(plain, optimized) bytes that a step reads and writes, by part: `num_seqs` sequences, each with `rows` rows and
    `keys` keys. An operation of PyTorch reads its inputs from memory and writes its result there; a fused kernel keeps
    what lies between in registers and L1."""
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    tokens = num_seqs * rows
    per_layer = hidden * (q_size + 2 * kv_size) + q_size * hidden + 3 * hidden * inner
    weights = layers * per_layer + config.vocab_size * hidden
    kv = layers * num_seqs * keys * 2 * kv_size
    # Decode: _gather copies K and V (read, write), the product reads the copies. A prompt's are copied twice, and its
    # scores are written, masked and softened in place of each other: five passes over rows x keys numbers a head.
    scores = 0 if rows == 1 else layers * tokens * keys * config.num_attention_heads
    rotated, written = layers * tokens * (q_size + kv_size), layers * tokens * kv_size
    numbers = {
        "matrix products": (weights, weights),
        "attention": (3 * kv if rows == 1 else 5 * kv + 5 * scores, kv),
        # rotate() has 4 products and 2 sums of halves, a cat and a copy: 11 passes; K and V go to the cache.
        "rotary + write": (11 * rotated + 4 * written, 2 * rotated + 3 * written),
        "add + norm": (5 * (2 * layers + 1) * tokens * hidden, 4 * (2 * layers + 1) * tokens * hidden),
        "silu * up": (5 * layers * tokens * inner, 3 * layers * tokens * inner),
    }
    return {name: [number * itemsize / 1e6 for number in pair] for name, pair in numbers.items()}


def read_rates() -> list[tuple[str, float]]:
    """(size of a tensor, GB a second) when one thread reads it over and over."""
    rates, num_threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for size in (2 << 20, 256 << 20):
        matrix, vector = torch.ones(size // (4 << 10), 1 << 10), torch.ones(1 << 10)  # their product reads each once
        times: list[float] = []
        until = time.perf_counter() + 0.15
        while time.perf_counter() < until or len(times) < 3:
            started = time.perf_counter()
            torch.mv(matrix, vector)
            times.append(time.perf_counter() - started)
        rates.append((f"{size >> 10:,} KiB", matrix.nbytes / min(times) / 1e9))
    torch.set_num_threads(num_threads)
    return rates


def stream_rate() -> float:
    """GB a second that all threads together read from memory."""
    data = torch.ones(64 << 20)
    times: list[float] = []
    for _ in range(4):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    return data.nbytes / min(times) / 1e9


# -- attention in six steps -------------------------------------------------------------------------------------------


class KeyReader:
    """Hands out K and V of one layer by slot, at most TILE tokens at a time, and counts them."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]."""
        _, self.block_size, self.num_kv_heads, _ = k_cache.shape
        self._k, self._v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        self.num_read = 0

    def read(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        """K and V in these slots, each [len(slots), num_kv_heads, head_dim], float32."""
        if len(slots) > TILE:
            raise ValueError(f"{len(slots)} slots at once; a tile has {TILE}")
        self.num_read += len(slots)
        index = torch.tensor(slots, dtype=torch.int64, device=self._k.device)
        return self._k[index].float().cpu(), self._v[index].float().cpu()


Attend = Callable[[Tensor, list[int], int, KeyReader], Tensor]


def paged_attention_by(attend: Attend) -> Callable[[Tensor, Tensor, Tensor, Batch], Tensor]:
    """paged_attention() of the engine from a function for one sequence: tiles of query rows, one after another."""

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        outs = []
        for b, rows in enumerate(q.split(batch.query_lens)):
            table, num_before = batch.block_tables[b].tolist(), batch.key_lens[b] - len(rows)
            for first in range(0, len(rows), TILE_ROWS):
                tile = rows[first : first + TILE_ROWS].float().cpu()
                outs.append(attend(tile, table, num_before + first + len(tile), KeyReader(k_cache, v_cache)))
        return torch.cat(outs).to(q)  # back to its dtype, and on a GPU to its memory

    return paged_attention


class Memory(TorchDispatchMode):
    """Watches what the operations inside it make: every tensor's bytes, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._made: list[tuple[int, weakref.ref[Tensor]]] = []
        self._alive: list[tuple[int, weakref.ref[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:  # a view makes nothing
                self._made.append((x.nbytes, weakref.ref(x)))
                self._alive.append(self._made[-1])
        self._alive = [(nbytes, ref) for nbytes, ref in self._alive if ref() is not None]
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for nbytes, _ in self._alive))
        return result

    def largest_bytes(self, result: Tensor) -> int:
        """Of the largest tensor beside the result."""
        return max(nbytes for nbytes, ref in self._made if ref() is not result)


# One head: q, k and v are [n, head_dim]. Row i sees the keys 0 to i. Each step is checked against the one before.


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.T * q.shape[1] ** -0.5
    later = torch.arange(len(k)) > torch.arange(len(q))[:, None]
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def row_by_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    for i in range(len(q)):
        scores = k[: i + 1] @ q[i] * q.shape[1] ** -0.5
        weights = (scores - scores.max()).exp()
        out[i] = weights @ v[: i + 1] / weights.sum()
    return out


def two_passes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    for i in range(len(q)):
        row = q[i] * q.shape[1] ** -0.5
        top, total = -math.inf, 0.0
        for first in range(0, i + 1, TILE):  # the online softmax: its maximum and its sum, a tile at a time
            scores = k[first : min(first + TILE, i + 1)] @ row
            new_top = max(top, scores.max().item())
            total = total * math.exp(top - new_top) + (scores - new_top).exp().sum().item()
            top = new_top
        for first in range(0, i + 1, TILE):  # and the weighted values, from the same scores computed again
            keys = slice(first, min(first + TILE, i + 1))
            out[i] += (k[keys] @ row - top).exp() / total @ v[keys]
    return out


def one_pass(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    for i in range(len(q)):
        row = q[i] * q.shape[1] ** -0.5
        top, total, acc = -math.inf, 0.0, torch.zeros_like(row)
        for first in range(0, i + 1, TILE):
            keys = slice(first, min(first + TILE, i + 1))
            scores = k[keys] @ row
            new_top = max(top, scores.max().item())
            shrink, weights = math.exp(top - new_top), (scores - new_top).exp()
            total = total * shrink + weights.sum().item()
            acc = acc * shrink + weights @ v[keys]
            top = new_top
        out[i] = acc / total
    return out


def tiles_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    for start in range(0, len(q), TILE_ROWS):
        rows = q[start : start + TILE_ROWS] * q.shape[1] ** -0.5
        position = torch.arange(start, start + len(rows))[:, None]
        top, total = torch.full((len(rows), 1), -torch.inf), torch.zeros(len(rows), 1)
        acc = torch.zeros_like(rows)
        for first in range(0, start + len(rows), TILE):
            keys = slice(first, min(first + TILE, start + len(rows)))
            later = torch.arange(keys.start, keys.stop) > position
            scores = (rows @ k[keys].T).masked_fill(later, -torch.inf)
            new_top = torch.maximum(top, scores.amax(1, keepdim=True))
            shrink, weights = (top - new_top).exp(), (scores - new_top).exp()
            total = total * shrink + weights.sum(1, keepdim=True)
            acc = acc * shrink + weights @ v[keys]
            top = new_top
        out[start : start + len(rows)] = acc / total
    return out


LADDER: list[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = [
    ("(a) dense", dense),
    ("(b) row by row", row_by_row),
    ("(c) online softmax, 2 passes", two_passes),
    ("(d) one pass, an accumulator", one_pass),
    ("(e) tiles of queries, too", tiles_of_queries),
]


def rows_read(name: str, n: int) -> int:
    """How many rows of K and of V a step reads for n queries."""
    by_row = n * (n + 1) // 2
    by_tile = sum(min(start + TILE_ROWS, n) for start in range(0, n, TILE_ROWS))
    return {"a": 2 * n, "b": 2 * by_row, "c": 3 * by_row, "d": 2 * by_row, "e": 2 * by_tile}[name[1]]


# -- the story --------------------------------------------------------------------------------------------------------


make_table = partial(draw.make_table, width=11, first=28)


def draw_waterfall(rows: list[tuple[str, float]], unit: str) -> Text:
    """A bar for each row: solid is what is left, thin what this row has taken away (or added: nothing thin)."""
    longest, before, text = max(value for _, value in rows), rows[0][1], Text()
    for name, value in rows:
        cells = max(1, round(BAR * value / longest))
        saved = max(0, round(BAR * before / longest) - cells)
        text.append(f"{name:<28}{value:>8.1f} {unit} ").append("█" * cells, "cyan").append("▏" * saved, "yellow")
        text.append("  (measured)\n", "dim")
        before = value
    text.rstrip()
    return text


def tell(story: Story) -> None:
    world = World(story)
    tell_hierarchy(story)
    tell_compiler(story, world)
    promised = tell_bytes(story, world)
    tell_operations(story, world)
    tell_shares(story, world, promised)
    tell_workload(story, world)
    tell_ladder(story, world)
    tell_paged(story, world)


def tell_hierarchy(story: Story) -> None:
    story.part("How far away is a number?")
    story.say(
        "One thread reads a tensor over and over. The first fits into the caches of most processors, the other not:"
    )
    table = make_table("size of the tensor", "GB/s")
    for size, rate in read_rates():
        table.add_row(size, f"{rate:.0f}", "(measured)")
    story.show(table)


def tell_compiler(story: Story, world: World) -> None:
    story.part("The C kernels, compiled here")
    arguments = world.config, world.runner.dtype
    with tempfile.TemporaryDirectory() as folder, _environment(XDG_CACHE_HOME=folder):
        times = []
        for _ in range(2):
            started = time.perf_counter()
            kernels = load_cpu_kernels(*arguments)
            times.append((time.perf_counter() - started) * 1e3)
    if kernels is None:
        story.say("There is no C compiler here, so the rows of C are missing below: PyTorch does the work.")
    else:
        story.say(f"With an empty cache folder: {times[0]:.0f} ms. Once more: {times[1]:.1f} ms.", measured=True)
    story.say("And with a compiler that does not exist, the engine's log says:")
    with (
        tempfile.TemporaryDirectory() as folder,
        _environment(XDG_CACHE_HOME=folder, CC="no-cc"),
        _log_lines() as lines,
    ):
        kernels = load_cpu_kernels(*arguments)
    story.say(f"  {lines[0]}")
    story.say(f"load_cpu_kernels returned {kernels}; the model runner takes TORCH_KERNELS instead.")


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def _log_lines() -> Iterator[list[str]]:
    """What the engine's logger says meanwhile."""
    lines: list[str] = []
    logger, handler = logging.getLogger("nanovllm"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with replaced(logger, "propagate", False), replaced(logger, "level", logging.INFO):
        logger._cache.clear()  # type: ignore[attr-defined]  # what it remembers of its level
        logger.addHandler(handler)
        try:
            yield lines
        finally:
            logger.removeHandler(handler)
            logger._cache.clear()  # type: ignore[attr-defined]


KINDS = {  # (sequences, rows of each, keys of each)
    "1 decode": (1, 1, CONTEXT),
    f"{BATCH} decodes": (BATCH, 1, CONTEXT),
    f"prompt of {PROMPT}": (1, PROMPT, PROMPT),
}


def tell_bytes(story: Story, world: World) -> dict[tuple[str, str], float]:
    """Returns what should be saved, in ms a step, by (part, kind of step)."""
    story.part("What each optimization should save, in bytes")
    story.say(
        f"Megabytes that a step reads and writes, counted from the ModelConfig; decodes at a context of {CONTEXT}. "
        "Left of the arrow PyTorch's operations, each reading its inputs and writing its result, right of it one "
        "kernel that keeps what lies between:"
    )
    table = make_table("part", *KINDS, width=18)
    parts = {kind: bytes_of_parts(world.config, world.itemsize, *sizes) for kind, sizes in KINDS.items()}
    for name in parts["1 decode"]:
        table.add_row(name, *(f"{parts[kind][name][0]:.1f} -> {parts[kind][name][1]:.1f}" for kind in KINDS))
    story.show(table)
    rate = stream_rate()
    story.say(f"All threads together read {rate:.0f} GB/s from memory here.", measured=True)
    return {(name, kind): (pair[0] - pair[1]) / rate for kind in KINDS for name, pair in parts[kind].items()}


def tell_operations(story: Story, world: World) -> None:
    story.part("How many operations a step has")
    story.say("Every PyTorch operation costs some microseconds before it does anything. One decode step makes:")
    table = make_table("one after another", "operations", "fewer")
    with world.decoding(1):
        before = None
        for setup in world.in_order:
            count = world.num_operations(setup)
            table.add_row(setup.name, f"{count:,}", "" if before is None else f"{before - count:,}", "(measured)")
            before = count
    story.show(table)


def tell_shares(story: Story, world: World, promised: dict[tuple[str, str], float]) -> None:
    story.part("What each one saves, measured")
    if not world.c_products and world.c_kernels is not None:
        story.say("cpu/linear.c leaves this dtype or this processor to oneDNN: C's matrix products are oneDNN's here.")
    times = {kind: world.prefill_ms() if rows > 1 else world.decode_ms(n) for kind, (n, rows, _) in KINDS.items()}
    story.say("Each alone, everything else plain. Milliseconds of the fastest step:")
    table = make_table("alone", *KINDS)
    for setup in world.alone:
        table.add_row(setup.name, *(f"{times[kind][id(setup)]:.1f}" for kind in KINDS), "(measured)")
    story.show(table)
    story.say("What the bytes promised and what was saved alone, in ms a step (promised, saved; 0.0: nothing):")
    table = make_table("part", *KINDS, width=14)
    for setup in world.alone[2 if world.c_kernels else 1 :]:
        name = setup.name.removeprefix("C: ") if world.c_kernels else "matrix products"
        plain = world.alone[0]
        saved = {kind: max(0.0, times[kind][id(plain)] - times[kind][id(setup)]) for kind in KINDS}
        table.add_row(name, *(f"{promised[name, kind]:.1f}, {saved[kind]:.1f}" for kind in KINDS), "(measured)")
    story.show(table)
    story.say("One after another. Solid: the step as it is now. Thin: what this row took away.")
    for kind in KINDS:
        story.say(f"{kind}:")
        story.show(draw_waterfall([(setup.name, times[kind][id(setup)]) for setup in world.in_order], "ms"))
    first, last = id(world.in_order[0]), id(world.all_on)
    ratios = ", ".join(f"{kind} {times[kind][first] / times[kind][last]:.1f} times" for kind in KINDS)
    story.say(f"All together: {ratios} as fast.", measured=True)


def tell_workload(story: Story, world: World) -> None:
    story.part("The control plane in the same picture")
    story.say(
        "Eight requests about the same text: 208 tokens in common, 16 of their own, 8 tokens of answer. Below the "
        "kernels, what chapters 5 and 7 do:"
    )
    plain, reordered, fast = world.in_order[0], world.in_order[1], world.all_on
    stages = [
        ("plain, one by one", plain, 1, False),
        ("+ reordered weights", reordered, 1, False),
        ("+ C kernels", fast, 1, False),
        ("+ batching", fast, 8, False),
        ("+ prefix caching", fast, 8, True),
    ]
    if world.c_kernels is None:
        stages.pop(2)
    runs = [(name, *world.workload_s(setup, at_once=n, caching=on)) for name, setup, n, on in stages]
    story.show(draw_waterfall([(name, seconds * 1e3) for name, seconds, _ in runs], "ms"))
    table = make_table("", "tokens computed")
    for name, _, num_tokens in runs:
        table.add_row(name, f"{num_tokens:,}")
    story.show(table)


def tell_ladder(story: Story, world: World) -> None:
    story.part("FlashAttention in five steps, one head")
    story.say(
        f"float32, head_dim 64, {TILE} keys a tile, {TILE_ROWS} query rows a tile. Each step must agree with the one "
        "before. The largest tensor that each makes beside its result, in bytes, as PyTorch reports it:"
    )
    lengths = (128, 256, 512)
    generator = torch.Generator().manual_seed(10)
    found: dict[str, list[str]] = {name: [] for name, _ in LADDER}
    with torch.inference_mode():
        for n in lengths:
            q, k, v = torch.randn(3, n, 64, generator=generator)
            before = None
            for name, step in LADDER:
                with Memory() as memory:
                    out = step(q, k, v)
                found[name].append(f"{memory.largest_bytes(out):,}")
                if before is not None and not torch.allclose(out, before, atol=1e-5):
                    raise AssertionError(f"{name} disagrees with the step before it at n = {n}")
                before = out
    table = make_table("step", *(f"n = {n:,}" for n in lengths), f"K, V rows read, n = {lengths[-1]:,}")
    for name, cells in found.items():
        table.add_row(name, *cells, f"{rows_read(name, lengths[-1]):,}")
    story.show(table)
    story.say("All agree to within 1e-5. (a) grows with n x n, (b) with n; (c), (d) and (e) do not grow.")
    story.say(
        f"(b), (c) and (d) read K and V anew for each query row, (c) K even twice. (e) reads them once for {TILE_ROWS} "
        "rows: that is what the second kind of tile is for."
    )


def tell_paged(story: Story, world: World) -> None:
    from chapters.ch10_optimization_stack import solution  # it imports this file

    story.part("(f) Over the block table, in the engine")
    ours, differences = paged_attention_by(solution.attend), []

    def both(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        floats = q.float(), k_cache.float(), v_cache.float()
        out = ours(q.float(), k_cache, v_cache, batch)
        differences.append((out - attention.paged_attention(*floats, batch)).abs().max().item())
        return out.to(q.dtype)

    world.use(replace(world.in_order[0], kernels=replace(TORCH_KERNELS, paged_attention=both)))
    outputs = world.llm.generate(
        ["The capital of France is", "Once upon a time"], SamplingParams(temperature=0, max_tokens=8), False
    )
    story.say(
        f"The same tiles, now for all heads, keys found through the block table, at most {TILE} of them at a time. "
        f"For two prompts and 8 steps each the engine ran with it: {len(differences)} calls, one a layer and step."
    )
    agree = max(differences) < 1e-4
    story.say(
        f"Compared in float32 with attention.paged_attention on the same cache: "
        f"{'every number agrees to within 1e-4' if agree else f'{max(differences)} APART'}."
    )
    story.say(f"Largest difference {max(differences):.1e}.", measured=True)
    story.say(f"The model said: {(outputs[0].prompt or '') + outputs[0].outputs[0].text!r}", measured=True)
    world.use(world.all_on)
