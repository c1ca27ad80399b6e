"""The ways in which lab 10 lets one engine compute a step, and their times.

The weights are laid out and the kernels swapped between steps.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from chapters.patching import replaced
from chapters.story import left_empty, stopwatch
from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.worker.cpu.reorder import reorder_weight
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import Linear

CONTEXT = 256  # tokens of a sequence when its decode steps begin to be timed
BATCH = 16
NUM_REQUESTS, NUM_SHARED, NUM_OWN, NUM_OUTPUT = 4, 64, 8, 8  # of the workload; the last three in tokens
MIN_ROUNDS, MAX_ROUNDS = 3, 12  # every setup gets its turn once a round
PATIENCE_S = 15  # no further round begins when this is over
SHORT_MS = 100  # in a step that takes longer, what the processor's caches held at its beginning is nothing


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
    for title, field in (swaps | {"silu * up": "gated_linear"}).items():
        swap: dict[str, Any] = {field: getattr(c_kernels, field)}
        alone.append(Setup(f"C: {title}", "plain", replace(TORCH_KERNELS, **swap)))
        in_order.append(Setup(f"C: {title}", "C", replace(in_order[-1].kernels, **swap)))
    return alone, in_order


@dataclass(frozen=True)
class Times:
    """Milliseconds of one setup, one number for each round."""

    rounds: list[float]

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def median(self) -> float:
        return median(self.rounds)

    def is_faster_than(self, other: "Times") -> bool:
        """In more than three of four rounds: seldom by chance, and yet one busy moment does not hide it."""
        wins = sum(ours < theirs for ours, theirs in zip(self.rounds, other.rounds, strict=True))
        return wins > 0.75 * len(self.rounds) and self.best < other.best

    def saved(self, other: "Times") -> float:
        """What this saves of the other's step; 0 if that is below the noise."""
        return other.best - self.best if self.is_faster_than(other) else 0.0


def in_turn(turns: Mapping[Any, Callable[[], float]], min_rounds: int, max_rounds: int) -> dict[Any, Times]:
    """Everything once, then everything again: a busy moment of the machine does not hit one setup alone."""
    rounds: dict[Any, list[float]] = {key: [] for key in turns}
    started = time.perf_counter()
    for number in range(max_rounds):
        if number >= min_rounds and time.perf_counter() - started > PATIENCE_S:
            break
        for key, turn in turns.items():
            rounds[key].append(turn())
    return {key: Times(values) for key, values in rounds.items()}


class World:
    """An engine whose way to compute can be changed between two steps."""

    def __init__(self, load: Callable[..., LLM]) -> None:
        sizes = {"max_num_seqs": BATCH, "max_num_batched_tokens": 2048, "max_model_len": 1024}
        self.llm = load(**sizes, num_gpu_blocks_override=512, block_size=16, optimizations=("c_kernels",), dtype="auto")
        self.engine, self.rng = self.llm.engine, random.Random(10)
        self.runner = self.engine.model_runner
        self.config, self.itemsize = self.engine.model_config, self.runner.dtype.itemsize
        self.c_kernels = None if self.runner.kernels is TORCH_KERNELS else self.runner.kernels
        self.linears = [module for module in self.runner.model.modules() if isinstance(module, Linear)]
        self.layouts = {"plain": [(layer.weight, layer.product) for layer in self.linears]}
        for name, kernels in (("oneDNN", TORCH_KERNELS), ("C", self.c_kernels)):
            if kernels is not None and self.runner.device.type == "cpu":
                self._lay_out("plain")
                for layer in self.linears:
                    reorder_weight(layer, kernels)
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
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        return self.engine.add_request(None, prompt, params, stream=False)

    def step_ms(self) -> float:
        return stopwatch(self.engine.step) * 1e3

    @contextmanager
    def decoding(self, num_seqs: int) -> Iterator[None]:
        """With so many sequences in the middle of their answers, each with a context of CONTEXT tokens and more.

        Nobody computes the K/V of their prompts: times do not depend on the numbers in the cache. The blocks are
        registered as if it were there, and forgotten at the end.
        """
        self.use(self.all_on)
        manager = self.engine.scheduler.block_manager
        with left_empty(self.llm):
            prompts = [self.random_prompt(CONTEXT) for _ in range(num_seqs)]
            for prompt in prompts:
                seq = Sequence(prompt)
                manager.allocate_with_prefix(seq)
                seq.num_computed_tokens = CONTEXT
                manager.register_prefix(seq)
                manager.free(seq)
            for prompt in prompts:
                self.add(prompt, 500)
            self.engine.step()
            yield

    def decode_ms(self, num_seqs: int) -> dict[Setup, Times]:
        """Of a decode step."""

        def turn(setup: Setup) -> float:
            self.use(setup)
            first_ms = self.step_ms()  # with different weights: it finds nothing of them in the processor's caches
            return self.step_ms() if first_ms < SHORT_MS else first_ms

        with self.decoding(num_seqs):
            turns = {setup: partial(turn, setup) for setup in [*self.alone, *self.in_order]}
            return in_turn(turns, MIN_ROUNDS, MAX_ROUNDS)

    def num_operations(self, setup: Setup) -> int:
        """PyTorch operations in the next step. A C kernel is none; what makes room for its result is one."""
        self.use(setup)
        with CountedOperations() as counted:
            self.engine.step()
        return counted.num_operations

    def workload_ms(self, setup: Setup, at_once: int, caching: bool) -> tuple[float, int]:
        """Questions about one text: milliseconds, and tokens computed."""
        self.use(setup)
        self.llm.reset_prefix_cache()
        text, before = self.random_prompt(NUM_SHARED), self.computed()
        manager, scheduler = self.engine.scheduler.block_manager, self.engine.scheduler
        with (
            left_empty(self.llm),
            replaced(manager, "enable_prefix_caching", caching),
            replaced(scheduler, "max_num_seqs", at_once),
        ):
            for _ in range(NUM_REQUESTS):
                self.add(text + self.random_prompt(NUM_OWN), NUM_OUTPUT)
            started = time.perf_counter()
            while self.engine.has_unfinished_requests():
                self.engine.step()
            return (time.perf_counter() - started) * 1e3, self.computed() - before

    def computed(self) -> int:
        return self.engine.stats.num_prefill_tokens + self.engine.stats.num_decode_tokens


class CountedOperations(TorchDispatchMode):
    """Counts the PyTorch operations that run inside it."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        return func(*args, **(kwargs or {}))
