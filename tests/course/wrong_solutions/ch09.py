"""Wrong solutions of chapter 9."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
row_parallel_forward
    bias_on_every_rank: the bias is in it 3 times
        ~ layer.bias if layer.group.rank == 0 else None => layer.bias
    bias_on_no_rank: the bias is missing
        ~ layer.bias if layer.group.rank == 0 else None => None
    bias_in_a_meeting_of_its_own: calls of all_reduce in a row-parallel layer
        + y = layer.group.all_reduce(layer.product(x, layer.weight, None))
        + return y if layer.bias is None else y + layer.group.all_reduce(layer.bias * (layer.group.rank == 0))
        = bias = layer.bias if layer.group.rank == 0 else None
    forgets_the_sum: that is this rank's partial sum
        ~ layer.group.all_reduce(layer.product(x, layer.weight, bias)) => layer.product(x, layer.weight, bias)
    averages: added up, not averaged
        - layer.group.all_reduce(layer.product(x, layer.weight, bias))
        + layer.group.all_reduce(layer.product(x, layer.weight, bias)) / layer.group.size
    cuts_x_again: a row-parallel layer gets its x cut already
        - layer.product(x, layer.weight
        + layer.product(x.chunk(layer.group.size, dim=-1)[layer.group.rank], layer.weight
    adds_up_x: x, weight and bias must stay as they are
        - layer.group.all_reduce(layer.product(x, layer.weight, bias))
        + layer.product(layer.group.all_reduce(x), layer.weight, layer.bias)
    past_the_product: call layer.product
        ~ layer.product( => F.linear(
embed
    border_one_too_far: words of other ranks need a row that exists
        ~ rows >= num_words => rows > num_words
    forgets_the_offset: nobody has put it in
        ~ rows = input_ids - decoder.group.rank * num_words => rows = input_ids
    strangers_get_a_row: who does not hold a word must add zeros
        ~ x.masked_fill(elsewhere[:, None], 0) => x
    keeps_its_part: calls of all_reduce
        ~ decoder.group.all_reduce(x.masked_fill(elsewhere[:, None], 0)) => x.masked_fill(elsewhere[:, None], 0)
    stays_away_without_words: every rank must call all_reduce
        = elsewhere = (rows < 0) | (rows >= num_words)
        + if bool(elsewhere.all()):
        +     return decoder.embed_tokens.new_zeros(len(input_ids), decoder.embed_tokens.shape[1])
    changes_the_ids: input_ids and embed_tokens must stay as they are
        ~ rows = input_ids - decoder.group.rank * num_words => rows = input_ids.sub_(decoder.group.rank * num_words)
read_share
    rows_and_columns_swapped: gate_proj is column-parallel: a rank has rows
        - if layer in ("o_proj", "down_proj") and kind == "weight":
        -     num_columns = part.get_shape()[1] // size
        -     return part[:, rank * num_columns : (rank + 1) * num_columns]
        - if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        + if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") and kind == "weight":
        +     num_columns = part.get_shape()[1] // size
        +     return part[:, rank * num_columns : (rank + 1) * num_columns]
        + if layer in ("o_proj", "down_proj", "embed_tokens", "lm_head"):
    rows_of_everything: o_proj is row-parallel: a rank has the columns
        - num_columns = part.get_shape()[1] // size
        + n = part.get_shape()[0] // size
        + return part[rank * n : (rank + 1) * n]
    reads_all_then_cuts: more numbers read than returned
        ~ return part[start:stop] => return part[:][start:stop]
    cuts_in_whole_heads: the 2 ranks have 16 of 18 rows together
        - return rank * num_rows // size, (rank + 1) * num_rows // size
        + num_heads = num_rows // config.head_dim // size
        + return rank * num_heads * config.head_dim, (rank + 1) * num_heads * config.head_dim
    one_row_too_late: one row too late
        - return rank * num_rows // size, (rank + 1) * num_rows // size
        + return rank * num_rows // size + (rank > 0), (rank + 1) * num_rows // size + (rank > 0)
    forgets_the_rank: rank 1 of 2
        ~ return rank * num_rows // size, (rank + 1) * num_rows // size => return 0, num_rows // size
    row_parallel_bias_is_cut: so its bias is not cut
        ~ "embed_tokens", "lm_head"): => "embed_tokens", "lm_head", "o_proj", "down_proj"):
    norms_are_cut: norms work on whole vectors
        - return part[:]
        + start, stop = _rows(layer, part.get_shape()[0], config, rank, size)
        + return part[start:stop]
    biases_are_whole: that is all of it
        ~ "embed_tokens", "lm_head"): => "embed_tokens", "lm_head") and kind == "weight":
    kv_heads_are_not_copied: needs a copy of that one, whole
        ~ if layer in ("k_proj", "v_proj"): => if False:
    merged_in_equal_parts: across the borders inside it
        + num_rows = part.get_shape()[0]
        + return part[rank * num_rows // size : (rank + 1) * num_rows // size]
        = shares, first = [], 0
    merged_kv_is_not_copied: qkv_proj
        - start, stop = _rows(projection, num_rows, config, rank, size)
        + start, stop = rank * num_rows // size, (rank + 1) * num_rows // size
""")
