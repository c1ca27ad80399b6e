"""Wrong solutions of chapter 4, each with a piece of what the student is told."""


def take(manager, seq, num_blocks):
    for _ in range(num_blocks):
        block = manager.free_blocks.popleft()
        manager.remove_name(block)
        block.ref_count = 1
        seq.block_table.append(block.block_id)


def reset(seq):
    seq.num_computed_tokens = seq.num_cached_tokens = seq.num_registered_blocks = 0
    seq.hash_collision = False


def rounded_up(manager, num_tokens):
    return -(-num_tokens // manager.block_size)


# -- allocate ---------------------------------------------------------------------------------------------------------


def allocate_rounds_down(manager, seq):
    num_blocks = len(seq.tokens) // manager.block_size
    if num_blocks > len(manager.free_blocks):
        return False
    take(manager, seq, num_blocks)
    reset(seq)
    return True


def allocate_always_one_more(manager, seq):
    num_blocks = len(seq.tokens) // manager.block_size + 1
    if num_blocks > len(manager.free_blocks):
        return False
    take(manager, seq, num_blocks)
    reset(seq)
    return True


def allocate_leaks(manager, seq):
    for _ in range(rounded_up(manager, len(seq.tokens))):
        if not len(manager.free_blocks):
            return False
        take(manager, seq, 1)
    reset(seq)
    return True


def allocate_keeps_one_block_back(manager, seq):
    num_blocks = rounded_up(manager, len(seq.tokens))
    if num_blocks >= len(manager.free_blocks):
        return False
    take(manager, seq, num_blocks)
    reset(seq)
    return True


def allocate_counts_no_references(manager, seq):
    num_blocks = rounded_up(manager, len(seq.tokens))
    if num_blocks > len(manager.free_blocks):
        return False
    for _ in range(num_blocks):
        block = manager.free_blocks.popleft()
        manager.remove_name(block)
        seq.block_table.append(block.block_id)
    reset(seq)
    return True


def allocate_forgets_no_names(manager, seq):
    num_blocks = rounded_up(manager, len(seq.tokens))
    if num_blocks > len(manager.free_blocks):
        return False
    for _ in range(num_blocks):
        block = manager.free_blocks.popleft()
        block.ref_count = 1
        seq.block_table.append(block.block_id)
    reset(seq)
    return True


def allocate_resets_nothing(manager, seq):
    num_blocks = rounded_up(manager, len(seq.tokens))
    if num_blocks > len(manager.free_blocks):
        return False
    take(manager, seq, num_blocks)
    return True


def allocate_takes_the_lowest_ids(manager, seq):
    num_blocks = rounded_up(manager, len(seq.tokens))
    if num_blocks > len(manager.free_blocks):
        return False
    for block_id in sorted(manager.free_blocks)[:num_blocks]:
        block = manager.blocks[block_id]
        manager.free_blocks.remove(block)
        manager.remove_name(block)
        block.ref_count = 1
        seq.block_table.append(block_id)
    reset(seq)
    return True


def allocate_leaves_them_in_the_queue(manager, seq):
    num_blocks = rounded_up(manager, len(seq.tokens))
    if num_blocks > len(manager.free_blocks):
        return False
    for block_id in list(manager.free_blocks)[:num_blocks]:
        manager.blocks[block_id].ref_count = 1
        seq.block_table.append(block_id)
    reset(seq)
    return True


def allocate_says_nothing(manager, seq):
    num_blocks = rounded_up(manager, len(seq.tokens))
    if num_blocks > len(manager.free_blocks):
        return False
    take(manager, seq, num_blocks)
    reset(seq)


# -- append_slots -----------------------------------------------------------------------------------------------------


def append_counts_the_new_token_twice(manager, seq, num_tokens=1):
    num_blocks = rounded_up(manager, len(seq.tokens) + num_tokens) - len(seq.block_table)
    if num_blocks > len(manager.free_blocks):
        return False
    take(manager, seq, num_blocks)
    return True


def append_one_at_the_border(manager, seq, num_tokens=1):
    if seq.num_computed_tokens % manager.block_size:
        return True
    if not len(manager.free_blocks):
        return False
    take(manager, seq, 1)
    return True


def append_a_block_a_token(manager, seq, num_tokens=1):
    if num_tokens > len(manager.free_blocks):
        return False
    take(manager, seq, num_tokens)
    return True


def append_too_late(manager, seq, num_tokens=1):
    num_blocks = (seq.num_computed_tokens + num_tokens) // manager.block_size - len(seq.block_table)
    if num_blocks > len(manager.free_blocks):
        return False
    take(manager, seq, num_blocks)
    return True


def append_asks_the_pool_first(manager, seq, num_tokens=1):
    if not len(manager.free_blocks):
        return False
    num_blocks = rounded_up(manager, seq.num_computed_tokens + num_tokens) - len(seq.block_table)
    if num_blocks > len(manager.free_blocks):
        return False
    take(manager, seq, num_blocks)
    return True


def append_leaks(manager, seq, num_tokens=1):
    while len(seq.block_table) * manager.block_size < seq.num_computed_tokens + num_tokens:
        if not len(manager.free_blocks):
            return False
        take(manager, seq, 1)
    return True


def append_counts_no_references(manager, seq, num_tokens=1):
    num_blocks = rounded_up(manager, seq.num_computed_tokens + num_tokens) - len(seq.block_table)
    if num_blocks > len(manager.free_blocks):
        return False
    for _ in range(num_blocks):
        seq.block_table.append(manager.free_blocks.popleft().block_id)
    return True


def append_forgets_no_names(manager, seq, num_tokens=1):
    num_blocks = rounded_up(manager, seq.num_computed_tokens + num_tokens) - len(seq.block_table)
    if num_blocks > len(manager.free_blocks):
        return False
    for _ in range(num_blocks):
        block = manager.free_blocks.popleft()
        block.ref_count = 1
        seq.block_table.append(block.block_id)
    return True


def append_at_the_front(manager, seq, num_tokens=1):
    num_blocks = rounded_up(manager, seq.num_computed_tokens + num_tokens) - len(seq.block_table)
    if num_blocks > len(manager.free_blocks):
        return False
    for _ in range(num_blocks):
        block = manager.free_blocks.popleft()
        manager.remove_name(block)
        block.ref_count = 1
        seq.block_table.insert(0, block.block_id)
    return True


def append_never_fails(manager, seq, num_tokens=1):
    num_blocks = rounded_up(manager, seq.num_computed_tokens + num_tokens) - len(seq.block_table)
    take(manager, seq, min(num_blocks, len(manager.free_blocks)))
    return True


# -- free -------------------------------------------------------------------------------------------------------------


def free_first_block_first(manager, seq):
    for block_id in seq.block_table:
        block = manager.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            manager.free_blocks.append(block)
    seq.block_table = []


def free_takes_all_references(manager, seq):
    for block_id in reversed(seq.block_table):
        block = manager.blocks[block_id]
        block.ref_count = 0
        manager.free_blocks.append(block)
    seq.block_table = []


def free_queues_what_others_hold(manager, seq):
    for block_id in reversed(seq.block_table):
        block = manager.blocks[block_id]
        block.ref_count -= 1
        manager.free_blocks.append(block)
    seq.block_table = []


def free_counts_nothing(manager, seq):
    for block_id in reversed(seq.block_table):
        manager.free_blocks.append(manager.blocks[block_id])
    seq.block_table = []


def free_leaks(manager, seq):
    for block_id in reversed(seq.block_table):
        manager.blocks[block_id].ref_count -= 1
    seq.block_table = []


def free_keeps_the_table(manager, seq):
    for block_id in reversed(seq.block_table):
        block = manager.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            manager.free_blocks.append(block)


def free_forgets_names(manager, seq):
    for block_id in reversed(seq.block_table):
        block = manager.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            manager.remove_name(block)
            manager.free_blocks.append(block)
    seq.block_table = []


def free_skips_the_last(manager, seq):
    for index in range(len(seq.block_table) - 1, 0, -1):
        block = manager.blocks[seq.block_table[index]]
        block.ref_count -= 1
        if block.ref_count == 0:
            manager.free_blocks.append(block)
    seq.block_table = []


WRONG = {
    "allocate": [
        (allocate_rounds_down, "6 tokens need 2 blocks of 4"),
        (allocate_always_one_more, "n full blocks need no further one"),
        (allocate_leaks, "before you take the first one"),
        (allocate_keeps_one_block_back, "when exactly as many blocks are free as are needed"),
        (allocate_counts_no_references, "its ref_count must be 1"),
        (allocate_forgets_no_names, "still bear the names of their old content"),
        (allocate_resets_nothing, "num_computed_tokens must be 0"),
        (allocate_takes_the_lowest_ids, "taken from the head of the free queue"),
        (allocate_leaves_them_in_the_queue, "must leave the free queue"),
        (allocate_says_nothing, "it returned nothing"),
    ],
    "append_slots": [
        (append_counts_the_new_token_twice, "wrong number of blocks of 4 for 4 tokens (3 computed, 1 more)"),
        (append_one_at_the_border, "6 computed tokens and 10 more are 16"),
        (append_a_block_a_token, "7 tokens fit into the 2 blocks of 4"),
        (append_too_late, "wrong number of blocks of 4 for 5 tokens"),
        (append_asks_the_pool_first, "when the table already has the blocks and none is free"),
        (append_leaks, "before you take the first one"),
        (append_counts_no_references, "its ref_count must be 1"),
        (append_forgets_no_names, "still bears the name of its old content"),
        (append_at_the_front, "the blocks in the table must stay, in their order"),
        (append_never_fails, "when the table is full and no block is free"),
    ],
    "free": [
        (free_first_block_first, "then 4, 3, 2"),
        (free_takes_all_references, "one reference goes, one stays"),
        (free_queues_what_others_hold, "only a block that nobody holds goes into the free queue"),
        (free_counts_nothing, "all reference counts must be 0"),
        (free_leaks, "a block without references belongs into the free queue"),
        (free_keeps_the_table, "its block_table must be empty"),
        (free_forgets_names, "free must leave names alone"),
        (free_skips_the_last, "all reference counts must be 0"),
    ],
}
