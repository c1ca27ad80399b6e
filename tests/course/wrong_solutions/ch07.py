"""Wrong solutions of chapter 7."""

from tests.course.wrong_solutions import Edit

PARENT = 'b"0" if parent is None else b"1" + parent'
IDS = 'struct.pack(f"<{len(token_ids)}I", *token_ids)'
START = 'struct.pack("<q", span.start - start)'
NUM_FULL, FULL = "in range(num_full)", "len(seq.tokens) // manager.block_size"
CACHED = "min(len(hits) * manager.block_size, len(seq.tokens) - 1)"
RECORD = "manager.stats.record(num_full, len(hits), int(hash_collision))"
COLLIDES = "hash_collision = True"
COMPUTED = "seq.num_computed_tokens //"
FREE = "(manager.blocks[i] for i in manager.free_blocks)"
POP, REMOVE = "manager.free_blocks.popleft()", "manager.free_blocks.remove(block)"

WRONG = {
    "name_block": [
        Edit("a_number", "hash_bytes(data)", "hash(data)", "the name is what hash_bytes returns"),
        Edit("sorted_tokens", "*token_ids", "*sorted(token_ids)", "the token ids and their order"),
        Edit("low_bytes", IDS, "bytes(i & 255 for i in token_ids)", "token ids go up to 2**32 - 1"),
        Edit("without_parent", 'b"1" + parent', 'b"1"', "the parent belongs into the name"),
        Edit("pythons_hash", "hash_bytes(data)", "hash_bytes(str(hash(data)).encode())", "another process gives"),
        Edit("without_salt", "cache_salt is not None and", "False and", "the salt belongs into the name"),
        Edit("true_salts_only", "cache_salt is not None and", "cache_salt and", "is not the same as no salt"),
        Edit("salt_in_every_block", " and parent is None", "", "the salt enters the first block only"),
        Edit("lora_in_the_first_block", "if lora_id", "if parent is None and lora_id", "is missing in a later block"),
        Edit("true_loras_only", "if lora_id is not None:", "if lora_id:", "lora_id 0 is an adapter like any other"),
        Edit("without_images", "in mm_spans:", "in ():", "content_hash belongs into each block"),
        Edit("images_off_by_one", "length > start", "length >= start", "this span does not overlap the block"),
        Edit("without_image_start", f" + {START}", "", "another part of the image lies in the block"),
        Edit("one_image", START, f"{START}\nbreak", "a block can have several images"),
        Edit("absolute_image_start", "span.start - start", "span.start", "a span's start counts relative"),
        Edit("image_length", f"+ {START}", f"+ {START} + bytes([span.length])", "the length of a span only says"),
        Edit("without_lengths", 'struct.pack("<I", len(encoded)) + encoded', "encoded", "two contents give the same"),
        Edit("no_tag_for_no_parent", PARENT, 'parent or b""', "its own says whether there is a parent"),
    ],
    "allocate_with_prefix": [
        Edit("says_nothing", "return True", "return", "it returned nothing"),
        Edit("without_looking", NUM_FULL, "in range(0)", "blocks 0 and 1 are full of them"),
        Edit("counts_no_references", "block.ref_count += 1", "block.ref_count = 1", "one more for each hit"),
        Edit("removes_all_hits", "in unused_hits:", "in hits:", "a hit is in it only if nobody uses it"),
        Edit("computes_everything", "= seq.num_cached_tokens", "= 0", "what is found is computed"),
        Edit("registers_hits_again", "seq.num_registered_blocks = len(hits)", "pass", "they have names already"),
        Edit("leaves_hits_in_the_queue", REMOVE, "pass", "hits must leave the free queue"),
        Edit("leaves_the_last_block_out", FULL, "(len(seq.tokens) - 1) // manager.block_size", "its block stays a hit"),
        Edit("leaves_nothing_to_compute", CACHED, "len(hits) * manager.block_size", "nothing is left to compute"),
        Edit("wants_room_for_all", "+ len(unused_hits)", "+ len(hits)", "hits in use cost nothing"),
        Edit("leaks", "return False", "hits[0].ref_count += 1\nreturn False", "reference counts changed. Count first"),
        Edit("counts_hits_as_free", " + len(unused_hits)", "", "of which 2 are the hits: don't count these twice"),
        Edit("keeps_the_collision", "seq.hash_collision = h", "seq.hash_collision |= h", "must be set anew"),
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
        Edit("rounds_up", FULL, "manager.num_blocks_for(len(seq.tokens))", "Only full blocks have names"),
        Edit("verifies_nothing", "if not block.holds(content):", "if False:", "Ask block.holds(content)"),
        Edit("records_nothing", RECORD, "pass", "one collision goes into the statistics"),
        Edit("looks_although_off", " if manager.enable_prefix_caching else 0", "", "although caching is off"),
        Edit("counts_probes", "record(num_full", "record(len(hits) + 1", "queries are all full blocks"),
    ],
    "register_prefix": [
        Edit("in_the_map_only", "block.block_hash = name", "pass", "must say so: block.block_hash"),
        Edit("takes_a_reference", "copies[block", "block.ref_count += 1\ncopies[block", "changes no reference counts"),
        Edit("without_content", "block.parent_hash, block.token_ids, block.extra_keys =", "_ =", "can be verified"),
        Edit("keeps_no_count", "seq.num_registered_blocks = index + 1", "pass", "num_registered_blocks: two blocks"),
        Edit("the_whole_prompt", COMPUTED, "len(seq.tokens) //", "The rest of the prompt is not in the cache"),
        Edit("from_the_start", "range(seq.num_registered_blocks", "range(0", "begin at seq.num_registered_blocks"),
        Edit("the_prompt_only", COMPUTED, f"min(seq.num_prompt_tokens, {COMPUTED[:-3]}) //", "4 tokens of the answer"),
        Edit("one_copy", "copies[block", "copies.clear()\ncopies[block", "the second joins the first"),
        Edit("after_a_collision", " or seq.hash_collision", "", "nothing is named any more"),
        Edit("verifies_nothing", "if copies and not", "if False and not", "register nothing from there on"),
        Edit("counts_nothing", f"seq.{COLLIDES}", f"seq.{COLLIDES}\nseq.num_registered_blocks = 0", "count along"),
    ],
    "take_fresh": [
        Edit("up_to", "range(num_blocks)", "range(num_blocks - len(seq.block_table))", "new ones go behind those"),
        Edit("counts_every_block", "if block.b", "manager.stats.evictions += 1\nif block.b", "nothing was evicted"),
        Edit("from_the_tail", POP, f"manager.blocks[list(manager.free_blocks)[-1]]\n{REMOVE}", "its head is taken"),
        Edit("without_references", "block.ref_count = 1", "pass", "each block that is taken has one reference"),
        Edit("keeps_names", "if block.block_hash is not None:", "if False:", "is still in hash_to_block under its old"),
        Edit("says_what_it_was", "block.block_hash = block.parent_hash = None", "pass", "still says what it was"),
        Edit("keeps_empty_dicts", "if not copies:", "if False:", "hash_to_block must not keep empty dicts"),
        Edit("the_lowest", POP, f"manager.blocks[min(manager.free_blocks)]\n{REMOVE}", "the head is taken, whatever"),
        Edit("counts_no_evictions", "manager.stats.evictions += 1", "pass", "that is one eviction"),
        Edit("evicts_all_copies", "if not copies:", "if True:", "only 0 leaves the dict under that name"),
        Edit("unnamed_first", POP, f"min({FREE}, key=lambda b: b.block_hash is not None)\n{REMOVE}", "worked example"),
    ],
}
