"""Offline throughput: random prompts, random output lengths, greedy, EOS ignored (the workload of nano-vllm's bench).

    python examples/bench_throughput.py                       32 requests on the demo checkpoint
    python examples/bench_throughput.py MODEL --num-requests 256 --max-input 1024 --max-output 1024

Prints how long the start took, the rates of prefill, decode and output, the mean batch, and peak memory (chapter 11).
"""

import time

_started = time.perf_counter()  # start time counts the imports below

import argparse  # noqa: E402
import random  # noqa: E402

from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.files.system import peak_memory_bytes  # noqa: E402
from nanovllm.tools.demo_model import model_or_demo  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory or hub id (default: the demo checkpoint)")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--min-input", type=int, default=32, help="prompt tokens")
    parser.add_argument("--max-input", type=int, default=256)
    parser.add_argument("--min-output", type=int, default=32, help="output tokens")
    parser.add_argument("--max-output", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    path = model_or_demo(args.model)
    max_model_len = args.max_input + args.max_output
    llm = LLM(path, dtype=args.dtype, quantization=args.quantization, max_model_len=max_model_len)
    start_s = time.perf_counter() - _started

    rng = random.Random(args.seed)
    vocab_size = llm.engine.model_config.vocab_size
    for _ in range(args.num_requests):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(args.min_input, args.max_input))]
        num_output = rng.randint(args.min_output, args.max_output)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_output)
        llm.engine.add_request(None, prompt, params, stream=False)

    # A step that computes prompt tokens counts as prefill; the decodes in such a step are counted separately.
    stats = llm.engine.stats
    prefill_s = decode_s = 0.0
    num_pure_decode_tokens = num_riding = 0
    for _ in track(range(args.num_requests), description="requests", console=Console(stderr=True)):
        finished = 0
        while not finished and llm.engine.has_unfinished_requests():
            prefilled, decoded, before = stats.num_prefill_tokens, stats.num_decode_tokens, time.perf_counter()
            finished = len(llm.engine.step())
            step_s = time.perf_counter() - before
            if stats.num_prefill_tokens > prefilled:
                prefill_s += step_s
                num_riding += stats.num_decode_tokens - decoded
            else:
                decode_s += step_s
                num_pure_decode_tokens += stats.num_decode_tokens - decoded

    num_output = stats.num_output_tokens
    seconds = prefill_s + decode_s
    peak_mb = peak_memory_bytes() / 1e6
    weights_mb = llm.engine.model_runner.weight_bytes / 1e6
    table = Table(title=f"{args.num_requests} requests, {stats.num_prefill_tokens:,} prompt tokens", show_header=False)
    for name, value in (
        ("start (import to ready)", f"{start_s:.1f} s"),
        ("prefill", f"{stats.num_prefill_tokens / prefill_s:,.0f} tokens/s  ({num_riding} decodes beside it)"),
        ("decode", f"{num_pure_decode_tokens / max(decode_s, 1e-9):,.0f} tokens/s"),
        ("output", f"{num_output / seconds:,.0f} tokens/s  ({num_output:,} tokens in {seconds:.1f} s)"),
        ("mean batch", f"{num_output / stats.num_steps:.1f} sequences sampled a step"),
        ("peak memory", f"{peak_mb:,.0f} MB resident, {weights_mb:,.0f} of them weights"),
    ):
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    main()
