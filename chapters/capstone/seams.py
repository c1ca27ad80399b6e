"""Seams: what a policy decides, put into a Scheduler and a BlockManager of the engine between two steps.

Nothing of the engine is replaced: the queue is put in order, the budget is a number, draft tokens are an argument of
schedule(), and the free queue's cached blocks are sorted. What a policy answers is judged first (answers.py).
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from chapters.capstone.answers import Refused, read_budget, read_draft_counts, read_ids, read_snapshots, read_worths
from chapters.capstone.views import Setup
from nanovllm.core.block_manager import BlockEvent, BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.policy import snapshot_positions
from nanovllm.features.speculation.choose import Proposer, Speculation


class Asked(Protocol):
    """A Desk."""

    def answer(self, message: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(eq=False)
class Client:
    """A request as the server's side keeps it. token_times: seconds, when it got each of its tokens."""

    index: int
    arrival_s: float
    seq: Sequence
    token_times: list[float] = field(default_factory=list)
    num_checked: int = 0
    num_accepted: int = 0
    refused: bool = False
    num_cached_blocks: int = 0  # when somebody looked last

    def note(self, chunk: ScheduledChunk, now: float) -> None:
        """A step is over, and this was its part."""
        num_new = len(self.seq.tokens) - chunk.known_end if chunk.reaches_end else 0
        self.token_times += [now] * num_new
        if chunk.draft_token_ids:
            self.num_accepted += num_new - 1
            self.num_checked += min(num_new, len(chunk.draft_token_ids))


class ChosenDrafts(Speculation):
    """As many draft tokens as the policy wants. most: tokens of a step. max_rows: of these, rows that give logits."""

    def __init__(self, proposer: Proposer, setup: Setup, max_rows: int) -> None:
        super().__init__(proposer, setup.max_draft_tokens, max_rows)
        self.most = setup.max_num_batched_tokens
        self.wanted: dict[int, int] = {}  # seq_id -> draft tokens in this step

    def choose(self, scheduler: Scheduler) -> dict[Sequence, int]:
        left = min(self.most, self.max_rows) - len(scheduler.running)
        counts = {}
        for seq in scheduler.running:
            wanted = min(self.wanted.get(seq.seq_id, 0), scheduler.num_tokens_left(seq) - 1, left)
            if wanted > 0 and len(seq.tokens) - seq.num_computed_tokens == 1:
                counts[seq] = wanted
                left -= wanted
        return counts


class Seams:
    """Between one scheduler and whoever is asked."""

    def __init__(self, asked: Asked, setup: Setup, scheduler: Scheduler, drafts: ChosenDrafts) -> None:
        self.asked, self.setup, self.scheduler, self.drafts = asked, setup, scheduler, drafts
        self.manager: BlockManager = scheduler.block_manager
        self.clients: dict[int, Client] = {}  # seq_id -> those that have not ended
        self._new: list[Client] = []
        self._may_run: set[int] = set()
        self._released: list[int] = []  # block ids, in the order of release
        self._uses: Counter[bytes] = Counter()
        self._depths: dict[bytes, int] = {}  # block hash -> blocks that come before it
        self._worth: dict[bytes, float] = {}  # block hash -> of cached blocks that nobody uses
        self.manager.on_event = self.note
        scheduler.may_run = lambda seq, running: seq.seq_id in self._may_run

    def add(self, client: Client) -> None:
        """It has come, and stands in the scheduler's queue."""
        self.clients[client.seq.seq_id] = client
        self._new.append(client)

    def forget(self, finished: list[Sequence]) -> None:
        """These have ended."""
        for seq in finished:
            del self.clients[seq.seq_id]

    def note(self, event: BlockEvent) -> None:
        block_hash = self.manager.blocks[event.block_id].block_hash
        if event.kind == "register":
            parent = self.manager.blocks[event.block_id].parent_hash
            self._depths[block_hash] = 0 if parent is None else self._depths[parent] + 1  # pyrefly: ignore[unsupported-operation]
        elif event.kind == "free" and block_hash is not None:
            self._released.append(event.block_id)
        elif event.kind == "hit" and block_hash is not None:
            self._uses[block_hash] += 1

    # -- before a step --------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Client]:
        """Ask, judge, and put it into the engine. Returns the requests that are sent away. Raises Refused."""
        waiting = [self.clients[seq.seq_id] for seq in self.scheduler.waiting]
        running = [self.clients[seq.seq_id] for seq in self.scheduler.running]
        blocks = self._blocks_released()
        found = self.asked.answer(
            {
                "now": now,
                "new": [(c.index, c.arrival_s, self._beginning(c.seq), c.seq.num_prompt_tokens) for c in self._new],
                "waiting": [(c.index, self._num_cached(c), 0, *self._progress(c)) for c in waiting],
                "running": [
                    (c.index, c.seq.num_cached_tokens, c.seq.num_computed_tokens, *self._progress(c)) for c in running
                ],
                "free": len(self.manager.free_blocks),
                "released": [self._described(block_id) for block_id in blocks],
            }
        )
        self._new = []
        by_index = {client.index: client for client in waiting}
        refused = [by_index.pop(index) for index in read_ids(found, "refuse", by_index)]
        for client in refused:
            if client.token_times:
                raise Refused(f"refuse() sends request {client.index} away, which has got a token")
        chosen = [by_index.pop(index) for index in read_ids(found, "order", by_index)]
        budget = read_budget(found, self.setup)
        answered = {client.index: client.seq.seq_id for client in running if client.token_times}
        wanted = read_draft_counts(found, self.setup, answered)
        worths = read_worths(found, len(blocks))

        self._drop(refused)
        self._may_run = {client.seq.seq_id for client in chosen}
        self.scheduler.waiting = deque(client.seq for client in [*chosen, *by_index.values()])
        self.scheduler.max_num_batched_tokens = budget
        self.drafts.wanted = {answered[index]: num for index, num in wanted.items()}
        if blocks:
            self._sort_free_blocks(blocks, worths)
        return refused

    def propose_drafts(self) -> dict[int, list[int]]:
        """{seq_id: draft tokens} for the step that has been decided."""
        return self.drafts.propose(self.scheduler)

    @property
    def has_work(self) -> bool:
        """Somebody runs, or may."""
        return bool(self.scheduler.running or self._may_run)

    def snapshots(self, num_tokens: int, num_matched: int, block_size: int) -> dict[int, bool]:
        """The block manager's own question, in the middle of a step (core/snapshots/policy.py)."""
        found = self.asked.answer({"snapshots": (num_tokens, num_matched)}).get("snapshots")
        if found is None:
            return snapshot_positions(num_tokens, num_matched, block_size)
        return read_snapshots(found, num_tokens, block_size)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _progress(self, client: Client) -> tuple[Any, ...]:
        if not client.token_times:
            return 0, None, 0, 0
        return client.seq.num_generated_tokens, client.token_times[0], client.num_checked, client.num_accepted

    def _beginning(self, seq: Sequence) -> str:
        size = self.manager.block_size
        return self.manager.hash_block(seq, 0)[0].hex() if seq.num_prompt_tokens >= size else ""

    def _num_cached(self, client: Client) -> int:
        """Blocks before a cached one are cached, too. So we look from where the cached ones ended the last time."""
        seq, cached = client.seq, self.manager.hash_to_block
        num_full = len(seq.tokens) // self.manager.block_size
        for index in range(len(seq.block_hashes), num_full):
            self.manager.hash_block(seq, index)
        num = min(client.num_cached_blocks, num_full)
        while num < num_full and seq.block_hashes[num] in cached:
            num += 1
        while num > 0 and seq.block_hashes[num - 1] not in cached:
            num -= 1
        client.num_cached_blocks = num
        return num * self.manager.block_size

    def _blocks_released(self) -> list[int]:
        """Those that are still cached, and that nobody has taken up since."""
        blocks = [self.manager.blocks[block_id] for block_id in dict.fromkeys(self._released)]
        self._released = []
        return [block.block_id for block in blocks if block.ref_count == 0 and block.block_hash is not None]

    def _described(self, block_id: int) -> tuple[str, str, int, int]:
        block = self.manager.blocks[block_id]
        first, block_hash = block, block.block_hash or b""
        while first.parent_hash is not None:
            first = next(iter(self.manager.hash_to_block[first.parent_hash].values()))
        return block_hash.hex(), (first.block_hash or b"").hex(), self._depths[block_hash], self._uses[block_hash]

    def _drop(self, refused: list[Client]) -> None:
        self.scheduler.abort(*(client.seq.seq_id for client in refused))
        for client in refused:
            client.refused = True
            del self.clients[client.seq.seq_id]

    def _sort_free_blocks(self, released: list[int], worths: list[float]) -> None:
        """The cached part of the free queue, the least worth first. A block is worth at least
        what a later one in its chain is: no block may be evicted before those that follow it."""
        manager = self.manager
        free = [manager.blocks[block_id] for block_id in manager.free_blocks]
        cached = [block for block in free if block.block_hash is not None]
        for block_id, worth in zip(released, worths, strict=True):
            self._worth[manager.blocks[block_id].block_hash] = worth  # pyrefly: ignore[unsupported-operation]
        worth_of = {block.block_hash: self._worth.get(block.block_hash, -math.inf) for block in cached}  # pyrefly: ignore[no-matching-overload]
        self._worth = dict(worth_of)  # pyrefly: ignore[bad-assignment]
        for block in sorted(cached, key=lambda block: -self._depths[block.block_hash]):  # pyrefly: ignore[bad-index]
            parent = block.parent_hash
            if parent in worth_of:
                worth_of[parent] = max(worth_of[parent], worth_of[block.block_hash])
        for block in sorted(cached, key=lambda block: worth_of[block.block_hash]):  # stable: the rest is as released
            manager.free_blocks.remove(block)
            manager.free_blocks.append(block)
