"""The invariants of block manager and scheduler, as assertions: what check_integrity() runs (chapters 4, 5 and 7)."""

from typing import TYPE_CHECKING

from nanovllm.core.sequence import SequenceStatus

if TYPE_CHECKING:
    from nanovllm.core.block_manager import BlockManager
    from nanovllm.core.scheduler import Scheduler


def check_manager(manager: "BlockManager") -> None:
    queue = list(manager.free_blocks)
    assert len(queue) == len(manager.free_blocks) == len(set(queue)), "the free queue's length is wrong"
    free = set(queue)
    is_cached = [manager.blocks[block_id].block_hash is not None for block_id in queue]
    in_order = manager.free_order == "release" or is_cached == sorted(is_cached)
    assert in_order, "in the free queue a cached block comes before an uncached one"
    num_cached = 0
    for index, block in enumerate(manager.blocks):
        assert block.block_id == index, f"block {index} says it is {block.block_id}"
        assert block.ref_count >= 0, f"block {index} has ref_count {block.ref_count}"
        assert (block.ref_count == 0) == (index in free), f"block {index}: ref_count and free queue disagree"
        if block.block_hash is None:
            continue
        num_cached += 1
        copies = manager.hash_to_block.get(block.block_hash, {})
        assert copies.get(index) is block, f"block {index} is cached and cannot be found"
        assert len(block.token_ids) == manager.block_size, f"block {index} is cached and not full"
        block_hash = manager.hasher.hash_block(block.parent_hash, block.token_ids, block.extra_keys)
        assert block.block_hash == block_hash, f"block {index} does not have the hash of its content"
        parent = block.parent_hash
        assert parent is None or parent in manager.hash_to_block, f"block {index} is cached, its parent is not"
        first = next(iter(copies.values()))
        assert first.holds((parent, block.token_ids, block.extra_keys)), f"block {index}: one hash, two contents"
    num_listed = sum(map(len, manager.hash_to_block.values()))
    assert num_listed == num_cached, "hash_to_block lists blocks that do not have the hash"
    assert all(manager.hash_to_block.values()), "hash_to_block keeps an empty entry"
    if manager.snapshots is not None:
        manager.snapshots.check_integrity(manager.hash_to_block)


def check_scheduler(scheduler: "Scheduler") -> None:
    manager = scheduler.block_manager
    manager.check_integrity()
    refs = [0] * len(manager.blocks)
    for seq in scheduler.running:
        assert seq.status in (SequenceStatus.PREFILL, SequenceStatus.DECODE), f"{seq} runs"
        assert len(seq.block_table) * manager.block_size >= seq.num_computed_tokens, f"{seq}: table"
        assert len(seq.block_table) <= manager.num_blocks_for(scheduler.max_model_len), f"{seq}: too long a table"
        for index, block_id in enumerate(seq.block_table):
            refs[block_id] += 1
            if manager.blocks[block_id].block_hash is not None:
                part = slice(index * manager.block_size, (index + 1) * manager.block_size)
                assert part.stop <= seq.num_computed_tokens, f"{seq}: block {block_id} is cached too early"
                assert manager.blocks[block_id].token_ids == seq.tokens[part], f"{seq}: block {block_id} is another's"
    queued = [seq.seq_id for seq in [*scheduler.running, *scheduler.waiting]]
    assert sorted(scheduler.seqs) == sorted(queued), "seqs differs from the queues"
    for seq in scheduler.waiting:
        assert seq.status is SequenceStatus.WAITING, f"{seq} waits"
        assert not seq.block_table and seq.num_computed_tokens == 0, f"{seq} waits and holds something"
    held = [block.ref_count for block in manager.blocks]
    assert refs == held, "reference counts differ from the block tables of the running sequences"
    for queue in (scheduler.running, scheduler.waiting):
        priorities = [seq.priority for seq in queue]
        assert priorities == sorted(priorities), f"not in order of priority: {priorities}"
    threshold = scheduler.long_prefill_token_threshold
    mid_prompt = [seq for seq in scheduler.running if len(seq.tokens) - seq.num_computed_tokens > 1]
    cut_by_budget = [seq for seq in mid_prompt if len(seq.tokens) - seq.num_cached_tokens <= threshold]
    assert len(cut_by_budget) <= 1, f"more than one is mid-prompt: {cut_by_budget}"
    for seq in cut_by_budget:  # nobody has been admitted since: those that follow it in `running` were there before
        later = scheduler.running[scheduler.running.index(seq) + 1 :]
        assert all(other.priority > seq.priority for other in later), f"admitted after one that is mid-prompt: {later}"
