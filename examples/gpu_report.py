"""What a GPU has to say about this engine, in one report: tests, memory, speed, where a step's time goes.

    python examples/gpu_report.py                        every part, eight minutes at most
    python examples/gpu_report.py --out PREFIX           writes PREFIX.md and PREFIX.json (default: gpu_report)
    python examples/gpu_report.py --parts memory,steps   only these
    python examples/gpu_report.py --short                tiny sizes: does every part work?
    python examples/gpu_report.py --pretend              the same on a pretend GPU, where there is none
    python examples/gpu_report.py --cpu                  only the CPU: 1, 2, 4, 8 and 16 threads, as many as it has

No network and no checkpoint is needed: checkpoints are made of random weights. Each part runs in a process of its own,
so neither a kernel that breaks the CUDA context nor a part that never ends spoils the others. Time that a part does not
use goes to those after it. Both files are rewritten after every part, with all rows that had been found by then.
"""

import argparse
import gc
import hashlib
import importlib.metadata
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bench_peers
import torch
from bench_throughput import steps_of
from measuring import ChildFailed, arguments, console, file_to_write, greedy, in_child, result, seconds
from profile_step import gpu_times, host_times, until_all_decode
from reporting import ROOT, Part, Row, code, describe, read_junit, run_parts, text_of

sys.path.insert(0, str(ROOT))  # for tests/, and for this package where it is not installed

from nanovllm import LLM, SamplingParams
from nanovllm.worker.cpu.threads import num_cpus
from tests.checkpoints import make_tokenizer
from tests.worker.cuda.backends import BACKENDS, installed_backends

LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=1e5)
QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=1e6)
QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", rope_theta=1e6)


def shape(*sizes: int) -> dict[str, int]:
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    names += ["num_attention_heads", "num_key_value_heads", "head_dim"]
    return dict(zip(names, sizes, strict=True))


# nano-vllm's bench.py runs Qwen3-0.6B. Its README reports, on its authors' hardware:
NANO_VLLM = "1,434 tokens/s for 133,966 output tokens, on an RTX 4070 Laptop (8 GB)"
QWEN3_06B = QWEN3 | shape(151_936, 1024, 3072, 28, 16, 8, 128)
QWEN25_05B = QWEN2 | shape(151_936, 896, 4864, 24, 14, 2, 64)
SMOLLM2_135M = LLAMA | shape(49_152, 576, 1536, 30, 9, 3, 64)
TINY = shape(40_960, 32, 48, 2, 2, 1, 16)

NUM_THREADS = (1, 2, 4, 8, 16)
GRACE_S = 10  # before a part is ended: what pytest, interrupted, needs to write down what it has found, and a last row
MOST_S = 480  # of all parts together


@dataclass(frozen=True)
class Sizes:
    tests: tuple[str, ...]  # files; those whose figures make a table come first
    test_options: tuple[str, ...]
    model: dict[str, Any]
    dtype: str
    options: dict[str, int]  # of the engine that runs it
    num_requests: int
    lens: tuple[int, int]  # of prompts and of outputs
    num_slow: int  # requests that PyTorch's backend gets
    slow_output: int  # and at most so many tokens of each
    peers: dict[str, int]  # of bench_peers.measure()
    batches: tuple[int, ...]
    context: int  # prompt tokens of each sequence whose decodes are measured
    num_steps: int
    copy_bytes: int
    cpu_models: dict[str, dict[str, Any]]
    cpu: dict[str, int]  # of bench_peers.measure()


FULL = Sizes(
    tests=("test_backends", "test_cuda", "test_flash_attention", "test_triton_kernels"),
    test_options=(),
    model=QWEN3_06B,
    dtype="bfloat16",
    options=dict(max_model_len=4096),
    num_requests=256,
    lens=(100, 1024),
    num_slow=32,
    slow_output=64,
    peers=dict(requests=32, prompt=2000, stream=128, repeats=3),
    batches=(1, 32, 256),
    context=256,
    num_steps=10,
    copy_bytes=2 << 30,
    cpu_models={"135M": SMOLLM2_135M, "0.5B": QWEN25_05B},
    cpu=dict(requests=32, prompt=512, stream=64),
)
SHORT = Sizes(
    tests=("test_backends", "test_kernels"),
    test_options=("-k", "not backends or llama-mha"),
    model=QWEN3 | TINY,
    dtype="float16",  # Triton's interpreter multiplies no bfloat16
    options=dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64),
    num_requests=4,
    lens=(4, 16),
    num_slow=2,
    slow_output=4,
    peers=dict(requests=0, prompt=40, stream=4, repeats=1),  # the requests need 384 tokens of context
    batches=(1, 2, 4),
    context=8,
    num_steps=2,
    copy_bytes=1 << 20,
    cpu_models={"tiny": LLAMA | TINY},
    cpu=dict(requests=2, prompt=40, stream=4),
)


@dataclass
class Run:
    """What every part is given. gpu: the pretend one, or None; folder: for checkpoints, removed afterwards."""

    sizes: Sizes
    folder: Path
    until: float  # time.time() at which the part will be ended
    gpu: Any = None

    def backends(self) -> list[str]:
        """PyTorch first: the others are compared with it. Then the engine's own choice; with a short run, only that."""
        *others, pytorch = installed_backends()
        return [pytorch, *others[: 1 if self.sizes is SHORT else None]]

    def engine(self, backend: str) -> LLM:
        """The model on this backend. What the engine before it held is given back first."""
        gc.collect()
        torch.cuda.empty_cache()
        folder = self.folder / "model"
        if not folder.exists():
            make_checkpoint(folder, self.sizes.model)
        options = dict(load_format="dummy", dtype=self.sizes.dtype, optimizations=BACKENDS[backend])
        return LLM(str(folder), **options, **self.sizes.options)

    def on_each(self, rows_of: Callable[[str], Iterator[Row]]) -> Iterator[Row]:
        """The rows of each backend; if one fails, a row that says how, and then those of the next.

        After some faults, such as an illegal access to memory, CUDA computes nothing more in this process: then the
        next ones fail, too.
        """
        for backend in self.backends():
            try:
                yield from ({"backend": backend} | row for row in rows_of(backend))
            except (Exception, SystemExit) as error:  # until_all_decode() ends scripts
                yield {"backend": backend, "error": describe(error)}


# -- the parts ---------------------------------------------------------------------------------------------------------


def versions(run: Run) -> Iterator[Row | str]:
    for package in ("flash-attn", "transformers", "safetensors", "xxhash", "pytest"):
        with suppress(importlib.metadata.PackageNotFoundError):
            yield {"what": package, "found": importlib.metadata.version(package)}
    yield {"what": "the backends that this allows", "found": "; ".join(installed_backends())}
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    yield {"what": "compute capability", "found": f"{properties.major}.{properties.minor}"}
    yield {"what": "multiprocessors", "found": properties.multi_processor_count}
    yield {"what": "memory free and total, GB", "found": f"{free / 1e9:.1f} of {total / 1e9:.1f}"}
    yield {"what": "memory bandwidth, GB/s (read and written by a large copy)", "found": bandwidth(run) / 1e9}
    yield environment()


def tests(run: Run) -> Iterator[Row | str]:
    """Each file in a process of its own: whatever ends it, or cuts it short, the others' results stay."""
    for name in run.sizes.tests:
        if run.until - time.time() < GRACE_S:
            yield f"**Cut**: {name} was not begun."
        else:
            yield from test_file(run, name)


def test_file(run: Run, name: str) -> Iterator[Row | str]:
    """What it had found when its time was over counts, too."""
    xml, printed = run.folder / f"{name}.xml", run.folder / f"{name}.txt"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-o", "addopts=", "--import-mode=importlib"]
    command += ["-o", "junit_family=legacy", f"--junitxml={xml}", "-p", "no:cacheprovider"]
    command += [f"tests/worker/cuda/{name}.py", *run.sizes.test_options]
    if run.gpu is not None:
        command += ["-p", "tests.pretend_gpu"]
    with printed.open("wb") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as process:
        try:
            process.wait(max(run.until - time.time() - GRACE_S, 1))
        except subprocess.TimeoutExpired:
            yield f"**Cut**: {name} was stopped before its last test."
            if sys.platform == "win32":
                process.terminate()  # nobody can send SIGINT there, so what pytest has found is lost
            else:
                process.send_signal(signal.SIGINT)
    if xml.exists():
        yield from read_junit(xml)
    if process.returncode:
        yield f"pytest of {name}, exit status {process.returncode}:"
        yield code("\n".join(printed.read_text("utf-8", errors="replace").splitlines()[-15:]))


def memory(run: Run) -> Iterator[Row]:
    """A full load: steps of max_num_batched_tokens, then max_num_seqs rows that are sampled with top_p."""

    def rows_of(backend: str) -> Iterator[Row]:
        llm = run.engine(backend)
        engine, pool = llm.engine, llm.engine.kv_pool
        total = torch.cuda.mem_get_info()[1]
        allowed = int(engine.config.gpu_memory_utilization * total)
        weights = engine.model_runner.usage()["weights"]
        torch.cuda.reset_peak_memory_stats()
        params = SamplingParams(temperature=0.6, top_p=0.9, ignore_eos=True, max_tokens=4)
        prompts = random_prompts(engine.config.max_num_seqs, max(pool.max_model_len // 16, 2))
        lowest_free = torch.cuda.mem_get_info()[0]
        for _ in steps_of(llm, [(prompt, params) for prompt in prompts]):
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
        blocks = {"blocks": f"{pool.num_blocks:,} of {pool.block_size}", "tokens": pool.num_blocks * pool.block_size}
        yield {name: value / 1e6 for name, value in num_bytes.items()} | blocks

    return run.on_each(rows_of)


def throughput(run: Run) -> Iterator[Row | str]:
    """The workload of nano-vllm's bench.py, drawn as it draws it."""
    sizes, bytes_per_s, backends = run.sizes, bandwidth(run), run.backends()
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(*sizes.lens))] for _ in range(sizes.num_requests)]
    num_outputs = [rng.randint(*sizes.lens) for _ in prompts]

    def rows_of(backend: str) -> Iterator[Row]:
        now = time.time()
        until = now + (run.until - GRACE_S - now) / (len(backends) - backends.index(backend))
        llm = run.engine(backend)
        work, workload = list(zip(prompts, num_outputs, strict=True)), f"{len(prompts)} requests"
        if backend == "PyTorch":
            work = [(prompt, min(num, sizes.slow_output)) for prompt, num in work[: sizes.num_slow]]
            workload = f"shortened: {len(work)} requests of at most {sizes.slow_output} output tokens"
        llm.generate([prompts[0][:8]], SamplingParams(max_tokens=4), use_tqdm=False)
        before, elapsed, bytes_read = llm.engine.stats.num_output_tokens, 0.0, 0
        sampled = dict[str, Any](temperature=0.6, ignore_eos=True)
        for step in steps_of(llm, [(prompt, SamplingParams(**sampled, max_tokens=num)) for prompt, num in work]):
            elapsed += step.seconds
            bytes_read += bytes_of_step(llm)
            if time.time() > until:
                workload += ", cut: its beginning, the largest batches"
                break
        num_tokens, by_bandwidth = llm.engine.stats.num_output_tokens - before, bytes_read / bytes_per_s
        rates = {"output tokens": num_tokens, "seconds": elapsed, "tokens/s": num_tokens / elapsed}
        bound = {"seconds by bandwidth": by_bandwidth, "times that": elapsed / by_bandwidth}
        yield {"workload": workload} | rates | bound

    yield from run.on_each(rows_of)
    yield f"Bandwidth in this process: {bytes_per_s / 1e9:,.0f} GB/s, of a large copy."
    yield f"nano-vllm's README reports for the real Qwen3-0.6B, on other hardware than this: {NANO_VLLM}."


def requests(run: Run) -> Iterator[Row]:
    """As bench_peers.py measures engines; then one prompt twice, which says what was found in the cache."""

    def rows_of(backend: str) -> Iterator[Row]:
        llm = run.engine(backend)
        sizes = argparse.Namespace(**run.sizes.peers, vocab_size=llm.engine.model_config.vocab_size)
        found = bench_peers.measure(bench_peers.VllmEngine(llm, SamplingParams), sizes)
        row: Row = {heading: found[key] for key, (heading, _, _) in bench_peers.MEASURES.items() if key in found}
        [prompt] = random_prompts(1, sizes.prompt)
        for name in ("cold", "cached"):
            [output] = llm.generate([prompt], greedy(1), use_tqdm=False)
            row[f"num_cached_tokens, {name}"] = output.num_cached_tokens
        yield row

    return run.on_each(rows_of)


def steps(run: Run) -> Iterator[Row]:
    """As profile_step.py measures them."""
    bytes_per_s, num = bandwidth(run), run.sizes.num_steps

    def rows_of(backend: str) -> Iterator[Row]:
        llm = run.engine(backend)
        for batch in run.sizes.batches:
            with ExitStack() as requests:
                start_decoding(llm, run, batch, requests, temperature=0.6)
                host = host_times(llm, num)
                in_python = sum(ms for name, ms in host.items() if name not in ("step", "run"))
                share = {"Python's share": f"{in_python / host['step']:.0%}"}
                bound = {"ms by bandwidth": bytes_of_step(llm) / bytes_per_s * 1e3}
                yield {"batch": batch} | host | share | bound | cost_of_steps(llm, run, num, host["step"])

    return run.on_each(rows_of)


KINDS: dict[str, dict[str, Any]] = {  # of steps, by what their requests ask for
    "greedy": {},
    "temperature and seed": dict(temperature=0.8, seed=1),
    "top_k, top_p, min_p": dict(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
    "penalties and bias": dict(
        repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={5: 1.0}
    ),
    "logprobs": dict(logprobs=2),
}


def kinds(run: Run) -> Iterator[Row]:
    """One step of each kind: two prompts, then a decode of both."""

    def rows_of(backend: str) -> Iterator[Row]:
        llm = run.engine(backend)
        for kind, options in KINDS.items():
            llm.reset_prefix_cache()  # the prompts are those of the kind before
            with ExitStack() as requests:
                add_requests(llm, run, 2, requests, **{"temperature": 0.0} | options)
                yield {"kind": kind, "step": "prompts"} | cost_of_steps(llm, run, 1)
                until_all_decode(llm)
                yield {"kind": kind, "step": "decode"} | cost_of_steps(llm, run, 2)

    return run.on_each(rows_of)


def cpu(run: Run) -> Iterator[Row | str]:
    """Each number of threads in a process of its own, which sees no GPU."""
    yield f"CPUs that this process may use: {num_cpus()}."
    yield environment()
    for name, sizes_of in run.sizes.cpu_models.items():
        folder, first = make_checkpoint(run.folder / name, sizes_of), None
        command = [sys.executable, __file__, *["--short"] * (run.sizes is SHORT), "--on-cpu", str(folder)]
        for num_threads in (num for num in NUM_THREADS if num <= num_cpus()):
            env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(num_threads)}
            row: Row = {"model": name, "threads": num_threads}
            try:
                found = in_child(command, env)
            except ChildFailed as failed:
                yield row | {"error": failed.reason}
                continue
            first = first or found["digest"]
            yield row | found | {"same bits": "yes" if found["digest"] == first else "no"}


def measure_on_cpu(folder: str, sizes: Sizes) -> Row:
    """What a process of part cpu finds, with the threads that its environment allows."""
    started = time.perf_counter()
    llm = LLM(folder, load_format="dummy", dtype=sizes.dtype, max_model_len=1024, max_num_seqs=32)
    start_s = time.perf_counter() - started
    answers = llm.generate(random_prompts(3, sizes.cpu["prompt"] // 2), greedy(32, logprobs=5), use_tqdm=False)
    engine = bench_peers.VllmEngine(llm, SamplingParams)
    vocab_size = llm.engine.model_config.vocab_size
    load = bench_peers.measure(engine, argparse.Namespace(**sizes.cpu, repeats=1, vocab_size=vocab_size))
    alone = bench_peers.measure(
        engine, argparse.Namespace(**sizes.cpu | {"requests": 0}, repeats=3, vocab_size=vocab_size)
    )
    return {
        "mixed load, output tokens/s": load["throughput"],
        "one stream, tokens/s": alone["stream"],
        "prefill, tokens/s": sizes.cpu["prompt"] / (alone["ttft_cold"] or 1),
        "TTFT cached, s": alone["ttft_cached"],
        "digest": digest(answers),
        "start, s": start_s,
    }


PARTS = [
    Part(
        versions,
        "Versions, hardware, backends",
        "What is installed, and what PyTorch's script for bug reports says of the machine.",
        30,
    ),
    Part(
        tests,
        "The repository's tests of the GPU",
        "Of each architecture and backend: are greedy tokens in float32 (no TF32) those of transformers on the CPU? "
        "Whose attention computed them, and did a recorded graph replay the decodes? How far, at most, are "
        "log-probabilities in half precision from transformers' in float32? PyTorch's show what rounding does.",
        150,
    ),
    Part(
        memory,
        "Memory",
        "MB, and the KV pool's size. What is allowed is `gpu_memory_utilization` of the GPU. The rest is what neither "
        "weights nor KV pool take: CUDA itself, the largest step, the graphs. The profiling run predicts it when the "
        "engine starts, and a full load measures it. (A pool that holds `max_num_seqs` sequences of `max_model_len` "
        "is no larger, and then more is predicted than needed.)",
        40,
    ),
    Part(
        throughput,
        "Output tokens per second",
        "The workload of nano-vllm's benchmark: 256 requests, prompts and outputs of 100 to 1,024 random tokens, "
        "temperature 0.6, EOS ignored, the shape of Qwen3-0.6B with random weights in bf16. Seconds by bandwidth: what "
        "reading the weights and the keys and values of every step once would take.",
        100,
    ),
    Part(
        requests,
        "Mixed load, time to the first token, one stream",
        "As bench_peers.py measures them, on the same model, medians of three: (a) 32 requests, prompts of 32 to 256 "
        "tokens, outputs of 32 to 128; (b) a prompt of 2,000 tokens, cold and from the prefix cache; (c) 128 tokens.",
        45,
    ),
    Part(
        steps,
        "Where a decode step's time goes",
        "The median step of a batch that only decodes, in ms. Python: schedule, pack (the step becomes tensors), run "
        "(the rest of the model runner's time: launching, and waiting for the result), update, outputs; its share is "
        "that of all but run. Kernels, copies, waits and launches are counted by the profiler in one step; idle is the "
        "time in which the GPU runs nothing.",
        45,
    ),
    Part(
        kinds,
        "What each kind of step asks of the GPU",
        "Copies to the GPU (h2d) and back (d2h), waits of the host (syncs), launches and replayed graphs of one step "
        "with two sequences. A decode through a graph takes one copy of packed integers, one replay, and one copy of "
        "token ids back; what the sampler is told takes one copy more.",
        20,
    ),
    Part(
        cpu,
        "The CPU, with more and more threads",
        "Random weights in bf16, in the shapes of SmolLM2-135M and Qwen2.5-0.5B, greedy, as bench_peers.py measures "
        "them: 32 requests, prompts of 32 to 256 random tokens, outputs of 32 to 128; one stream of 64 tokens; a "
        "prompt of 512, cold and cached. The digest is of the answers to three prompts, tokens and logprobs, to the "
        "last bit.",
        50,
    ),
]


# -- what the parts use -------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, sizes: dict[str, Any]) -> Path:
    """A checkpoint without weights. Its tokenizer knows 300 words."""
    folder.mkdir()
    config = dict(
        max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False,
        hidden_act="silu", torch_dtype="bfloat16", bos_token_id=0, eos_token_id=1, **sizes,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    make_tokenizer().save_pretrained(folder)
    return folder


def random_prompts(num: int, length: int) -> list[list[int]]:
    rng = random.Random(num * length)
    return [rng.choices(range(10_000), k=length) for _ in range(num)]


def add_requests(llm: LLM, run: Run, num: int, requests: ExitStack, **params: Any) -> None:
    """Requests that go on until `requests` is closed."""
    longest = llm.engine.kv_pool.max_model_len - run.sizes.context
    sampling = SamplingParams(**params, ignore_eos=True, max_tokens=longest)
    prompts = random_prompts(num, run.sizes.context)
    ids = [llm.engine.add_request(None, prompt, sampling, stream=False) for prompt in prompts]
    requests.callback(llm.engine.abort_request, ids)


def start_decoding(llm: LLM, run: Run, num: int, requests: ExitStack, **params: Any) -> None:
    add_requests(llm, run, num, requests, **params)
    until_all_decode(llm)
    for _ in range(2):
        llm.engine.step()


def cost_of_steps(llm: LLM, run: Run, num_steps: int, wall_ms: float | None = None) -> Row:
    """What one of the next steps asks of the GPU, by PyTorch's profiler; a pretend GPU counts by itself."""
    if run.gpu is None:
        return gpu_times(llm.engine.step, num_steps, wall_ms)
    run.gpu.reset_counts()
    for _ in range(num_steps):
        llm.engine.step()
    return {name: number / num_steps for name, number in vars(run.gpu.counts).items()}


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

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return 2 * run.sizes.copy_bytes / min(seconds(copy) for _ in range(10))


def environment() -> str:
    """What PyTorch's own script for bug reports says of this machine."""
    command = [sys.executable, "-m", "torch.utils.collect_env"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return code("\n".join(line for line in said if not line.startswith(("Vulnerability", "Flags", "Collecting"))))


def digest(outputs: list[Any]) -> str:
    """Of tokens and logprobs: repr() of a float gives all its bits."""
    said = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


# -- one process for each part, and the two files -----------------------------------------------------------------


def run_here(part: Part, until: float, sizes: Sizes, pretend: bool) -> None:
    """What the process of a part does. Each row is handed over as soon as it is found."""
    with ExitStack() as stack:
        run = Run(sizes, Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))), until)
        if pretend:
            from tests.pretend_gpu import pretend_gpu

            run.gpu = stack.enter_context(pretend_gpu(total_bytes=2 << 30))
            torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other
        for found in part.function(run):
            result(found)


def main() -> None:
    names = [part.name for part in PARTS]
    parser = arguments(__doc__, model=None)
    parser.add_argument("--out", type=file_to_write, default="gpu_report", help="where to write, without .md and .json")
    parser.add_argument("--parts", help=f"some of: {', '.join(names)}, with commas between them")
    parser.add_argument("--short", action="store_true", help="tiny sizes")
    parser.add_argument("--pretend", action="store_true", help="on a pretend GPU; implies --short")
    parser.add_argument("--cpu", action="store_true", help="only part cpu, which needs no GPU")
    parser.add_argument("--on-cpu", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--here", nargs=2, metavar=("PART", "UNTIL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu and args.parts is not None:
        parser.error("--cpu measures only part cpu: leave out --parts")
    short = args.short or args.pretend
    chosen = names if args.parts is None else args.parts.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"no such part: {', '.join(sorted(unknown))} (there are {', '.join(names)})")
    sizes = SHORT if short else FULL
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        sizes = replace(sizes, dtype="float16")  # such as a T4, which has no bfloat16
    if args.on_cpu is not None:
        result(measure_on_cpu(args.on_cpu, sizes))
        return
    if args.here is not None:
        name, until = args.here
        run_here(PARTS[names.index(name)], float(until), sizes, args.pretend)
        return
    if not args.cpu and not args.pretend and not torch.cuda.is_available():
        found = "There is no GPU here (torch.cuda.is_available() is False); --pretend runs on a pretend one, "
        print(f"{found}--cpu measures the CPU.", file=sys.stderr)
        raise SystemExit(2)

    def command_of(part: Part, limit_s: float) -> list[str]:
        options = ["--short"] * short + ["--pretend"] * args.pretend
        return [
            sys.executable,
            str(Path(__file__).resolve()),
            *options,
            "--here",
            part.name,
            str(time.time() + limit_s),
        ]

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
        parts = [replace(PARTS[names.index("cpu")], budget_s=MOST_S)]
    run_parts(parts, command_of, report, args.out)
    console().print(text_of(report), markup=False, soft_wrap=True)
    console().print(f"Written: {args.out}.md and {args.out}.json")
    if all(part["state"].startswith("failed") for part in report["parts"]):
        sys.exit("every part has failed")


if __name__ == "__main__":
    main()
