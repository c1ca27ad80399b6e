"""Wrong solutions of chapter 14."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
abort
    keeps_the_blocks: they are free
        ~ scheduler.block_manager.free(seq) =>
    keeps_the_seat: A ran and has left
        ~ scheduler.running = [seq for seq in scheduler.running if seq.status is not SequenceStatus.FINISHED] =>
    raises_for_unknown_ids: KeyError
        ~ scheduler.seqs.pop(seq_id, None) => scheduler.seqs.pop(seq_id)
    stays_in_seqs: scheduler.seqs
        ~ scheduler.seqs.pop(seq_id, None) => scheduler.seqs.get(seq_id)
    forgets_what_is_cached: but still found by hash
        + table = seq.block_table
        = scheduler.block_manager.free(seq)
        + for block_id in reversed(table):
        +     scheduler.block_manager.uncache(scheduler.block_manager.blocks[block_id])
admit
    fixed_queue: 30 of them wait
        ~ return wait_s <= SHARE_OF_DEADLINE * deadline_s => return state.num_waiting < 16
    refuses_the_unknown: so far
        ~ return state.num_waiting < state.max_num_seqs => return False
    blocks_do_not_count: not enough blocks
        ~ if state.num_waiting == 0 and has_seat and has_blocks: => if state.num_waiting == 0 and has_seat:
    jumps_the_queue: stands behind
        ~ if state.num_waiting == 0 and has_seat and has_blocks: => if has_seat and has_blocks:
    up_to_the_last_moment: a little late
        ~ return wait_s <= SHARE_OF_DEADLINE * deadline_s => return wait_s <= deadline_s
route
    least_loaded: replica 2 has all of them
        ~ costs.append(load + BLOCK_SIZE * (len(block_hashes) - num_found)) => costs.append(load)
    counts_requests_for_tokens: 1,024 tokens are there
        ~ BLOCK_SIZE * (len(block_hashes) - num_found) => len(block_hashes) - num_found
    counts_what_cannot_be_found: replica 0 has lost its first block
        - while num_found < len(block_hashes) and block_hashes[num_found] in here:
        -     num_found += 1
        + num_found = sum(block_hash in here for block_hash in block_hashes)
    guesses_from_what_was_sent: has not announced any
        + memory.setdefault(costs.index(min(costs)), set()).update(block_hashes)
        = return costs.index(min(costs))
    what_is_gone_is_kept: replica 0 has 4 blocks left
        ~ here.difference_update(event.block_hashes) => pass
    raises_when_told_twice: KeyError
        ~ here.difference_update(event.block_hashes) => any(here.remove(name) for name in event.block_hashes)
    cleared_is_ignored: has cleared its cache
        ~ here.clear() => pass
    keeps_all_events: stored and removed again
        ~ costs = [] => costs = memory.setdefault("events", []).extend(events) or []
    block_hashes_turned_round: have been changed
        ~ costs = [] => costs = block_hashes.reverse() or []
provision
    plans_with_the_mean: fewer for each would make its steps shorter
        - while not ask(plan).keeps(limits):
        -     plan = plan._replace(num_machines=plan.num_machines + max(1, plan.num_machines // 8))
        + num_tokens = load.requests_per_s * (load.num_prompt_tokens - load.num_shared_tokens + load.num_output_tokens)
        + plan = plan._replace(num_machines=ceil(num_tokens * machines[plan.machine].cost.token_s))
    computes_the_shared_beginning: keeps them, too
        - num_own_prompt = load.num_prompt_tokens - load.num_shared_tokens  # the shared beginning is computed once
        + num_own_prompt = load.num_prompt_tokens
    twice_to_be_safe: keeps them, too
        ~ return plan => return plan._replace(num_machines=2 * plan.num_machines)
    forgets_the_memory: preemptions a request
        - while not ask(plan).keeps(limits):
        -     plan = plan._replace(num_machines=plan.num_machines + max(1, plan.num_machines // 8))
        + num_tokens = load.requests_per_s * (load.num_prompt_tokens - load.num_shared_tokens + load.num_output_tokens)
        + plan = Plan("small", ceil(num_tokens * machines["small"].cost.token_s / 0.6), 256)
    two_seats: requests wait for a seat
        ~ return plan => return plan._replace(max_num_seqs=2)
    always_small: where nobody else is
        - while not ask(plan).keeps(limits):
        -     plan = plan._replace(num_machines=plan.num_machines + max(1, plan.num_machines // 8))
        + plan = plans[0] or Plan("small", 60, 26)
    gives_up: it returned nothing. Of the last plan
        - while not ask(plan).keeps(limits):
        -     plan = plan._replace(num_machines=plan.num_machines + max(1, plan.num_machines // 8))
        + plan = plans[0] or Plan("small", 60, 26)
        + if not ask(plan).keeps(limits):
        +     return None
    believes_the_estimate: prompts wait for each other
        ~ while not ask(plan).keeps(limits): => while False:
    asks_the_same_again: begin with an estimate
        - while not ask(plan).keeps(limits):
        -     plan = plan._replace(num_machines=plan.num_machines + max(1, plan.num_machines // 8))
        + while not ask(plan).keeps(limits):
        +     pass
    half_a_machine: whole numbers
        ~ return plan => return plan._replace(num_machines=plan.num_machines / 1)
""")
