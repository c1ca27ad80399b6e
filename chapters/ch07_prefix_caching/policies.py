"""Different orders of eviction, to compare with the engine's free queue."""

import random
from collections.abc import Callable
from itertools import count

from chapters.patching import replaced
from chapters.stage import compute
from nanovllm import SamplingParams
from nanovllm.core import block_manager
from nanovllm.core.block_manager import Block, BlockManager, FreeBlockQueue
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence

BLOCK_SIZE = 4
POLICIES = ("released longest ago", "fewest uses so far", "next use farthest away")


class ByRank(FreeBlockQueue):
    """A free queue that gives the block of lowest rank instead of its head, uncached ones before all others.

    Only blocks without a cached child are given, so that a cached block's parent stays cached.
    """

    manager: BlockManager
    rank: Callable[[bytes], float]  # of a hash

    def popleft(self) -> Block:
        blocks = [self.manager.blocks[block_id] for block_id in self]
        parents = {block.parent_hash for block in self.manager.blocks if block.block_hash is not None}
        leaves = [block for block in blocks if block.block_hash not in parents - {None}]
        block = min(leaves, key=lambda b: float("-inf") if b.block_hash is None else self.rank(b.block_hash))
        self.remove(block)
        return block


def bursts(num_rounds: int, num_strangers: int) -> list[Sequence]:
    """A system prompt of 4 blocks again and again, each time with a question of its own, and strangers between."""
    fresh, seqs = count(1000), []
    for _ in range(num_rounds):
        seqs.append(Sequence([*range(16), *(next(fresh) for _ in range(8))]))
        seqs += [Sequence([next(fresh) for _ in range(24)]) for _ in range(num_strangers)]
    return seqs


def num_hits(policy: str, seqs: list[Sequence], num_blocks: int) -> int:
    """Blocks found when the requests come one after another and blocks are evicted in this order."""
    with replaced(block_manager, "FreeBlockQueue", FreeBlockQueue if policy == POLICIES[0] else ByRank):
        manager = BlockManager(num_blocks, BLOCK_SIZE)
    uses: dict[bytes, list[int]] = {}  # hash -> numbers of the requests that ask for it
    for number, seq in enumerate(seqs):
        for index in range(len(seq.tokens) // BLOCK_SIZE):
            uses.setdefault(manager.hash_block(seq, index)[0], []).append(number)
    now = 0

    def rank(name: bytes) -> float:
        if policy == POLICIES[1]:
            return sum(use < now for use in uses[name])
        return -min((use for use in uses[name] if use > now), default=len(seqs))

    if isinstance(manager.free_blocks, ByRank):
        manager.free_blocks.manager, manager.free_blocks.rank = manager, rank
    for now, seq in enumerate(seqs):  # noqa: B007  rank() looks at it
        assert manager.allocate_with_prefix(seq)
        compute(manager, seq)
        manager.free(seq)
    manager.check_integrity()
    return manager.stats.hits


NUM_USERS, NUM_TURNS, MAX_RUNNING = 16, 6, 4
POOL_TOKENS = 13_440  # 60 % of what the conversations below say in all


def play_conversations(free_order: str, block_size: int, pool_tokens: int) -> tuple[float, int]:
    """Sixteen conversations with one system prompt, four at a time, on the real scheduler.

    Whose turn is next is drawn by lot, always alike. Returns the hit rate and the number of computed tokens.
    """
    rng, fresh = random.Random(7), count(1000)
    manager = BlockManager(pool_tokens // block_size, block_size, free_order=free_order)
    scheduler = Scheduler(manager, max_num_seqs=MAX_RUNNING, max_num_batched_tokens=2048, max_model_len=4096)
    system = [next(fresh) for _ in range(300)]
    history = dict.fromkeys(range(NUM_USERS), system)
    turns = [user for user in history for _ in range(NUM_TURNS)]
    rng.shuffle(turns)
    talking: dict[int, int] = {}  # seq_id -> user
    num_computed = 0
    while turns or scheduler.has_unfinished():
        while turns and len(talking) < MAX_RUNNING and turns[-1] not in talking.values():
            user = turns.pop()
            question, answer_len = [next(fresh) for _ in range(rng.randint(40, 200))], rng.randint(20, 200)
            seq = Sequence(history[user] + question, SamplingParams(max_tokens=answer_len))
            scheduler.add(seq)
            talking[seq.seq_id] = user
        output = scheduler.schedule()
        num_computed += output.num_tokens
        token_ids = [[next(fresh)] if chunk.reaches_end else [] for chunk in output.chunks]
        for seq in scheduler.update(output, token_ids):
            history[talking.pop(seq.seq_id)] = seq.tokens
    return manager.stats.hit_rate, num_computed
