"""The pool of threads behind the C kernels: every item once, whoever computes it; and how many threads there are."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.worker.cpu import threads
from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
from nanovllm.worker.layers import Linear
from tests.processes import LIMIT_S

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class Jobs:
    """Jobs for the pool, which note how often each item was computed, in which chunks, and by which threads."""

    def __init__(self, pool: ctypes.CDLL) -> None:
        self.pool, self.chunks, self.thread_ids = pool, [], set()
        self.work = WORK(self._compute)

    def _compute(self, _, first, end):
        self.chunks.append((first, end))
        self.thread_ids.add(threading.get_native_id())

    def run(self, num_items: int, min_chunk: int) -> None:
        self.chunks.clear()
        self.pool.parallel_for(self.work, None, ctypes.c_int64(num_items), ctypes.c_int64(min_chunk))
        computed = sorted(item for first, end in self.chunks for item in range(first, end))
        assert computed == list(range(num_items))


@pytest.fixture
def pool(monkeypatch):
    """With three helpers, on however few CPUs."""
    try:
        pool = threads.load_pool()
    except OSError:
        pytest.skip("no C compiler")
    pool.set_threads(4, None)
    yield pool
    pool.set_threads(threads.num_threads(), None)


@pytest.mark.parametrize("min_chunk", [1, 3, 1000])
@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 4, 100])
def test_every_item_is_computed_once(pool, num_items, min_chunk):
    jobs = Jobs(pool)
    for _ in range(20):
        jobs.run(num_items, min_chunk)
    if 2 * num_items < 3 * min_chunk:  # the second chunk would be less than half of one
        assert jobs.chunks == [(0, num_items)]
    else:  # a chunk is half of the share that each of 4 threads has in what is left
        for first, end in jobs.chunks:
            assert end - first == max((num_items - first) // 8, min(min_chunk, num_items - first))


def test_many_tiny_jobs_one_after_another(pool):
    """A helper that is late for one job meets the next one."""
    jobs = Jobs(pool)
    for i in range(5000):
        jobs.run(i % 9, 1)


def test_helpers_take_part_and_only_as_many_as_may(pool):
    started, jobs = threading.Barrier(4, timeout=LIMIT_S), Jobs(pool)
    meet = WORK(lambda *_: started.wait() and None)
    pool.parallel_for(meet, None, ctypes.c_int64(4), ctypes.c_int64(1))  # each of four threads waits for the others
    pool.set_threads(1, None)
    for _ in range(50):
        jobs.run(64, 1)
    assert jobs.thread_ids == {threading.get_native_id()}


def test_two_threads_call_at_once(pool):
    """One of them gets the pool, the others compute alone; with real kernels, so that they truly run at once.

    A job of fewer than 50 rows would not ask for the pool.
    """
    torch.manual_seed(0)
    failed = []

    def compute(seed: int) -> None:
        for i in range(300):
            x = torch.full((1 + i, 512), seed + i / 100)
            y = kernels.silu_and_mul(x)
            if not torch.allclose(y, torch.nn.functional.silu(x[:, :256]) * x[:, 256:], rtol=1e-4):
                failed.append((seed, i))

    config = type("Config", (), {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "rotary_dim": 8})
    kernels = load_cpu_kernels(config, torch.float32)
    callers = [threading.Thread(target=compute, args=(seed,), daemon=True) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LIMIT_S)
        assert not caller.is_alive()
    assert failed == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_the_child_of_a_fork_has_helpers_of_its_own(pool):
    jobs = Jobs(pool)
    jobs.run(100, 1)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            for i in range(200):
                jobs.run(i % 20, 1)
            num_threads = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 4
            os._exit(0 if num_threads >= 4 else 1)
        jobs.run(100, 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity, as on Linux")
def test_on_one_cpu_the_caller_does_not_wait_for_helpers(tmp_path):
    """Four threads share one CPU. Python's callbacks are slow enough that they take turns. Nothing hangs, and the
    process ends although helpers sleep."""
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tests.worker.cpu.test_threads import Jobs, threads
pool = threads.load_pool()
assert threads.num_threads() == 1
pool.set_threads(4, None)
jobs = Jobs(pool)
for i in range(2000):
    jobs.run(i % 30, 1)
"""
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=LIMIT_S)
    if "no C compiler" in result.stderr:
        pytest.skip("no C compiler")
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc, as on Linux")
def test_helpers_leave_signals_to_the_programs_threads(pool):
    before = set(os.listdir("/proc/self/task"))
    child = os.fork()  # where no helper has been started
    if child == 0:
        Jobs(pool).run(100, 1)
        blocked = 0
        for task in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
            lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
            [mask] = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
            blocked += bool(mask & 1 << 1)  # bit 1: signal 2, SIGINT
        os._exit(blocked)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3, before


# -- how many threads --------------------------------------------------------------------------------------------------


def v2(limit: str, own: str = "") -> dict[str, str]:
    """What a machine with cgroups of version 2 says to a process in the group `own`."""
    return {"proc/self/cgroup": f"0::/{own}", f"sys/fs/cgroup/{own}/cpu.max": limit}


def v1(groups: str, folder: str, quota_us: int, period_us: int) -> dict[str, str]:
    path = f"sys/fs/cgroup/{folder}/cpu.cfs"
    return {"proc/self/cgroup": groups, f"{path}_quota_us": str(quota_us), f"{path}_period_us": str(period_us)}


CGROUPS = {  # the files, and how many CPUs they leave
    "none": ({}, None),
    "v2, no limit": (v2("max 100000"), None),
    "v2, one and a half CPUs": (v2("150000 100000"), 2),
    "v2, a group above": (v2("max 100000", "a/b") | {"sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
    "v2, a tenth of a CPU": (v2("10000 100000"), 1),
    "v1": (v1("5:memory:/m\n3:cpu,cpuacct:/docker/1\n0::/", "cpu,cpuacct/docker/1", 250_000, 100_000), 3),
    "v1 in a container": (v1("3:cpu:/docker/1", "cpu", 100_000, 50_000), 2),  # it sees its own group at the top
    "v1, no limit": (v1("3:cpu:/", "cpu", -1, 100_000), None),
    "nonsense": (v2("a lot"), None),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_the_quota_of_a_cgroup(tmp_path, name):
    files, expected = CGROUPS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert threads.cgroup_quota(tmp_path) == expected


def test_no_more_threads_than_cpus_or_than_pytorch_would_take(monkeypatch):
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(threads, "cgroup_quota", lambda root: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert threads.num_threads() == 3
    monkeypatch.setattr(threads, "cgroup_quota", lambda root: 2)
    assert threads.num_threads() == 2
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 1)
    assert threads.num_threads() == 1


# -- whose threads -----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["bfloat16", "float32", "plain"])
def test_a_step_runs_on_one_kind_of_threads(checkpoint, monkeypatch, two_threads, how):
    """PyTorch keeps its threads only where it computes the products. Afterwards it has them back, also after errors."""
    options = {"enforce_eager": True} if how == "plain" else {"dtype": how}
    llm = LLM(str(checkpoint()), **options)
    runner = llm.engine.model_runner
    if how != "plain" and runner.kernels is threads.TORCH_KERNELS:
        pytest.skip("no C compiler")
    products = {module.product for module in runner.model.layers.modules() if isinstance(module, Linear)}
    in_c, seen, forward = products == {runner.kernels.linear}, [], runner.forward

    def observed(batch):
        seen.append(torch.get_num_threads())
        if len(seen) == 3:
            raise RuntimeError("on purpose")
        return forward(batch)

    monkeypatch.setattr(runner, "forward", observed)
    monkeypatch.setattr(runner, "recorded_steps", None)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert torch.get_num_threads() == 2
    with pytest.raises(RuntimeError, match="on purpose"):
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))
    assert torch.get_num_threads() == 2
    assert seen == [1 if in_c else 2] * 3
    openmp = threads._openmp()
    if not in_c or not hasattr(openmp, "omp_set_num_threads"):
        return

    def interrupted(number):
        openmp.omp_set_num_threads(number)
        if number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(threads, "_openmp", lambda: SimpleNamespace(omp_set_num_threads=interrupted))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_a_long_context_is_cut_for_as_many_threads_as_a_step_has(checkpoint, monkeypatch, num_threads):
    """PyTorch has one thread in such a step: it is not PyTorch that is asked."""
    monkeypatch.setattr(threads, "num_threads", lambda: num_threads)
    llm = LLM(str(checkpoint("llama")), dtype="float32")
    recorded = llm.engine.model_runner.recorded_steps
    if recorded is None:
        pytest.skip("no C compiler")
    two = [[5] * 300, [6] * 300]  # 2 rows, 2 KV heads, 2 parts of keys
    llm.generate(two, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert recorded.attention_step.num_tasks == 2
    assert recorded.attention_step.num_parts == (1 if num_threads == 1 else 2)


def test_pytorchs_threads_compute_the_kernels_where_they_compute_the_products(pool, two_threads):
    team = getattr(threads._openmp(), "GOMP_parallel", None)
    if team is None:
        pytest.skip("PyTorch's OpenMP runtime is another one")
    jobs = Jobs(pool)
    pool.set_threads(2, ctypes.cast(team, ctypes.c_void_p))
    for i in range(200):
        jobs.run(i % 30, 1)
    met = threading.Barrier(2, timeout=LIMIT_S)
    meet = WORK(lambda *_: met.wait() and None)
    pool.parallel_for(meet, None, ctypes.c_int64(2), ctypes.c_int64(1))


def in_fork(function) -> str:
    """What a forked child says of it."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            signal.alarm(60)  # instead of waiting for ever
            os.write(writing, f"it returned {function()}".encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_fork_says_that_it_cannot_compute(llm, checkpoint):
    """Whatever is asked of it, and whoever else was using the LLM when it was forked; the parent goes on."""
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    stream, asynchronous = llm.stream([5, 6], greedy), AsyncLLM(str(checkpoint()), num_gpu_blocks_override=64)
    before = next(stream), llm.generate([5], greedy)[0].outputs

    async def answer() -> None:
        async for _ in asynchronous.generate([5], greedy):
            pass

    def check(*functions) -> None:
        for function in functions:
            said = in_fork(function)
            assert said.startswith("RuntimeError: this process was forked from one that has an LLM"), said

    check(
        lambda: llm.generate([5], greedy),
        lambda: next(stream),
        lambda: LLM(str(checkpoint())),
        llm.engine.step,
        lambda: asyncio.run(answer()),
        lambda: asyncio.run(asynchronous.stats()),
    )
    llm.turns.take(lambda: check(llm.stats))
    assert "it returned None" in in_fork(asynchronous.shutdown)
    assert list(stream)[-1].finished and llm.generate([5], greedy)[0].outputs == before[1]
    asynchronous.shutdown()
