"""Random workloads against slow twins: a radix tree with LRU leaf eviction, and a naive model of every operation."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence
from tests.marks import by_night

# -- the radix tree ----------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A block of tokens below its prefix. released: when its last user let go of it; 0: never used."""

    key: tuple
    parent: "Node | None"
    children: dict = field(default_factory=dict)
    users: int = 1
    released: int = 0


class RadixTree:
    """Prefix cache as a tree, evicting the least recently released leaf (RadixAttention, arXiv:2312.07104).

    Memory that holds nothing findable (the partly filled end of a sequence, or a block never used) is a leaf of its own
    once it is free. Under "uncached_first" it is taken before any cached leaf, as SGLang takes its free pages before it
    evicts; under "release" it waits its turn among them. Recency is the time of release.
    """

    def __init__(self, num_blocks: int, block_size: int, free_order: str):
        self.block_size, self.free_order = block_size, free_order
        self.root = Node((), None)
        self.clock = 0
        self.leaves = [Node(("never used", i), self.root, users=0, released=i - num_blocks) for i in range(num_blocks)]
        self.nodes = list(self.leaves)  # every block that is not root, cached or not
        self.hits = self.misses = self.evictions = 0

    def admit(self, tokens: list[int]) -> "list[Node] | None":
        """The path of a sequence whose prompt is computed at once; None when it does not fit."""
        size, node, path = self.block_size, self.root, []
        blocks = [tuple(tokens[i : i + size]) for i in range(0, len(tokens), size)]
        num_full = len(tokens) // size
        for key in blocks[:num_full]:
            if key not in node.children:
                break
            node = node.children[key]
            path.append(node)
        num_free = sum(n.users == 0 for n in self.nodes) - sum(n.users == 0 for n in path)
        if len(blocks) - len(path) > num_free:
            return None
        self.hits += len(path)
        self.misses += num_full - len(path)
        for hit in path:
            hit.users += 1
        fresh = [self._take() for _ in blocks[len(path) :]]
        for new in fresh:
            path.append(new)
        self.cache(path, blocks[:num_full])
        return path

    def cache(self, path: list[Node], full_blocks: list[tuple]) -> None:
        """Hang the full blocks of a path into the tree."""
        parent = self.root
        for node, key in zip(path, full_blocks, strict=False):
            if node.parent is None:
                assert key not in parent.children, "no duplicates in this workload"
                node.key, node.parent = key, parent
                parent.children[key] = node
            parent = node

    def grow(self, path: list[Node]) -> bool:
        if not any(n.users == 0 for n in self.nodes):
            return False
        path.append(self._take())
        return True

    def release(self, path: list[Node]) -> None:
        for node in reversed(path):
            node.users -= 1
            if node.users == 0:
                self.clock += 1
                node.released = self.clock
                if node.parent is None:
                    node.key, node.parent = ("never cached", self.clock), self.root

    def _take(self) -> Node:
        evictable = [n for n in self.nodes if n.users == 0 and not n.children]
        is_uncached_first = self.free_order == "uncached_first"
        victim = min(evictable, key=lambda n: (is_uncached_first and self._is_cached(n), n.released))
        self.nodes.remove(victim)
        if self._is_cached(victim):
            del victim.parent.children[victim.key]
            self.evictions += 1
        fresh = Node((), None)
        self.nodes.append(fresh)
        return fresh

    def _is_cached(self, node: Node) -> bool:
        return node.parent.children.get(node.key) is node


FREE_ORDERS = st.sampled_from(["uncached_first", "release"])
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "continue", "decode", "decode", "release"]),
        st.integers(0, 10**6),
        st.integers(0, 14),
    ),
    max_size=80,
)


@pytest.mark.parametrize("time", [1, by_night(2), by_night(3)])  # other examples each time
@settings(max_examples=100, deadline=None)
@given(actions=ACTIONS, block_size=st.sampled_from([1, 2, 3]), num_blocks=st.integers(4, 14), free_order=FREE_ORDERS)
def test_hits_misses_and_evictions_equal_a_radix_trees(actions, block_size, num_blocks, free_order, time):
    """Equal, operation by operation, on any workload in which no two running sequences fill the same block.

    That condition is needed: the tree keeps one node for a content, while two sequences that compute the same tokens
    side by side fill two blocks (block tables are append-only), and the second copy takes room. A prompt that an
    earlier sequence has computed is found; it takes two that run at the same time, the second admitted before the
    first has registered the block. Here: prompts are registered as they are admitted, sampled tokens are unique, and
    a sequence that continues another one repeats only tokens whose K/V is computed.
    """
    manager = BlockManager(num_blocks, block_size, free_order=free_order)
    tree = RadixTree(num_blocks, block_size, free_order)
    running: list[tuple[Sequence, list[Node]]] = []
    history: list[list[int]] = [[]]
    unique = 1000

    def compare():
        stats = manager.stats
        assert (stats.hits, stats.misses, stats.evictions) == (tree.hits, tree.misses, tree.evictions)
        manager.check_integrity()

    for action, pick, length in actions:
        if action in ("admit", "continue"):
            if action == "admit":  # a few common beginnings, then tokens from a small alphabet
                tokens = [pick % 2] * (length // 2) + [pick % 3] * (length - length // 2) + [pick % 5]
            else:
                earlier = history[pick % len(history)]
                tokens = [*earlier[: length + 1], pick % 7]
            seq = Sequence(tokens)
            path = tree.admit(tokens)
            assert manager.can_allocate(seq) == (path is not None)
            if manager.allocate_with_prefix(seq):
                seq.num_computed_tokens = len(tokens)
                manager.register_prefix(seq)
                running.append((seq, path))
                history.append(list(tokens))
        elif action == "decode" and running:
            seq, path = running[pick % len(running)]
            if len(seq.tokens) % block_size == 0 and not tree.grow(path):
                assert not manager.append_slots(seq)
                continue
            assert manager.append_slots(seq)
            unique += 1
            seq.append(unique)
            seq.num_computed_tokens += 1
            manager.register_prefix(seq)
            full = len(seq.tokens) // block_size
            tree.cache(path, [tuple(seq.tokens[i * block_size : (i + 1) * block_size]) for i in range(full)])
            history.append(list(seq.tokens))
        elif action == "release" and running:
            seq, path = running.pop(pick % len(running))
            manager.free(seq)
            tree.release(path)
        compare()


# -- every operation ---------------------------------------------------------------------------------------------------


class BlockManagerMachine(RuleBasedStateMachine):
    """The manager against lists and dicts: exact block ids, exact queue, exact hashes, after every operation.

    The oracle knows the content of a cached block as its whole prefix, so it needs no hashes.
    """

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), free_order=FREE_ORDERS)
    def start(self, num_blocks, block_size, free_order):
        self.size = block_size
        self.manager = BlockManager(num_blocks, block_size, free_order=free_order)
        self.queue = list(range(num_blocks))
        self.content: dict[int, tuple] = {}  # cached block -> (salt, prefix up to its end), in order of registration
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []

    def take(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block_id in taken:
            self.content.pop(block_id, None)
        return taken

    def prefix(self, seq: Sequence, index: int) -> tuple:
        return (seq.cache_salt, tuple(seq.tokens[: (index + 1) * self.size]))

    def admit(self, seq: Sequence) -> bool:
        hits = []
        for index in range(len(seq.tokens) // self.size):
            copies = [b for b, content in self.content.items() if content == self.prefix(seq, index)]
            if not copies:
                break
            hits.append(copies[0])
        num_fresh = -(-len(seq.tokens) // self.size) - len(hits)
        fits = num_fresh <= len([b for b in self.queue if b not in hits])
        assert self.manager.can_allocate(seq) == fits
        stats = self.manager.stats.snapshot()
        assert self.manager.allocate_with_prefix(seq) == fits
        if not fits:
            assert self.manager.stats == stats and not seq.block_table
            return False
        self.queue = [b for b in self.queue if b not in hits]
        assert seq.block_table == hits + self.take(num_fresh)
        assert seq.num_cached_tokens == min(len(hits) * self.size, len(seq.tokens) - 1)
        self.running.append(seq)
        return True

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20), salt=st.sampled_from([None, None, "a"]))
    def add(self, tokens, salt):
        self.admit(Sequence(tokens, cache_salt=salt))

    @precondition(lambda self: self.preempted)
    @rule()
    def resume(self):
        if self.admit(self.preempted[0]):
            self.preempted.pop(0)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 100), num_tokens=st.integers(1, 9), token_id=st.integers(0, 2))
    def compute(self, pick, num_tokens, token_id):
        """A chunk of what is known, or a decode when all of it is computed."""
        seq = self.running[pick % len(self.running)]
        if seq.num_computed_tokens == len(seq.tokens):
            seq.append(token_id)
        num_tokens = min(num_tokens, len(seq.tokens) - seq.num_computed_tokens)
        needed = -(-(seq.num_computed_tokens + num_tokens) // self.size) - len(seq.block_table)
        table = list(seq.block_table)
        fits = needed <= len(self.queue)
        assert self.manager.append_slots(seq, num_tokens) == fits
        assert seq.block_table == table + (self.take(max(needed, 0)) if fits else [])
        if not fits:
            return
        seq.num_computed_tokens += num_tokens
        self.manager.register_prefix(seq)
        for index in range(seq.num_computed_tokens // self.size):
            self.content.setdefault(seq.block_table[index], self.prefix(seq, index))

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 100), preempt=st.booleans())
    def release(self, pick, preempt):
        seq = self.running.pop(pick % len(self.running))
        in_use = {b for other in self.running for b in other.block_table}
        for block_id in reversed([b for b in seq.block_table if b not in in_use]):
            if self.manager.free_order == "release" or block_id in self.content:
                self.queue.append(block_id)
            else:
                self.queue.insert(0, block_id)
        self.manager.free(seq)
        if preempt:
            seq.num_computed_tokens = 0
            self.preempted.append(seq)

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (not self.running)
        if not self.running:
            self.content = {}
            self.queue = list(range(len(self.manager.blocks)))

    @rule(n=st.integers(0, 15))
    def preview(self, n):
        assert self.manager.eviction_candidates(n) == self.queue[:n]

    @invariant()
    def agrees(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert list(self.manager.free_blocks) == self.queue
        cached = {block.block_id for block in self.manager.blocks if block.block_hash is not None}
        assert cached == set(self.content)
        hashes = [
            {self.manager.blocks[b].block_hash for b, c in self.content.items() if c == x}
            for x in self.content.values()
        ]
        assert all(len(found) == 1 for found in hashes), "one content, one hash"


class TestBlockManagerMachine(BlockManagerMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=60, deadline=None)


@pytest.mark.nightly
class TestBlockManagerMachineAtLength(BlockManagerMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
