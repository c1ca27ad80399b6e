"""What a GPU has to say about this engine, in one report: correctness, tests, memory, speed, where a step's time goes.

    python examples/gpu_report.py                        every part, eight minutes at most
    python examples/gpu_report.py --out PREFIX           writes PREFIX.md and PREFIX.json (default: gpu_report)
    python examples/gpu_report.py --parts memory,steps   only these
    python examples/gpu_report.py --short                tiny sizes: does every part work?
    python examples/gpu_report.py --pretend              the same on a pretend GPU, where there is none
    python examples/gpu_report.py --cpu                  only the CPU: 1, 2, 4, 8 and 16 threads, as many as it has

No network and no checkpoint is needed: checkpoints are made of random weights. Each part runs in a process of its own,
so neither a kernel that breaks the CUDA context nor a part that never ends spoils the others. Time that a part does not
use goes to those after it. Both files are rewritten after every part.
"""

import argparse
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import platform
import random
import re
import statistics
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests/, which makes checkpoints, and for this package where it is not installed

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.config import EngineConfig  # noqa: E402
from nanovllm.core.sequence import Sequence  # noqa: E402

Row = dict[str, Any]

# What each backend is to the engine. The first one that is installed is what an LLM without options takes.
BACKENDS = {
    "flash-attn, graphs": ("triton", "flash_attn", "cuda_graphs"),
    "flash-attn": ("triton", "flash_attn"),
    "Triton, graphs": ("triton", "cuda_graphs"),
    "Triton": ("triton",),
    "PyTorch": (),
}
# nano-vllm's bench.py runs this model. Its README reports, on its authors' hardware:
NANO_VLLM = "1,434 tokens/s for 133,966 output tokens, on an RTX 4070 Laptop (8 GB)"
QWEN3_06B = dict(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)
TINY = dict(
    vocab_size=10_240,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
# Of part "cpu": the demo model's shape, and Qwen2.5-0.5B's.
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=1e5)
QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=1e6)
SMOLLM2_135M = LLAMA | dict(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
)
QWEN25_05B = QWEN2 | dict(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
)
NUM_THREADS = (16, 8, 4, 2, 1)  # the most first: they are the fastest, should time run out

NUM_TOKENS = 10_000  # prompts are made of this many of them

TIE = 1e-4  # where transformers' two best logits are closer than this, either token is right
# tests/conftest.py reads an option of pytest-xdist, which need not be installed.
PYTEST = """
import importlib.util, sys, pytest
class Options:
    def pytest_addoption(self, parser):
        if importlib.util.find_spec("xdist") is None:
            parser.addoption("--numprocesses", default=None)
sys.exit(pytest.main(sys.argv[1:], [Options()]))
"""
GRACE_S = 10  # a part that has run out of time ends itself; after so many seconds more it is ended
MOST_S = 480  # of all parts together
WARM_STEPS = 2


@dataclass(frozen=True)
class Sizes:
    variants: tuple[str, ...]  # architectures, none: all
    left_out: tuple[str, ...]  # backends
    half_dtypes: tuple[str, ...]
    prompt_lens: tuple[int, ...]  # of part "agreement"
    num_output: int
    tiny_options: dict[str, int]  # of the engines there
    model: dict[str, int]
    dtype: str
    model_options: dict[str, int]  # of the engine that runs it
    num_requests: int
    input_lens: tuple[int, int]
    output_lens: tuple[int, int]
    num_slow: int  # requests that PyTorch's backend gets
    slow_output: int  # and at most so many tokens of each
    ttft_len: int
    batches: tuple[int, ...]
    context: int  # prompt tokens of each sequence whose decodes are profiled
    num_steps: int  # timed, and as many profiled
    copy_bytes: int
    test_paths: tuple[str, ...]
    cpu_models: dict[str, dict[str, Any]]
    cpu_requests: int  # of the mixed load
    cpu_input_lens: tuple[int, int]
    cpu_output_lens: tuple[int, int]
    cpu_prompt: int  # tokens of a prefill
    cpu_stream: int  # tokens of one stream


FULL = Sizes(
    variants=(),
    left_out=(),
    half_dtypes=("bfloat16", "float16"),
    prompt_lens=(1, 17, 40, 100, 100),
    num_output=16,
    tiny_options=dict(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256),
    model=QWEN3_06B,
    dtype="bfloat16",
    model_options=dict(max_model_len=4096),
    num_requests=256,
    input_lens=(100, 1024),
    output_lens=(100, 1024),
    num_slow=32,
    slow_output=64,
    ttft_len=2000,
    batches=(1, 32, 256),
    context=256,
    num_steps=10,
    copy_bytes=2 << 30,
    test_paths=("tests/worker/cuda",),
    cpu_models={"135M": SMOLLM2_135M, "0.5B": QWEN25_05B},
    cpu_requests=32,
    cpu_input_lens=(32, 256),
    cpu_output_lens=(32, 128),
    cpu_prompt=512,
    cpu_stream=64,
)
SHORT = Sizes(
    variants=("llama", "qwen3-moe"),
    left_out=("flash-attn", "Triton"),
    half_dtypes=("float16",),  # Triton's interpreter multiplies no bfloat16
    prompt_lens=(3, 17),
    num_output=3,
    tiny_options=dict(max_model_len=32, max_num_seqs=2, max_num_batched_tokens=32),
    model=TINY,
    dtype="float16",
    model_options=dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64),
    num_requests=4,
    input_lens=(8, 32),
    output_lens=(4, 8),
    num_slow=2,
    slow_output=4,
    ttft_len=40,
    batches=(1, 2, 4),
    context=8,
    num_steps=2,
    copy_bytes=1 << 20,
    test_paths=("tests/worker/cuda/test_kernels.py",),
    cpu_models={"tiny": LLAMA | TINY},
    cpu_requests=3,
    cpu_input_lens=(4, 16),
    cpu_output_lens=(2, 4),
    cpu_prompt=40,
    cpu_stream=4,
)


class OutOfTime(BaseException):
    """A part has used its time; the message says what it has left out. Not an Exception: it is no row's failure."""


@dataclass
class Section:
    """What a part has found so far. Every change goes to a file at once, so whoever ends the process loses nothing."""

    path: Path
    until: float  # time.time() at which the part should end
    rows: list[Row] = field(default_factory=list)  # neighbours with the same columns become one table
    notes: list[str] = field(default_factory=list)
    cut: str | None = None  # what was left out for want of time

    def add(self, row: Row) -> Row:
        """A row that may be completed later; then save()."""
        self.rows.append(row)
        self.save()
        return row

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.save()

    def save(self) -> None:
        write(self.path, json.dumps(dict(rows=self.rows, notes=self.notes, cut=self.cut), default=str))

    def seconds_left(self) -> float:
        return self.until - time.time()

    def begin(self, what: str) -> None:
        """Raise OutOfTime if no time is left for this, or CUDA's error if a kernel before it has broken the context."""
        if self.seconds_left() <= 0:
            raise OutOfTime(f"out of time before: {what}")
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


@dataclass
class Run:
    """What every part is given. gpu: the pretend one, or None; folder: for checkpoints, removed afterwards."""

    sizes: Sizes
    folder: Path
    gpu: Any = None


# -- the parts ----------------------------------------------------------------------------------------------------


def versions(run: Run, section: Section) -> None:
    """Each line on its own: one that cannot be answered says why."""
    asked: dict[str, Callable[[], object]] = {
        "Python": platform.python_version,
        "system": platform.platform,
        "CPU cores": os.cpu_count,
        "CUDA of this PyTorch": lambda: torch.version.cuda,
        "GPU": lambda: torch.cuda.get_device_properties(0).name,
        "compute capability": lambda: "{}.{}".format(*torch.cuda.get_device_capability()),
        "multiprocessors": lambda: torch.cuda.get_device_properties(0).multi_processor_count,
        "memory free and total, GB": lambda: " of ".join(f"{n / 1e9:.1f}" for n in torch.cuda.mem_get_info()),
        "memory bandwidth, GB/s (read and written by a large copy)": lambda: f"{bandwidth(run) / 1e9:,.0f}",
        "a CUDA graph is recorded and replayed": try_graph,
    }
    for package in ("torch", "triton", "flash-attn", "transformers", "safetensors", "xxhash", "pytest", "numpy"):
        section.add({"what": package, "found": attempt(version_of, package)})
    for what, ask in asked.items():
        section.add({"what": what, "found": attempt(ask)})
    for backend in ("flash-attn", "Triton", "PyTorch"):
        row = section.add({"asked for": backend})
        for dtype in ("float32", "float16", "bfloat16"):
            row[dtype] = attempt(choice_of_kernels, backend, dtype)
            section.save()


def agreement(run: Run, section: Section) -> None:
    """Greedy tokens in float32 beside transformers', then log-probabilities in half precision beside PyTorch's."""
    checkpoints, sizes = importlib.import_module("tests.checkpoints"), run.sizes
    backends = chosen_backends(run)[::-1]  # PyTorch first: the others are compared with it
    folders = {}
    for variant in sizes.variants or checkpoints.VARIANTS:
        try:
            folders[variant] = checkpoints.make_checkpoint(run.folder / variant, variant)
        except Exception as error:  # an older transformers may not know it
            section.note(f"{variant} could not be made: {describe(error)}")
    blank = dict.fromkeys(("tokens", *sizes.half_dtypes, "replays"), "")
    rows = {
        (variant, backend): section.add({"architecture": variant, "backend": backend, **blank})
        for variant in folders
        for backend in backends
    }
    rng = random.Random(0)
    prompts = [rng.choices(range(4, 320), k=length) for length in sizes.prompt_lens]
    prompts.append(prompts[-1][: sizes.prompt_lens[-1] // 2] + prompts[0])  # begins as another one does
    greedy: dict[str, Any] = dict(temperature=0, max_tokens=sizes.num_output, ignore_eos=True)

    def check_tokens(variant: str, backend: str) -> str:
        """The word ok, or the first token that transformers would not have chosen, and by which margin."""
        with count_replays(run.gpu) as counts:
            llm = load(folders[variant], backend, dtype="float32", **sizes.tiny_options)
            outputs = llm.generate(prompts, SamplingParams(**greedy), use_tqdm=False)
        rows[variant, backend]["replays"] = counts["replays"]
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            answer = output.outputs[0].token_ids
            choices, margins = checkpoints.reference_choices(folders[variant], (*prompt, *answer))
            for position, token in enumerate(answer, start=len(prompt)):
                expected, margin = choices[position - 1], margins[position - 1]
                if token != expected and margin >= TIE:
                    where = f"token {position - len(prompt)} of prompt {number}"
                    return f"{where}: {token}, not {expected} (margin {margin:.4f})"
        return "ok"

    by_pytorch: dict[tuple[str, str], list[Answer]] = {}

    def largest_difference(variant: str, backend: str, dtype: str) -> str:
        """Of any token's log-probability, at any position at which the answers still agree."""
        llm = load(folders[variant], backend, dtype=dtype, **sizes.tiny_options)
        outputs = llm.generate(prompts, SamplingParams(logprobs=-1, **greedy), use_tqdm=False)
        found = [answer_of(output.outputs[0]) for output in outputs]
        if backend == "PyTorch":
            by_pytorch[variant, dtype], expected = found, []
            for prompt, (token_ids, _) in zip(prompts, found, strict=True):
                logits = checkpoints.reference_logits(folders[variant], [*prompt, *token_ids])
                expected.append((token_ids, logits[len(prompt) - 1 : -1].log_softmax(-1)))
        elif (variant, dtype) not in by_pytorch:
            return "PyTorch's backend gave nothing to compare with"
        else:
            expected = by_pytorch[variant, dtype]
        return f"{max(map(difference, found, expected)):.4f}"

    for backend in backends:
        for variant in folders:
            section.begin(f"float32 of {variant} on {backend}, and what follows")
            is_half_only = backend.startswith("flash-attn")
            row = rows[variant, backend]
            row["tokens"] = "half precision only" if is_half_only else attempt(check_tokens, variant, backend)
            section.save()
        for dtype in sizes.half_dtypes:
            for variant in folders:
                section.begin(f"{dtype} of {variant} on {backend}, and what follows")
                rows[variant, backend][dtype] = attempt(largest_difference, variant, backend, dtype)
                section.save()


def memory(run: Run, section: Section) -> None:
    """A full load: steps of max_num_batched_tokens, then max_num_seqs rows that are sampled with top_p."""
    model = make_model(run)

    def row_of(backend: str) -> Row:
        llm = load_model(run, model, backend)
        engine, config, pool = llm.engine, llm.engine.config, llm.engine.kv_pool
        total = torch.cuda.mem_get_info()[1]
        allowed = int(config.gpu_memory_utilization * total)
        weights = engine.model_runner.usage()["weights"]
        torch.cuda.reset_peak_memory_stats()
        prompt_len = max(pool.max_model_len // 16, 2)
        params = SamplingParams(temperature=0.6, top_p=0.9, ignore_eos=True, max_tokens=4)
        for prompt in random_prompts(config.max_num_seqs, prompt_len):
            engine.add_request(None, prompt, params, stream=False)
        lowest_free = torch.cuda.mem_get_info()[0]
        while engine.has_unfinished_requests():
            engine.step()
            lowest_free = min(lowest_free, torch.cuda.mem_get_info()[0])
        used = total - lowest_free
        num_bytes = {
            "GPU": total,
            "allowed": allowed,
            "weights": weights,
            "KV pool": pool.num_bytes,
            "predicted for the rest": allowed - weights - pool.num_bytes,
            "measured for the rest": used - weights - pool.num_bytes,
            "most allocated by PyTorch": torch.cuda.max_memory_allocated(),
            "left of what is allowed": allowed - used,
        }
        in_mb = {name: value / 1e6 for name, value in num_bytes.items()}
        return in_mb | {
            "blocks": f"{pool.num_blocks:,} of {pool.block_size}",
            "tokens": pool.num_blocks * pool.block_size,
        }

    for backend in chosen_backends(run):
        section.begin(backend)
        section.add({"backend": backend} | attempt_row(row_of, backend))


def throughput(run: Run, section: Section) -> None:
    """The workload of nano-vllm's bench.py, drawn as it draws it."""
    sizes = run.sizes
    model, backends, bytes_per_s = make_model(run), chosen_backends(run), bandwidth(run)
    random.seed(0)
    prompts = []
    for _ in range(sizes.num_requests):
        length = random.randint(*sizes.input_lens)
        prompts.append([random.randint(0, NUM_TOKENS) for _ in range(length)])
    num_outputs = [random.randint(*sizes.output_lens) for _ in range(sizes.num_requests)]

    def row_of(backend: str, until: float) -> Row:
        llm = load_model(run, model, backend)
        engine = llm.engine
        work = list(zip(prompts, num_outputs, strict=True))
        workload = f"{len(work)} requests"
        if backend == "PyTorch":
            work = [(prompt, min(num, sizes.slow_output)) for prompt, num in work[: sizes.num_slow]]
            workload = f"shortened: {len(work)} requests of at most {sizes.slow_output} output tokens"
        llm.generate([prompts[0][:8]], SamplingParams(max_tokens=4), use_tqdm=False)
        before, bytes_read = engine.stats.num_output_tokens, 0
        started = time.perf_counter()
        for prompt, num_output in work:
            params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_output)
            engine.add_request(None, prompt, params, stream=False)
        while engine.has_unfinished_requests():
            engine.step()
            bytes_read += bytes_of_step(llm)
            if time.time() > until:
                workload += ", cut: its beginning, the largest batches"
                break
        elapsed = time.perf_counter() - started
        num_tokens = engine.stats.num_output_tokens - before
        by_bandwidth = bytes_read / bytes_per_s
        return {
            "workload": workload,
            "output tokens": num_tokens,
            "seconds": elapsed,
            "tokens/s": num_tokens / elapsed,
            "seconds by bandwidth": by_bandwidth,
            "times that": elapsed / by_bandwidth,
        }

    for done, backend in enumerate(backends):
        section.begin(backend)
        share = section.seconds_left() / (len(backends) - done)
        section.add({"backend": backend} | attempt_row(row_of, backend, time.time() + share))
    section.note(f"Bandwidth in this process: {bytes_per_s / 1e9:,.0f} GB/s, of a large copy.")
    section.note(f"nano-vllm's README reports for the real Qwen3-0.6B, on other hardware than this: {NANO_VLLM}.")


def first_token(run: Run, section: Section) -> None:
    """The median of three prompts, each cold and then again."""
    model, length = make_model(run), run.sizes.ttft_len

    def row_of(backend: str) -> Row:
        llm = load_model(run, model, backend)
        one_token = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1)

        def timed(prompt: list[int]) -> tuple[float, int]:
            started = time.perf_counter()
            [output] = llm.generate([prompt], one_token, use_tqdm=False)
            return (time.perf_counter() - started) * 1e3, output.num_cached_tokens

        first, *prompts = random_prompts(4, length)
        for _ in range(2):  # the first prompt compiles what is still to be compiled
            timed(first)
        row: Row = {"prompt tokens": length}
        for name in ("cold", "cached"):
            found = [timed(prompt) for prompt in prompts]
            row[f"{name}, ms"] = statistics.median(ms for ms, _ in found)
            row[f"num_cached_tokens, {name}"] = statistics.median(num for _, num in found)
        return row

    for backend in chosen_backends(run):
        section.begin(backend)
        section.add({"backend": backend} | attempt_row(row_of, backend))


def decode_steps(run: Run, section: Section) -> None:
    """First timed alone, then once more under the profiler, which makes Python slower and the kernels not."""
    model, sizes, bytes_per_s = make_model(run), run.sizes, bandwidth(run)
    num_output = WARM_STEPS + 2 * sizes.num_steps + 2

    def row_of(llm: LLM, batch: int) -> Row:
        engine = llm.engine
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_output + batch)
        prompts = random_prompts(batch, sizes.context)
        ids = [engine.add_request(None, prompt, params, stream=False) for prompt in prompts]
        try:
            while engine.scheduler.waiting or not all(map(has_begun, engine.scheduler.running)):
                engine.step()
            for _ in range(WARM_STEPS):
                engine.step()
            row, wall_ms = host_times(llm, sizes.num_steps)
            row["ms by bandwidth"] = bytes_of_step(llm) / bytes_per_s * 1e3
            if run.gpu is not None:
                return row | counts_of_steps(run.gpu, engine.step, sizes.num_steps)
            return row | profile_of_steps(engine.step, sizes.num_steps, run.folder / "trace.json", wall_ms)
        finally:
            engine.abort_request(ids)

    def measure(backend: str) -> Row:
        llm = load_model(run, model, backend)
        for batch in sizes.batches:
            section.begin(f"{backend}, batch {batch}")
            section.add({"backend": backend, "batch": batch} | attempt_row(row_of, llm, batch))
        return {}

    for backend in chosen_backends(run):
        section.begin(backend)
        if failure := attempt_row(measure, backend):
            section.add({"backend": backend} | failure)


KINDS: dict[str, dict[str, Any]] = {  # of steps, by what their requests ask for
    "greedy": {},
    "temperature and seed": dict(temperature=0.8, seed=1),
    "top_k, top_p, min_p": dict(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
    "penalties and bias": dict(
        repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={5: 1.0}
    ),
    "logprobs": dict(logprobs=2),
}


def kinds_of_steps(run: Run, section: Section) -> None:
    """One step of each kind: two prompts, then a decode of both."""
    model = make_model(run)

    def measure(backend: str) -> Row:
        llm = load_model(run, model, backend)
        engine = llm.engine

        def cost(num_steps: int) -> Row:
            if run.gpu is not None:
                return counts_of_steps(run.gpu, engine.step, num_steps)
            return profile_of_steps(engine.step, num_steps, run.folder / "trace.json", 0.0)

        for kind, options in KINDS.items():
            params = SamplingParams(**dict[str, Any](temperature=0.0, ignore_eos=True, max_tokens=12) | options)
            prompts = random_prompts(2, run.sizes.context)
            ids = [engine.add_request(None, prompt, params, stream=False) for prompt in prompts]
            try:
                section.add({"backend": backend, "kind": kind, "step": "prompts"} | attempt_row(cost, 1))
                while engine.scheduler.waiting or not all(map(has_begun, engine.scheduler.running)):
                    engine.step()
                section.add({"backend": backend, "kind": kind, "step": "decode"} | attempt_row(cost, 2))
            finally:
                engine.abort_request(ids)
        return {}

    for backend in chosen_backends(run):
        section.begin(backend)
        if failure := attempt_row(measure, backend):
            section.add({"backend": backend} | failure)


def repository_tests(run: Run, section: Section) -> None:
    """pytest in a process of its own; what it had printed when its time was over counts, too."""
    if importlib.util.find_spec("pytest") is None:
        section.note("pytest is not installed, so no test was run.")
        return
    options = ["-v", "--tb=short", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider"]
    options.append("--continue-on-collection-errors")  # a file may need a package that is not here
    command = [sys.executable, "-c", PYTEST, *options, *run.sizes.test_paths]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    output, seconds = run.folder / "pytest.txt", max(section.seconds_left(), 1)
    with output.open("w", encoding="utf-8") as file:
        to_file: dict[str, Any] = dict(stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path})
        try:
            status = str(subprocess.run(command, cwd=ROOT, timeout=seconds, **to_file).returncode)
        except subprocess.TimeoutExpired:
            status = "none: stopped"
            section.cut = "pytest was stopped before its last test"
    text = output.read_text("utf-8", errors="replace")
    counts, failures = read_pytest(text)
    section.add({"tests": " ".join(run.sizes.test_paths), "exit status": status, **counts})
    for line in failures[:40]:
        section.note(f"`{line}`")
    section.note("The last lines of pytest:\n\n```text\n" + "\n".join(text.splitlines()[-15:]) + "\n```")


def cpu_threads(run: Run, section: Section) -> None:
    """Each number of threads in a process of its own, which sees no GPU."""
    from nanovllm.worker.cpu.threads import num_cpus

    counts = [num for num in NUM_THREADS if num <= num_cpus()]
    section.note(f"The processor: {processor()}; CPUs that this process may use: {num_cpus()}.")

    def row_of(folder: Path, num_threads: int) -> Row:
        options = ["--short"] if run.sizes is SHORT else []
        try:
            found = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), *options, "--cpu-child", str(folder)],
                cwd=ROOT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(num_threads)},
                stdout=subprocess.PIPE,
                timeout=max(section.seconds_left(), 1),
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise OutOfTime(f"out of time within: {folder.name}, {num_threads} threads") from None
        return json.loads(found.stdout)

    for name, shape in run.sizes.cpu_models.items():
        folder = make_checkpoint(run.folder / name, shape)
        at = len(section.rows)
        digests = []
        for num_threads in counts:
            section.begin(f"{name}, {num_threads} threads")
            row = attempt_row(row_of, folder, num_threads)
            if "digest" in row:
                digests.append(row["digest"])
                row["same bits"] = "yes" if row["digest"] == digests[0] else "no"
            section.rows.insert(at, {"model": name, "threads": num_threads} | row)
            section.save()


def measure_on_cpu(folder: Path, sizes: Sizes) -> Row:
    """What a child process of part "cpu" finds, with the threads that its environment allows."""
    started = time.perf_counter()
    longest = max(sizes.cpu_prompt + 1, sizes.cpu_input_lens[1] + sizes.cpu_output_lens[1], 16 + sizes.cpu_stream)
    llm = LLM(
        str(folder),
        load_format="dummy",
        dtype=sizes.dtype,
        max_model_len=longest,
        max_num_seqs=sizes.cpu_requests,
        enable_prefix_caching=False,
    )
    start_s = time.perf_counter() - started
    rng = random.Random(0)

    def generate(lens: list[tuple[int, int]], **options: Any) -> tuple[list[Any], float]:
        """Outputs for (prompt length, output length) of each request, and the seconds that they take."""
        prompts = [rng.choices(range(NUM_TOKENS), k=length) for length, _ in lens]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=num, **options) for _, num in lens]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return outputs, time.perf_counter() - started

    answers, _ = generate([(length, sizes.cpu_output_lens[0]) for length in (1, 7, sizes.cpu_prompt // 2)], logprobs=5)
    mixed = [
        (rng.randint(*sizes.cpu_input_lens), rng.randint(*sizes.cpu_output_lens)) for _ in range(sizes.cpu_requests)
    ]
    _, mixed_s = generate(mixed)
    _, stream_s = generate([(16, sizes.cpu_stream)])
    prefill_s = statistics.median(generate([(sizes.cpu_prompt, 1)])[1] for _ in range(3))
    return {
        "mixed load, output tokens/s": sum(num for _, num in mixed) / mixed_s,
        "one stream, tokens/s": sizes.cpu_stream / stream_s,
        "prefill, tokens/s": sizes.cpu_prompt / prefill_s,
        "digest": digest(answers),
        "start, s": start_s,
    }


@dataclass(frozen=True)
class Part:
    name: str
    title: str
    about: str  # what the tables hold
    function: Callable[[Run, Section], None]
    budget_s: int


PARTS = [
    Part(
        "versions",
        "Versions, hardware, backends",
        "What is installed, and what attention the engine chooses for a head of 128 dimensions, in its own words.",
        versions,
        25,
    ),
    Part(
        "agreement",
        "Do the backends agree?",
        "`tokens`: greedy tokens in float32 (no TF32) beside transformers' on the CPU; where its two best logits are "
        f"within {TIE}, either is right. The columns of half precision have the largest difference between "
        "log-probabilities: of PyTorch's backend from transformers in float32, which shows what rounding does; of the "
        "others from PyTorch's backend on the same GPU. `replays`: CUDA graphs replayed in float32.",
        agreement,
        105,
    ),
    Part(
        "memory",
        "Memory",
        "MB, and the KV pool's size. What is allowed is `gpu_memory_utilization` of the GPU. The rest is what neither "
        "weights nor KV pool take: CUDA itself, the largest step, the graphs. The profiling run predicts it when the "
        "engine starts, and a full load measures it. (A pool that holds `max_num_seqs` sequences of `max_model_len` "
        "is no larger, and then more is predicted than needed.)",
        memory,
        45,
    ),
    Part(
        "throughput",
        "Output tokens per second",
        "The workload of nano-vllm's benchmark: 256 requests, prompts and outputs of 100 to 1,024 random tokens, "
        "temperature 0.6, EOS ignored, the shape of Qwen3-0.6B with random weights in bf16. Seconds by bandwidth: what "
        "reading the weights and the keys and values of every step once would take.",
        throughput,
        105,
    ),
    Part(
        "first_token",
        "Time to the first token",
        "Of a prompt alone, on the same model: cold, and once more from the prefix cache.",
        first_token,
        35,
    ),
    Part(
        "steps",
        "Where a decode step's time goes",
        "The median step of a batch that only decodes, in ms. Python: schedule, pack (the step becomes tensors), run "
        "(the rest of the model runner's time: launching, and waiting for the result), update, outputs; its share is "
        "that of all but run. Kernels, copies, waits and launches are counted by the profiler in one step; idle is the "
        "time in which the GPU runs nothing.",
        decode_steps,
        50,
    ),
    Part(
        "kinds",
        "What each kind of step asks of the GPU",
        "Copies to the GPU (h2d) and back (d2h), waits of the host (syncs), launches and replayed graphs of one step "
        "with two sequences. A decode through a graph takes one copy of packed integers, one replay, and one copy of "
        "token ids back; what the sampler is told takes one copy more.",
        kinds_of_steps,
        20,
    ),
    Part("tests", "The repository's tests of the GPU", "pytest, one process.", repository_tests, 40),
    Part(
        "cpu",
        "The CPU, with more and more threads",
        "Random weights in bf16, in the shapes of SmolLM2-135M and Qwen2.5-0.5B, greedy. Mixed load: 32 requests, "
        "prompts of 32 to 256 random tokens, outputs of 32 to 128. One stream: 64 tokens after a prompt of 16. "
        "Prefill: the median of three prompts of 512 tokens. The digest is of the answers to three prompts, tokens "
        "and logprobs, to the last bit.",
        cpu_threads,
        55,
    ),
]


# -- what the parts use -------------------------------------------------------------------------------------------


def chosen_backends(run: Run) -> list[str]:
    """Those whose packages are installed, the engine's own choice first and PyTorch last."""
    packages = {name for name in ("triton", "flash_attn") if importlib.util.find_spec(name)}
    installed = [name for name, needs in BACKENDS.items() if packages.issuperset({*needs} - {"cuda_graphs"})]
    return [name for name in installed if name not in run.sizes.left_out]


def load(folder: Path, backend: str, **options: Any) -> LLM:
    """An engine on this backend. What the one before it held is given back first."""
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(str(folder), optimizations=BACKENDS[backend], **options)


def load_model(run: Run, folder: Path, backend: str) -> LLM:
    return load(folder, backend, load_format="dummy", dtype=run.sizes.dtype, **run.sizes.model_options)


def make_model(run: Run) -> Path:
    """A checkpoint without weights, of Qwen3-0.6B's shape unless sizes are short."""
    qwen3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", rope_theta=1e6)
    return make_checkpoint(run.folder / "model", qwen3 | run.sizes.model)


def make_checkpoint(folder: Path, shape: dict[str, Any]) -> Path:
    """A checkpoint without weights. Its tokenizer knows 300 words."""
    folder.mkdir()
    config = dict(
        max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False,
        hidden_act="silu", torch_dtype="bfloat16", bos_token_id=0, eos_token_id=1, **shape,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    importlib.import_module("tests.checkpoints").make_tokenizer().save_pretrained(folder)
    return folder


def random_prompts(num: int, length: int) -> list[list[int]]:
    rng = random.Random(num * length)
    return [rng.choices(range(NUM_TOKENS), k=length) for _ in range(num)]


def has_begun(seq: Sequence) -> bool:
    return seq.num_generated_tokens > 0


def bytes_of_step(llm: LLM) -> int:
    """Bytes that the newest step had to read: the weights once, and the keys and values of all its sequences."""
    engine, pool = llm.engine, llm.engine.kv_pool
    num_keys = sum(chunk.end for chunk in engine.last_scheduled.chunks) if engine.last_scheduled is not None else 0
    return engine.model_runner.usage()["weights"] + num_keys * pool.num_bytes // (pool.num_blocks * pool.block_size)


def bandwidth(run: Run) -> float:
    """Bytes per second, read and written, by the best of ten large copies on the GPU."""
    from nanovllm.worker.cuda.platform import CUDAPlatform

    source = torch.ones(run.sizes.copy_bytes, dtype=torch.uint8, device=CUDAPlatform().device)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * run.sizes.copy_bytes / best


def choice_of_kernels(backend: str, dtype: str) -> str:
    """What the engine says about its attention when it is asked for this backend."""
    from nanovllm.worker.cuda.gpu_kernels import load_cuda_kernels

    said: list[str] = []
    logger, handler = logging.getLogger("nanovllm"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        load_cuda_kernels(EngineConfig(model="-", optimizations=BACKENDS[backend]), 128, getattr(torch, dtype))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return "; ".join(said).removeprefix("attention: ") or "nothing was said"


def try_graph() -> str:
    from nanovllm.worker.cuda.platform import CUDAPlatform

    x = torch.ones(4, device=CUDAPlatform().device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + x
    x.fill_(3)
    graph.replay()
    return "yes" if y.tolist() == [6.0] * 4 else f"yes, with a wrong result: {y.tolist()}"


@contextmanager
def count_replays(gpu: Any) -> Iterator[dict[str, int]]:
    """counts["replays"]: of CUDA graphs. gpu: the pretend one, which counts by itself, or None."""
    if gpu is not None:
        gpu.reset_counts()
        yield vars(gpu.counts)
        return
    counts, replay = {"replays": 0}, torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        counts["replays"] += 1
        replay(graph)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", counted):
        yield counts


Answer = tuple[list[int], torch.Tensor]  # token ids, and the log-probabilities of all tokens: [num, vocab_size]


def answer_of(completion: Any) -> Answer:
    rows = [[row[token_id].logprob for token_id in range(len(row))] for row in completion.logprobs]
    return completion.token_ids, torch.tensor(rows)


def digest(outputs: list[Any]) -> str:
    """Of tokens and logprobs, bit by bit."""
    hashed = hashlib.sha256()
    for output in outputs:
        [completion] = output.outputs
        for entries in completion.logprobs:
            for token_id, entry in sorted(entries.items()):
                hashed.update(struct.pack("<qd", token_id, entry.logprob))
        hashed.update(struct.pack(f"<{len(completion.token_ids)}q", *completion.token_ids))
    return hashed.hexdigest()[:16]


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def difference(found: Answer, expected: Answer) -> float:
    """The largest between log-probabilities, up to the first token that differs: what follows it is another text."""
    num = 0
    for ours, theirs in zip(found[0], expected[0], strict=True):
        num += 1
        if ours != theirs:
            break
    return (found[1][:num] - expected[1][:num]).abs().max().item()


def host_times(llm: LLM, num_steps: int) -> tuple[Row, float]:
    """Where Python is in the median of so many steps, in ms, and how long the step takes."""
    from nanovllm.worker import model_runner

    engine = llm.engine
    places = {
        "schedule": (engine.scheduler, "schedule"),
        "pack": (model_runner, "pack"),
        "run": (engine.model_runner, "run"),
        "update": (engine.scheduler, "update"),
        "outputs": (engine, "update"),
    }
    places = {name: place for name, place in places.items() if hasattr(*place)}
    spent = dict.fromkeys(places, 0.0)

    def timed(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += (time.perf_counter() - started) * 1e3

        return call

    steps = []
    with ExitStack() as patches:
        for name, (owner, attribute) in places.items():
            patches.enter_context(mock.patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        torch.cuda.synchronize()
        for _ in range(num_steps):
            spent.update(dict.fromkeys(places, 0.0))
            started = time.perf_counter()
            engine.step()
            steps.append({"step": (time.perf_counter() - started) * 1e3, **spent})
    median = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    median["run"] -= median.get("pack", 0.0)
    python_ms = sum(median[name] for name in places if name != "run")
    return median | {"Python's share": f"{python_ms / median['step']:.0%}"}, median["step"]


def counts_of_steps(gpu: Any, step: Callable[[], object], num_steps: int) -> Row:
    """What a pretend GPU counts in one step."""
    gpu.reset_counts()
    for _ in range(num_steps):
        step()
    return {name: number / num_steps for name, number in vars(gpu.counts).items()}


def profile_of_steps(step: Callable[[], object], num_steps: int, trace: Path, wall_ms: float) -> Row:
    """What torch.profiler says of one step. wall_ms: of a step without the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for num in (1, num_steps):  # the first time sets the profiler up
        with torch.profiler.profile(activities=activities) as profiler:
            with torch.profiler.record_function("decode steps"):
                for _ in range(num):
                    step()
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    return read_trace(json.loads(trace.read_text("utf-8"))["traceEvents"], num_steps, wall_ms)


def read_trace(events: list[dict[str, Any]], num_steps: int, wall_ms: float) -> Row:
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

    return {
        "kernels": number(kernels),
        "ms in kernels": sum(event["dur"] for event in kernels) / num_steps / 1e3,
        "ms GPU idle": wall_ms - busy / num_steps / 1e3,
        "copies to GPU": number([e for e in copies if "HtoD" in e["name"]]),
        "from GPU": number([e for e in copies if "DtoH" in e["name"]]),
        "waits": number([name for name in calls if "Synchronize" in name]),
        "launches": number([name for name in calls if re.match(r"cu(da)?LaunchKernel", name)]),
        "graphs": number([name for name in calls if re.match(r"cu(da)?GraphLaunch", name)]),
    }


def read_pytest(text: str) -> tuple[dict[str, int], list[str]]:
    """({outcome: number of tests}, lines that name failures) of what pytest -v has printed, to its end or not."""
    outcomes = re.findall(r"^\S+::.*? (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", text, re.MULTILINE)
    failures = re.findall(r"^(?:FAILED|ERROR) \S*\.py.*", text, re.MULTILINE)  # of the summary, if there is one
    if not failures:
        failures = re.findall(r"^\S+::.*? (?:FAILED|ERROR)\b", text, re.MULTILINE)
    return {name.lower(): number for name, number in Counter(outcomes).items()}, failures


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe(error: Exception) -> str:
    """One line: the error, and where in the repository it came from. The whole traceback goes to stderr."""
    traceback.print_exception(error)
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(ROOT):
            where = f" ({Path(frame.filename).relative_to(ROOT).as_posix()}:{frame.lineno})"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}{where}"


def attempt(function: Callable[..., object], *args: Any) -> object:
    """What it returns, or what it raises, as a line."""
    try:
        return function(*args)
    except Exception as error:
        return describe(error)


def attempt_row(function: Callable[..., Row], *args: Any) -> Row:
    """The row that it returns, or one that says what it raises."""
    try:
        return function(*args)
    except Exception as error:
        return {"error": describe(error)}


# -- one process for each part, and the two files -----------------------------------------------------------------


def run_in_this_process(part: Part, section: Section, short: bool, pretend: bool) -> None:
    """What the child process of a part does."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        run = Run(SHORT if short else FULL, folder)
        if pretend:
            pretend_gpu = importlib.import_module("tests.pretend_gpu").pretend_gpu
            run.gpu = stack.enter_context(pretend_gpu(total_bytes=2 << 30))
            torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        section.save()
        try:
            part.function(run, section)
        except OutOfTime as error:
            section.cut = str(error)
        section.save()


def run_part(part: Part, command: list[str], section_path: Path, seconds: float, console: Console) -> dict[str, Any]:
    """A part as the report holds it. command, which writes section_path, has so many seconds and a little grace."""
    started, limit = time.monotonic(), seconds + GRACE_S
    errors_path = section_path.with_suffix(".stderr")
    killed = False
    with errors_path.open("wb") as errors, subprocess.Popen(command, stderr=errors, cwd=ROOT) as process:
        with console.status("") as status:
            while process.poll() is None and not killed:
                time.sleep(0.1)
                elapsed = time.monotonic() - started
                status.update(f"{part.title}: {elapsed:.0f} of at most {seconds:.0f} s")
                killed = elapsed > limit
        if killed:
            process.kill()
    found: dict[str, Any] = {"rows": [], "notes": [], "cut": None}
    if section_path.exists():
        found = json.loads(section_path.read_text("utf-8"))
    result = {"name": part.name, "title": part.title, "about": part.about, "state": "done", **found}
    if killed:
        result["state"] = "cut"
        result["cut"] = f"it did not end by itself and was stopped after {limit:.0f} s"
    elif process.returncode != 0:
        result["state"] = f"failed (exit status {process.returncode})"
    elif found["cut"] is not None:
        result["state"] = "cut"
    said = errors_path.read_text("utf-8", errors="replace").splitlines()
    return result | {"seconds": time.monotonic() - started, "stderr": said[-100:]}


def run_parts(
    parts: list[Part],
    command_of: Callable[[Part, Path, float], list[str]],
    report: dict[str, Any],
    out: str,
    console: Console,
) -> None:
    """Run the parts one after another; write both files after each. command_of: see run_part()."""
    begin, allowed = time.monotonic(), 0.0
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for part in parts:
            allowed += part.budget_s
            seconds = allowed - (time.monotonic() - begin)
            path = Path(folder, f"{part.name}.json")
            result = run_part(part, command_of(part, path, seconds), path, seconds, console)
            console.print(f"{part.title}: {result['state']}, {len(result['rows'])} rows, {result['seconds']:.0f} s")
            report["parts"].append(result)
            write(Path(f"{out}.json"), json.dumps(report, indent=1))
            write(Path(f"{out}.md"), markdown(report))


def write(path: Path, text: str) -> None:
    """The whole file or none of it, whenever the process ends."""
    temporary = path.with_name(path.name + ".new")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# nanovllm on a CPU" if report["cpu"] else "# nanovllm on a GPU",
        "",
        f"`{report['command']}`, {report['date']}.",
        "",
    ]
    if report["pretend"] and not report["cpu"]:
        lines += ["**On a pretend GPU, written in Python: its times and bandwidths mean nothing.**", ""]
    if report["short"]:
        lines += [
            "Sizes are tiny (`--short`), whatever the texts below say of a workload, and there are fewer backends.",
            "",
        ]
    for part in report["parts"]:
        lines += [f"## {part['title']}", "", part["about"], ""]
        for _, rows in itertools.groupby(part["rows"], key=tuple):
            lines += [*table(list(rows)), ""]
        for note in part["notes"]:
            lines += [note, ""]
        if part["cut"] is not None:
            lines += [f"**Cut**: {part['cut']}.", ""]
        if part["state"].startswith("failed") or any(line.startswith("Traceback") for line in part["stderr"]):
            lines += ["The last lines that it wrote to stderr:", "", "```text", *part["stderr"][-20:], "```", ""]
        lines += [f"This part: {part['state']}, {part['seconds']:.0f} s.", ""]
    return "\n".join(lines)


def table(rows: list[Row]) -> list[str]:
    """Rows with the same columns, as lines of Markdown that are easy to read as they are, too."""
    cells = [list(rows[0]), *([shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def main() -> None:
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_report", help="where to write, without .md and .json")
    parser.add_argument("--parts", help=f"some of: {names}, with commas between them")
    parser.add_argument("--short", action="store_true", help="tiny sizes")
    parser.add_argument("--pretend", action="store_true", help="on a pretend GPU; implies --short")
    parser.add_argument("--cpu", action="store_true", help="only part cpu, which needs no GPU")
    parser.add_argument("--cpu-child", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=3, metavar=("PART", "FILE", "UNTIL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    short = args.short or args.pretend
    chosen = names.split(", ") if args.parts is None else args.parts.split(",")
    if unknown := set(chosen) - set(names.split(", ")):
        parser.error(f"no such part: {', '.join(sorted(unknown))} (there are {names})")
    if args.cpu_child is not None:
        print(json.dumps(measure_on_cpu(Path(args.cpu_child), SHORT if short else FULL)))
        return
    if args.child is not None:
        name, path, until = args.child
        [part] = [part for part in PARTS if part.name == name]
        run_in_this_process(part, Section(Path(path), float(until)), short, args.pretend)
        return
    if not args.cpu and not args.pretend and not torch.cuda.is_available():
        print(
            "There is no GPU here (torch.cuda.is_available() is False); --pretend runs on a pretend one, "
            "--cpu measures the CPU.",
            file=sys.stderr,
        )
        raise SystemExit(2)

    def command_of(part: Part, path: Path, seconds: float) -> list[str]:
        options = ["--short"] * short + ["--pretend"] * args.pretend
        child = ["--child", part.name, str(path), str(time.time() + seconds)]
        return [sys.executable, str(Path(__file__).resolve()), *options, *child]

    console = Console(highlight=False)
    report: dict[str, Any] = {
        "command": " ".join(["python examples/gpu_report.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "short": short,
        "pretend": args.pretend,
        "cpu": args.cpu,
        "parts": [],
    }
    parts = [part for part in PARTS if part.name in chosen]
    if args.cpu:
        parts = [replace(part, budget_s=MOST_S) for part in PARTS if part.name == "cpu"]
    run_parts(parts, command_of, report, args.out, console)
    console.print(markdown(report), markup=False, soft_wrap=True)
    console.print(f"Written: {args.out}.md and {args.out}.json")


if __name__ == "__main__":
    main()
