"""A hybrid model measured on this machine: its prefix cache, its speed, and what it costs as texts grow (chapter 16).

    python examples/bench_hybrid.py [MODEL] [--parts snapshots engines length] [--prompt 900] [--vllm-python PATH]

1. what share of an unbounded cache's savings several ways to place snapshots reach, in ten workloads, with the engine's
own scheduler and no model; 2. this engine, llama.cpp, transformers and vLLM on a prompt of --prompt tokens and one
stream, each in a process of its own (--only chooses among them; bench_peers.py says what to install); 3. what the
recurrence costs, how decode slows down with length, and the memory of a sequence.
Without MODEL, the model has the shape of Qwen3.5-0.8B and random weights. It is made once, 1.5 GB in the user's cache
folder.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from bench_peers import run_worker
from bench_prefix_cache import workloads as earlier_workloads
from measuring import (
    add_some_of,
    arguments,
    console,
    greedy,
    positive,
    program,
    progress,
    prompt_ids,
    random_checkpoint,
    seconds,
    table,
    timed,
    vocab_size_of,
)
from profile_step import until_all_decode

from nanovllm import LLM
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.hybrid.hybrid_kernels import kernels_for
from nanovllm.files.hub import cache_folder, resolve_checkpoint
from nanovllm.tools.demo_model import model_or_demo

sys.path.insert(0, str(Path(__file__).parents[1]))  # chapters/ is not installed
from chapters.ch16_fixed_memory.placing import (
    BLOCK_SIZE,
    POLICIES,
    UNBOUNDED,
    Requests,
    every_block,
    hard_workloads,
    play,
    random_ids,
)

NUM_PROMPT = 900
LENGTHS = 16, 1_000, 4_000, 8_000
SHAPE: dict[str, Any] = dict(
    vocab_size=248_320,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=24,  # every fourth attends
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=32_768,
)
QWEN3_06B_KV_BYTES = 28 * 8 * 128 * 2 * 2  # a token's K/V in Qwen3-0.6B: layers, K/V heads, head size, K and V, bf16
ENGINES = {  # label: (its name in bench_peers.py, dtype)
    "nanovllm": ("nanovllm", "bfloat16"),
    "nanovllm, int8": ("nanovllm, int8", "bfloat16"),
    "nanovllm, int4": ("nanovllm, int4", "bfloat16"),
    "nanovllm, float32": ("nanovllm", "float32"),
    "transformers, float32": ("transformers, one by one", "float32"),
    "transformers, bf16": ("transformers, one by one", "bfloat16"),
    "vLLM, bf16": ("vLLM, eager", "bfloat16"),
    "llama.cpp, Q8_0": ("llama.cpp, Q8_0", "bfloat16"),
    "llama.cpp, Q4_0": ("llama.cpp, Q4_0", "bfloat16"),
}


def main() -> None:
    parser = arguments(__doc__, model="a hybrid checkpoint's directory")
    parts = {"snapshots": show_snapshots, "engines": show_engines, "length": show_length}
    add_some_of(parser, "--parts", parts)
    parser.add_argument("--vllm-python", type=program, default=sys.executable, help="the Python that has vLLM")
    add_some_of(parser, "--only", ENGINES)
    parser.add_argument("--prompt", type=positive, default=NUM_PROMPT, help="tokens of part 2's prompt")
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=LENGTHS, help="tokens before the steps of part 3"
    )
    parser.add_argument("--repeats", type=positive, default=3)
    args = parser.parse_args()
    model = model_or_demo(args.model or str(make_checkpoint()))
    if ModelConfig.from_directory(resolve_checkpoint(model, load_format="dummy")).hybrid is None:
        sys.exit(f"{model} is no hybrid model")
    for part in args.parts:
        parts[part](model, args)


def make_checkpoint() -> Path:
    """A hub checkpoint's files: config.json, weights in bf16, a tokenizer (the demo model's)."""
    folder = cache_folder() / "Qwen3.5-0.8B-shaped"
    if folder.exists():
        return folder
    with console().status(f"making {folder}, 1.5 GB"):
        from transformers.models.qwen3_5 import Qwen3_5TextConfig

        rope = dict(rope_type="default", rope_theta=10_000_000.0, partial_rotary_factor=0.25)
        mrope = dict(mrope_section=[11, 11, 10], mrope_interleaved=True)
        config = Qwen3_5TextConfig(**SHAPE, rope_parameters=rope | mrope)
        random_checkpoint(folder.with_name(f"{folder.name}.unfinished"), config).rename(folder)
    return folder


# -- 1. snapshots ------------------------------------------------------------------------------------------------------


def workloads() -> dict[str, Requests]:
    """Four that are hard on a cache of states, then the six of bench_prefix_cache.py."""
    found = hard_workloads()
    for name, _, _, make in earlier_workloads(20):
        found[name] = [(prompt, [7] * 4) for prompt in make(random.Random(0))]
    return found


def show_snapshots(model: str, args: argparse.Namespace) -> None:
    """The bound is the one that the engine chooses on this machine."""
    slots = LLM(model, block_size=BLOCK_SIZE).engine.model_runner.states.slots
    given = workloads()
    for bound in (slots.max_snapshots, 8):
        title = f"1. What snapshots save, at most {bound}: part of the tokens that an unbounded cache saves"
        rows = table(title, "workload", "unbounded", *POLICIES)
        for name, requests in progress(given.items(), "workloads"):
            unbounded = sum(play(requests, every_block, UNBOUNDED))
            saved = [sum(play(requests, policy, bound)) for policy in POLICIES.values()]
            parts = [f"{n / unbounded:.0%}" if unbounded else "-" for n in saved]
            rows.add_row(name, f"{unbounded:,}", *parts)
        console().print(rows, "")


# -- 2. engines --------------------------------------------------------------------------------------------------------


def show_engines(model: str, args: argparse.Namespace) -> None:
    """As bench_peers.py measures them, each in a process of its own."""
    vocab_size = vocab_size_of(model)
    columns = ("TTFT", "from the cache", "one stream", "start", "peak memory")
    rows = table(f"2. A prompt of {args.prompt:,} tokens, and one stream", "engine", *columns)
    for label in args.only:
        name, dtype = ENGINES[label]
        options = dict(requests=0, prompt=args.prompt, stream=32, sampling=False, repeats=args.repeats, dtype=dtype)
        with console().status(f"{label} ..."):
            found = run_worker(
                name, model, argparse.Namespace(**options, vllm_python=args.vllm_python, vocab_size=vocab_size)
            )
        if isinstance(found, str):
            console().print(f"{label}: {found}")
            continue
        cached = "-" if found["ttft_cached"] is None else f"{found['ttft_cached']:.2f} s"
        row = f"{found['ttft_cold']:.2f} s", cached, f"{found['stream']:.1f} tokens/s"
        rows.add_row(
            label, *row, f"{found['start']:.0f} s", "-" if found["memory"] is None else f"{found['memory']:,.0f} MB"
        )
    if not rows.rows:
        sys.exit("no engine could be measured")
    console().print(rows, "")


# -- 3. length ---------------------------------------------------------------------------------------------------------


def show_length(model: str, args: argparse.Namespace) -> None:
    unrecorded = ("reordered_weights", "c_kernels")  # a replayed step calls no kernel by its name
    llm = LLM(
        model, max_model_len=max(*args.lengths, NUM_PROMPT) + 100, max_num_batched_tokens=1024, optimizations=unrecorded
    )
    rng, token_ids = random.Random(0), prompt_ids(llm.engine.model_config.vocab_size)

    def generate(prompt: list[int], num_output: int) -> float:
        return seconds(llm.generate, [prompt], greedy(num_output), use_tqdm=False)

    generate(random_ids(rng, NUM_PROMPT, token_ids), 2)  # warm up
    in_kernels = time_kernels(llm)

    def step_ms(prompt: list[int], num: int) -> tuple[float, dict[str, float]]:
        """Milliseconds of a step after the first token: the whole step, and the kernels' parts."""
        llm.engine.add_request(None, prompt, greedy(num + 1), stream=False)
        until_all_decode(llm)  # the step that gives the first token computes rows of the prompt
        in_kernels.clear()
        total = sum(seconds(llm.engine.step) for _ in range(num))
        return total / num * 1e3, {name: value / num * 1e3 for name, value in in_kernels.items()}

    prefill_s, part = generate(random_ids(rng, NUM_PROMPT, token_ids), 1), in_kernels["delta_net"]
    console().print(
        f"[bold]3. Length.[/] Of a prefill of {NUM_PROMPT} tokens ({prefill_s:.2f} s) convolution, recurrence and "
        f"gated norm take {part:.2f} s, {part / prefill_s:.1%}."
    )
    columns = ("step", "of it attention", "of it recurrence", "the rest")
    rows = table("A step of one stream after so many tokens, median of 5 runs of 16 steps", "tokens before", *columns)
    for length in args.lengths:
        prompt = random_ids(rng, length, token_ids)
        found = sorted((step_ms(prompt, 16) for _ in range(5)), key=lambda pair: pair[0])
        total, kernels = found[len(found) // 2]
        attention, recurrence = kernels["paged_attention"], kernels["delta_net"]
        row = total, attention, recurrence, total - attention - recurrence
        rows.add_row(f"{length:,}", *(f"{ms:.1f} ms" for ms in row))
    console().print(rows)
    config, state = llm.engine.model_config, llm.engine.model_runner.states.slot_bytes
    kv = 8000 * config.kv_bytes_per_token(2)
    ours, same, smaller = kv + state, kv * config.num_hidden_layers / config.num_kv_layers, 8000 * QWEN3_06B_KV_BYTES
    console().print(
        f"Memory of a sequence of 8,000 tokens: K/V {kv / 1e6:.0f} MB and state {state / 1e6:.0f} MB, together "
        f"{ours / 1e6:.0f} MB. If every layer attended: {same / 1e6:.0f} MB, {ours / same:.2f} of it. Qwen3-0.6B, "
        f"where every layer does: {smaller / 1e6:.0f} MB, {ours / smaller:.2f} of it."
    )


def time_kernels(llm: LLM) -> dict[str, float]:
    """Seconds in these C functions from now on: attention's, and the wing's own."""
    kernels, spent = llm.engine.model_runner.kernels, dict[str, float]()
    if kernels.library is None:
        sys.exit("part 3 times C functions, and there is no C compiler here")
    delta_net: Any = kernels_for(kernels).delta_net  # a partial(function, kernels, library)
    for name, library in (("paged_attention", kernels.library), ("delta_net", delta_net.args[1])):
        setattr(library, name, timed(spent, name, getattr(library, name)))
    return spent


if __name__ == "__main__":
    main()
