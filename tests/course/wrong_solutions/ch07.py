"""Wrong solutions of chapter 7."""

from tests.course.wrong_solutions import Edit

PARENT = 'b"0" if parent is None else b"1" + parent'
IDS = 'struct.pack(f"<{len(token_ids)}I", *token_ids)'
OVERLAPS = "span.start < start + len(token_ids) and span.start + span.length > start"
START = 'struct.pack("<q", span.start - start)'
POP = "manager.free_blocks.popleft()"

WRONG = {
    "name_block": [
        Edit("name_without_parent", 'b"1" + parent', 'b"1"', "the parent belongs into the name"),
        Edit("position_for_parent", PARENT, 'struct.pack("<I", start)', "the parent belongs into the name"),
        Edit(
            "position_too",
            "hash_bytes(data)",
            'hash_bytes(data + struct.pack("<I", start))',
            "start itself does not enter the name",
        ),
        Edit("bytes_of_a_list", IDS, "bytes(token_ids)", "bytes must be in range(0, 256)"),
        Edit("low_bytes", IDS, "bytes(i & 255 for i in token_ids)", "token ids go up to 2**32 - 1"),
        Edit(
            "shortest_bytes",
            IDS,
            'b"".join(i.to_bytes((i.bit_length() + 7) // 8 or 1, "big") for i in token_ids)',
            "two contents give the same bytes",
        ),
        Edit("digits", IDS, '"".join(map(str, token_ids)).encode()', "two contents give the same bytes"),
        Edit("sorted_tokens", "*token_ids", "*sorted(token_ids)", "the token ids and their order"),
        Edit(
            "pythons_hash",
            "hash_bytes(data)",
            'hash_bytes(struct.pack("<q", hash(data)))',
            "another process gives the same block another name",
        ),
        Edit("a_number", "hash_bytes(data)", "hash(data)", "the name is what hash_bytes returns"),
        Edit(
            "without_salt",
            "cache_salt is not None and",
            "False and",
            "the salt belongs into the name of the first block",
        ),
        Edit("salt_in_every_block", " and parent is None", "", "the salt enters the first block only"),
        Edit("true_salts_only", "cache_salt is not None and", "cache_salt and", "is not the same as no salt"),
        Edit(
            "lora_in_the_first_block",
            "if lora_id is",
            "if parent is None and lora_id is",
            "is missing in a later block",
        ),
        Edit("true_loras_only", "if lora_id is not None:", "if lora_id:", "lora_id 0 is an adapter like any other"),
        Edit("without_images", "in mm_spans:", "in ():", "content_hash belongs into each block"),
        Edit("all_images", OVERLAPS, "True", "this span does not overlap the block"),
        Edit(
            "images_that_begin_in_it",
            "span.start + span.length > start",
            "span.start >= start",
            "content_hash belongs into each block",
        ),
        Edit(
            "images_off_by_one", "span.length > start", "span.length >= start", "this span does not overlap the block"
        ),
        Edit("one_image", START, f"{START}\nbreak", "a block can have several images"),
        Edit("absolute_image_start", "span.start - start", "span.start", "a span's start counts relative to the block"),
        Edit("without_image_start", f" + {START}", "", "another part of the image lies in the block"),
        Edit(
            "image_length",
            START,
            'struct.pack("<qI", span.start - start, span.length)',
            "the length of a span only says whether it overlaps",
        ),
        Edit(
            "without_lengths",
            'struct.pack("<I", len(encoded)) + encoded',
            "encoded",
            "two contents give the same bytes",
        ),
        Edit(
            "without_tags",
            """
            if cache_salt is not None and parent is None:
                data += b"S" + _text(cache_salt)
            if lora_id is not None:
                data += b"L" + struct.pack("<q", lora_id)
            """,
            """
            if cache_salt is not None and parent is None:
                data += _text(cache_salt)
            if lora_id is not None:
                data += struct.pack("<q", lora_id)
            """,
            "two contents give the same bytes",
        ),
        Edit("no_tag_for_no_parent", PARENT, 'parent or b""', "its own says whether there is a parent"),
        Edit("zeros_for_no_parent", PARENT, "parent or bytes(8)", "its own says whether there is a parent"),
    ],
    "allocate_with_prefix": [
        Edit("without_looking", "in range(num_full)", "in range(0)", "blocks 0 and 1 are full of them"),
        Edit(
            "looks_up_partial_blocks",
            "len(seq.tokens) // manager.block_size",
            "manager.num_blocks_for(len(seq.tokens))",
            "Only full blocks have names",
        ),
        Edit(
            "looks_up_although_off",
            " if manager.enable_prefix_caching else 0",
            "",
            "name_block was called, although caching is off",
        ),
        Edit(
            "leaves_the_last_block_out",
            "len(seq.tokens) // manager.block_size",
            "(len(seq.tokens) - 1) // manager.block_size",
            "its block stays a hit",
        ),
        Edit("verifies_nothing", "if not block.holds(content):", "if False:", "Ask block.holds(content)"),
        Edit(
            "goes_on_behind_a_collision",
            """
            hash_collision = True
            break
            """,
            """
            hash_collision = True
            continue
            """,
            "the search ends",
        ),
        Edit(
            "leaks_references",
            """
            if num_fresh + len(unused_hits) > len(manager.free_blocks):
                return False

            # Second pass: the hits, before a fresh block is popped that is one of them. Third: the fresh ones.
            for block in unused_hits:
                manager.free_blocks.remove(block)
            for block in hits:
                block.ref_count += 1
                seq.block_table.append(block.block_id)
            """,
            """
            for block in unused_hits:
                manager.free_blocks.remove(block)
            for block in hits:
                block.ref_count += 1
                seq.block_table.append(block.block_id)
            if num_fresh > len(manager.free_blocks):
                return False
            """,
            "the reference counts changed. Count first",
        ),
        Edit("leaves_hits_in_the_queue", "manager.free_blocks.remove(block)", "pass", "hits must leave the free queue"),
        Edit(
            "removes_all_hits",
            "for block in unused_hits:",
            "for block in hits:",
            "a hit is in it only if nobody uses it",
        ),
        Edit(
            "counts_hits_as_free",
            "num_fresh + len(unused_hits)",
            "num_fresh",
            "of which 2 are the hits: don't count these twice",
        ),
        Edit("wants_room_for_all", "num_fresh + len(unused_hits)", "num_fresh + len(hits)", "hits in use cost nothing"),
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
        Edit("counts_no_references", "block.ref_count += 1", "block.ref_count = 1", "one more for each hit"),
        Edit(
            "takes_one_too_many",
            "manager.num_blocks_for(len(seq.tokens))",
            "len(seq.tokens) // manager.block_size + 1",
            "its block stays a hit",
        ),
        Edit(
            "leaves_nothing_to_compute",
            "min(len(hits) * manager.block_size, len(seq.tokens) - 1)",
            "len(hits) * manager.block_size",
            "nothing is left to compute",
        ),
        Edit(
            "computes_everything",
            "seq.num_computed_tokens = seq.num_cached_tokens",
            "seq.num_computed_tokens = 0",
            "what is found is computed",
        ),
        Edit("registers_hits_again", "seq.num_registered_blocks = len(hits)", "pass", "they have names already"),
        Edit(
            "keeps_the_collision_of_an_earlier_run",
            "seq.hash_collision = hash_collision",
            "seq.hash_collision |= hash_collision",
            "hash_collision must be set anew",
        ),
        Edit(  # a refusal must leave hash_collision as it is
            "notes_the_collision_at_once",
            "hash_collision = True",
            "seq.hash_collision = hash_collision = True",
            "it said False, but the seq.hash_collision changed",
        ),
        Edit(
            "resets_the_collision_first",
            "hits, hash_collision = [], False",
            "hits, hash_collision, seq.hash_collision = [], False, False",
            "it said False, but the seq.hash_collision changed",
        ),
        Edit(
            "resets_the_count_first",
            "hits, hash_collision = [], False",
            "hits, hash_collision, seq.num_registered_blocks = [], False, 0",
            "it said False, but the seq.num_registered_blocks changed",
        ),
        Edit(
            "counts_refusals",
            "unused_hits = [",
            "manager.stats.record(num_full, len(hits), int(hash_collision))\nunused_hits = [",
            "the statistics changed. Count first",
        ),
        Edit("counts_probes", "record(num_full", "record(min(num_full, len(hits) + 1)", "queries are all full blocks"),
        Edit(
            "records_nothing",
            "manager.stats.record(num_full, len(hits), int(hash_collision))",
            "pass",
            "one collision goes into the statistics",
        ),
        Edit("says_nothing", "return True", "return", "it returned nothing"),
    ],
    "register_prefix": [
        Edit(
            "rounds_up",
            "seq.num_computed_tokens // manager.block_size",
            "manager.num_blocks_for(seq.num_computed_tokens)",
            "Only full blocks have names",
        ),
        Edit(
            "the_whole_prompt",
            "seq.num_computed_tokens //",
            "len(seq.tokens) //",
            "The rest of the prompt is not in the cache",
        ),
        Edit(
            "the_prompt_only",
            "seq.num_computed_tokens //",
            "min(seq.num_computed_tokens, seq.num_prompt_tokens) //",
            "4 of 4 tokens of the answer are computed",
        ),
        Edit("from_the_start", "range(seq.num_registered_blocks", "range(0", "begin at seq.num_registered_blocks"),
        Edit(
            "from_the_cached_tokens",
            "range(seq.num_registered_blocks",
            "range(seq.num_cached_tokens // manager.block_size",
            "begin at seq.num_registered_blocks",
        ),
        Edit(
            "overwrites_copies",
            "copies[block.block_id] = block",
            "manager.hash_to_block[name] = {block.block_id: block}",
            "the second joins the first",
        ),
        Edit(
            "skips_copies",
            """
            copies[block.block_id] = block
            block.block_hash = name
            block.parent_hash, block.token_ids, block.extra_keys = content
            """,
            """
            if not copies:
                copies[block.block_id] = block
                block.block_hash = name
                block.parent_hash, block.token_ids, block.extra_keys = content
            """,
            "the second joins the first",
        ),
        Edit(
            "although_off",
            "not manager.enable_prefix_caching or ",
            "",
            "name_block was called, although caching is off",
        ),
        Edit("after_a_collision", " or seq.hash_collision", "", "nothing is named any more"),
        Edit(
            "registers_unverified",
            "copies and not next(iter(copies.values())).holds(content)",
            "False",
            "ask holds(content), and register nothing from there on",
        ),
        Edit(
            "registers_behind_a_collision",
            """
            seq.hash_collision = True
            return
            """,
            """
            seq.hash_collision = True
            continue
            """,
            "register nothing from there on",
        ),
        Edit(  # what was registered before the collision stays registered
            "counts_nothing_after_a_collision",
            "seq.hash_collision = True",
            "seq.hash_collision, seq.num_registered_blocks = True, 0",
            "num_registered_blocks must count along",
        ),
        Edit(
            "counts_at_the_end",
            "seq.num_registered_blocks = index + 1",
            "if index + 1 == seq.num_computed_tokens // manager.block_size:\n    seq.num_registered_blocks = index + 1",
            "num_registered_blocks must count along",
        ),
        Edit(
            "in_the_map_only",
            """
            block.block_hash = name
            block.parent_hash, block.token_ids, block.extra_keys = content
            """,
            "",
            "must say so: block.block_hash",
        ),
        Edit(
            "without_content",
            "block.parent_hash, block.token_ids, block.extra_keys = content",
            "pass",
            "or no hit can be verified",
        ),
        Edit(
            "keeps_no_count",
            "seq.num_registered_blocks = index + 1",
            "pass",
            "num_registered_blocks: two blocks are done",
        ),
        Edit(
            "takes_a_reference",
            "block.block_hash = name",
            "block.block_hash = name\nblock.ref_count += 1",
            "registering changes no reference counts",
        ),
    ],
    "take_fresh": [
        Edit(
            "keeps_names",
            "if block.block_hash is not None:",
            "if False:",
            "is still in hash_to_block under its old name",
        ),
        Edit(
            "keeps_the_map",
            """
            copies = manager.hash_to_block[block.block_hash]
            del copies[block.block_id]  # this copy only
            if not copies:
                del manager.hash_to_block[block.block_hash]
            """,
            "",
            "is still in hash_to_block under its old name",
        ),
        Edit(
            "keeps_the_blocks_name",
            """
            block.block_hash = block.parent_hash = None
            block.token_ids, block.extra_keys = [], ()
            """,
            "",
            "was taken and still says what it was",
        ),
        Edit("evicts_all_copies", "if not copies:", "if True:", "only 0 leaves the dict under that name"),
        Edit("keeps_empty_dicts", "if not copies:", "if False:", "hash_to_block must not keep empty dicts"),
        Edit(
            "from_the_tail",
            POP,
            "manager.blocks[list(manager.free_blocks)[-1]]\nmanager.free_blocks.remove(block)",
            "its head is taken",
        ),
        Edit(
            "the_lowest",
            POP,
            "manager.blocks[min(manager.free_blocks)]\nmanager.free_blocks.remove(block)",
            "the head is taken, whatever it is",
        ),
        Edit(
            "unnamed_first",
            POP,
            "min((manager.blocks[i] for i in manager.free_blocks), key=lambda block: block.block_hash is not None)\n"
            "manager.free_blocks.remove(block)",
            "worked example, request 2",
        ),
        Edit(
            "counts_every_block",
            "block.ref_count = 1",
            "block.ref_count, manager.stats.evictions = 1, manager.stats.evictions + 1",
            "nothing was evicted",
        ),
        Edit("counts_no_evictions", "manager.stats.evictions += 1", "pass", "that is one eviction"),
        Edit("without_references", "block.ref_count = 1", "pass", "each block that is taken has one reference"),
        Edit(
            "up_to",
            "range(num_blocks)",
            "range(num_blocks - len(seq.block_table))",
            "new ones go behind those that are in the table",
        ),
        Edit(
            "a_new_table",
            "for _ in range(num_blocks):",
            "seq.block_table = []\nfor _ in range(num_blocks):",
            "new ones go behind those that are in the table",
        ),
    ],
}
