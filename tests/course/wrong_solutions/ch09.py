"""Wrong solutions of chapter 9."""

from tests.course.wrong_solutions import Edit

WRONG = {
    "row_parallel_forward": [
        Edit(
            "bias_on_every_rank",
            "layer.bias if layer.group.rank == 0 else None",
            "layer.bias",
            "the bias is in it 3 times",
        ),
        Edit("bias_on_no_rank", "layer.bias if layer.group.rank == 0 else None", "None", "the bias is missing"),
        Edit(
            "bias_behind_the_sum_on_one_rank",
            """
            bias = layer.bias if layer.group.rank == 0 else None
            return layer.group.all_reduce(layer.product(x, layer.weight, bias))
            """,
            """
            y = layer.group.all_reduce(layer.product(x, layer.weight, None))
            return y if layer.bias is None or layer.group.rank > 0 else y + layer.bias
            """,
            "rank 1 of 3, a row-parallel layer with a bias: the bias is missing",
        ),
        Edit(
            "bias_in_a_meeting_of_its_own",
            """
            bias = layer.bias if layer.group.rank == 0 else None
            return layer.group.all_reduce(layer.product(x, layer.weight, bias))
            """,
            """
            y = layer.group.all_reduce(layer.product(x, layer.weight, None))
            if layer.bias is None:
                return y
            return y + layer.group.all_reduce(layer.bias * (layer.group.rank == 0))
            """,
            "calls of all_reduce in a row-parallel layer",
        ),
        Edit(
            "forgets_the_sum",
            "layer.group.all_reduce(layer.product(x, layer.weight, bias))",
            "layer.product(x, layer.weight, bias)",
            "that is this rank's partial sum",
        ),
        Edit(
            "averages",
            "layer.group.all_reduce(layer.product(x, layer.weight, bias))",
            "layer.group.all_reduce(layer.product(x, layer.weight, bias)) / layer.group.size",
            "added up, not averaged",
        ),
        Edit(
            "cuts_x_again",
            "layer.product(x, layer.weight",
            "layer.product(x.chunk(layer.group.size, dim=-1)[layer.group.rank], layer.weight",
            "a row-parallel layer gets its x cut already",
        ),
        Edit(
            "adds_up_x",
            "layer.group.all_reduce(layer.product(x, layer.weight, bias))",
            "layer.product(layer.group.all_reduce(x), layer.weight, layer.bias)",
            "x, weight and bias must stay as they are",
        ),
        Edit(
            "only_rank_0_meets",
            "return layer.group.all_reduce(layer.product(x, layer.weight, bias))",
            """
            y = layer.product(x, layer.weight, bias)
            return layer.group.all_reduce(y) if layer.group.rank == 0 else y
            """,
            "every rank must call all_reduce",
        ),
        Edit(
            "cuts_the_outputs",  # the weight is cut by inputs
            "layer.group.all_reduce(layer.product(x, layer.weight, bias))",
            "layer.product(x, layer.weight, bias).chunk(layer.group.size, dim=-1)[layer.group.rank]",
            "rank 0 of 3, a row-parallel layer without a bias",
        ),
        Edit("past_the_product", "layer.product(", "F.linear(", "call layer.product"),
    ],
    "embed": [
        Edit(
            "border_one_too_far", "rows >= num_words", "rows > num_words", "words of other ranks need a row that exists"
        ),
        Edit("first_word_is_lost", "rows < 0", "rows <= 0", "nobody has put it in"),
        Edit(
            "forgets_the_offset",
            "rows = input_ids - decoder.group.rank * num_words",
            "rows = input_ids",
            "nobody has put it in",
        ),
        Edit(
            "strangers_get_a_row",
            "x.masked_fill(elsewhere[:, None], 0)",
            "x",
            "who does not hold a word must add zeros",
        ),
        Edit(
            "negative_rows_wrap",
            """
            elsewhere = (rows < 0) | (rows >= num_words)
            x = F.embedding(rows.masked_fill(elsewhere, 0), decoder.embed_tokens)  # any row will do for other words
            """,
            """
            elsewhere = rows >= num_words
            x = decoder.embed_tokens[rows.masked_fill(elsewhere, 0)]
            """,
            "who does not hold a word must add zeros",
        ),
        Edit(
            "keeps_its_part",
            "decoder.group.all_reduce(x.masked_fill(elsewhere[:, None], 0))",
            "x.masked_fill(elsewhere[:, None], 0)",
            "calls of all_reduce",
        ),
        Edit(
            "stays_away_without_words",
            "elsewhere = (rows < 0) | (rows >= num_words)",
            """
            elsewhere = (rows < 0) | (rows >= num_words)
            if bool(elsewhere.all()):
                return decoder.embed_tokens.new_zeros(len(input_ids), decoder.embed_tokens.shape[1])
            """,
            "every rank must call all_reduce",
        ),
        Edit(
            "changes_the_ids",
            "rows = input_ids - decoder.group.rank * num_words",
            "rows = input_ids.sub_(decoder.group.rank * num_words)",
            "input_ids and embed_tokens must stay as they are",
        ),
    ],
    "read_share": [
        Edit(
            "rows_and_columns_swapped",
            """
            if layer in ("o_proj", "down_proj") and kind == "weight":
                num_columns = part.get_shape()[1] // size
                return part[:, rank * num_columns : (rank + 1) * num_columns]
            if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
            """,
            """
            if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") and kind == "weight":
                num_columns = part.get_shape()[1] // size
                return part[:, rank * num_columns : (rank + 1) * num_columns]
            if layer in ("o_proj", "down_proj", "embed_tokens", "lm_head"):
            """,
            "gate_proj is column-parallel: a rank has rows",
        ),
        Edit(
            "rows_of_everything",
            """
            num_columns = part.get_shape()[1] // size
            return part[:, rank * num_columns : (rank + 1) * num_columns]
            """,
            """
            num_rows = part.get_shape()[0] // size
            return part[rank * num_rows : (rank + 1) * num_rows]
            """,
            "o_proj is row-parallel: a rank has the columns",
        ),
        Edit(
            "reads_all_then_cuts",
            "return part[start:stop]",
            "return part[:][start:stop]",
            "more numbers read than returned",
        ),
        Edit(
            "cuts_in_whole_heads",  # in units of head_dim: what does not fill a head is lost
            "return rank * num_rows // size, (rank + 1) * num_rows // size",
            """
            num_heads = num_rows // config.head_dim // size
            return rank * num_heads * config.head_dim, (rank + 1) * num_heads * config.head_dim
            """,
            "the 2 ranks have 16 of 18 rows together",
        ),
        Edit(
            "one_row_too_late",
            "return rank * num_rows // size, (rank + 1) * num_rows // size",
            "return rank * num_rows // size + (rank > 0), (rank + 1) * num_rows // size + (rank > 0)",
            "one row too late",
        ),
        Edit(
            "rows_overlap",
            "return rank * num_rows // size, (rank + 1) * num_rows // size",
            "return rank * num_rows // size - (rank > 0), (rank + 1) * num_rows // size - (rank > 0)",
            "one row too early",
        ),
        Edit(
            "forgets_the_rank",
            "return rank * num_rows // size, (rank + 1) * num_rows // size",
            "return 0, num_rows // size",
            "rank 1 of 2",
        ),
        Edit(
            "row_parallel_bias_is_cut",
            '"embed_tokens", "lm_head"):',
            '"embed_tokens", "lm_head", "o_proj", "down_proj"):',
            "so its bias is not cut",
        ),
        Edit(
            "norms_are_cut",
            "return part[:]",
            """
            start, stop = _rows(layer, part.get_shape()[0], config, rank, size)
            return part[start:stop]
            """,
            "norms work on whole vectors",
        ),
        Edit(
            "biases_are_whole",
            '"embed_tokens", "lm_head"):',
            '"embed_tokens", "lm_head") and kind == "weight":',
            "that is all of it",
        ),
        Edit(
            "kv_heads_are_not_copied",
            """
            if layer in ("k_proj", "v_proj"):
                num_heads = config.num_key_value_heads
                first_head, num_ours = rank * num_heads // size, max(1, num_heads // size)  # neighbours share where few
                return first_head * config.head_dim, (first_head + num_ours) * config.head_dim
            """,
            "",
            "needs a copy of that one, whole",
        ),
        Edit(
            "kv_heads_in_turn",
            "first_head, num_ours = rank * num_heads // size",
            "first_head, num_ours = rank % num_heads",
            "query head 1 belongs to KV head 0",
        ),
        Edit(
            "merged_in_equal_parts",
            """
            shares, first = [], 0
            for projection, num_rows in merged[layer].items():
                start, stop = _rows(projection, num_rows, config, rank, size)
                shares.append(part[first + start : first + stop])
                first += num_rows
            return torch.cat(shares)
            """,
            """
            num_rows = part.get_shape()[0]
            return part[rank * num_rows // size : (rank + 1) * num_rows // size]
            """,
            "across the borders inside it",
        ),
        Edit(
            "merged_kv_is_not_copied",
            "start, stop = _rows(projection, num_rows, config, rank, size)",
            "start, stop = rank * num_rows // size, (rank + 1) * num_rows // size",
            "qkv_proj",
        ),
        Edit(
            "merged_is_read_whole",
            "part[first + start : first + stop]",
            "part[:][first + start : first + stop]",
            "more numbers read than returned",
        ),
    ],
}
