"""Our solutions of the exercises of chapter 14."""

from collections import deque
from collections.abc import Callable
from math import ceil, sqrt
from typing import Any

from chapters.ch14_many_users.capacity import Limits, Load, Machine, Plan, Report
from chapters.ch14_many_users.overload import State
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import SequenceStatus
from nanovllm.features.cache_reports.events import AllBlocksCleared, BlockStored, KVCacheEvent

BLOCK_SIZE, STEP_TOKENS = 64, 512
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


def route(
    memory: dict[Any, Any], block_hashes: list[bytes], loads: list[int], events: list[tuple[int, KVCacheEvent]]
) -> int:
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
        while num_found < len(block_hashes) and block_hashes[num_found] in here:
            num_found += 1
        costs.append(load + BLOCK_SIZE * (len(block_hashes) - num_found))
    return costs.index(min(costs))


def provision(load: Load, limits: Limits, machines: dict[str, Machine], ask: Callable[[Plan], Report]) -> Plan:
    """See exercise.py."""
    plans = [estimate(load, limits, name, machine) for name, machine in machines.items()]
    plan = min((plan for plan in plans if plan is not None), key=lambda plan: plan.per_hour)
    while not ask(plan).keeps(limits):
        plan = plan._replace(num_machines=plan.num_machines + max(1, plan.num_machines // 8))
    return plan


def estimate(load: Load, limits: Limits, name: str, machine: Machine) -> Plan | None:
    """The smallest number of these machines that may do. None if no number does."""
    step_s, token_s = machine.cost.step_s, machine.cost.token_s
    num_own_prompt = load.num_prompt_tokens - load.num_shared_tokens  # the shared beginning is computed once
    longest = 1.5 * num_own_prompt
    alone_s = longest * token_s + ceil(longest / STEP_TOKENS) * step_s
    # A step takes step_s / (1 - busy), and a prompt alone_s / (1 - busy). Room for chance: a fraction of the limits.
    most_busy = min(1 - step_s / (0.7 * limits.token_s), 1 - alone_s / (0.7 * limits.ttft_s))
    num_tokens = machine.num_blocks(load.kv_bytes_per_token) * BLOCK_SIZE - load.num_shared_tokens
    max_num_seqs = int(num_tokens / (1.5 * (num_own_prompt + load.num_output_tokens)))
    if most_busy <= 0 or max_num_seqs < 1:
        return None
    work_s = (num_own_prompt + load.num_output_tokens) * token_s  # of a request
    num_machines = ceil(load.requests_per_s * work_s / most_busy)
    while True:
        rate = load.requests_per_s / num_machines
        num_inside = rate * load.num_output_tokens * step_s / (1 - rate * work_s)  # Little's law
        if num_inside + sqrt(num_inside) <= max_num_seqs:
            return Plan(name, num_machines, max_num_seqs)
        num_machines += 1
