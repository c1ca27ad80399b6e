"""Wrong solutions of chapter 7."""

from tests.course.wrong_solutions import Edit

IDS = 'struct.pack(f"<{len(token_ids)}I", *token_ids)'
CACHED = "min(len(hits) * manager.block_size, len(seq.tokens) - 1)"
COMPUTED = "seq.num_computed_tokens //"
FREE = "(manager.blocks[i] for i in manager.free_blocks)"
RUN = "len(list(takewhile(store.may_have, wanted)))"
POP, REMOVE = "manager.free_blocks.popleft()", "manager.free_blocks.remove(block)"
NO_STATES = """
if manager.snapshots is None:
    return found
"""
DOWN = """
while num_hits > 0 and found[num_hits - 1].block_hash not in manager.snapshots.by_hash:
    num_hits -= 1
return found[:num_hits]
"""
UP = """
for index in range(num_hits):
    if found[index].block_hash in manager.snapshots.by_hash:
        return found[: index + 1]
return []
"""

WRONG = {
    "hash_block": [
        Edit("low_bytes", IDS, "bytes(i & 255 for i in token_ids)", "token ids go up to 2**32 - 1"),
        Edit("without_parent", 'b"1" + parent', 'b"1"', "the parent belongs in the hash"),
        Edit("pythons_hash", "hash_bytes(data)", "hash_bytes(str(hash(data)).encode())", "another process gives"),
        Edit("true_salts_only", "cache_salt is not None and", "cache_salt and", "is not the same as no salt"),
        Edit("salt_in_every_block", " and parent is None", "", "the salt enters the first block only"),
        Edit("images_off_by_one", "length > start", "length >= start", "this span does not overlap the block"),
        Edit(
            "once_for_each_image",
            "in mm_spans",
            "in {span.content_hash: span for span in mm_spans}.values()",
            "block twice",
        ),
        Edit(
            "ends_at_an_image_elsewhere",
            """
            if span.start < start + len(token_ids) and span.start + span.length > start:
                data += b"M" + _text(span.content_hash) + struct.pack("<q", span.start - start)
            """,
            """
            if span.start >= start + len(token_ids) or span.start + span.length <= start:
                break
            data += b"M" + _text(span.content_hash) + struct.pack("<q", span.start - start)
            """,
            "look at every span",
        ),
        Edit("absolute_image_start", "span.start - start", "span.start", "a span's start counts relative"),
        Edit(
            "pictures_without_lengths",
            "_text(span.content_hash)",
            "span.content_hash.encode()",
            "two contents give the",
        ),
        Edit("without_lengths", 'struct.pack("<I", len(encoded)) + encoded', "encoded", "two contents give the same"),
    ],
    "allocate_with_prefix": [
        Edit("registers_hits_again", "seq.num_registered_blocks = len(hits)", "pass", "they have hashes already"),
        Edit("leaves_hits_in_the_queue", REMOVE, "pass", "hits must leave the free queue"),
        Edit("leaves_nothing_to_compute", CACHED, "len(hits) * manager.block_size", "nothing is left to compute"),
        Edit(
            "rounds_up",
            "len(seq.tokens) // manager.block_size",
            "manager.num_blocks_for(len(seq.tokens))",
            "Only full blocks have hashes",
        ),
        Edit("leaks", "return False", "hits[0].ref_count += 1\nreturn False", "reference counts changed. Count first"),
        Edit("counts_hits_as_free", " + len(unused_hits)", "", "of which 2 are the hits: don't count these twice"),
        Edit(
            "pops_before_it_takes_hits_out",
            """
            for block in unused_hits:
                manager.free_blocks.remove(block)
            for block in hits:
                block.ref_count += 1
                seq.block_table.append(block.block_id)
            manager.take_fresh_blocks(seq, num_fresh)
            """,
            """
            manager.take_fresh_blocks(seq, num_fresh)
            for block in hits:
                if block.ref_count == 0:
                    manager.free_blocks.remove(block)
                block.ref_count += 1
            seq.block_table = [block.block_id for block in hits] + seq.block_table
            """,
            "take them out before fresh ones are popped",
        ),
        Edit("verifies_nothing", "if not block.holds(content):", "if False:", "Ask block.holds(content)"),
        Edit("k_and_v_alone", NO_STATES, NO_STATES.replace("manager.snapshots is None", "True"), "there is a snapshot"),
        Edit("any_snapshot", "found[num_hits - 1].block_hash", "found[0].block_hash", "the deepest block found"),
        Edit("first_snapshot", DOWN, UP, "the deepest block found"),
        Edit("gives_a_token_back", "min(len(found), most)", "len(found)", "one token must be left"),
        Edit("tells_of_hits", "seq, len(found) *", "seq, len(hits) *", "all tokens that were found"),
        Edit("no_state", "manager.snapshots.allocate(seq,", "(lambda *given: None)(seq,", "the sequence has no state"),
        Edit("room_for_any_state", "not has_state or num", "num", "no room for one more state"),
        Edit("asks_ours", "_hits(manager, seq, found)", "manager._reusable(seq, found)", "yours to write"),
        Edit("looks_although_off", " if manager.enable_prefix_caching else 0", "", "although caching is off"),
    ],
    "register_prefix": [
        Edit("in_the_map_only", "block.block_hash = block_hash", "pass", "must say so: block.block_hash"),
        Edit("the_whole_prompt", COMPUTED, "len(seq.tokens) //", "The rest of the prompt is not in the cache"),
        Edit("from_the_start", "range(seq.num_registered_blocks", "range(0", "begin at seq.num_registered_blocks"),
        Edit("one_copy", "copies[block", "copies.clear()\ncopies[block", "the second joins the first"),
        Edit("after_a_collision", " or seq.hash_collision", "", "nothing is hashed any more"),
        Edit("verifies_nothing", "if copies and not", "if False and not", "register nothing from there on"),
    ],
    "take_fresh": [
        Edit("up_to", "range(num_blocks)", "range(num_blocks - len(seq.block_table))", "new ones go after those"),
        Edit("from_the_tail", POP, f"manager.blocks[list(manager.free_blocks)[-1]]\n{REMOVE}", "its head is taken"),
        Edit(
            "keeps_hashes", "if block.block_hash is not None:", "if False:", "is still in hash_to_block under its old"
        ),
        Edit("counts_no_evictions", "manager.stats.evictions += 1", "pass", "that is one eviction"),
        Edit("evicts_all_copies", "if not copies:", "if True:", "only 0 leaves the dict under that hash"),
        Edit("uncached_first", POP, f"min({FREE}, key=lambda b: b.block_hash is not None)\n{REMOVE}", "worked example"),
    ],
    "next_run": [
        Edit(
            "from_the_first_block", "hashes[num_in_pool:]", "hashes", "begins with the first block that the pool lacks"
        ),
        Edit("over_gaps", RUN, "sum(map(store.may_have, wanted))", "ends before the first block that its store lacks"),
        Edit("all_the_rest", "return store, num_blocks", "return store, len(wanted)", "ends before the first block"),
        Edit("the_slowest_first", "in stores", "in reversed(stores)", "the one that is first in the list is faster"),
        Edit("the_longest", "in stores:", f"in sorted(stores, key=lambda store: -{RUN}):", "memory has bc, disk bcd"),
        Edit("memory_alone", "in stores", "in stores[:1]", "num_in_pool=7, memory has nothing, disk h"),
        Edit("asks_for_ever", " or num_in_vain >= MAX_IN_VAIN", "", "nothing is asked for any more"),
        Edit("asks_once", "num_in_vain >= MAX_IN_VAIN", "num_in_vain", "so the stores are asked again"),
        Edit("an_empty_run", "if num_blocks:", "if True:", "one of the stores and a number of blocks, one at least"),
    ],
}
