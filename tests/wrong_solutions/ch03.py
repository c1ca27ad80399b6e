"""Wrong solutions of chapter 3, and what their hints must say."""

import torch

# -- kv_bytes_per_token


def keys_only(config, itemsize):
    return config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize


def query_heads(config, itemsize):
    return 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * itemsize


def one_layer(config, itemsize):
    return 2 * config.num_key_value_heads * config.head_dim * itemsize


def always_bf16(config, itemsize):
    return 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def head_dim_guessed(config, itemsize):
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize


# -- slot_mapping


def late_at_the_border(block_table, start, end, write_start, block_size):
    """A position belongs to the next block one position too late."""
    slots = []
    for i in range(start, end):
        index = max(i - 1, 0) // block_size
        slots.append(block_table[index] * block_size + i % block_size if i >= write_start else -1)
    return slots


def logical_block(block_table, start, end, write_start, block_size):
    return [i if i >= write_start else -1 for i in range(start, end)]


def ignores_write_start(block_table, start, end, write_start, block_size):
    return [block_table[i // block_size] * block_size + i % block_size for i in range(start, end)]


def relative_to_start(block_table, start, end, write_start, block_size):
    return [
        block_table[i // block_size] * block_size + i % block_size if i + start >= write_start else -1
        for i in range(end - start)
    ]


def leaves_rows_out(block_table, start, end, write_start, block_size):
    return [block_table[i // block_size] * block_size + i % block_size for i in range(write_start, end)]


def write_start_not_written(block_table, start, end, write_start, block_size):
    return [
        block_table[i // block_size] * block_size + i % block_size if i > write_start or write_start == start else -1
        for i in range(start, end)
    ]


def eats_the_table(block_table, start, end, write_start, block_size):
    slots = [-1] * (write_start - start)
    for i in range(end):
        if i % block_size == 0:
            block_id = block_table.pop(0)
        if i >= write_start:
            slots.append(block_id * block_size + i % block_size)
    return slots


# -- write_kv


def minus_one_is_last(k_cache, v_cache, k, v, slots):
    k_cache.view(-1, *k.shape[1:])[slots] = k
    v_cache.view(-1, *v.shape[1:])[slots] = v


def stops_at_minus_one(k_cache, v_cache, k, v, slots):
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            return
        k_cache[slot // k_cache.shape[1], slot % k_cache.shape[1]] = k[i]
        v_cache[slot // v_cache.shape[1], slot % v_cache.shape[1]] = v[i]


def clamps_minus_one(k_cache, v_cache, k, v, slots):
    """Slot -1 becomes slot 0, which belongs to somebody."""
    slots = slots.clamp(min=0)
    k_cache[slots // k_cache.shape[1], slots % k_cache.shape[1]] = k
    v_cache[slots // v_cache.shape[1], slots % v_cache.shape[1]] = v


def divides_by_num_blocks(k_cache, v_cache, k, v, slots):
    keep = slots >= 0
    at = slots[keep] // k_cache.shape[0] % k_cache.shape[0], slots[keep] % k_cache.shape[0]
    k_cache[at], v_cache[at] = k[keep], v[keep]


def writes_a_copy(k_cache, v_cache, k, v, slots):
    keep = slots >= 0
    flat_k, flat_v = k_cache.clone().flatten(0, 1), v_cache.clone().flatten(0, 1)
    flat_k[slots[keep]], flat_v[slots[keep]] = k[keep], v[keep]


def k_in_both(k_cache, v_cache, k, v, slots):
    keep = slots >= 0
    for cache in (k_cache, v_cache):
        cache[slots[keep] // cache.shape[1], slots[keep] % cache.shape[1]] = k[keep]


def first_rows(k_cache, v_cache, k, v, slots):
    """Leaves the -1 out of the slots, and forgets to leave out the rows."""
    slots = slots[slots >= 0]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache[torch.div(slots, cache.shape[1], rounding_mode="floor"), slots % cache.shape[1]] = rows[: len(slots)]


WRONG = {
    "kv_bytes_per_token": [
        (keys_only, "a token leaves both"),
        (query_heads, "count the KV heads"),
        (one_layer, "every layer has a K and a V"),
        (always_bf16, "itemsize is the bytes of one number"),
        (head_dim_guessed, "take head_dim"),
    ],
    "slot_mapping": [
        (late_at_the_border, "position 8 is offset 0 of the second block"),
        (logical_block, "the physical id block_table[index]"),
        (ignores_write_start, "positions before write_start get slot -1"),
        (relative_to_start, "the block table still begins at position 0"),
        (leaves_rows_out, "one slot for each position"),
        (write_start_not_written, "write_start itself is written"),
        (eats_the_table, "changed block_table"),
    ],
    "write_kv": [
        (minus_one_is_last, "In Python and PyTorch the index -1 is the last one"),
        (stops_at_minus_one, "the tokens after it are written all the same"),
        (clamps_minus_one, "slot -1 means: write nothing"),
        (divides_by_num_blocks, "slot 17 is k_cache[2, 1]"),
        (writes_a_copy, "in the very tensor that was given"),
        (k_in_both, "v_cache is wrong at slots"),
        (first_rows, "the tokens after it are written all the same"),
    ],
}
