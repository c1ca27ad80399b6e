"""Our solutions of the exercises of chapter 14."""

from collections import deque
from typing import Any

from chapters.ch14_many_users.overload import State
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import SequenceStatus
from nanovllm.features.cache_reports.events import AllBlocksCleared, BlockStored, KVCacheEvent

BLOCK_SIZE = 64
SHARE_OF_DEADLINE = 0.75  # for the queue; the rest is for the prompt, and for what was measured wrong


def abort(scheduler: Scheduler, *seq_ids: int) -> None:
    """See exercise.py."""
    for seq_id in seq_ids:
        seq = scheduler.seqs.pop(seq_id, None)
        if seq is not None:
            seq.status, seq.finish_reason = SequenceStatus.FINISHED, "abort"
            scheduler.block_manager.free(seq)
    scheduler.running = [seq for seq in scheduler.running if seq.status is not SequenceStatus.FINISHED]
    scheduler.waiting = deque(seq for seq in scheduler.waiting if seq.status is not SequenceStatus.FINISHED)


def admit(state: State, deadline_s: float) -> bool:
    """See exercise.py."""
    has_seat = state.num_running < state.max_num_seqs
    has_blocks = state.num_blocks_needed <= state.num_free_blocks
    if state.num_waiting == 0 and has_seat and has_blocks:
        return True
    if state.requests_per_s == 0:
        return state.num_waiting < state.max_num_seqs
    wait_s = (state.num_waiting + 1) / state.requests_per_s
    return wait_s <= SHARE_OF_DEADLINE * deadline_s


def route(memory: dict[Any, Any], names: list[bytes], loads: list[int], events: list[tuple[int, KVCacheEvent]]) -> int:
    """See exercise.py."""
    for index, event in events:
        here = memory.setdefault(index, set())
        if isinstance(event, AllBlocksCleared):
            here.clear()
        elif isinstance(event, BlockStored):
            here.update(event.block_hashes)
        else:
            here.difference_update(event.block_hashes)
    costs = []
    for index, load in enumerate(loads):
        here = memory.get(index, set())
        num_found = 0
        while num_found < len(names) and names[num_found] in here:
            num_found += 1
        costs.append(load + BLOCK_SIZE * (len(names) - num_found))
    return costs.index(min(costs))
