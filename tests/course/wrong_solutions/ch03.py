"""Wrong solutions of chapter 3."""

from tests.course.wrong_solutions import Edit

PARTS = "pool_bytes // (block_size * token_bytes)"
POSITION = "divmod(position, block_size)"
LATE = "max(position - 1, 0) // block_size, position % block_size"
FIRST = "max(0, position + 1 - window) if window else 0"
RAISED = 'raise ValueError(f"no block of {block_size} tokens fits into {pool_bytes} bytes")'
NEEDED = "max_num_seqs * blocks_of_a_sequence"

WRONG = {
    "pool_blocks": [
        Edit("keys_only", "token_bytes = 2 * ", "token_bytes = ", "64 numbers of K and 64 of V"),
        Edit("bytes_of_a_token", "(block_size * token_bytes)", "token_bytes", "a block has block_size tokens"),
        Edit("query_heads", "config.num_key_value_heads", "config.num_attention_heads", "count the KV heads"),
        Edit("always_bf16", "* itemsize", "* 2", "itemsize is the bytes of one number"),
        Edit("head_dim_guessed", "config.head_dim", "config.hidden_size // config.num_attention_heads", "take head"),
        Edit("a_part_of_a_block", PARTS, f"-(-{PARTS})", "what is left over is no block"),
        Edit("a_pool_of_none", "num_blocks < 1", "False", "raise ValueError"),
        Edit("says_what_to_raise", RAISED, 'return "ValueError"', "raise ValueError"),
        Edit("tokens_in_one_row", NEEDED, "-(-max_num_seqs * max_model_len // block_size)", "round up for each"),
        Edit("as_much_as_fits", f"min(num_blocks, {NEEDED})", "num_blocks", "no more than max_num_seqs sequences"),
        Edit("all_that_is_needed", f"min(num_blocks, {NEEDED})", NEEDED, "what is left over is no block"),
        Edit("limits_what_was_given", "if given_bytes is None:", "if True:", "the user has said how large"),
        Edit(
            "nothing_given", "if given_bytes is None else given", "if not given_bytes else given", "0 bytes were given"
        ),
    ],
    "window_slots": [
        Edit("late_at_the_border", POSITION, LATE, "is offset 0"),
        Edit("logical_block", "block_table[index] *", "index *", "the physical id block_table[index]"),
        Edit("window_before_the_row", "position + 1 - window", "position - window", "is one of the `window` positions"),
        Edit("counts_from_the_end", FIRST, "position + 1 - window if window else 0", "begins at position 0"),
        Edit("no_window_no_slots", f"{FIRST}", "max(0, position + 1 - window)", "that there is no window"),
        Edit("this_step_only", FIRST, FIRST.replace("0,", "start,"), "even if an earlier step computed them"),
        Edit("not_causal", "range(first, position + 1)", "range(first, end)", "a row sees the positions up to its own"),
        Edit("one_window_for_all", "position + 1 - window", "start + 1 - window", "each row has a window of its own"),
        Edit("relative_to_start", POSITION, "divmod(max(position - start, 0), block_size)", "offsets 0 to 3"),
        Edit("rows_are_tuples", "return rows", "return [tuple(row) for row in rows]", "must return a list of lists"),
        Edit("eats_the_table", "return rows", "block_table.clear()\nreturn rows", "changed block_table"),
    ],
    "write_kv": [
        Edit("writes_a_copy", "k_cache[block_ids", "k_cache = k_cache.clone()\nk_cache[block_ids", "that was given"),
        Edit("k_in_both", "= v[wanted]", "= k[wanted]", "v_cache is wrong at slots"),
        Edit("minus_one_is_last", "slots >= 0", "slots >= -1", "In Python and PyTorch the index -1 is the last one"),
    ],
}
