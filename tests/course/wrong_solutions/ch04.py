"""Wrong solutions of chapter 4."""

from tests.course.wrong_solutions import Edit

TOKENS = "-(-len(seq.tokens) // manager.block_size)"
TAKE_ALL = "_take(manager, seq, len(manager.free_blocks))\nreturn False"
HASH = "manager.uncache(block)"
CACHED = "min(len(hits) * manager.block_size, len(seq.tokens) - 1)"
TOUCH = """
for block in unused_hits:  # before fresh ones are taken, or one of them might be
    manager.free_blocks.remove(block)
for block in hits:
    block.ref_count += 1
    seq.block_table.append(block.block_id)
_take(manager, seq, num_fresh)
"""
TOUCH_LATE = """
_take(manager, seq, num_fresh)
for block in hits:
    if block.ref_count == 0:
        manager.free_blocks.remove(block)
    block.ref_count += 1
seq.block_table = [block.block_id for block in hits] + seq.block_table
"""
ASKS = "if not manager._has_room(seq, hits)"
ADD = "manager.free_blocks.append(block)"

WRONG = {
    "allocate": [
        Edit("says_nothing", "return True", "return None", "it returned nothing"),
        Edit("always_one_more", TOKENS, "len(seq.tokens) // manager.block_size + 1", "need no further one"),
        Edit("leaves_hits_alone", "hits = manager.get_computed_blocks(seq).blocks", "hits = []", "the hits are"),
        Edit("counts_no_hits_as_cached", CACHED, "0", "two hits hold 8 tokens"),
        Edit("nothing_left_to_compute", CACHED, "len(hits) * manager.block_size", "to have logits"),
        Edit("keeps_old_counts", "seq.num_registered_blocks = len(hits)", "pass", "two hits hold 8 tokens"),
        Edit("fresh_ones_first", TOUCH, TOUCH_LATE, "take them out before fresh ones are taken"),
        Edit("counts_hits_as_free", "num_fresh + len(unused_hits) >", "num_fresh >", "don't count these twice"),
        Edit("counts_all_hits", "num_fresh + len(unused_hits) >", "num_fresh + len(hits) >", "costs nothing"),
        Edit("hits_are_new", "block.ref_count += 1", "block.ref_count = 1", "a hit gets one more reference"),
        Edit("leaks", "return False", TAKE_ALL, "before you take the first one"),
        Edit("keeps_one_block_back", "(unused_hits) > len", "(unused_hits) >= len", "exactly as many blocks"),
        Edit("forgets_no_hashes", HASH, "pass", "still have the hashes of their old content"),
        Edit("asks_ours", "if num_fresh + len(unused_hits) > len(manager.free_blocks)", ASKS, "_has_room does a part"),
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
        Edit("one_order", ' and manager.free_order == "uncached_first"', "", "all blocks go to the tail"),
        Edit("takes_all_references", "block.ref_count -= 1", "block.ref_count = 0", "one reference goes, one stays"),
        Edit("forgets_hashes", ADD, f"{HASH}\n{ADD}", "free must leave hashes alone"),
    ],
}
