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
from chapters.ch06_prefill_decode.roofline import decode_chunks, prompt_chunk
from chapters.draw import COLORS
from chapters.stage import Stage
from chapters.story import Story, stopwatch
from nanovllm import LLM, SamplingParams
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.outputs import RequestMetrics
from nanovllm.worker.batch import Batch

PROMPT_LENS = (16, 64, 256, 1024)
BATCH_SIZES = (1, 2, 4, 8, 16)
CONTEXT = 64  # tokens of a sequence in the middle of the decode steps that are timed
BUDGETS = (64, 256, 2048)
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
            self.add(num_prompt, num_output=1)
            return stopwatch(self.engine.step)

        return min(repeat(once, 3))

    def decode_s(self, batch_sizes: tuple[int, ...]) -> dict[int, float]:
        """Seconds of a decode step by batch size, the median of up to NUM_DECODE_STEPS, at contexts around CONTEXT.

        The largest batch comes first; then requests leave until the next one is reached.
        """
        seconds, num_steps = {}, NUM_DECODE_STEPS * len(batch_sizes)
        ids = [self.add(CONTEXT - num_steps // 2, num_steps + 2) for _ in range(max(batch_sizes))]
        self.engine.step()  # the prompts, and everyone's first token
        for batch_size in sorted(batch_sizes, reverse=True):
            self.abort(ids[batch_size:])
            del ids[batch_size:]
            seconds[batch_size] = median(repeat(lambda: stopwatch(self.engine.step), NUM_DECODE_STEPS))
        self.abort(ids)
        return seconds

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.engine.abort_request(request_id)

    def one_request(self) -> tuple[list[tuple[int, float]], RequestMetrics]:
        """A request alone: (tokens computed, seconds) of each step, and its metrics."""
        self.add(256, 6)
        stats, steps, outputs = self.engine.stats, [], []
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
        scheduler = self.engine.scheduler
        before, scheduler.max_num_batched_tokens = scheduler.max_num_batched_tokens, budget
        runner = self.add(32, 100)
        times, tokens_per_step, metrics = [], [], None
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
        self.abort([runner, guest])
        scheduler.max_num_batched_tokens = before
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


# -- the story ------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    world = World(story)
    tell_paper(story, world)
    tell_packed(story)
    world.add(256, num_output=1)
    world.engine.step()  # the first step waits for memory
    tell_one_request(story, world)
    seconds = tell_rates(story, world)
    tell_roofline(story, world, seconds)
    tell_budgets(story, world)


def tell_paper(story: Story, world: World) -> None:
    story.part("What a step costs on paper")
    config, itemsize = world.config, world.itemsize
    whole = world.on_paper.cost(decode_chunks(1, CONTEXT)).weight_bytes
    layers = world.on_paper.cost([prompt_chunk(0, 1, 2)]).weight_bytes  # nobody samples: no output matrix
    theirs = world.engine.model_runner.weight_bytes
    story.say(
        f"The weight matrices of all layers hold {layers // itemsize:,} numbers, the output matrix "
        f"{(whole - layers) // itemsize:,}: {whole / 1e6:.1f} MB at {itemsize} bytes each. The model runner says that "
        f"it holds {theirs / 1e6:.1f} MB (norms included). K and V of one token: "
        f"{config.kv_bytes_per_token(itemsize):,} bytes.\n\nThe table shows the FLOPs and bytes of a step, counted "
        "from the ModelConfig and the step's chunks:"
    )
    table = make_table("step", "tokens", "GFLOP", "weights MB", "K/V MB", "FLOPs a byte", width=10)
    rows = [(f"{n} x decode, context {CONTEXT}", decode_chunks(n, CONTEXT)) for n in BATCH_SIZES]
    rows += [(f"16 x decode, context {n:,}", decode_chunks(16, n)) for n in (1024, 8192)]
    rows += [(f"prompt of {n:,}", [prompt_chunk(0, n, n)]) for n in PROMPT_LENS]
    for name, chunks in rows:
        cost, num_tokens = world.on_paper.cost(chunks), sum(chunk.end - chunk.start for chunk in chunks)
        bytes_mb = f"{cost.weight_bytes / 1e6:.1f}", f"{cost.kv_bytes / 1e6:.1f}"
        table.add_row(name, f"{num_tokens:,}", f"{cost.flops / 1e9:.2f}", *bytes_mb, f"{cost.intensity:.1f}")
    story.show(table)
    ridge = H100_FLOPS_PER_S / H100_BYTES_PER_S
    story.say(
        f"FLOPs a byte: the arithmetic intensity. An H100's data sheet says {H100_FLOPS_PER_S / 1e12:.0f} TFLOP/s and "
        f"{H100_BYTES_PER_S / 1e12:.2f} TB/s, so it can do {ridge:.0f} FLOPs in the time in which it reads one byte. A "
        "step below that waits for memory, a step above it for arithmetic."
    )


def tell_packed(story: Story) -> None:
    story.part("Two decodes and a prompt chunk in one batch")
    stage = Stage(16, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=40)
    stage.add([10, 11, 12], answer=[13, 14])
    stage.add([20, 21, 22, 23, 24], answer=[25, 26])
    stage.step()
    stage.add(list(range(30, 40)))
    story.say(
        "The budget is 8 tokens a step, and blocks have 4. A and B have computed their prompts and sampled tokens 13 "
        "and 25. Now C arrives with a prompt of 10 tokens, 30 to 39. This is the next step, as the model gets it:"
    )
    output = stage.schedule()
    story.show(draw_batch(output, stage.names))
    story.say(
        "A and B have a row each, C the six that are left of the budget. Row 7 is not the end of C's prompt, so nobody "
        "asks for its logits. The step after that has the rest of C, and samples for all three:"
    )
    stage.finish(output)
    story.show(draw_batch(stage.schedule(), stage.names))


def tell_one_request(story: Story, world: World) -> None:
    story.part("One request, step by step")
    steps, metrics = world.one_request()
    story.say("The prompt has 256 tokens, the output has six, and nobody else is in the engine:")
    table = make_table("step", "tokens", "ms", "ms a token")
    for number, (num_tokens, seconds) in enumerate(steps, start=1):
        row = number, num_tokens, f"{seconds * 1e3:.1f}", f"{seconds * 1e3 / num_tokens:.2f}"
        table.add_row(*map(str, row), "(measured)")
    story.show(table)
    story.say(
        "Step 1 is the prefill: 256 tokens at once, and from the last of them comes the first output token. Steps 2 to "
        "6 are decodes: one token each. A decode token costs many times what a prompt token costs."
    )
    ttft_ms, tpot_ms = (metrics.ttft_s or 0) * 1e3, (metrics.tpot_s or 0) * 1e3
    story.say(
        f"By its own stopwatch: TTFT {ttft_ms:.1f} ms; TPOT {tpot_ms:.1f} ms, over "
        f"{metrics.num_output_tokens - 1} gaps.",
        measured=True,
    )


def tell_rates(story: Story, world: World) -> dict[tuple[str, int], float]:
    """Returns the seconds of a step, by ("prompt", its length) or ("decode", batch size)."""
    story.part("The two phases, in tokens per second")
    seconds = {("prompt", n): world.prefill_s(n) for n in PROMPT_LENS}
    seconds |= {("decode", n): step_s for n, step_s in world.decode_s(BATCH_SIZES).items()}
    decodes = f"Decode steps at a context of about {CONTEXT} tokens, the median of up to {NUM_DECODE_STEPS}:"
    for kind, column, told, sizes in (
        ("prompt", "prompt", "The first table shows a whole prompt in one step, the best of up to three:", PROMPT_LENS),
        ("decode", "sequences", decodes, BATCH_SIZES),
    ):
        story.say(told)
        table = make_table(column, "ms a step", "tokens/s")
        for n in sizes:
            step_s = seconds[kind, n]
            table.add_row(str(n), f"{step_s * 1e3:.1f}", f"{n / step_s:,.0f}", "(measured)")
        story.show(table)
    times = seconds["decode", 16] / seconds["decode", 1]
    story.say(
        f"Sixteen sequences take {times:.1f} times as long as one, and give 16 tokens instead of one.", measured=True
    )
    return seconds


def tell_roofline(story: Story, world: World, seconds: dict[tuple[str, int], float]) -> None:
    story.part("Bytes and FLOPs on this machine")
    runner = world.engine.model_runner
    bytes_per_s, flops_per_s = read_rate(runner.device), compute_rate(runner.device, runner.dtype)
    story.machine = {"GB/s": bytes_per_s / 1e9, "GFLOP/s": flops_per_s / 1e9}
    story.say(
        f"Reads {bytes_per_s / 1e9:.0f} GB/s, does {flops_per_s / 1e9:,.0f} GFLOP/s in matrix products: "
        f"{flops_per_s / bytes_per_s:.0f} FLOPs a byte.",
        measured=True,
    )
    story.say(
        "The table shows what each step would take if only its bytes counted, or only its FLOPs; and what it took:"
    )
    table = make_table("step", "FLOPs a byte", "bytes, ms", "FLOPs, ms", "took, ms", width=11)
    for (kind, n), step_s in sorted(seconds.items(), key=lambda item: item[0]):
        chunks = decode_chunks(n, CONTEXT) if kind == "decode" else [prompt_chunk(0, n, n)]
        cost = world.on_paper.cost(chunks)
        memory_s, compute_s = cost.read_bytes / bytes_per_s, cost.flops / flops_per_s
        name = f"{n} x decode" if kind == "decode" else f"prompt of {n}"
        times = (f"{value * 1e3:.1f}" for value in (memory_s, compute_s, step_s))
        table.add_row(name, f"{cost.intensity:.1f}", *times, "(measured)")
    story.show(table)
    story.say(
        "The larger of the two floors is the one that counts: bytes for a few decodes, FLOPs for long prompts. What a "
        "step took above it went into attention, small operations, Python, and whatever else this machine was doing."
    )


def tell_budgets(story: Story, world: World) -> None:
    story.part("Moving the chunk size")
    story.say(
        f"Request A is decoding. Request B arrives with a prompt of {LONG_PROMPT:,} tokens. max_num_batched_tokens is "
        "all that differs. Until B's first token:"
    )
    arrivals = {budget: repeat(partial(world.newcomer, budget), 3) for budget in BUDGETS}
    table = make_table("budget", "steps", "tokens of B in each step", "A's tokens meanwhile")
    for budget, runs in arrivals.items():
        sizes, _ = runs[0]
        whole, last = len(sizes) - 1, sizes[-1]
        shape = f"{whole} x {sizes[0]}, then {last}" if whole else f"{last}"
        table.add_row(str(budget), str(len(sizes)), shape, str(len(sizes)))
    story.show(table)
    story.say("The steps under a budget of 256, 16 prompt tokens a cell:")
    story.show(draw_steps(arrivals[256][0][0]))
    story.say("This is what the two users notice, the median of up to three runs:")
    table = make_table("budget", "B's TTFT, ms", "A waits at most, ms", "A waits usually, ms")
    for budget, runs in arrivals.items():
        times = (f"{median(values) * 1e3:.0f}" for values in zip(*(seconds for _, seconds in runs), strict=True))
        table.add_row(str(budget), *times, "(measured)")
    story.show(table)
    story.say(
        "The longest pause of A shrinks with the budget. The price is more steps: each reads all weights again, and "
        "each later chunk reads the K and V of those before it. How much of that B notices depends on the machine."
    )
