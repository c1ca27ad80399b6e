"""Wrong solutions of chapter 14."""

from tests.course.wrong_solutions import Edit

ENDS = 'seq.status, seq.finish_reason = SequenceStatus.FINISHED, "abort"'
STILL_RUNNING = "scheduler.running = [seq for seq in scheduler.running if seq.status is not SequenceStatus.FINISHED]"
STILL_WAITING = (
    "scheduler.waiting = deque(seq for seq in scheduler.waiting if seq.status is not SequenceStatus.FINISHED)"
)
BEGINS_AT_ONCE = "if state.num_waiting == 0 and has_seat and has_blocks:"
IN_TIME = "return wait_s <= SHARE_OF_DEADLINE * deadline_s"
COST = "costs.append(load + BLOCK_SIZE * (len(names) - num_found))"

WRONG = {
    "abort": [
        Edit("keeps_the_blocks", "scheduler.block_manager.free(seq)", "pass", "they are free"),
        Edit("keeps_the_seat", STILL_RUNNING, "pass", "A ran and has left"),
        Edit("keeps_the_place", STILL_WAITING, "pass", "C waited and has left"),
        Edit("looks_at_those_who_run", STILL_WAITING, "scheduler.waiting = deque()", "C waited and has left"),
        Edit(
            "takes_a_finish",
            ENDS + "\n",
            'scheduler.seqs[seq_id] = seq\nscheduler.finish(seq, "abort")\n',
            "not in list",
        ),
        Edit("raises_for_unknown_ids", "scheduler.seqs.pop(seq_id, None)", "scheduler.seqs.pop(seq_id)", "KeyError"),
        Edit("stays_in_seqs", "scheduler.seqs.pop(seq_id, None)", "scheduler.seqs.get(seq_id)", "scheduler.seqs"),
        Edit("ends_with_stop", '"abort"', '"stop"', "finish_reason"),
        Edit(
            "forgets_what_is_cached",
            "\nscheduler.block_manager.free(seq)\n",
            """
                table = seq.block_table
                scheduler.block_manager.free(seq)
                for block_id in reversed(table):
                    scheduler.block_manager.remove_name(scheduler.block_manager.blocks[block_id])
            """,
            "but named",
        ),
        Edit(
            "queue_turned_round",
            "deque(seq for seq in scheduler.waiting",
            "deque(seq for seq in reversed(scheduler.waiting)",
            "C waited and has left",
        ),
    ],
    "admit": [
        Edit("lets_all_in", IN_TIME, "return True", "waits 15 s"),
        Edit("lets_nobody_wait", IN_TIME, "return False", "waits 2 s of 10"),
        Edit("fixed_queue", IN_TIME, "return state.num_waiting < 16", "30 of them wait"),
        Edit(
            "counts_places",
            "wait_s = (state.num_waiting + 1) / state.requests_per_s",
            "wait_s = state.num_waiting / state.max_num_seqs",
            "waits 15 s",
        ),
        Edit(
            "rate_upside_down",
            "(state.num_waiting + 1) / state.requests_per_s",
            "(state.num_waiting + 1) * state.requests_per_s",
            "waits 2 s of 10",
        ),
        Edit(
            "divides_by_nothing",
            """
                if state.requests_per_s == 0:
                    return state.num_waiting < state.max_num_seqs
            """,
            "\n",
            "ZeroDivisionError",
        ),
        Edit("refuses_the_unknown", "return state.num_waiting < state.max_num_seqs", "return False", "so far"),
        Edit("admits_the_unknown", "return state.num_waiting < state.max_num_seqs", "return True", "so far"),
        Edit("blocks_do_not_count", BEGINS_AT_ONCE, "if state.num_waiting == 0 and has_seat:", "not enough blocks"),
        Edit("jumps_the_queue", BEGINS_AT_ONCE, "if has_seat and has_blocks:", "stands behind"),
        Edit("room_does_not_count", BEGINS_AT_ONCE, "if False:", "nobody is there"),
        Edit("up_to_the_last_moment", IN_TIME, "return wait_s <= deadline_s", "a little late"),
        Edit("much_too_careful", "SHARE_OF_DEADLINE = 0.75", "SHARE_OF_DEADLINE = 0.21", "a queue with 2 places"),
    ],
    "route": [
        Edit("least_loaded", COST, "costs.append(load)", "replica 2 has all of them"),
        Edit("by_prefix", COST, "costs.append(len(names) - num_found)", "nobody has any of its blocks"),
        Edit(
            "counts_requests_for_tokens",
            "BLOCK_SIZE * (len(names) - num_found)",
            "len(names) - num_found",
            "1,024 tokens are there",
        ),
        Edit(
            "remembers_the_first_home",
            "sent = memory[best]",
            "sent = memory[0] if names and names[0] in memory[0] else memory[best]",
            "replica 1 has the blocks, too",
        ),
        Edit("forgets_all", "sent[name] = True", "pass", "KeyError"),
        Edit("forgets_nothing", "while len(sent) > num_blocks:", "while False:", "64 others"),
        Edit("first_in_first_out", "sent.move_to_end(name)", "pass", "lately"),
        Edit("first_block_first", "for name in reversed(names):", "for name in names:", "first four are there"),
        Edit(
            "looks_at_the_first_block",
            "while num_found < len(names) and names[num_found] in sent:",
            "if names and names[0] in sent:\n    num_found = len(names)\nwhile False:",
            "replica 1 has",
        ),
        Edit(
            "all_in_one_memory",
            "memory.setdefault(index, OrderedDict())",
            "memory.setdefault(index, memory.get(0, OrderedDict()))",
            "replica 2 has all of them",
        ),
        Edit(
            "the_last_one",
            "best = costs.index(min(costs))",
            "best = len(costs) - 1 - costs[::-1].index(min(costs))",
            "nobody has",
        ),
        Edit("names_turned_round", "costs = []", "costs = names.reverse() or []", "have been changed"),
    ],
}
