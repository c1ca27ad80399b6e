"""The prefix cache below the pool, measured here: memory, and a directory that outlives the process (chapter 7).

    python examples/bench_tiers.py [MODEL] [--parts restart work speed harm size] [--kills N] [--damages N]

1. restart: time to the first token of a 2,000-token prompt, before and after a process has ended, on the shape of a
0.5B model (random weights), same bits; 2. work: tokens computed with a pool of a quarter of what a workload needs, ten
workloads, by the engine's own scheduler without a model; 3. speed: output tokens/s where nothing repeats, with and
without a directory, quiet and beside a busy process; 4. harm: processes killed while they write, files damaged at
random; 5. size: how long a large directory takes to open, and what its index takes in memory.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.store import NO_EXTRA, Record
from nanovllm.core.tiers.tiers import Tiers
from nanovllm.features.tiers import segment
from nanovllm.features.tiers.directory import CacheDirectory, prepared
from nanovllm.features.tiers.disk_store import DiskStore
from nanovllm.features.tiers.memory_store import MemoryStore
from nanovllm.features.tiers.segment import Space
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 16
NUM_PROMPT = 2000
SHAPE = dict(  # Qwen2-0.5B's, as a Llama
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    head_dim=64, vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=4096,
)  # fmt: skip
console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
Prompts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory or hub id (default: the demo checkpoint)")
    parts = {"restart": restart, "work": work, "speed": speed, "harm": harm, "size": size}
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--damages", type=int, default=10_000)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--runs", type=int, default=8, help="pairs of runs in part 3")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    parser.add_argument("--open", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        print(json.dumps(open_once(Path(args.open))))
    elif args.ask:
        print(json.dumps(ask_once(args.model, args.ask)))
    else:
        for name in args.parts:
            with tempfile.TemporaryDirectory() as folder:
                parts[name](args, Path(folder) / "cache")


def child(*arguments: str) -> dict[str, Any]:
    """What this script prints in a process of its own, with these arguments."""
    ended = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


# -- 1. a process that has ended ---------------------------------------------------------------------------------------


def restart(args: argparse.Namespace, path: Path) -> None:
    from nanovllm.tools.demo_model import model_or_demo

    table = Table(title=f"1. A prompt of {NUM_PROMPT:,} tokens on a 0.5B model's shape, bf16", title_justify="left")
    for name in ("process", "first token after", "of the first", "found in the cache", "bits of the answer"):
        table.add_column(name, justify="left" if name == "process" else "right")
    first = None
    for name in track(("first", "second", "third"), "processes", console=Console(stderr=True), transient=True):
        found = child(model_or_demo(args.model), "--ask", str(path))
        first = first or found
        assert found["bits"] == first["bits"], "other bits"
        share = f"{found['ttft_s'] / first['ttft_s']:.3f}"
        table.add_row(name, f"{found['ttft_s'] * 1000:,.1f} ms", share, f"{found['cached']:,} tokens", found["bits"])
    console.print(table)


def ask_once(model: str, path: str) -> dict[str, Any]:
    from nanovllm import LLM

    options: dict[str, Any] = {"load_format": "dummy", "hf_overrides": SHAPE, "dtype": "bfloat16"}
    llm = LLM(model, prefix_cache_dir=path, max_model_len=4096, max_num_seqs=4, **options)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5)
    llm.generate([[rng.randrange(100, 40_000) for _ in range(100)]], params, use_tqdm=False)  # warms up
    [output] = llm.generate([[rng.randrange(100, 40_000) for _ in range(NUM_PROMPT)]], params, use_tqdm=False)
    answer = repr((output.outputs[0].token_ids, output.outputs[0].logprobs)).encode()
    ttft_s = output.metrics.first_token_time - output.metrics.arrival_time  # type: ignore[operator]
    return {"ttft_s": ttft_s, "cached": output.num_cached_tokens, "bits": hashlib.sha256(answer).hexdigest()[:12]}


# -- 2. tokens computed ------------------------------------------------------------------------------------------------


def traces() -> dict[str, Prompts]:
    """Requests in the order of their arrival; many talk at a time."""
    rng = random.Random(0)

    def ids(n: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(n)]

    def growing(num: int, num_turns: int, shared: list[int], length: int) -> Prompts:
        texts, prompts = [shared + ids(40) for _ in range(num)], []
        for i in rng.sample([*range(num)] * num_turns, num * num_turns):
            texts[i] = texts[i] + ids(length)
            prompts.append(texts[i])
            texts[i] = texts[i] + ids(length)
        return prompts

    instructions, documents, examples = ids(64), [ids(400) for _ in range(50)], [ids(800) for _ in range(12)]
    popularity = [1 / (1 + i) for i in range(50)]
    return {
        "chat": growing(16, 8, ids(256), 64),
        "agents": growing(8, 10, ids(1500), 100),
        "documents": [instructions + rng.choices(documents, popularity)[0] + ids(20) for _ in range(200)],
        "few-shot": [rng.choice(examples) + ids(30) for _ in range(240)],
    }


def work(args: argparse.Namespace, path: Path) -> None:
    from bench_prefix_cache import workloads

    found = traces() | {name: make(random.Random(0)) for name, _, _, make in workloads(40)}
    table = Table(title="2. Tokens computed, of those with an unbounded pool", title_justify="left")
    columns = ("workload", "requests", "unbounded", "a quarter of the pool", "and memory", "and a disk")
    for name in columns:
        table.add_column(name, justify="left" if name == "workload" else "right")
    for name, prompts in track(found.items(), "workloads", console=Console(stderr=True), transient=True):
        longest = max(map(len, prompts)) // BLOCK_SIZE + 2
        unbounded = BlockManager(sum(map(len, prompts)) // BLOCK_SIZE + 2 * len(prompts), BLOCK_SIZE)
        computed = [play(unbounded, prompts)]
        num_blocks = max(len(unbounded.hash_to_block) // 4, longest)
        computed.append(play(BlockManager(num_blocks, BLOCK_SIZE), prompts))
        memory = MemoryStore(64 * len(unbounded.hash_to_block))
        disk = DiskStore(opened(path / name, 1 << 30, Space("00" * 16, 0, BLOCK_SIZE, 64)))
        for tiers in ({"memory": memory}, {"disk": disk}):
            manager = BlockManager(num_blocks, BLOCK_SIZE, hash_algo="sha256")
            computed.append(play(manager, prompts, Tiers(manager, NoData(), **tiers)))
        disk.close()
        ratios = (f"{n / computed[0]:.2f}" for n in computed[1:])
        table.add_row(name, str(len(prompts)), f"{computed[0]:,}", *ratios)
    console.print(table)


class NoData:
    """A pool's tensors, where nothing is computed."""

    def read(self, block_ids: list[int]) -> list[Any]:
        return [np.zeros(64, np.uint8) for _ in block_ids]

    def write(self, block_ids: list[int], data: list[Any]) -> None: ...

    def read_state(self, slot: int) -> Any: ...

    def write_state(self, slot: int, data: Any) -> None: ...


def play(manager: BlockManager, prompts: Prompts, tiers: Tiers | None = None) -> int:
    """Serve the requests with the scheduler, eight at a time. Returns how many tokens were computed."""
    manager.on_event = None if tiers is None else tiers.on_event
    max_model_len = len(manager.blocks) * BLOCK_SIZE
    scheduler = Scheduler(manager, max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=max_model_len)
    waiting, num_computed = [*reversed(prompts)], 0
    while waiting or scheduler.has_unfinished():
        while waiting and len(scheduler.seqs) < 8:
            scheduler.add(Sequence(waiting.pop(), SamplingParams(max_tokens=4, ignore_eos=True)))
        if tiers is not None:
            tiers.poll(scheduler.waiting)
        output = scheduler.schedule()
        if tiers is not None:
            tiers.save_evicted()
        num_computed += output.num_tokens
        scheduler.update(output, [[7] * chunk.num_logits for chunk in output.chunks])
        if not output.chunks:
            assert tiers is not None and tiers.wait(1.0)
    return num_computed


# -- 3. where nothing repeats ------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace, path: Path) -> None:
    from bench_busy import neighbours

    from nanovllm import LLM
    from nanovllm.tools.demo_model import model_or_demo

    model = model_or_demo(args.model)
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16}
    without, with_disk = LLM(model, **options), LLM(model, prefix_cache_dir=path, prefix_cache_bytes="4G", **options)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

    def rate(llm: LLM) -> float:
        prompts = [random.choices(range(100, 30_000), k=256) for _ in range(16)]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return 16 * 64 / (time.perf_counter() - started)

    table = Table(title="3. 16 random prompts of 256 tokens, 64 generated: output tokens/s", title_justify="left")
    for name in ("", "without", "with a directory", "ratio of pairs: median", "lowest", "highest", "dropped"):
        table.add_column(name, justify="right" if name else "left")
    for name, count in (("quiet", 0), ("beside a busy process", 1)):
        with neighbours("loop", count, model):
            for llm in (without, with_disk):
                rate(llm)
            pairs = []
            for _ in track(range(args.runs), name, console=Console(stderr=True), transient=True):
                pairs.append((rate(without), rate(with_disk)))
        ratios = sorted(b / a for a, b in pairs)
        medians = [f"{statistics.median(rates):.0f}" for rates in zip(*pairs, strict=True)]
        shown = [f"{ratio:.3f}" for ratio in (statistics.median(ratios), ratios[0], ratios[-1])]
        table.add_row(name, *medians, *shown, str(with_disk.stats()["tiers"]["disk"]["num_dropped"]))
    console.print(table)


# -- 4. kills and damage -----------------------------------------------------------------------------------------------

SPACE = Space("ab" * 16, 0, 4, 1000, '{"model": "a model"}')


def chain(*token_ids: int, block_size: int = 4) -> list[Record]:
    """A record for each number: a block of tokens, all with this number."""
    hasher, records = BlockHasher(block_size, "sha256"), list[Record]()
    for token_id in token_ids:
        parent_hash = records[-1].block_hash if records else None
        tokens = [token_id] * block_size
        records.append(Record(hasher.hash_block(parent_hash, tokens), parent_hash, tokens, NO_EXTRA))
    return records


def data_of(record: Record, num_bytes: int = 1000) -> np.ndarray:
    """What computing this block would give, in a world where K/V follows from the hash."""
    seed = int.from_bytes(record.block_hash, "little")
    return np.frombuffer(random.Random(seed).randbytes(num_bytes), np.uint8)


def with_data(records: list[Record], num_bytes: int = 1000) -> list[tuple[Record, np.ndarray]]:
    return [(record, data_of(record, num_bytes)) for record in records]


def check_read(directory: CacheDirectory, records: list[Record], num_bytes: int = 1000) -> int:
    """Read records; AssertionError for wrong data. Returns how many were there."""
    found = directory.read(records)
    for record, data in zip(records, found, strict=False):
        assert data.tobytes() == data_of(record, num_bytes).tobytes(), "wrong data"
    return len(found)


def opened(path: Path, num_bytes: int, space: Space = SPACE) -> CacheDirectory:
    directory = CacheDirectory(prepared(path), num_bytes)
    directory.use([space])
    return directory


def some_chain(rng: random.Random) -> list[Record]:
    """One of 6 * 3^7 and their beginnings."""
    return chain(rng.randrange(6), *(rng.randrange(3) for _ in range(rng.randrange(8))))


def harm(args: argparse.Namespace, path: Path) -> None:
    table = Table(title="4. What has gone wrong", title_justify="left")
    for name in ("", "times", "records read afterwards", "wrong", "crashes"):
        table.add_column(name, justify="right" if name else "left")
    for name, number, read in (
        ("killed while writing", args.kills, kills(args.kills, path)),
        ("files damaged", args.damages, damages(args.damages, path)),
    ):
        console_read = sum(track(read, name, number, console=Console(stderr=True), transient=True))
        table.add_row(name, f"{number:,}", f"{console_read:,}", "0", "0")
        shutil.rmtree(path)
    console.print(table)


def kills(number: int, path: Path, num_bytes: int = 600_000) -> Iterator[int]:
    """Processes that write in small steps and die at one of them. Yields how many right records each has left."""
    if sys.platform == "win32":
        raise SystemExit("part 4 forks processes and kills them: Linux or macOS; name other --parts")
    for seed in range(number):
        if (pid := os.fork()) == 0:
            try:
                write_and_die(random.Random(seed), path, num_bytes)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "it did not live to its death"
        directory = opened(path, num_bytes)
        rng = random.Random(seed)
        yield sum(check_read(directory, some_chain(rng)) for _ in range(20))
        directory.close()


def write_and_die(rng: random.Random, path: Path, num_bytes: int) -> None:
    steps_left, write_all = rng.randrange(1, 120), segment._write_all

    class InSteps:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: memoryview) -> int:
            nonlocal steps_left
            steps_left -= 1
            if steps_left <= 0:
                os.kill(os.getpid(), 9)
            return self.file.write(data[:300])

    segment._write_all = lambda file, data: write_all(InSteps(file), data)
    directory = opened(path, num_bytes)
    while True:
        directory.put(with_data(some_chain(rng)))


def damages(number: int, path: Path, num_bytes: int = 600_000, seed: int = 0) -> Iterator[int]:
    """Bytes changed, ends cut off and parts cleared, in every file, open and closed. Yields records read."""
    rng, directory = random.Random(seed), opened(path, num_bytes)
    for _ in range(number):
        directory.put(with_data(some_chain(rng)))
        is_open = rng.random() < 0.5
        if not is_open:
            directory.close()
        damage(rng, rng.choice([file for file in path.iterdir() if file.stat().st_size]))
        if not is_open:
            directory = opened(path, num_bytes)
        yield sum(check_read(directory, some_chain(rng)) for _ in range(4))
    directory.close()


def damage(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    where = rng.randrange(len(data))
    match rng.randrange(3):
        case 0:
            for _ in range(rng.randrange(1, 20)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            del data[where:]
        case _:
            data[where : where + 500] = bytes(len(data[where : where + 500]))
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate(len(data))


# -- 5. a large one ----------------------------------------------------------------------------------------------------

LARGE = Space("ef" * 16, 0, BLOCK_SIZE, BLOCK_SIZE * 12_288)  # 12 KB a token: 0.5B, bf16


def size(args: argparse.Namespace, path: Path) -> None:
    num_bytes = int(args.gigabytes * 1e9)
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes * 1.1:
        raise SystemExit(f"{path.parent} has {free / 1e9:.1f} GB free; name fewer with --gigabytes, or set TMPDIR")
    directory, data = opened(path, 2 * num_bytes, LARGE), np.zeros(LARGE.data_bytes, np.uint8)
    for first in track(
        range(0, num_bytes // LARGE.slot_bytes, 128), "writing", console=Console(stderr=True), transient=True
    ):
        records = chain(*range(first, first + 128), block_size=BLOCK_SIZE)  # 2,048 tokens
        for start in range(0, 128, 16):
            directory.put([(record, data) for record in records[start : start + 16]])
    directory.close()
    found = [child("--open", str(path)) for _ in range(3)]
    table = Table(title="5. A large directory", title_justify="left", show_header=False)
    seconds, memory = (min(run[name] for run in found) for name in ("seconds", "bytes"))
    total, number = sum(file.stat().st_size for file in path.iterdir()), found[0]["records"]
    table.add_row("on disk", f"{total / 1e9:.2f} GB, {number:,} blocks of {BLOCK_SIZE} tokens")
    table.add_row("opened in", f"{seconds:.3f} s")
    table.add_row("its index in memory", f"{memory / number:.0f} bytes a block")
    console.print(table)


def open_once(path: Path) -> dict[str, Any]:
    started = time.perf_counter()
    opened(path, 1 << 60, LARGE)
    seconds = time.perf_counter() - started
    tracemalloc.start()
    directory = opened(path, 1 << 60, LARGE)
    num_bytes, _ = tracemalloc.get_traced_memory()
    return {"seconds": seconds, "bytes": num_bytes, "records": len(directory)}


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
