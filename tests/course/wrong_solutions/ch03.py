"""Wrong solutions of chapter 3."""

from tests.course.wrong_solutions import Edit

WRONG = {
    "kv_bytes_per_token": [
        Edit("keys_only", "return 2 * ", "return ", "a token leaves both"),
        Edit("query_heads", "config.num_key_value_heads", "config.num_attention_heads", "count the KV heads"),
        Edit("one_layer", "config.num_hidden_layers * ", "", "every layer has a K and a V"),
        Edit("always_bf16", "* itemsize", "* 2", "itemsize is the bytes of one number"),
        Edit(
            "head_dim_guessed",
            "* config.head_dim",
            "* (config.hidden_size // config.num_attention_heads)",
            "take head_dim",
        ),
    ],
    "slot_mapping": [
        Edit(
            "late_at_the_border",  # a position belongs to the next block one position too late
            "index, offset = divmod(position, block_size)",
            "index, offset = max(position - 1, 0) // block_size, position % block_size",
            "position 8 is offset 0 of the second block",
        ),
        Edit("logical_block", "block_table[index] *", "index *", "the physical id block_table[index]"),
        Edit(
            "ignores_write_start", "if position < write_start:", "if False:", "positions before write_start get slot -1"
        ),
        Edit(
            "relative_to_start",
            "divmod(position, block_size)",
            "divmod(position - start, block_size)",
            "the block table still begins at position 0",
        ),
        Edit("leaves_rows_out", "range(start, end)", "range(write_start, end)", "one slot for each position"),
        Edit(
            "write_start_not_written",
            "if position < write_start:",
            "if position <= write_start and write_start > start:",
            "write_start itself is written",
        ),
        Edit(
            "eats_the_table",
            "slots.append(block_table[index] * block_size + offset)",
            """
            slots.append(block_table[0] * block_size + offset)
            if offset == block_size - 1:
                block_table.pop(0)
            """,
            "changed block_table",
        ),
    ],
    "write_kv": [
        Edit(
            "minus_one_is_last",
            "wanted = slots >= 0",
            "wanted = slots >= -1",
            "In Python and PyTorch the index -1 is the last one",
        ),
        Edit(
            "stops_at_minus_one",
            "wanted = slots >= 0",
            "wanted = (slots >= 0).cumprod(0).bool()",
            "the tokens after it are written all the same",
        ),
        Edit(
            "clamps_minus_one",  # slot -1 becomes slot 0, which belongs to somebody
            "wanted = slots >= 0",
            "slots = slots.clamp(min=0)\nwanted = slots >= 0",
            "slot -1 means: write nothing",
        ),
        Edit(
            "divides_by_num_blocks",
            "slots[wanted] // k_cache.shape[1], slots[wanted] % k_cache.shape[1]",
            "slots[wanted] // k_cache.shape[0] % k_cache.shape[0], slots[wanted] % k_cache.shape[0]",
            "slot 17 is k_cache[2, 1]",
        ),
        Edit(
            "writes_a_copy",
            "k_cache[block_ids, offsets] = ",
            "k_cache, v_cache = k_cache.clone(), v_cache.clone()\nk_cache[block_ids, offsets] = ",
            "in the very tensor that was given",
        ),
        Edit("k_in_both", "= v[wanted]", "= k[wanted]", "v_cache is wrong at slots"),
        Edit(
            "first_rows",  # leaves the -1 out of the slots, and forgets to leave out the rows
            """
            k_cache[block_ids, offsets] = k[wanted]
            v_cache[block_ids, offsets] = v[wanted]
            """,
            """
            k_cache[block_ids, offsets] = k[: len(block_ids)]
            v_cache[block_ids, offsets] = v[: len(block_ids)]
            """,
            "the tokens after it are written all the same",
        ),
    ],
}
