"""Wrong solutions of chapter 4."""

from tests.course.wrong_solutions import Edit

ROUNDED_UP = "-(-(seq.num_computed_tokens + num_tokens) // manager.block_size)"

WRONG = {
    "allocate": [
        Edit(
            "allocate_rounds_down",
            "-(-len(seq.tokens) // manager.block_size)",
            "len(seq.tokens) // manager.block_size",
            "6 tokens need 2 blocks of 4",
        ),
        Edit(
            "allocate_always_one_more",
            "-(-len(seq.tokens) // manager.block_size)",
            "len(seq.tokens) // manager.block_size + 1",
            "n full blocks need no further one",
        ),
        Edit(
            "allocate_leaks",
            "return False",
            "_take(manager, seq, len(manager.free_blocks))\nreturn False",
            "before you take the first one",
        ),
        Edit(
            "allocate_keeps_one_block_back",
            "num_needed > len",
            "num_needed >= len",
            "when exactly as many blocks are free as are needed",
        ),
        Edit("allocate_counts_no_references", "block.ref_count = 1", "pass", "its ref_count must be 1"),
        Edit(
            "allocate_forgets_no_names",
            "manager.remove_name(block)",
            "pass",
            "still bear the names of their old content",
        ),
        Edit(
            "allocate_resets_nothing",
            """
            seq.num_computed_tokens = seq.num_cached_tokens = seq.num_registered_blocks = 0
            seq.hash_collision = False
            """,
            "",
            "num_computed_tokens must be 0",
        ),
        Edit(
            "allocate_takes_the_lowest_ids",
            "block = manager.free_blocks.popleft()",
            "block = manager.blocks[min(manager.free_blocks)]\nmanager.free_blocks.remove(block)",
            "taken from the head of the free queue",
        ),
        Edit(
            "allocate_leaves_them_in_the_queue",
            "manager.free_blocks.popleft()",
            "manager.blocks[list(manager.free_blocks)[len(seq.block_table)]]",
            "must leave the free queue",
        ),
        Edit("allocate_says_nothing", "return True", "return None", "it returned nothing"),
    ],
    "append_slots": [
        Edit(
            "append_counts_the_new_token_twice",
            "seq.num_computed_tokens + num_tokens",
            "len(seq.tokens) + num_tokens",
            "wrong number of blocks of 4 for 4 tokens (3 computed, 1 more)",
        ),
        Edit(
            "append_one_at_the_border",
            f"{ROUNDED_UP} - len(seq.block_table)",
            "int(seq.num_computed_tokens % manager.block_size == 0)",
            "6 computed tokens and 10 more are 16",
        ),
        Edit(
            "append_a_block_a_token",
            f"{ROUNDED_UP} - len(seq.block_table)",
            "num_tokens",
            "7 tokens fit into the 2 blocks of 4",
        ),
        Edit(
            "append_too_late",
            ROUNDED_UP,
            "(seq.num_computed_tokens + num_tokens) // manager.block_size",
            "wrong number of blocks of 4 for 5 tokens",
        ),
        Edit(
            "append_asks_the_pool_first",
            "if num_needed > len(manager.free_blocks):",
            "if not len(manager.free_blocks) or num_needed > len(manager.free_blocks):",
            "when the table already has the blocks and none is free",
        ),
        Edit(
            "append_leaks",
            "return False",
            "_take(manager, seq, len(manager.free_blocks))\nreturn False",
            "before you take the first one",
        ),
        Edit("append_counts_no_references", "block.ref_count = 1", "pass", "its ref_count must be 1"),
        Edit(
            "append_forgets_no_names", "manager.remove_name(block)", "pass", "still bears the name of its old content"
        ),
        Edit(
            "append_at_the_front",
            "seq.block_table.append(block.block_id)",
            "seq.block_table.insert(0, block.block_id)",
            "the blocks in the table must stay, in their order",
        ),
        Edit(
            "append_never_fails",
            "return False",
            "num_needed = len(manager.free_blocks)",
            "when the table is full and no block is free",
        ),
    ],
    "free": [
        Edit("free_first_block_first", "reversed(seq.block_table)", "seq.block_table", "then 4, 3, 2"),
        Edit(
            "free_takes_all_references", "block.ref_count -= 1", "block.ref_count = 0", "one reference goes, one stays"
        ),
        Edit(
            "free_queues_what_others_hold",
            "if block.ref_count == 0:",
            "if True:",
            "only a block that nobody holds goes into the free queue",
        ),
        Edit("free_counts_nothing", "block.ref_count -= 1", "pass", "all reference counts must be 0"),
        Edit(
            "free_puts_all_at_the_tail",
            "manager.free_blocks.appendleft(block)",
            "manager.free_blocks.append(block)",
            "block 4 has no name, so it must be at the head",
        ),
        Edit(
            "free_leaks",
            "manager.free_blocks.append(block)",
            "pass",
            "a block without references belongs into the free queue",
        ),
        Edit("free_keeps_the_table", "seq.block_table = []", "pass", "its block_table must be empty"),
        Edit(
            "free_forgets_names",
            "manager.free_blocks.append(block)",
            "manager.remove_name(block)\nmanager.free_blocks.append(block)",
            "free must leave names alone",
        ),
        Edit(
            "free_skips_the_last",
            "reversed(seq.block_table)",
            "reversed(seq.block_table[1:])",
            "all reference counts must be 0",
        ),
    ],
}
