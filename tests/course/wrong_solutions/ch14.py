"""Wrong solutions of chapter 14."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
abort
    keeps_the_blocks: they are free
        ~ scheduler.block_manager.free(seq) =>
    keeps_the_seat: A ran and has left
        ~ scheduler.running = [seq for seq in scheduler.running if seq.status is not SequenceStatus.FINISHED] =>
    keeps_the_place: C waited and has left
        ~ scheduler.waiting = deque(seq for seq in scheduler.waiting if seq.status is not SequenceStatus.FINISHED) =>
    raises_for_unknown_ids: KeyError
        ~ scheduler.seqs.pop(seq_id, None) => scheduler.seqs.pop(seq_id)
    stays_in_seqs: scheduler.seqs
        ~ scheduler.seqs.pop(seq_id, None) => scheduler.seqs.get(seq_id)
    ends_with_stop: finish_reason
        ~ "abort" => "stop"
    forgets_what_is_cached: but named
        + table = seq.block_table
        = scheduler.block_manager.free(seq)
        + for block_id in reversed(table):
        +     scheduler.block_manager.remove_name(scheduler.block_manager.blocks[block_id])
admit
    lets_all_in: waits 15 s
        ~ return wait_s <= SHARE_OF_DEADLINE * deadline_s => return True
    lets_nobody_wait: waits 2 s of 10
        ~ return wait_s <= SHARE_OF_DEADLINE * deadline_s => return False
    fixed_queue: 30 of them wait
        ~ return wait_s <= SHARE_OF_DEADLINE * deadline_s => return state.num_waiting < 16
    refuses_the_unknown: so far
        ~ return state.num_waiting < state.max_num_seqs => return False
    admits_the_unknown: so far
        ~ return state.num_waiting < state.max_num_seqs => return True
    blocks_do_not_count: not enough blocks
        ~ if state.num_waiting == 0 and has_seat and has_blocks: => if state.num_waiting == 0 and has_seat:
    jumps_the_queue: stands behind
        ~ if state.num_waiting == 0 and has_seat and has_blocks: => if has_seat and has_blocks:
    room_does_not_count: nobody is there
        ~ if state.num_waiting == 0 and has_seat and has_blocks: => if False:
    up_to_the_last_moment: a little late
        ~ return wait_s <= SHARE_OF_DEADLINE * deadline_s => return wait_s <= deadline_s
    much_too_careful: a queue with 2 places
        ~ SHARE_OF_DEADLINE = 0.75 => SHARE_OF_DEADLINE = 0.21
route
    least_loaded: replica 2 has all of them
        ~ costs.append(load + BLOCK_SIZE * (len(names) - num_found)) => costs.append(load)
    by_prefix: nobody has any of its blocks
        ~ costs.append(load + BLOCK_SIZE * (len(names) - num_found)) => costs.append(len(names) - num_found)
    counts_requests_for_tokens: 1,024 tokens are there
        ~ BLOCK_SIZE * (len(names) - num_found) => len(names) - num_found
    remembers_the_first_home: replica 1 has the blocks, too
        ~ sent = memory[best] => sent = memory[0] if names and names[0] in memory[0] else memory[best]
    forgets_nothing: 64 others
        ~ while len(sent) > num_blocks: => while False:
    first_in_first_out: lately
        ~ sent.move_to_end(name) =>
    first_block_first: first four are there
        ~ for name in reversed(names): => for name in names:
    looks_at_the_first_block: replica 1 has
        - while num_found < len(names) and names[num_found] in sent:
        + if names and names[0] in sent:
        +     num_found = len(names)
        + while False:
    the_last_one: nobody has
        ~ best = costs.index(min(costs)) => best = len(costs) - 1 - costs[::-1].index(min(costs))
    names_turned_round: have been changed
        ~ costs = [] => costs = names.reverse() or []
""")
