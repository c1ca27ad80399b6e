"""The prefix cache below the pool, measured here: memory, and a directory that outlives the process (chapter 7).

    python examples/bench_tiers.py [MODEL] [--parts restart work speed harm size] [--kills N] [--damages N]

1. restart: time to the first token of a 2,000-token prompt, before and after a process has ended, on the shape of a
0.5B model (random weights), same bits; 2. work: tokens computed with a pool of a quarter of what a workload needs, ten
workloads, by the engine's own scheduler without a model; 3. speed: output tokens/s where nothing repeats, with and
without a directory, quiet and beside a busy process; 4. harm: processes killed while they write, files damaged at
random; 5. size: how long a large directory takes to open, and what its index takes in memory.
Part 5 writes --gigabytes to a temporary folder, 10 unless you say otherwise.
"""

import argparse
import contextlib
import hashlib
import random
import shutil
import statistics
import sys
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from damaged_tiers import chain, damages, kills, opened
from measuring import (
    above_zero,
    add_some_of,
    arguments,
    console,
    greedy,
    in_child,
    in_turn,
    positive,
    progress,
    prompt_ids,
    result,
    seconds,
    table,
)

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.core.tiers.tiers import Tiers
from nanovllm.features.tiers.disk_store import DiskStore
from nanovllm.features.tiers.memory_store import MemoryStore
from nanovllm.features.tiers.segment import Space

BLOCK_SIZE = 16
NUM_PROMPT = 2000
SHAPE = dict(  # Qwen2-0.5B's, as a Llama
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    head_dim=64, vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=4096,
)  # fmt: skip
Prompts = list[list[int]]


def main() -> None:
    parser = arguments(__doc__)
    parts = {"restart": restart, "work": work, "speed": speed, "harm": harm, "size": size}
    add_some_of(parser, "--parts", parts)
    parser.add_argument("--kills", type=positive, default=1000)
    parser.add_argument("--damages", type=positive, default=10_000)
    parser.add_argument("--gigabytes", type=above_zero, default=10)
    parser.add_argument("--runs", type=positive, default=8, help="pairs of runs in part 3")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    parser.add_argument("--open", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        result(open_once(Path(args.open)))
    elif args.ask:
        result(ask_once(args.model, args.ask))
    else:
        for name in args.parts:
            with tempfile.TemporaryDirectory() as folder:
                parts[name](args, Path(folder) / "cache")


# -- 1. a process that has ended ---------------------------------------------------------------------------------------


def restart(args: argparse.Namespace, path: Path) -> None:
    from nanovllm.tools.demo_model import model_or_demo

    title = f"1. A prompt of {NUM_PROMPT:,} tokens on a 0.5B model's shape, bf16"
    rows = table(title, "process", "first token after", "of the first", "found in the cache", "bits of the answer")
    first = None
    for name in progress(("first", "second", "third"), "processes"):
        found = in_child([sys.executable, __file__, model_or_demo(args.model), "--ask", path])
        first = first or found
        if found["bits"] != first["bits"]:
            raise SystemExit(f"the {name} process has answered {found['bits']}, the first {first['bits']}")
        share = f"{found['ttft_s'] / first['ttft_s']:.3f}"
        rows.add_row(name, f"{found['ttft_s'] * 1000:,.1f} ms", share, f"{found['cached']:,} tokens", found["bits"])
    console().print(rows)


def ask_once(model: str, path: str) -> dict[str, Any]:
    from nanovllm import LLM

    options: dict[str, Any] = {"load_format": "dummy", "hf_overrides": SHAPE, "dtype": "bfloat16"}
    llm = LLM(model, prefix_cache_dir=path, max_model_len=4096, max_num_seqs=4, **options)
    rng = random.Random(0)
    params = greedy(16, logprobs=5)
    llm.generate([[rng.randrange(100, 40_000) for _ in range(100)]], params, use_tqdm=False)  # warms up
    [output] = llm.generate([[rng.randrange(100, 40_000) for _ in range(NUM_PROMPT)]], params, use_tqdm=False)
    answer = repr((output.outputs[0].token_ids, output.outputs[0].logprobs)).encode()
    ttft_s = output.metrics.first_token_time - output.metrics.arrival_time  # pyrefly: ignore[unsupported-operation]
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
    columns = ("requests", "unbounded", "a quarter of the pool", "and memory", "and a disk")
    rows = table("2. Tokens computed, of those with an unbounded pool", "workload", *columns)
    for name, prompts in progress(found.items(), "workloads"):
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
        rows.add_row(name, str(len(prompts)), f"{computed[0]:,}", *ratios)
    console().print(rows)


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
            scheduler.add(Sequence(waiting.pop(), greedy(4)))
        if tiers is not None:
            tiers.poll(scheduler.waiting)
        output = scheduler.schedule()
        if tiers is not None:
            tiers.save_evicted()
        num_computed += output.num_tokens
        scheduler.update(output, [[7] * chunk.num_logits for chunk in output.chunks])
        if not output.chunks and (tiers is None or not tiers.wait(1.0)):
            raise RuntimeError("nothing runs, and no block is awaited")
    return num_computed


# -- 3. where nothing repeats ------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace, path: Path) -> None:
    from bench_busy import neighbours

    from nanovllm import LLM
    from nanovllm.tools.demo_model import model_or_demo

    model = model_or_demo(args.model)
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16}
    without, with_disk = LLM(model, **options), LLM(model, prefix_cache_dir=path, prefix_cache_bytes="4G", **options)
    token_ids = prompt_ids(without.engine.model_config.vocab_size)

    def rate(llm: LLM) -> float:
        prompts = [random.choices(token_ids, k=256) for _ in range(16)]
        return 16 * 64 / seconds(llm.generate, prompts, greedy(64), use_tqdm=False)

    columns = ("without", "with a directory", "ratio of pairs: median", "lowest", "highest", "dropped")
    rows = table("3. 16 random prompts of 256 tokens, 64 generated: output tokens/s", "", *columns)
    ways = {"without": partial(rate, without), "with": partial(rate, with_disk)}
    for name, count in (("quiet", 0), ("beside a busy process", 1)):
        with neighbours("loop", count, model):
            in_turn(ways, 1, "warming up")
            dropped_before = num_dropped(with_disk)
            rates = in_turn(ways, args.runs, name)
        ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
        medians = [f"{statistics.median(of):.0f}" for of in rates.values()]
        shown = [f"{ratio:.3f}" for ratio in (statistics.median(ratios), min(ratios), max(ratios))]
        rows.add_row(name, *medians, *shown, str(num_dropped(with_disk) - dropped_before))
    console().print(rows)


def num_dropped(llm: Any) -> int:
    """Blocks that have not been written so far, because the directory could not keep up."""
    return llm.stats()["tiers"]["disk"]["num_dropped"]


# -- 4. kills and damage -----------------------------------------------------------------------------------------------


def harm(args: argparse.Namespace, path: Path) -> None:
    rows = table("4. What has gone wrong", "", "times", "records read afterwards", "wrong", "crashes")
    for name, number, read in (
        ("killed while writing", args.kills, kills(args.kills, path)),
        ("files damaged", args.damages, damages(args.damages, path)),
    ):
        num_read = sum(progress(read, name, number))
        rows.add_row(name, f"{number:,}", f"{num_read:,}", "0", "0")
        shutil.rmtree(path)
    console().print(rows)


# -- 5. a large one ----------------------------------------------------------------------------------------------------

LARGE = Space("ef" * 16, 0, BLOCK_SIZE, BLOCK_SIZE * 12_288)  # 12 KB a token: 0.5B, bf16


def size(args: argparse.Namespace, path: Path) -> None:
    num_bytes = int(args.gigabytes * 1e9)
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes * 1.1:
        raise SystemExit(f"{path.parent} has {free / 1e9:.1f} GB free; name fewer with --gigabytes, or set TMPDIR")
    directory, data = opened(path, 2 * num_bytes, LARGE), np.zeros(LARGE.data_bytes, np.uint8)
    for first in progress(range(0, num_bytes // LARGE.slot_bytes, 128), "writing"):
        records = chain(*range(first, first + 128), block_size=BLOCK_SIZE)  # 2,048 tokens
        for start in range(0, 128, 16):
            directory.put([(record, data) for record in records[start : start + 16]])
    directory.close()
    found = [in_child([sys.executable, __file__, "--open", path]) for _ in range(3)]
    rows = table("5. A large directory", "", "", show_header=False)
    opened_s, memory = (min(run[name] for run in found) for name in ("seconds", "bytes"))
    total, number = sum(file.stat().st_size for file in path.iterdir()), found[0]["records"]
    rows.add_row("on disk", f"{total / 1e9:.2f} GB, {number:,} blocks of {BLOCK_SIZE} tokens")
    rows.add_row("opened in", f"{opened_s:.3f} s")
    rows.add_row("its index in memory", f"{memory / number:.0f} bytes a block")
    console().print(rows)


def open_once(path: Path) -> dict[str, Any]:
    elapsed = seconds(opened, path, 1 << 60, LARGE)
    tracemalloc.start()
    directory = opened(path, 1 << 60, LARGE)
    num_bytes, _ = tracemalloc.get_traced_memory()
    return {"seconds": elapsed, "bytes": num_bytes, "records": len(directory)}


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
