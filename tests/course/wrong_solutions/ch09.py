"""Wrong solutions of chapter 9."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
row_parallel_forward
    bias_on_every_rank: the bias is in it 3 times
        ~ layer.bias if layer.group.rank == 0 else None => layer.bias
    forgets_the_sum: that is this rank's partial sum
        ~ layer.group.all_reduce(layer.product(x, layer.weight, bias)) => layer.product(x, layer.weight, bias)
    cuts_x_again: a row-parallel layer gets its x cut already
        - layer.product(x, layer.weight
        + layer.product(x.chunk(layer.group.size, dim=-1)[layer.group.rank], layer.weight
    adds_up_x: x, weight and bias must stay as they are
        - layer.group.all_reduce(layer.product(x, layer.weight, bias))
        + layer.product(layer.group.all_reduce(x), layer.weight, layer.bias)
embed
    border_one_too_far: words of other ranks need a row that exists
        ~ rows >= num_words => rows > num_words
    forgets_the_offset: nobody has put it in
        ~ rows = input_ids - decoder.group.rank * num_words => rows = input_ids
    strangers_get_a_row: a rank that does not hold a word must add zeros
        ~ x.masked_fill(elsewhere[:, None], 0) => x
    stays_away_without_words: every rank must call all_reduce
        = elsewhere = (rows < 0) | (rows >= num_words)
        + if bool(elsewhere.all()):
        +     return decoder.embed_tokens.new_zeros(len(input_ids), decoder.embed_tokens.shape[1])
    always_float32: the dtype of what you return
        ~ decoder.embed_tokens)  # any row will do for other ranks' words => decoder.embed_tokens.float())
read_share
    rows_of_everything: o_proj is row-parallel: a rank has the columns
        - num_columns = part.get_shape()[1] // size
        + n = part.get_shape()[0] // size
        + return part[rank * n : (rank + 1) * n]
    reads_all_then_cuts: more numbers read than returned
        ~ return part[start:stop] => return part[:][start:stop]
    forgets_the_rank: rank 1 of 2
        ~ return rank * num_rows // size, (rank + 1) * num_rows // size => return 0, num_rows // size
    row_parallel_bias_is_cut: so its bias is not cut
        ~ "embed_tokens", "lm_head"): => "embed_tokens", "lm_head", "o_proj", "down_proj"):
    kv_heads_are_not_copied: needs a copy of that one, whole
        ~ if layer in ("k_proj", "v_proj"): => if False:
    one_kv_head: 8 query heads and 4 KV heads
        ~ max(1, num_heads // size) => 1
    merged_in_equal_parts: across the borders inside it
        + num_rows = part.get_shape()[0]
        + return part[rank * num_rows // size : (rank + 1) * num_rows // size]
        = shares, first = [], 0
""")
