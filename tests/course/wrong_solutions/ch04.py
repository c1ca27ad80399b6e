"""Wrong solutions of chapter 4."""

from tests.course.wrong_solutions import Edit

TOKENS = "-(-len(seq.tokens) // manager.block_size)"
TAKE_ALL = "_take(manager, seq, len(manager.free_blocks))\nreturn False"
HASH = "manager.uncache(block)"
RESET = "seq.num_computed_tokens = seq.num_cached_tokens = seq.num_registered_blocks = 0"
ADD = "manager.free_blocks.append(block)"

WRONG = {
    "allocate": [
        Edit("says_nothing", "return True", "return None", "it returned nothing"),
        Edit("always_one_more", TOKENS, "len(seq.tokens) // manager.block_size + 1", "need no further one"),
        Edit("resets_nothing", RESET, "pass", "num_computed_tokens must be 0"),
        Edit("leaks", "return False", TAKE_ALL, "before you take the first one"),
        Edit("keeps_one_block_back", "num_needed > len", "num_needed >= len", "when exactly as many blocks are free"),
        Edit("forgets_no_hashes", HASH, "pass", "still have the hashes of their old content"),
    ],
    "append_slots": [
        Edit("counts_the_new_token_twice", "seq.num_computed_tokens +", "len(seq.tokens) +", "3 computed, 1 more"),
        Edit("counts_no_references", "block.ref_count = 1", "pass", "its ref_count must be 1"),
        Edit("one_at_a_time", "seq, num_needed)", "seq, num_needed > 0)", "10 more are 16"),
        Edit("asks_the_pool_first", "if num_needed", "if not manager.free_blocks or num_needed", "and none is free"),
        Edit("never_fails", "return False", "return True", "when the table is full and no block is free"),
        Edit("append_forgets_no_hashes", HASH, "pass", "still has the hash of its old content"),
    ],
    "free": [
        Edit("keeps_the_table", "seq.block_table = []", "pass", "its block_table must be empty"),
        Edit("first_block_first", "reversed(seq.block_table)", "seq.block_table", "then 4, 3, 2"),
        Edit("all_at_the_tail", ".appendleft(block)", ".append(block)", "has no hash, so it must be at the head"),
        Edit("takes_all_references", "block.ref_count -= 1", "block.ref_count = 0", "one reference goes, one stays"),
        Edit("forgets_hashes", ADD, f"{HASH}\n{ADD}", "free must leave hashes alone"),
    ],
}
