"""Offline throughput: random prompts, random output lengths, greedy, EOS ignored (the workload of nano-vllm's bench).

    python examples/bench_throughput.py                       32 requests on the demo checkpoint
    python examples/bench_throughput.py MODEL --num-requests 256 --max-input 1024 --max-output 1024
    python examples/bench_throughput.py MODEL --quantization compressed-tensors

With compressed-tensors, make_compressed.py first writes the model as others publish it in 4 bits (rounded to the
nearest), in a process of its own. That does not count as a part of the start.

Prints how long the start took, the rates of prefill, decode and output, the mean batch, and peak memory (chapter 11).
"""

import time

_started = time.perf_counter()  # start time counts the imports below

import argparse  # noqa: E402
import random  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NamedTuple  # noqa: E402

from measuring import arguments, compress_beside, console, greedy, positive, table  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.files.system import peak_memory_bytes  # noqa: E402
from nanovllm.tools.demo_model import model_or_demo  # noqa: E402


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-requests", type=positive, default=32)
    parser.add_argument("--min-input", type=positive, default=32, help="prompt tokens")
    parser.add_argument("--max-input", type=positive, default=256)
    parser.add_argument("--min-output", type=positive, default=32, help="output tokens")
    parser.add_argument("--max-output", type=positive, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["int8", "int4", "compressed-tensors"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.min_input > args.max_input or args.min_output > args.max_output:
        parser.error("--min-input must be at most --max-input, and --min-output at most --max-output")

    path = model_or_demo(args.model)
    with tempfile.TemporaryDirectory() as folder:
        writing = time.perf_counter()
        if args.quantization == "compressed-tensors":
            path = compress_beside(path, Path(folder, "packed"), "nearest")
        written_s = time.perf_counter() - writing
        max_model_len = args.max_input + args.max_output
        llm = LLM(path, dtype=args.dtype, quantization=args.quantization, max_model_len=max_model_len)
        start_s = time.perf_counter() - _started - written_s
        measure(llm, start_s, args)


def measure(llm: LLM, start_s: float, args: argparse.Namespace) -> None:

    rng = random.Random(args.seed)
    vocab_size = llm.engine.model_config.vocab_size
    work = []
    for _ in range(args.num_requests):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(args.min_input, args.max_input))]
        work.append((prompt, greedy(rng.randint(args.min_output, args.max_output))))
    with console().status(f"{args.num_requests} requests"):
        steps = list(steps_of(llm, work))

    prefills = [step for step in steps if step.num_prefill_tokens]
    decodes = [step for step in steps if not step.num_prefill_tokens]
    prefill_s, decode_s = (sum(step.seconds for step in some) for some in (prefills, decodes))
    num_prompt = sum(step.num_prefill_tokens for step in prefills)
    num_riding, num_decoded = (sum(step.num_decode_tokens for step in some) for some in (prefills, decodes))
    num_output = llm.engine.stats.num_output_tokens
    seconds = prefill_s + decode_s
    peak = f"{peak_bytes / 1e6:,.0f}" if (peak_bytes := peak_memory_bytes()) else "-"  # Windows does not say
    weights_mb = llm.engine.model_runner.weight_bytes / 1e6
    found = table(f"{args.num_requests} requests, {num_prompt:,} prompt tokens", "", "", show_header=False)
    found.columns[1].justify = "left"
    found.add_row("start (import to ready)", f"{start_s:.1f} s")
    found.add_row("prefill", f"{num_prompt / prefill_s:,.0f} tokens/s  ({num_riding} decodes beside it)")
    found.add_row("decode", f"{num_decoded / max(decode_s, 1e-9):,.0f} tokens/s")
    found.add_row("output", f"{num_output / seconds:,.0f} tokens/s  ({num_output:,} tokens in {seconds:.1f} s)")
    found.add_row("mean batch", f"{num_output / len(steps):.1f} sequences sampled a step")
    found.add_row("peak memory", f"{peak} MB resident, {weights_mb:,.0f} of them weights")
    console().print(found)


class Step(NamedTuple):
    """A step that computes prompt tokens counts as prefill; the decodes beside them are counted apart."""

    seconds: float
    num_prefill_tokens: int
    num_decode_tokens: int


def steps_of(llm: LLM, work: list[tuple[list[int], SamplingParams]]) -> Iterator[Step]:
    """Serve these requests, all of them submitted at once. Yields after each step, until the last has ended."""
    engine, stats = llm.engine, llm.engine.stats
    for prompt, params in work:
        engine.add_request(None, prompt, params, stream=False)
    while engine.has_unfinished_requests():
        num_prefilled, num_decoded = stats.num_prefill_tokens, stats.num_decode_tokens
        started = time.perf_counter()
        engine.step()
        elapsed = time.perf_counter() - started
        yield Step(elapsed, stats.num_prefill_tokens - num_prefilled, stats.num_decode_tokens - num_decoded)


if __name__ == "__main__":
    main()
