"""Wrong solutions of chapter 6."""

from tests.course.wrong_solutions import Edit

WRONG = {
    "step_cost": [
        Edit("one_flop_a_weight", "linear_flops=2 * ", "linear_flops=", "two FLOPs for each weight"),
        Edit("one_layer", "body = config.num_hidden_layers * (attention + mlp)", "body = attention + mlp", "one layer"),
        Edit("mlp_of_two_matrices", "mlp = 3 * ", "mlp = 2 * ", "an MLP has three matrices"),
        Edit("kv_projections_as_wide_as_q", "q_size + 2 * kv_size", "3 * q_size", "outputs for the KV heads only"),
        Edit(
            "heads_fill_hidden_size",
            "q_size = config.num_attention_heads * config.head_dim",
            "q_size = config.hidden_size",
            "q_proj has num_attention_heads * head_dim = 12 outputs",
        ),
        Edit("scores_only", "attention_flops=4 * ", "attention_flops=2 * ", "two for adding up the weighted v"),
        Edit("kv_heads_compute", "pairs * q_size", "pairs * kv_size", "each query head has scores of its own"),
        Edit(
            "query_heads_are_cached",
            "2 * kv_size * config.n",
            "2 * q_size * config.n",
            "only the KV heads have K and V",
        ),
        Edit("keys_only", "num_keys * 2 * ", "num_keys * ", "K and V both count"),
        Edit("always_bf16", "weights * itemsize", "weights * 2", "itemsize 4"),
        Edit("not_its_own_key", "sum(position + 1 for", "sum(position for", "its own key"),
        Edit(
            "every_row_meets_every_key",
            "sum(position + 1 for chunk in chunks for position in range(chunk.start, chunk.end))",
            "sum((chunk.end - chunk.start) * chunk.end for chunk in chunks)",
            "attention is causal",
        ),
        Edit(
            "keys_of_this_chunk_only",
            "for position in range(chunk.start, chunk.end)",
            "for position in range(chunk.end - chunk.start)",
            "the keys of the 4 tokens that earlier steps computed",
        ),
        Edit(
            "every_row_samples",
            "sum(chunk.samples for chunk in chunks)",
            "num_rows",
            "only the row that samples, the last, meets the output matrix",
        ),
        Edit(
            "every_chunk_samples", "sum(chunk.samples for chunk in chunks)", "len(chunks)", "the chunk does not sample"
        ),
        Edit("output_matrix_always_read", "body + head if num_sampled else body", "body + head", "nobody samples"),
        Edit("weights_for_each_row", "weights * itemsize", "weights * itemsize * num_rows", "read once a step"),
        Edit("weights_for_each_chunk", "weights * itemsize", "weights * itemsize * len(chunks)", "share one reading"),
        Edit("kv_for_each_row", "kv_bytes=num_keys", "kv_bytes=pairs", "once for all rows of the chunk"),
        Edit(
            "kv_of_this_chunk_only",
            "sum(chunk.end for chunk in chunks)",
            "num_rows",
            "the K and V of the 4 tokens before it are read, too",
        ),
        Edit(
            "kv_of_the_whole_prompt",
            "sum(chunk.end for chunk in chunks)",
            "sum(len(chunk.seq.tokens) for chunk in chunks)",
            "the tokens behind the chunk have no K and V yet",
        ),
        Edit("kv_shared", "sum(chunk.end for", "max(chunk.end for", "each sequence has K and V of its own"),
        Edit("fractions", "linear_flops=2 * (", "linear_flops=2.0 * (", "are whole"),
    ],
    "pack": [
        Edit("no_leading_zero", "return cu_seqlens_q,", "return cu_seqlens_q[1:],", "it lacks the leading 0"),
        Edit(
            "lengths_instead_of_sums",
            "cu_seqlens_q.append(end_row)",
            "cu_seqlens_q.append(chunk.end - chunk.start)",
            "running sum, from 0 on",
        ),
        Edit(
            "keys_of_this_chunk_only",
            "seqlens_k.append(chunk.end)",
            "seqlens_k.append(chunk.end - chunk.start)",
            "also to those of earlier steps",
        ),
        Edit(
            "keys_of_the_whole_prompt",
            "seqlens_k.append(chunk.end)",
            "seqlens_k.append(len(chunk.seq.tokens))",
            "tokens behind the chunk are not there yet",
        ),
        Edit("not_its_own_key", "seqlens_k.append(chunk.end)", "seqlens_k.append(chunk.end - 1)", "attends to itself"),
        Edit("samples_in_the_middle_of_a_prompt", "if chunk.samples:", "if True:", "does not sample"),
        Edit("row_behind_the_last", "append(end_row - 1)", "append(end_row)", "that row is the next chunk's first"),
        Edit(
            "adds_the_end",
            "end_row = cu_seqlens_q[-1] + chunk.end - chunk.start",
            "end_row = cu_seqlens_q[-1] + chunk.end",
            "where does it begin, where does it end?",
        ),
    ],
    "token_budget": [
        Edit("rounds_up", "fits = int(limit_s", "fits = 1 + int(limit_s", "with that many it takes longer"),
        Edit(
            "reading_and_computing_in_turn",
            "fits = int(limit_s * ",
            "fits = int((limit_s - machine.weight_bytes / machine.bytes_per_s) * ",
            "both happen at the same time",
        ),
        Edit(
            "forgets_the_reading",
            "if machine.weight_bytes / machine.bytes_per_s <= limit_s:",
            "if True:",
            "no number of tokens fits",
        ),
        Edit("zero_when_nothing_fits", "max(fits, num_decodes + 1)", "fits", "the engine stands still"),
        Edit("prompts_stand_still", "num_decodes + 1", "max(num_decodes, 1)", "or the prompt stands still"),
        Edit(
            "counts_everybody_who_runs",
            "sum(len(seq.tokens) - seq.num_computed_tokens == 1 for seq in scheduler.running)",
            "len(scheduler.running)",
            "in the middle of its prompt does not decode",
        ),
        Edit(
            "counts_who_waits",
            "in scheduler.running)",
            "in [*scheduler.running, *scheduler.waiting])",
            "5 with prompts of one token are waiting",
        ),
        Edit(
            "over_the_engines_limit",
            "min(max(fits, num_decodes + 1), scheduler.max_num_batched_tokens)",
            "max(min(fits, scheduler.max_num_batched_tokens), num_decodes + 1)",
            "it has the last word",
        ),
        Edit("budget_for_the_prompt_alone", "max(fits,", "max(fits + num_decodes,", "until its first token"),
        Edit(
            "lowers_the_engines_limit",
            "return min(max(fits, num_decodes + 1), scheduler.max_num_batched_tokens)",
            """
            scheduler.max_num_batched_tokens = min(max(fits, num_decodes + 1), scheduler.max_num_batched_tokens)
            return scheduler.max_num_batched_tokens
            """,
            "token_budget only answers",
        ),
    ],
}
