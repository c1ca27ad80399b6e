"""Where snapshots could be taken, and what that saves: the engine's own Scheduler and SnapshotCache, no model.

Four workloads that are hard on a cache of states, several policies, and play(), which sends a workload through the
scheduler. What a model would compute does not matter to the cache, so the answers are chosen beforehand. Needs the
standard library and nanovllm/core only, so that a browser can run it; examples/bench_hybrid.py measures with it.
"""

import random

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.cache import SnapshotCache
from nanovllm.core.snapshots.policy import Policy, snapshot_positions
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE, MAX_LEN, MAX_RUNNING = 16, 9_000, 8
UNBOUNDED = 20_000  # snapshots: one for every block of any workload
Requests = list[tuple[list[int], list[int]]]  # (prompt, answer), one after another

# -- policies: (num_tokens, num_matched, block_size) -> {position: is it known to be wanted?} -------------------------


def at_the_end(num_tokens: int, num_matched: int, block_size: int) -> dict[int, bool]:
    return {(num_tokens - 1) // block_size * block_size: True}


def as_vllm(num_tokens: int, num_matched: int, block_size: int) -> dict[int, bool]:
    """One state near the prompt's end: vLLM's blocks are as large as a state or larger, 384 tokens here, on a CPU."""
    return {(num_tokens - 1) // 384 * 384: True}


def end_and_fork(num_tokens: int, num_matched: int, block_size: int) -> dict[int, bool]:
    last = (num_tokens - 1) // block_size * block_size
    return {last: True, min(num_matched, last): True}


def every_512(num_tokens: int, num_matched: int, block_size: int) -> dict[int, bool]:
    return dict.fromkeys(range(512, num_tokens, 512), True) | at_the_end(num_tokens, num_matched, block_size)


def every_block(num_tokens: int, num_matched: int, block_size: int) -> dict[int, bool]:
    return dict.fromkeys(range(block_size, num_tokens, block_size), True)


POLICIES: dict[str, Policy] = {
    "as vLLM": as_vllm,
    "end": at_the_end,
    "end, fork": end_and_fork,
    "every 512": every_512,
    "every block": every_block,
    "this engine's": snapshot_positions,
}

# -- workloads --------------------------------------------------------------------------------------------------------


def random_ids(rng: random.Random, n: int, token_ids: range = range(1000, 40_000)) -> list[int]:
    return [rng.choice(token_ids) for _ in range(n)]


def hard_workloads() -> dict[str, Requests]:
    """Ids are random: to the cache, text is nothing but ids."""
    rng = random.Random(0)
    system, long_system, varied = random_ids(rng, 600), random_ids(rng, 1500), random_ids(rng, 5200)
    chat: Requests = []
    history = random_ids(rng, 100)
    for _ in range(8):
        chat.append((history, random_ids(rng, 90)))
        history = history + chat[-1][1] + random_ids(rng, 40)
    shared_lengths = [rng.randint(4900, 5200) for _ in range(32)]
    return {
        "600 shared, 3 own": [(system + random_ids(rng, 3), [7]) for _ in range(16)],
        "1,500 shared, 700 own": [(long_system + random_ids(rng, 700), [7]) for _ in range(64)],
        "a chat of 8 turns": chat,
        "4,900-5,200 shared of 6,000": [(varied[:n] + random_ids(rng, 6000 - n), [7]) for n in shared_lengths],
    }


# -- the engine's scheduler -------------------------------------------------------------------------------------------


def make_scheduler(num_blocks: int, policy: Policy, max_snapshots: int, max_running: int = MAX_RUNNING) -> Scheduler:
    snapshots = SnapshotCache(max_running=max_running, max_snapshots=max_snapshots, policy=policy)
    manager = BlockManager(num_blocks, BLOCK_SIZE, snapshots=snapshots)
    return Scheduler(manager, max_num_seqs=max_running, max_num_batched_tokens=8192, max_model_len=MAX_LEN)


def num_blocks_for(requests: Requests) -> int:
    """Blocks of a pool that holds K/V of all of them, and of one more."""
    return (sum(len(prompt) + len(answer) for prompt, answer in requests) + MAX_LEN) // BLOCK_SIZE + 1


def send(scheduler: Scheduler, prompt: list[int], answer: list[int]) -> Sequence:
    """One request, to its end. Its num_cached_tokens says where it began."""
    seq = Sequence(prompt, SamplingParams(max_tokens=len(answer), ignore_eos=True))
    scheduler.add(seq)
    for token in answer:
        scheduler.update(scheduler.schedule(), [[token]])
    return seq


def play(requests: Requests, policy: Policy, max_snapshots: int) -> list[int]:
    """Where each request begins: its tokens that need not be computed. The pool holds K/V of all of them."""
    scheduler = make_scheduler(num_blocks_for(requests), policy, max_snapshots)
    return [send(scheduler, prompt, answer).num_cached_tokens for prompt, answer in requests]
