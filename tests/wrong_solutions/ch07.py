"""Wrong solutions of chapter 7, each with a piece of what the student is told."""

import struct

# -- name_block -------------------------------------------------------------------------------------------------------


def overlapping(spans, start, size):
    return [span for span in spans if span.start < start + size and span.start + span.length > start]


def text(value):
    return struct.pack("<I", len(value)) + value.encode()


def encoded(
    parent,
    ids,
    start,
    salt,
    lora,
    spans,
    *,
    head=lambda parent: b"0" if parent is None else b"1" + parent,
    pack=lambda ids: struct.pack(f"<{len(ids)}I", *ids),
    with_salt=lambda salt, parent: salt is not None and parent is None,
    with_lora=lambda lora, parent: lora is not None,
    chosen=overlapping,
    where=lambda span, start: struct.pack("<q", span.start - start),
):
    """The right bytes, with room for mistakes."""
    data = head(parent) + pack(ids)
    if with_salt(salt, parent):
        data += b"S" + text(salt)
    if with_lora(lora, parent):
        data += b"L" + struct.pack("<q", lora)
    for span in chosen(spans, start, len(ids)):
        data += b"M" + text(span.content_hash) + where(span, start)
    return data


def name_without_parent(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, head=lambda parent: b"0" if parent is None else b"1"))


def name_with_position_instead_of_parent(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, head=lambda parent: struct.pack("<I", start)))


def name_with_position_too(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    return hash_bytes(encoded(parent, token_ids, start, cache_salt, lora_id, mm_spans) + struct.pack("<I", start))


def name_by_bytes_of_a_list(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    return hash_bytes(encoded(parent, token_ids, start, cache_salt, lora_id, mm_spans, pack=bytes))


def name_by_low_bytes(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, pack=lambda ids: bytes(i & 255 for i in ids)))


def name_by_shortest_bytes(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    def pack(ids):
        return b"".join(i.to_bytes((i.bit_length() + 7) // 8 or 1, "big") for i in ids)

    return hash_bytes(encoded(parent, token_ids, start, cache_salt, lora_id, mm_spans, pack=pack))


def name_by_digits(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, pack=lambda ids: "".join(map(str, ids)).encode()))


def name_of_a_set_of_tokens(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    return hash_bytes(encoded(parent, sorted(token_ids), start, cache_salt, lora_id, mm_spans))


def name_by_pythons_hash(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    spans = [(span.content_hash, span.start - start) for span in overlapping(mm_spans, start, len(token_ids))]
    salt = cache_salt if parent is None else None
    number = hash((parent, tuple(token_ids), salt, lora_id, tuple(spans)))
    return hash_bytes(struct.pack("<q", number))


def name_is_a_number(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    return hash((parent, tuple(token_ids), cache_salt, lora_id, mm_spans))


def name_without_salt(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    return hash_bytes(encoded(parent, token_ids, start, None, lora_id, mm_spans))


def name_with_salt_in_every_block(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, with_salt=lambda salt, parent: salt is not None))


def name_with_true_salts_only(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, with_salt=lambda salt, parent: salt and parent is None))


def name_with_lora_in_the_first_block(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, with_lora=lambda lora, parent: lora is not None and parent is None))


def name_with_true_loras_only(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, with_lora=lambda lora, parent: lora))


def name_without_images(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    return hash_bytes(encoded(parent, token_ids, start, cache_salt, lora_id, ()))


def name_with_all_images(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, chosen=lambda spans, start, size: spans))


def name_with_images_that_begin_in_it(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    def chosen(spans, start, size):
        return [span for span in spans if start <= span.start < start + size]

    return hash_bytes(encoded(parent, token_ids, start, cache_salt, lora_id, mm_spans, chosen=chosen))


def name_with_images_off_by_one(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    def chosen(spans, start, size):
        return [span for span in spans if span.start <= start + size and span.start + span.length >= start]

    return hash_bytes(encoded(parent, token_ids, start, cache_salt, lora_id, mm_spans, chosen=chosen))


def name_with_one_image(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, chosen=lambda *of: overlapping(*of)[:1]))


def name_with_absolute_image_start(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, where=lambda span, start: struct.pack("<q", span.start)))


def name_without_image_start(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, where=lambda span, start: b""))


def name_with_image_length(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    def where(span, start):
        return struct.pack("<qI", span.start - start, span.length)

    return hash_bytes(encoded(parent, token_ids, start, cache_salt, lora_id, mm_spans, where=where))


def name_without_lengths(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    data = b"0" if parent is None else b"1" + parent
    data += struct.pack(f"<{len(token_ids)}I", *token_ids)
    if cache_salt is not None and parent is None:
        data += b"S" + cache_salt.encode()
    if lora_id is not None:
        data += b"L" + str(lora_id).encode()
    for span in overlapping(mm_spans, start, len(token_ids)):
        data += span.content_hash.encode() + str(span.start - start).encode()
    return hash_bytes(data)


def name_without_tags(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    data = b"0" if parent is None else b"1" + parent
    data += struct.pack(f"<{len(token_ids)}I", *token_ids)
    if cache_salt is not None and parent is None:
        data += text(cache_salt)
    if lora_id is not None:
        data += struct.pack("<q", lora_id)
    for span in overlapping(mm_spans, start, len(token_ids)):
        data += text(span.content_hash) + struct.pack("<q", span.start - start)
    return hash_bytes(data)


def name_without_a_tag_for_no_parent(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    return hash_bytes(
        encoded(parent, token_ids, start, cache_salt, lora_id, mm_spans, head=lambda parent: parent or b"")
    )


def name_with_zeros_for_no_parent(parent, token_ids, start, cache_salt, lora_id, mm_spans, hash_bytes):
    where = token_ids, start, cache_salt, lora_id, mm_spans
    return hash_bytes(encoded(parent, *where, head=lambda parent: parent or bytes(8)))


# -- allocate_with_prefix ---------------------------------------------------------------------------------------------


def find(manager, seq, *, verify=True, go_on=False, num=None):
    """(hits, contested) as in the right solution, with room for mistakes."""
    hits, contested = [], False
    num_full = len(seq.tokens) // manager.block_size if manager.enable_prefix_caching else 0
    for index in range(num_full if num is None else num):
        name, content = manager.name_block(seq, index)
        copies = manager.hash_to_block.get(name)
        block = next(iter(copies.values())) if copies else None
        if block is None or (verify and not block.holds(content)):
            contested |= block is not None
            if go_on:
                continue
            break
        hits.append(block)
    return hits, contested


def touch(manager, seq, hits):
    for block in hits:
        if block.ref_count == 0:
            manager.free_blocks.remove(block)
        block.ref_count += 1
        seq.block_table.append(block.block_id)


def note(manager, seq, hits, contested=False):
    seq.num_cached_tokens = min(len(hits) * manager.block_size, len(seq.tokens) - 1)
    seq.num_computed_tokens = seq.num_cached_tokens
    seq.num_registered_blocks, seq.hash_collision = len(hits), contested
    if manager.enable_prefix_caching:
        manager.stats.record(len(seq.tokens) // manager.block_size, len(hits), int(contested))


def fits(manager, seq, hits):
    num_fresh = manager.num_blocks_for(len(seq.tokens)) - len(hits)
    return num_fresh + sum(block.ref_count == 0 for block in hits) <= len(manager.free_blocks)


def take_rest(manager, seq, hits):
    manager.take_fresh_blocks(seq, manager.num_blocks_for(len(seq.tokens)) - len(hits))


def allocate(manager, seq, **mistake):
    hits, contested = find(manager, seq, **mistake)
    if not fits(manager, seq, hits):
        return False
    touch(manager, seq, hits)
    take_rest(manager, seq, hits)
    note(manager, seq, hits, contested)
    return True


def allocate_without_looking(manager, seq):
    return allocate(manager, seq, num=0)


def allocate_looks_up_partial_blocks(manager, seq):
    return allocate(manager, seq, num=manager.num_blocks_for(len(seq.tokens)))


def allocate_looks_up_although_off(manager, seq):
    return allocate(manager, seq, num=len(seq.tokens) // manager.block_size)


def allocate_leaves_the_last_block_out(manager, seq):
    if not manager.enable_prefix_caching:
        return allocate(manager, seq)
    return allocate(manager, seq, num=(len(seq.tokens) - 1) // manager.block_size)


def allocate_verifies_nothing(manager, seq):
    return allocate(manager, seq, verify=False)


def allocate_goes_on_behind_a_collision(manager, seq):
    return allocate(manager, seq, go_on=True)


def allocate_leaks_references(manager, seq):
    hits, contested = find(manager, seq)
    touch(manager, seq, hits)
    if manager.num_blocks_for(len(seq.tokens)) - len(hits) > len(manager.free_blocks):
        return False
    take_rest(manager, seq, hits)
    note(manager, seq, hits, contested)
    return True


def allocate_leaves_hits_in_the_queue(manager, seq):
    hits, contested = find(manager, seq)
    if not fits(manager, seq, hits):
        return False
    for block in hits:
        block.ref_count += 1
        seq.block_table.append(block.block_id)
    take_rest(manager, seq, hits)
    note(manager, seq, hits, contested)
    return True


def allocate_removes_all_hits(manager, seq):
    hits, contested = find(manager, seq)
    if not fits(manager, seq, hits):
        return False
    for block in hits:
        manager.free_blocks.remove(block)
        block.ref_count += 1
        seq.block_table.append(block.block_id)
    take_rest(manager, seq, hits)
    note(manager, seq, hits, contested)
    return True


def allocate_counts_hits_as_free(manager, seq):
    hits, contested = find(manager, seq)
    if manager.num_blocks_for(len(seq.tokens)) - len(hits) > len(manager.free_blocks):
        return False
    touch(manager, seq, hits)
    take_rest(manager, seq, hits)
    note(manager, seq, hits, contested)
    return True


def allocate_wants_room_for_all(manager, seq):
    hits, contested = find(manager, seq)
    if manager.num_blocks_for(len(seq.tokens)) > len(manager.free_blocks):
        return False
    touch(manager, seq, hits)
    take_rest(manager, seq, hits)
    note(manager, seq, hits, contested)
    return True


def allocate_pops_before_it_touches(manager, seq):
    hits, contested = find(manager, seq)
    if not fits(manager, seq, hits):
        return False
    take_rest(manager, seq, hits)
    for block in hits:
        if block.ref_count == 0:
            manager.free_blocks.remove(block)
        block.ref_count += 1
    seq.block_table = [block.block_id for block in hits] + seq.block_table
    note(manager, seq, hits, contested)
    return True


def allocate_counts_no_references(manager, seq):
    hits, contested = find(manager, seq)
    if not fits(manager, seq, hits):
        return False
    for block in hits:
        if block.ref_count == 0:
            manager.free_blocks.remove(block)
            block.ref_count = 1
        seq.block_table.append(block.block_id)
    take_rest(manager, seq, hits)
    note(manager, seq, hits, contested)
    return True


def allocate_takes_one_too_many(manager, seq):
    hits, contested = find(manager, seq)
    if not fits(manager, seq, hits):
        return False
    touch(manager, seq, hits)
    manager.take_fresh_blocks(seq, len(seq.tokens) // manager.block_size + 1 - len(hits))
    note(manager, seq, hits, contested)
    return True


def allocate_leaves_nothing_to_compute(manager, seq):
    ok = allocate(manager, seq)
    if ok:
        seq.num_cached_tokens = seq.num_computed_tokens = seq.num_registered_blocks * manager.block_size
    return ok


def allocate_computes_everything(manager, seq):
    ok = allocate(manager, seq)
    if ok:
        seq.num_computed_tokens = 0
    return ok


def allocate_registers_hits_again(manager, seq):
    before = seq.num_registered_blocks
    ok = allocate(manager, seq)
    seq.num_registered_blocks = before
    return ok


def allocate_resets_to_the_first_run(manager, seq):
    before = seq.hash_collision
    ok = allocate(manager, seq)
    seq.hash_collision = seq.hash_collision or before
    return ok


def allocate_counts_refusals(manager, seq):
    hits, contested = find(manager, seq)
    manager.stats.record(len(seq.tokens) // manager.block_size, len(hits), int(contested))
    if not fits(manager, seq, hits):
        return False
    touch(manager, seq, hits)
    take_rest(manager, seq, hits)
    note(manager, seq, hits, contested)
    return True


def allocate_counts_probes(manager, seq):
    hits, contested = find(manager, seq)
    if not fits(manager, seq, hits):
        return False
    touch(manager, seq, hits)
    take_rest(manager, seq, hits)
    stats, manager.stats = manager.stats, type(manager.stats)()
    note(manager, seq, hits, contested)
    manager.stats = stats
    if manager.enable_prefix_caching:
        stats.record(min(len(hits) + 1, len(seq.tokens) // manager.block_size), len(hits), int(contested))
    return True


def allocate_counts_nothing(manager, seq):
    stats = manager.stats
    before = stats.queries, stats.hits, stats.misses
    ok = allocate(manager, seq)
    stats.queries, stats.hits, stats.misses = before
    return ok


def allocate_says_nothing(manager, seq):
    if not allocate(manager, seq):
        return False


# -- register_prefix --------------------------------------------------------------------------------------------------


def register(manager, seq, *, first=None, last=None, off=False, contested=False, enter=None, verify=True, stop=True):
    """As in the right solution, with room for mistakes."""
    if (not manager.enable_prefix_caching and not off) or (seq.hash_collision and not contested):
        return
    first = seq.num_registered_blocks if first is None else first
    for index in range(first, seq.num_computed_tokens // manager.block_size if last is None else last):
        name, content = manager.name_block(seq, index)
        block = manager.blocks[seq.block_table[index]]
        copies = manager.hash_to_block.get(name)
        if verify and copies and not next(iter(copies.values())).holds(content):
            manager.stats.collisions += 1
            seq.hash_collision = True
            if stop:
                return
            continue
        if enter is None:
            manager.hash_to_block.setdefault(name, {})[block.block_id] = block
        else:
            enter(manager, name, block)
        block.block_hash = name
        block.parent_hash, block.token_ids, block.extra_keys = content
        seq.num_registered_blocks = index + 1


def register_rounds_up(manager, seq):
    register(manager, seq, last=-(-seq.num_computed_tokens // manager.block_size))


def register_the_whole_prompt(manager, seq):
    register(manager, seq, last=len(seq.tokens) // manager.block_size)


def register_the_prompt_only(manager, seq):
    num_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
    register(manager, seq, last=num_tokens // manager.block_size)


def register_from_the_start(manager, seq):
    register(manager, seq, first=0)


def register_from_the_cached_tokens(manager, seq):
    register(manager, seq, first=seq.num_cached_tokens // manager.block_size)


def register_overwrites_copies(manager, seq):
    def enter(manager, name, block):
        manager.hash_to_block[name] = {block.block_id: block}

    register(manager, seq, enter=enter)


def register_skips_copies(manager, seq):
    if not manager.enable_prefix_caching or seq.hash_collision:
        return
    for index in range(seq.num_registered_blocks, seq.num_computed_tokens // manager.block_size):
        name, content = manager.name_block(seq, index)
        block = manager.blocks[seq.block_table[index]]
        if name not in manager.hash_to_block:
            manager.hash_to_block[name] = {block.block_id: block}
            block.block_hash = name
            block.parent_hash, block.token_ids, block.extra_keys = content
        seq.num_registered_blocks = index + 1


def register_although_off(manager, seq):
    register(manager, seq, off=True)


def register_although_contested(manager, seq):
    register(manager, seq, contested=True)


def register_verifies_nothing(manager, seq):
    register(manager, seq, verify=False)


def register_goes_on_behind_a_collision(manager, seq):
    register(manager, seq, stop=False)


def register_in_the_map_only(manager, seq):
    for index in range(seq.num_registered_blocks, seq.num_computed_tokens // manager.block_size):
        name, _ = manager.name_block(seq, index)
        block = manager.blocks[seq.block_table[index]]
        manager.hash_to_block.setdefault(name, {})[block.block_id] = block
        seq.num_registered_blocks = index + 1


def register_without_content(manager, seq):
    for index in range(seq.num_registered_blocks, seq.num_computed_tokens // manager.block_size):
        name, _ = manager.name_block(seq, index)
        block = manager.blocks[seq.block_table[index]]
        manager.hash_to_block.setdefault(name, {})[block.block_id] = block
        block.block_hash = name
        seq.num_registered_blocks = index + 1


def register_keeps_no_count(manager, seq):
    register(manager, seq)
    seq.num_registered_blocks = 0


def register_takes_a_reference(manager, seq):
    before = seq.num_registered_blocks
    register(manager, seq)
    for block_id in seq.block_table[before : seq.num_registered_blocks]:
        manager.blocks[block_id].ref_count += 1


# -- take_fresh -------------------------------------------------------------------------------------------------------


def forget(manager, block):
    if block.block_hash is None:
        return
    copies = manager.hash_to_block[block.block_hash]
    del copies[block.block_id]
    if not copies:
        del manager.hash_to_block[block.block_hash]
    block.block_hash = block.parent_hash = None
    block.token_ids, block.extra_keys = [], ()
    manager.stats.evictions += 1


def take(manager, seq, num_blocks, *, choose=None, evict=forget):
    """As in the right solution, with room for mistakes."""
    for _ in range(num_blocks):
        if choose is None:
            block = manager.free_blocks.popleft()
        else:
            block = manager.blocks[choose(manager, list(manager.free_blocks))]
            manager.free_blocks.remove(block)
        evict(manager, block)
        block.ref_count = 1
        seq.block_table.append(block.block_id)


def take_keeps_names(manager, seq, num_blocks):
    take(manager, seq, num_blocks, evict=lambda manager, block: None)


def take_keeps_the_map(manager, seq, num_blocks):
    def evict(manager, block):
        manager.stats.evictions += block.block_hash is not None
        block.block_hash = block.parent_hash = None
        block.token_ids, block.extra_keys = [], ()

    take(manager, seq, num_blocks, evict=evict)


def take_keeps_the_blocks_name(manager, seq, num_blocks):
    def evict(manager, block):
        copies = manager.hash_to_block.get(block.block_hash, {})
        if copies.pop(block.block_id, None) is not None:
            manager.stats.evictions += 1
            if not copies:
                del manager.hash_to_block[block.block_hash]

    take(manager, seq, num_blocks, evict=evict)


def take_evicts_all_copies(manager, seq, num_blocks):
    def evict(manager, block):
        if block.block_hash is not None:
            manager.hash_to_block.pop(block.block_hash, None)
            block.block_hash = block.parent_hash = None
            block.token_ids, block.extra_keys = [], ()
            manager.stats.evictions += 1

    take(manager, seq, num_blocks, evict=evict)


def take_keeps_empty_dicts(manager, seq, num_blocks):
    def evict(manager, block):
        if block.block_hash is not None:
            del manager.hash_to_block[block.block_hash][block.block_id]
            block.block_hash = block.parent_hash = None
            block.token_ids, block.extra_keys = [], ()
            manager.stats.evictions += 1

    take(manager, seq, num_blocks, evict=evict)


def take_from_the_tail(manager, seq, num_blocks):
    take(manager, seq, num_blocks, choose=lambda manager, queue: queue[-1])


def take_the_lowest(manager, seq, num_blocks):
    take(manager, seq, num_blocks, choose=lambda manager, queue: min(queue))


def take_unnamed_first(manager, seq, num_blocks):
    def choose(manager, queue):
        return next((i for i in queue if manager.blocks[i].block_hash is None), queue[0])

    take(manager, seq, num_blocks, choose=choose)


def take_counts_every_block(manager, seq, num_blocks):
    before = manager.stats.evictions
    take(manager, seq, num_blocks)
    manager.stats.evictions = before + num_blocks


def take_counts_nothing(manager, seq, num_blocks):
    before = manager.stats.evictions
    take(manager, seq, num_blocks)
    manager.stats.evictions = before


def take_without_references(manager, seq, num_blocks):
    before = len(seq.block_table)
    take(manager, seq, num_blocks)
    for block_id in seq.block_table[before:]:
        manager.blocks[block_id].ref_count = 0


def take_up_to(manager, seq, num_blocks):
    take(manager, seq, num_blocks - len(seq.block_table))


def take_a_new_table(manager, seq, num_blocks):
    seq.block_table = []
    take(manager, seq, num_blocks)


WRONG = {
    "name_block": [
        (name_without_parent, "the parent belongs into the name"),
        (name_with_position_instead_of_parent, "the parent belongs into the name"),
        (name_with_position_too, "start itself does not enter the name"),
        (name_by_bytes_of_a_list, "bytes must be in range(0, 256)"),
        (name_by_low_bytes, "token ids go up to 2**32 - 1"),
        (name_by_shortest_bytes, "two contents give the same bytes"),
        (name_by_digits, "two contents give the same bytes"),
        (name_of_a_set_of_tokens, "the token ids and their order"),
        (name_by_pythons_hash, "another process gives the same block another name"),
        (name_is_a_number, "the name is what hash_bytes returns"),
        (name_without_salt, "the salt belongs into the name of the first block"),
        (name_with_salt_in_every_block, "the salt enters the first block only"),
        (name_with_true_salts_only, "is not the same as no salt"),
        (name_with_lora_in_the_first_block, "is missing in a later block"),
        (name_with_true_loras_only, "lora_id 0 is an adapter like any other"),
        (name_without_images, "content_hash belongs into each block"),
        (name_with_all_images, "this span does not overlap the block"),
        (name_with_images_that_begin_in_it, "content_hash belongs into each block"),
        (name_with_images_off_by_one, "this span does not overlap the block"),
        (name_with_one_image, "a block can have several images"),
        (name_with_absolute_image_start, "a span's start counts relative to the block"),
        (name_without_image_start, "another part of the image lies in the block"),
        (name_with_image_length, "the length of a span only says whether it overlaps"),
        (name_without_lengths, "two contents give the same bytes"),
        (name_without_tags, "two contents give the same bytes"),
        (name_without_a_tag_for_no_parent, "its own says whether there is a parent"),
        (name_with_zeros_for_no_parent, "its own says whether there is a parent"),
    ],
    "allocate_with_prefix": [
        (allocate_without_looking, "blocks 0 and 1 are full of them"),
        (allocate_looks_up_partial_blocks, "Only full blocks have names"),
        (allocate_looks_up_although_off, "name_block was called, although caching is off"),
        (allocate_leaves_the_last_block_out, "its block stays a hit"),
        (allocate_verifies_nothing, "Ask block.holds(content)"),
        (allocate_goes_on_behind_a_collision, "the search ends"),
        (allocate_leaks_references, "the reference counts changed. Count first"),
        (allocate_leaves_hits_in_the_queue, "hits must leave the free queue"),
        (allocate_removes_all_hits, "a hit is in it only if nobody uses it"),
        (allocate_counts_hits_as_free, "of which 2 are the hits: don't count these twice"),
        (allocate_wants_room_for_all, "hits in use cost nothing"),
        (allocate_pops_before_it_touches, "take them out before fresh ones are popped"),
        (allocate_counts_no_references, "one more for each hit"),
        (allocate_takes_one_too_many, "its block stays a hit"),
        (allocate_leaves_nothing_to_compute, "nothing is left to compute"),
        (allocate_computes_everything, "what is found is computed"),
        (allocate_registers_hits_again, "they have names already"),
        (allocate_resets_to_the_first_run, "hash_collision must be set anew"),
        (allocate_counts_refusals, "the statistics changed. Count first"),
        (allocate_counts_probes, "queries are all full blocks"),
        (allocate_counts_nothing, "queries are all full blocks"),
        (allocate_says_nothing, "it returned nothing"),
    ],
    "register_prefix": [
        (register_rounds_up, "Only full blocks have names"),
        (register_the_whole_prompt, "The rest of the prompt is not in the cache"),
        (register_the_prompt_only, "4 of 4 tokens of the answer are computed"),
        (register_from_the_start, "begin at seq.num_registered_blocks"),
        (register_from_the_cached_tokens, "begin at seq.num_registered_blocks"),
        (register_overwrites_copies, "the second joins the first"),
        (register_skips_copies, "the second joins the first"),
        (register_although_off, "name_block was called, although caching is off"),
        (register_although_contested, "nothing is named any more"),
        (register_verifies_nothing, "ask holds(content), and register nothing from there on"),
        (register_goes_on_behind_a_collision, "register nothing from there on"),
        (register_in_the_map_only, "must say so: block.block_hash"),
        (register_without_content, "or no hit can be verified"),
        (register_keeps_no_count, "num_registered_blocks: two blocks are done"),
        (register_takes_a_reference, "registering changes no reference counts"),
    ],
    "take_fresh": [
        (take_keeps_names, "is still in hash_to_block under its old name"),
        (take_keeps_the_map, "is still in hash_to_block under its old name"),
        (take_keeps_the_blocks_name, "was taken and still says what it was"),
        (take_evicts_all_copies, "only 0 leaves the dict under that name"),
        (take_keeps_empty_dicts, "hash_to_block must not keep empty dicts"),
        (take_from_the_tail, "its head is taken"),
        (take_the_lowest, "the head is taken, whatever it is"),
        (take_unnamed_first, "the head is taken, whatever it is"),
        (take_counts_every_block, "nothing was evicted"),
        (take_counts_nothing, "that is one eviction"),
        (take_without_references, "each block that is taken has one reference"),
        (take_up_to, "new ones go behind those that are in the table"),
        (take_a_new_table, "new ones go behind those that are in the table"),
    ],
}
