"""Snapshots placed by hand, beside the engine's policy: the same requests on three real schedulers (chapter 16)."""

from functools import cache
from typing import NamedTuple

from chapters.ch16_fixed_memory.placing import (
    BLOCK_SIZE,
    Requests,
    every_block,
    hard_workloads,
    make_scheduler,
    num_blocks_for,
    send,
)
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.cache import Snapshot
from nanovllm.core.snapshots.policy import snapshot_positions

NUM_REQUESTS = 10  # of each workload
BOUNDS = 8, 4, 2


@cache
def workloads() -> dict[str, Requests]:
    return {name: requests[:NUM_REQUESTS] for name, requests in hard_workloads().items()}


class Sent(NamedTuple):
    """A request that was sent. Numbers are tokens: of its prompt, and where it began in each of the three."""

    length: int
    matched: int
    yours: int
    policy: int
    unbounded: int
    marks: list[int]


class Shelf:
    """A workload, where you want snapshots of its next prompt (marks), and what became of those before."""

    def __init__(self, workload: str = "600 shared, 3 own", bound: int = BOUNDS[0]) -> None:
        self.workload, self.bound = workload, bound
        self.requests = workloads()[workload]
        self.marks: dict[int, bool] = {}  # position -> is it wanted for certain? as a policy answers
        self.sent: list[Sent] = []
        self.num_blocks = num_blocks_for(self.requests)
        self.yours = self._scheduler(lambda *_: dict(self.marks), bound)
        self.policy = self._scheduler(snapshot_positions, bound)
        self.unbounded = self._scheduler(every_block, self.num_blocks)
        self._look()

    def _scheduler(self, policy: object, max_snapshots: int) -> Scheduler:
        return make_scheduler(self.num_blocks, policy, max_snapshots, max_running=1)  # pyrefly: ignore[bad-argument-type]

    def _look(self) -> None:
        """What the cache has of the next prompt: blocks with K/V, and those with a snapshot."""
        self.num_matched, self.snapshots = 0, list[int]()
        if not self.is_over:
            # What a model without states would reuse.
            hits = self.manager.get_computed_blocks(Sequence(self.prompt)).blocks
            self.num_matched = len(hits) * BLOCK_SIZE
            ends = ((number * BLOCK_SIZE, block.block_hash) for number, block in enumerate(hits, start=1))
            self.snapshots = [end for end, block_hash in ends if block_hash in self.snapshots_kept]

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def manager(self) -> BlockManager:
        return self.yours.block_manager

    @property
    def snapshots_kept(self) -> dict[bytes, Snapshot]:
        """Of all prompts so far, by block hash."""
        assert self.manager.snapshots is not None
        return self.manager.snapshots.by_hash

    @property
    def is_over(self) -> bool:
        return len(self.sent) == len(self.requests)

    @property
    def prompt(self) -> list[int]:
        return self.requests[len(self.sent)][0]

    @property
    def last_end(self) -> int:
        """The end of the last full block that leaves a token to be computed."""
        return (len(self.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    @property
    def fork(self) -> int:
        """Where the next prompt leaves what the cache knows."""
        return min(self.num_matched, self.last_end)

    @property
    def begins(self) -> int:
        """Where the next prompt will begin: at the deepest snapshot that leaves a token to be computed."""
        return max((end for end in self.snapshots if end <= self.last_end), default=0)

    def computed(self) -> dict[str, int]:
        """Prompt tokens so far, by who placed the snapshots."""
        names = {"yours": "yours", "this engine's": "policy", "unbounded": "unbounded"}
        return {shown: sum(sent.length - getattr(sent, name) for sent in self.sent) for shown, name in names.items()}

    # -- what one can do ----------------------------------------------------------------------------------------------

    def mark(self, positions: list[int]) -> list[int]:
        """Want a snapshot for each position, at the last end of a block that is not after it. Returns these ends."""
        self._check_not_over()
        for position in positions:
            if not 0 < position <= len(self.prompt):
                raise ValueError(f"{position:,} is no position of this prompt, which has {len(self.prompt):,} tokens.")
        ends = sorted({end for position in positions if (end := position // BLOCK_SIZE * BLOCK_SIZE)})
        self.marks |= dict.fromkeys((end for end in ends if end <= self.last_end), True)
        return [end for end in ends if end <= self.last_end]

    def mark_as_policy(self) -> list[int]:
        self._check_not_over()
        self.marks = snapshot_positions(len(self.prompt), self.num_matched, BLOCK_SIZE)
        return sorted(position for position in self.marks if position)

    def send(self) -> Sent:
        """The next request, through all three schedulers."""
        self._check_not_over()
        prompt, answer = self.requests[len(self.sent)]
        marks = sorted(position for position in self.marks if position)
        yours, policy, unbounded = (
            send(each, prompt, answer).num_cached_tokens for each in (self.yours, self.policy, self.unbounded)
        )
        self.sent.append(Sent(len(prompt), self.num_matched, yours, policy, unbounded, marks))
        self.manager.check_integrity()
        self.marks = {}
        self._look()
        return self.sent[-1]

    def _check_not_over(self) -> None:
        if self.is_over:
            raise ValueError("All requests were sent. Take another workload (o), or start over (r).")
