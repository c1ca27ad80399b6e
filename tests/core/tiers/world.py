"""A scheduler over a pool whose K/V is plain to see: at each position what everything before it adds up to."""

import random
from concurrent.futures import Future

from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.cache import SnapshotCache
from nanovllm.core.snapshots.state import NOTHING_READ
from nanovllm.core.tiers.store import BLOCK as BLOCK_KIND
from nanovllm.core.tiers.tiers import Tiers
from nanovllm.sampling_params import SamplingParams
from tests.core.by_hand import fail_step

BLOCK = 4


class Copy(list):
    nbytes = BLOCK


class FakePool:
    """kv[block][offset] and states[slot] are hashes of what a model would have read so far."""

    def __init__(self, num_blocks: int, num_slots: int = 0) -> None:
        self.kv = [[None] * BLOCK for _ in range(num_blocks)]
        self.states = [None] * num_slots

    def read(self, block_ids):
        return [Copy(self.kv[block_id]) for block_id in block_ids]

    def write(self, block_ids, data):
        for block_id, of_block in zip(block_ids, data, strict=True):
            self.kv[block_id] = [*of_block]

    def read_state(self, slot):
        return Copy([self.states[slot]])

    def write_state(self, slot, data):
        (self.states[slot],) = data


class SlowStore:
    """Keeps everything; delivers when it is told to, and now and then loses something or stops early."""

    medium = "disk"

    def __init__(self, rng: random.Random, loses: float = 0.0) -> None:
        self.rng, self.loses = rng, loses
        self.kept, self.promised = {}, []

    def may_have(self, key):
        return key in self.kept

    def put(self, records, read):
        for record, data in zip(records, read(len(records)), strict=True):
            assert record.kind != BLOCK_KIND or len(record.token_ids) == BLOCK, "a block that is not full"
            assert record.parent_hash is None or record.parent_hash in self.kept, "a child without its parent"
            self.kept[record.key] = record, data

    def fetch(self, records):
        assert records
        future = Future()
        self.promised.append((future, records))
        return future

    def deliver(self):
        for future, records in self.promised:
            found = []
            for record in records:
                if self.rng.random() < self.loses:
                    break
                kept, data = self.kept[record.key]
                assert kept == record
                found.append(data)
            future.set_result(found)
        self.promised = []

    def touch(self, keys):
        pass

    def reset(self):
        self.kept.clear()


class World:
    """step() schedules, computes, checks every position that is read against what it must be, and samples at random."""

    def __init__(self, rng, memory=None, disk=None, num_blocks=24, is_hybrid=False, num_snapshots=4, **options):
        self.rng, self.finished = rng, []
        snapshots = SnapshotCache(max_running=4, max_snapshots=num_snapshots) if is_hybrid else None
        self.manager = BlockManager(num_blocks, BLOCK, snapshots=snapshots)
        self.manager.hasher = BlockHasher(BLOCK, "sha256", adapter_digest=lambda number: f"adapter {number}")
        self.pool = FakePool(num_blocks, 4 + num_snapshots)
        self.tiers = Tiers(self.manager, self.pool, memory, disk)
        self.manager.on_event = self.tiers.on_event
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": num_blocks * BLOCK} | options
        self.scheduler = Scheduler(self.manager, **limits)
        self.num_computed = 0

    def add(self, tokens, max_tokens=4, priority=0, **options) -> Sequence:
        seq = Sequence(tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True), **options)
        seq.priority = priority
        self.scheduler.add(seq)
        return seq

    def step(self, fails=None) -> None:
        """fails: "schedule" or "compute": an exception ends the step there."""
        is_full = len(self.scheduler.running) == self.scheduler.max_num_seqs
        self.scheduler.candidates = self.tiers.poll(self.scheduler.waiting, is_full)
        output = self.scheduler.schedule()
        if fails != "schedule":
            self.tiers.save_evicted()
            self.compute(output)
        if fails is not None:
            fail_step(self.scheduler, output)
        else:
            self.num_computed += output.num_tokens
            tokens = [[self.rng.randrange(50) for _ in range(chunk.num_logits)] for chunk in output.chunks]
            self.finished += self.scheduler.update(output, tokens)
        self.scheduler.check_integrity()

    def compute(self, output) -> None:
        for chunk in output.chunks:
            read = read_so_far(chunk.seq)
            for position in range(chunk.write_start, chunk.end):
                self.pool.kv[chunk.seq.block_table[position // BLOCK]][position % BLOCK] = read[position + 1]
            for start, end, source, target in chunk.seq.parts["state"].segments if "state" in chunk.seq.parts else ():
                before = read[0] if source == NOTHING_READ else self.pool.states[source]
                assert before == read[start], f"{chunk.seq}: a wrong state"
                self.pool.states[target] = read[end]
        for chunk in output.chunks:
            read = read_so_far(chunk.seq)
            for position in range(chunk.end):
                found = self.pool.kv[chunk.seq.block_table[position // BLOCK]][position % BLOCK]
                assert found == read[position + 1], f"{chunk.seq}: wrong K/V at {position}"

    def run(self, max_steps=500) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                return
            self.step()
            if self.tiers.disk is not None:
                self.tiers.disk.deliver()
        raise AssertionError("it does not end")


def read_so_far(seq: Sequence) -> list[int]:
    """[n] is what a model has read of the first n tokens."""
    read = [hash((seq.cache_salt, seq.lora_id, seq.mm_spans))]
    for token in seq.tokens:
        read.append(hash((read[-1], token)))
    return read
