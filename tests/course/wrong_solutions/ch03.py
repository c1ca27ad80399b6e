"""Wrong solutions of chapter 3."""

from tests.course.wrong_solutions import Edit

POSITION = "divmod(position, block_size)"
LATE = "max(position - 1, 0) // block_size, position % block_size"

WRONG = {
    "kv_bytes_per_token": [
        Edit("keys_only", "return 2 * ", "return ", "a token leaves both"),
        Edit("query_heads", "config.num_key_value_heads", "config.num_attention_heads", "count the KV heads"),
        Edit("always_bf16", "* itemsize", "* 2", "itemsize is the bytes of one number"),
        Edit("head_dim_guessed", "config.head_dim", "config.hidden_size // config.num_attention_heads", "take head"),
    ],
    "slot_mapping": [
        Edit("late_at_the_border", POSITION, LATE, "is offset 0"),
        Edit("logical_block", "block_table[index] *", "index *", "the physical id block_table[index]"),
        Edit("relative_to_start", POSITION, "divmod(position - start, block_size)", "still begins at position 0"),
        Edit("ignores_write_start", "position < write_start", "False", "positions before write_start get slot -1"),
        Edit("eats_the_table", "return slots", "block_table.clear()\nreturn slots", "changed block_table"),
    ],
    "write_kv": [
        Edit("writes_a_copy", "k_cache[block_ids", "k_cache = k_cache.clone()\nk_cache[block_ids", "that was given"),
        Edit("k_in_both", "= v[wanted]", "= k[wanted]", "v_cache is wrong at slots"),
        Edit("minus_one_is_last", "slots >= 0", "slots >= -1", "In Python and PyTorch the index -1 is the last one"),
    ],
}
