"""Lab 6: steps counted on paper; a packed batch; prefill and decode timed on this machine; the chunk size moved.

Every step is one of the engine's. Costs are counted from the checkpoint's ModelConfig and a step's ScheduledChunks: the
engine's decoder does the step without memory, and a meter adds up what it does (meter.py).
"""

import random
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.text import Text

from chapters import draw
from chapters.ch06_prefill_decode.meter import PaperModel
from chapters.draw import COLORS
from chapters.patching import replaced
from chapters.story import Story, left_empty, stopwatch
from nanovllm import LLM, SamplingParams
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.outputs import RequestMetrics
from nanovllm.worker.batch import Batch

CONTEXT = 64  # tokens of a sequence in the middle of the decode steps that are timed
LONG_PROMPT = 1000
NUM_DECODE_STEPS = 6
PATIENCE_S = 0.7  # a measurement is repeated while this lasts
H100_FLOPS_PER_S, H100_BYTES_PER_S = 989e12, 3.35e12  # NVIDIA's data sheet: SXM, bf16 without sparsity


# -- on this machine ------------------------------------------------------------------------------------------------


def read_rate(device: torch.device) -> float:
    """Bytes per second that a sum over 512 MB reads, the best of up to eight."""
    data = torch.ones(128 << 20, device=device)
    return data.nbytes / min(repeat(lambda: stopwatch(lambda: data.sum().item()), 8))


def compute_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large matrix product, the best of up to eight.

    Where a processor cannot multiply bf16, float32 is faster, and the C kernels compute with that.
    """
    rates = []
    for kind in (dtype, torch.float32):
        x, weight = torch.randn(1024, 2048).to(device, kind), torch.randn(2048, 2048).to(device, kind)
        seconds = min(repeat(lambda: stopwatch(lambda: F.linear(x, weight)[0, 0].item()), 8))  # noqa: B023
        rates.append(2 * 1024 * 2048 * 2048 / seconds)
    return max(rates)


def repeat(function: Callable[[], Any], times: int) -> list:
    """What up to so many calls return; fewer on a slow machine."""
    started, results = time.perf_counter(), [function()]
    while len(results) < times and time.perf_counter() - started < PATIENCE_S:
        results.append(function())
    return results


class World:
    """The engine on a checkpoint, and random prompts that share nothing."""

    def __init__(self, story: Story) -> None:
        sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 1280}
        self.llm: LLM = story.load(**sizes, num_gpu_blocks_override=256, block_size=16)
        self.engine, self.rng = self.llm.engine, random.Random(6)
        self.config, self.itemsize = self.engine.model_config, self.engine.model_runner.dtype.itemsize
        self.on_paper = PaperModel(self.config, self.engine.model_runner.dtype)

    def add(self, num_prompt: int, num_output: int) -> str:
        prompt = [self.rng.randrange(self.config.vocab_size) for _ in range(num_prompt)]
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        return self.engine.add_request(None, prompt, params)

    def prefill_s(self, num_prompt: int) -> float:
        """Seconds of the one step that computes a prompt, the best of up to three."""

        def once() -> float:
            with left_empty(self.llm):
                self.add(num_prompt, num_output=1)
                return stopwatch(self.engine.step)

        return min(repeat(once, 3))

    def decode_s(self, batch_sizes: tuple[int, ...]) -> dict[int, float]:
        """Seconds of a decode step by batch size, the median of up to NUM_DECODE_STEPS, at contexts around CONTEXT.

        The largest batch comes first; then requests leave until the next one is reached.
        """
        seconds, num_steps = {}, NUM_DECODE_STEPS * len(batch_sizes)
        with left_empty(self.llm):
            ids = [self.add(CONTEXT - num_steps // 2, num_steps + 2) for _ in range(max(batch_sizes))]
            self.engine.step()  # the prompts, and everyone's first token
            for batch_size in sorted(batch_sizes, reverse=True):
                self.engine.abort_request(ids[batch_size:])
                del ids[batch_size:]
                seconds[batch_size] = median(repeat(lambda: stopwatch(self.engine.step), NUM_DECODE_STEPS))
        return seconds

    def one_request(self) -> tuple[list[tuple[int, float]], RequestMetrics]:
        """A request alone: (tokens computed, seconds) of each step, and its metrics."""
        stats, steps, outputs = self.engine.stats, [], []
        with left_empty(self.llm):
            self.add(256, 6)
            while self.engine.has_unfinished_requests():
                before = stats.num_prefill_tokens + stats.num_decode_tokens
                seconds = stopwatch(lambda: outputs.extend(self.engine.step()))
                steps.append((stats.num_prefill_tokens + stats.num_decode_tokens - before, seconds))
        return steps, outputs[-1].metrics

    def newcomer(self, budget: int) -> tuple[list[int], tuple[float, float, float]]:
        """A long prompt arrives while a short request is decoding, under a token budget.

        Returns the newcomer's prompt tokens in each step until its first token; and in seconds its TTFT, the other's
        longest gap between two tokens, and its usual one.
        """
        times, tokens_per_step, metrics = [], [], None
        with left_empty(self.llm), replaced(self.engine.scheduler, "max_num_batched_tokens", budget):
            self.add(32, 100)
            for _ in range(4):
                self.engine.step()
                times.append(time.perf_counter())
            usual_s = median(after - earlier for earlier, after in pairwise(times))
            stats, guest = self.engine.stats, self.add(LONG_PROMPT, 100)
            while metrics is None:
                num_before = stats.num_prefill_tokens
                outputs = self.engine.step()
                times.append(time.perf_counter())
                tokens_per_step.append(stats.num_prefill_tokens - num_before)
                metrics = next((output.metrics for output in outputs if output.request_id == guest), None)
        longest_s = max(after - earlier for earlier, after in pairwise(times))
        return tokens_per_step, (metrics.ttft_s or 0.0, longest_s, usual_s)


# -- pictures -------------------------------------------------------------------------------------------------------


make_table = partial(draw.make_table, width=12)


def draw_batch(output: SchedulerOutput, names: dict[int, str]) -> Text:
    """The packed tensors of a step in blocks of 4, a column for each row of the batch."""
    batch = Batch.from_scheduler_output(output, 4)
    owners = [chunk.seq.seq_id for chunk in output.chunks for _ in range(chunk.start, chunk.end)]
    colors, sampled = dict(zip(names, COLORS, strict=False)), batch.logits_rows.tolist()
    lines: dict[str, list] = {"row": [*range(len(owners))], "sequence": [names[owner] for owner in owners]}
    lines |= {name: getattr(batch, name).tolist() for name in ("input_ids", "positions", "slot_mapping")}
    lines["logits wanted"] = ["*" if row in sampled else "" for row in range(len(owners))]
    text = Text()
    for name, values in lines.items():
        text.append(f"{name:<14}")
        for owner, value in zip(owners, values, strict=True):
            text.append(f"{value:>5}", colors[owner] if name == "sequence" else "")
        text.append("\n")
    for name in ("cu_seqlens_q", "seqlens_k", "logits_rows"):
        text.append(f"{name:<14} {getattr(batch, name).tolist()}\n")
    text.rstrip()
    return text


def draw_steps(prompt_tokens: list[int]) -> Text:
    """A bar for each step: the running request's token, then the newcomer's chunk, 16 tokens a cell."""
    text = Text()
    for number, num_tokens in enumerate(prompt_tokens, start=1):
        text.append(f"step {number:>2}  1 ").append("A", "green").append(f" + {num_tokens:>4} ")
        text.append("█" * -(-num_tokens // 16) + "\n", "cyan")
    text.rstrip()
    return text
