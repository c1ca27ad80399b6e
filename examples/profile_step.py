"""Where the time of a step goes (chapter 10).

    python examples/profile_step.py [MODEL] [--batch 32] [--context 256] [--prompt 1024] [--contexts]

Measures a prefill of one prompt and decodes of a batch, part by part, against the floor of each part: what its bytes
take at this machine's read bandwidth, or its multiplications at this machine's best matrix product, whichever is more.
The ratio says how many times as long as its floor a part takes. Floors are those of layers that see all tokens, without
a sliding window.
Before that it prints how long a decode step takes, and how much of it is spent outside C functions (Python's share),
with the step recorded and replayed (nanovllm/worker/cpu/recorded_step.py) and without. Part by part, nothing is
replayed. All this is for dense models; experts, states and weights of few bits have no such floors.
--contexts: time per decoded token of one sequence against the length of its context, beside the bandwidth floor.
On a GPU: where Python is in a decode step, and what PyTorch's profiler says of the GPU meanwhile.
"""

import dataclasses
import json
import random
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from measuring import arguments, positive, table, timed
from measuring import seconds as stopwatch
from rich.console import Console

from nanovllm import LLM, SamplingParams
from nanovllm.request import Request
from nanovllm.tools.demo_model import model_or_demo
from nanovllm.worker import model_runner
from nanovllm.worker.layers import GatedLinear, Linear, OutputHead

NUM_STEPS = 20
MOST_STEPS = 3 * NUM_STEPS  # of a request: while others get their first token, and while all are measured
console = Console(highlight=False)
seconds: dict[str, float] = defaultdict(float)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--context", type=positive, default=256)
    parser.add_argument("--prompt", type=positive, default=1024)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--enforce-eager", action="store_true", help="plain PyTorch, for comparison")
    parser.add_argument("--contexts", action="store_true")
    args = parser.parse_args()
    llm = LLM(
        model_or_demo(args.model),
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        enforce_eager=args.enforce_eager,
        enable_prefix_caching=False,
        max_num_batched_tokens=max(args.prompt, 2 * args.batch, 1024),  # decodes leave room for prompts
        max_num_seqs=max(args.batch, 256),
    )
    longest = llm.engine.kv_pool.max_model_len
    if not args.contexts and max(args.prompt, args.context + MOST_STEPS) >= longest:
        needed = f"--prompt and one more, and --context and {MOST_STEPS} more"
        parser.error(f"a sequence of this model has {longest:,} tokens at most, and must have room for {needed}")
    runner = llm.engine.model_runner
    if runner.device.type != "cpu":
        show_gpu(llm, sorted({1, args.batch}), args.context)
        return
    config = llm.engine.model_config
    if config.expert_layers or config.hybrid is not None or config.is_quantized:
        others = "of experts, of layers with a state and of weights of few bits"
        sys.exit(f"on a CPU this measures dense models: it knows no floors {others}")
    # Where a processor cannot multiply bf16, float32 is faster, and the C kernels compute with that.
    gb_per_s, gflops = read_bandwidth(), max(matmul_rate(dtype) for dtype in (runner.dtype, torch.float32))
    console.print(f"This machine: {gb_per_s:.0f} GB/s read, {gflops:,.0f} GFLOP/s in matrix products\n")
    if args.contexts:
        show_contexts(llm, gb_per_s)
        return
    show_python(llm, sorted({1, args.batch}), args.context)

    def floor_ms(num_rows: int, num_sampled: int, keys_read: int, pairs: int) -> dict[str, float]:
        """Lower bounds: linear layers read every weight once, attention reads every key and value once."""
        config, size = llm.engine.model_config, runner.dtype.itemsize
        head = config.vocab_size * config.hidden_size
        body = sum(p.numel() for n, p in shapes(llm)) - head
        linear = max((body + head) * size / gb_per_s / 1e9, 2 * (body * num_rows + head * num_sampled) / gflops / 1e9)
        kv_bytes = keys_read * runner.kv_config.kv_bytes_per_token(runner.kv_dtype.itemsize)
        attention_flops = 4 * pairs * config.num_attention_heads * config.head_dim * config.num_hidden_layers
        attention = max(kv_bytes / gb_per_s / 1e9, attention_flops / gflops / 1e9)
        return {"linear layers": linear * 1e3, "attention": attention * 1e3}

    with ExitStack() as timers:
        add_timers(llm, timers)
        for _ in range(2):  # the first warms up
            request(llm, args.prompt, 1)
            prefill_s = timed_steps(llm, 1)
        floor = floor_ms(args.prompt, 1, args.prompt, args.prompt * (args.prompt + 1) // 2)
        draw(f"Prefill of {args.prompt} tokens", prefill_s, 1, floor)

        for _ in range(args.batch):
            request(llm, args.context)
        until_all_decode(llm)
        decode_s = timed_steps(llm, NUM_STEPS)
        keys = args.batch * (args.context + NUM_STEPS // 2)
        draw(
            f"Decode, batch {args.batch}, context {args.context}",
            decode_s,
            NUM_STEPS,
            floor_ms(args.batch, args.batch, keys, keys),
        )


def request(llm: LLM, num_prompt: int, num_output: int | None = None, stream: bool = True) -> str:
    """Add a request with a random prompt. num_output: None: as long as it can be, so that it does not end meanwhile."""
    num_output = num_output or llm.engine.kv_pool.max_model_len - num_prompt
    prompt = random.choices(range(100, llm.engine.model_config.vocab_size), k=num_prompt)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_output)
    return llm.engine.add_request(None, prompt, params, stream=stream)


def until_all_decode(llm: LLM) -> None:
    """Step until every request that has been added has its first token. Ends the script if they do not fit at once."""
    scheduler, stats = llm.engine.scheduler, llm.engine.stats
    num_preempted = scheduler.num_preemptions
    while scheduler.waiting or any(seq.num_generated_tokens == 0 for seq in scheduler.running):
        num_prefilled = stats.num_prefill_tokens
        llm.engine.step()
        is_stuck = scheduler.waiting and stats.num_prefill_tokens == num_prefilled
        if is_stuck or scheduler.num_preemptions > num_preempted:
            num, room = len(scheduler.seqs), llm.engine.kv_pool.num_blocks * llm.engine.kv_pool.block_size
            sys.exit(f"{num} requests do not fit into the KV pool at once, which has room for {room:,} tokens")


def show_python(llm: LLM, batches: list[int], context: int) -> None:
    """Decode steps and the part of them that is spent outside C functions, of requests whose text nobody reads yet."""
    runner = llm.engine.model_runner
    library, recorder, recorded = runner.kernels.library, runner.kernels.recorder, runner.recorded_steps
    if library is None or runner.device.type != "cpu":
        return
    in_c: dict[str, float] = {}
    rows = table("Decode steps, median", "batch", "", "ms a step", "of it Python")
    timers = ExitStack()
    timers.enter_context(mock.patch.object(recorder, "call", timed(in_c, "C", recorder.call)))
    timers.enter_context(mock.patch.object(library, "replay", timed(in_c, "C", library.replay)))
    for batch in batches:
        ids = [request(llm, context, stream=False) for _ in range(batch)]
        until_all_decode(llm)
        for how, replayed in (("recorded", recorded), ("call by call", None)):
            if how == "recorded" and replayed is None:
                continue
            runner.recorded_steps = replayed
            steps = []
            for _ in range(NUM_STEPS):
                in_c.clear()
                step_s = stopwatch(llm.engine.step)
                steps.append((step_s, in_c.get("C", 0.0)))
            step_s, python_s = (statistics.median(s) for s in zip(*((s, s - c) for s, c in steps), strict=True))
            rows.add_row(str(batch), how, f"{step_s * 1e3:.2f}", f"{python_s * 1e3:.2f}")
        runner.recorded_steps = recorded
        llm.engine.abort_request(ids)
    timers.close()
    console.print(rows, "")


def timed_steps(llm: LLM, num: int) -> float:
    seconds.clear()
    return sum(stopwatch(llm.engine.step) for _ in range(num))


def add_timers(llm: LLM, timers: ExitStack) -> None:
    """Put a stopwatch around each part of the step, until `timers` is closed."""

    engine, runner = llm.engine, llm.engine.model_runner
    for owner, name, part in (
        (engine.scheduler, "schedule", "scheduling"),
        (engine.scheduler, "update", "scheduling"),
        (Request, "add_tokens", "detokenizing, outputs"),
        (Request, "output", "detokenizing, outputs"),
        (model_runner.Batch, "from_scheduler_output", "preparing tensors"),
        (model_runner, "sample_rows", "sampling"),
        (Linear, "forward", "linear layers"),
        (GatedLinear, "forward", "linear layers"),
        (OutputHead, "forward", "linear layers"),
    ):
        timers.enter_context(mock.patch.object(owner, name, timed(seconds, part, getattr(owner, name))))
    functions = (
        field.name
        for field in dataclasses.fields(runner.kernels)
        # choose_tokens is a part of sample_rows(), gated_linear one of GatedLinear.forward()
        if field.name not in ("choose_tokens", "gated_linear", "library", "dtype", "recorder", "load_wing", "made")
    )
    parts = dict.fromkeys(functions, "small operations")
    parts["paged_attention"] = "attention"
    runner.kernels = dataclasses.replace(
        runner.kernels, **{name: timed(seconds, part, getattr(runner.kernels, name)) for name, part in parts.items()}
    )


def draw(title: str, total_s: float, num_steps: int, floor: dict[str, float]) -> None:
    found = table(title, "part", "ms a step", "share", "floor ms", "ratio", "")
    found.columns[-1].justify = "left"
    parts = ("scheduling", "preparing tensors", "linear layers", "attention", "small operations", "sampling")
    rows = {part: seconds[part] for part in (*parts, "detokenizing, outputs")}
    rows["Python between them"] = total_s - sum(seconds.values())
    for part, part_s in rows.items():
        ms, share = part_s / num_steps * 1e3, part_s / total_s
        bound, ratio = (f"{floor[part]:.1f}", f"{ms / floor[part]:.2f}") if part in floor else ("", "")
        found.add_row(part, f"{ms:.2f}", f"{share:.1%}", bound, ratio, "█" * round(share * 12))
    found.add_section()
    ms, bound_ms = total_s / num_steps * 1e3, sum(floor.values())
    found.add_row("step", f"{ms:.2f}", "", f"{bound_ms:.1f}", f"{ms / bound_ms:.2f}", "")
    console.print(found)
    control = seconds["scheduling"] + seconds["preparing tensors"] + seconds["detokenizing, outputs"]
    console.print(f"Scheduling, preparation and bookkeeping: {control / total_s:.1%} of the step.\n")


def show_contexts(llm: LLM, gb_per_s: float) -> None:
    """Time per decoded token against context length."""
    runner = llm.engine.model_runner
    weights = sum(parameter.numel() for _, parameter in shapes(llm)) * runner.dtype.itemsize
    kv_bytes = runner.kv_config.kv_bytes_per_token(runner.kv_dtype.itemsize)
    columns = ("ms a token", "more than before", "floor: bytes / bandwidth", "more than before")
    rows = table("One sequence: time per decoded token", "context", *columns)
    previous = None
    num_output = NUM_STEPS + 2
    for context in (16, 1000, 2000, 4000, 8000):
        if context + num_output > llm.engine.kv_pool.max_model_len:
            break
        request(llm, context, num_output)
        until_all_decode(llm)
        ms = timed_steps(llm, NUM_STEPS) / NUM_STEPS * 1e3
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        floor = (weights + context * kv_bytes) / gb_per_s / 1e6
        more = ("", "") if previous is None else (f"{ms - previous[0]:.2f}", f"{floor - previous[1]:.2f}")
        rows.add_row(f"{context:,}", f"{ms:.2f}", more[0], f"{floor:.2f}", more[1])
        previous = (ms, floor)
    console.print(rows)


def shapes(llm: LLM) -> list[tuple[str, torch.Tensor]]:
    """Parameters that a step multiplies with, by shape (without data: they may have been reordered)."""
    from nanovllm.worker.model import Decoder

    with torch.device("meta"):
        return [(n, p) for n, p in Decoder(llm.engine.model_config).named_parameters() if n != "lm_head.weight"]


def read_bandwidth() -> float:
    """GB/s of a sum over 512 MB, the best of five."""
    data = torch.ones(128 << 20)
    return max(data.nbytes / stopwatch(data.sum) for _ in range(5)) / 1e9


def matmul_rate(dtype: torch.dtype) -> float:
    """GFLOP/s of a large matrix product, the best of five."""
    x, weight = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    return max(2 * 1024 * 2048 * 2048 / stopwatch(lambda: F.linear(x, weight)) for _ in range(5)) / 1e9


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def show_gpu(llm: LLM, batches: list[int], context: int) -> None:
    found = []
    for batch in batches:
        ids = [request(llm, context, stream=False) for _ in range(batch)]
        until_all_decode(llm)
        host = host_times(llm, NUM_STEPS)
        found.append({"batch": batch} | host | gpu_times(llm.engine.step, NUM_STEPS, host["step"]))
        llm.engine.abort_request(ids)
    rows = table("Decode steps: median ms in Python; then, of one step, what the GPU has done", *found[0])
    for row in found:
        rows.add_row(*(f"{value:.3g}" for value in row.values()))
    console.print(rows)


def host_times(llm: LLM, num_steps: int) -> dict[str, float]:
    """Where Python is in the median of so many steps, in ms. step: the whole; run: what the runner does but pack."""
    engine = llm.engine
    places = {
        "schedule": (engine.scheduler, "schedule"),
        "pack": (model_runner, "pack"),
        "run": (engine.model_runner, "run"),
        "update": (engine, "update"),
        "outputs": (engine, "make_outputs"),
    }
    spent: dict[str, float] = {}
    steps = []
    with ExitStack() as patches:
        for name, (owner, attribute) in places.items():
            patches.enter_context(mock.patch.object(owner, attribute, timed(spent, name, getattr(owner, attribute))))
        torch.cuda.synchronize()
        for _ in range(num_steps):
            spent.clear()
            steps.append({"step": stopwatch(engine.step), **spent})
    median = {name: 1e3 * statistics.median(step[name] for step in steps) for name in steps[0]}
    median["run"] -= median["pack"]
    return median


def gpu_times(step: Callable[[], object], num_steps: int, wall_ms: float | None = None) -> dict[str, float]:
    """What torch.profiler says of one of the next num_steps steps, in which Python is slower.

    wall_ms: what a step takes without the profiler; without it, nothing is said of how long the GPU is idle.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # the first time sets the profiler up
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("decode steps"):
            for _ in range(num_steps):
                step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return read_trace(json.loads(trace.read_text("utf-8"))["traceEvents"], num_steps, wall_ms)


def read_trace(events: list[dict[str, Any]], num_steps: int, wall_ms: float | None) -> dict[str, float]:
    """Events of a trace, in microseconds, as numbers of one step. Calls outside of "decode steps" do not count."""
    events = [event for event in events if event.get("ph") == "X"]
    [steps] = [event for event in events if event["name"] == "decode steps" and event["cat"] == "user_annotation"]
    begin, end = steps["ts"], steps["ts"] + steps["dur"]
    kernels = [event for event in events if event["cat"] == "kernel"]
    copies = [event for event in events if event["cat"] == "gpu_memcpy"]
    on_gpu = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [e["name"] for e in events if e["cat"] in ("cuda_runtime", "cuda_driver") and begin <= e["ts"] <= end]
    busy = reached = 0.0
    for event in sorted(on_gpu, key=lambda event: event["ts"]):
        finish = event["ts"] + event["dur"]
        busy += max(finish - max(event["ts"], reached), 0)
        reached = max(reached, finish)

    def number(found: list) -> float:
        return len(found) / num_steps

    idle = {} if wall_ms is None else {"ms GPU idle": wall_ms - busy / num_steps / 1e3}
    return {
        "kernels": number(kernels),
        "ms in kernels": sum(event["dur"] for event in kernels) / num_steps / 1e3,
        **idle,
        "copies to GPU": number([e for e in copies if "HtoD" in e["name"]]),
        "from GPU": number([e for e in copies if "DtoH" in e["name"]]),
        "waits": number([name for name in calls if "Synchronize" in name]),
        "launches": number([name for name in calls if re.match(r"cu(da)?LaunchKernel", name)]),
        "graphs": number([name for name in calls if re.match(r"cu(da)?GraphLaunch", name)]),
    }


if __name__ == "__main__":
    with torch.inference_mode():
        main()
