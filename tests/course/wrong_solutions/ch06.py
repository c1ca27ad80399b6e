"""Wrong solutions of chapter 6."""

from tests.course.wrong_solutions import Edit

POSITIONS, END = "range(chunk.start, chunk.end)", "append(chunk.end)"
SAMPLED, WEIGHTS = "sum(chunk.reaches_end for chunk in chunks)", "weights * itemsize"

WRONG = {
    "step_cost": [
        Edit("one_flop_a_weight", "linear_flops=2 * ", "linear_flops=", "two FLOPs for each weight"),
        Edit("keys_of_this_chunk_only", POSITIONS, "range(chunk.end - chunk.start)", "that earlier steps computed"),
        Edit("heads_fill_the_hidden_size", "pairs * q_size", "pairs * config.hidden_size", "need not be hidden_size"),
        Edit("weights_for_each_row", WEIGHTS, f"{WEIGHTS} * num_rows", "read once a step"),
        Edit("every_chunk_samples", SAMPLED, "len(chunks)", "the chunk does not sample"),
        Edit("kv_shared", "sum(chunk.end for", "max(chunk.end for", "each sequence has K and V of its own"),
        Edit("always_bf16", WEIGHTS, "weights * 2", "itemsize 4"),
    ],
    "pack": [
        Edit("row_behind_the_last", "append(end_row - 1)", "append(end_row)", "that row is the next chunk's first"),
        Edit("lengths_instead_of_sums", "append(end_row)", "append(chunk.end - chunk.start)", "running sum, from 0 on"),
        Edit("keys_of_this_chunk_only", END, "append(chunk.end - chunk.start)", "also to those of earlier steps"),
        Edit("samples_in_a_prompt", "if chunk.reaches_end:", "if True:", "inside a prompt does not sample"),
    ],
    "token_budget": [
        Edit("rounds_up", "fits = int(limit_s", "fits = 1 + int(limit_s", "with that many it takes longer"),
        Edit("reading_then_computing", "int(limit_s * ", "int((limit_s - 0.04) * ", "both happen at the same time"),
        Edit("zero_when_nothing_fits", "max(fits, num_decodes + 1)", "fits", "the engine stands still"),
        Edit(
            "counts_who_has_generated",
            "len(seq.tokens) - seq.num_computed_tokens == 1",
            "seq.num_generated_tokens > 0",
            "one token left to compute",
        ),
        Edit("counts_who_waits", "scheduler.running)", "[*scheduler.running, *scheduler.waiting])", "who waits does"),
        Edit("over_the_limit", ", scheduler.max_num_batched_tokens)", ", 2048)", "it has the last word"),
        Edit("budget_for_the_prompt_alone", "max(fits,", "max(fits + num_decodes,", "until its first token"),
        Edit("lowers_the_limit", "return min(", "scheduler.max_num_batched_tokens //= 2\nreturn min(", "only answers"),
    ],
}
