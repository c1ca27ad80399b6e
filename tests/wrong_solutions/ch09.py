"""Typical wrong solutions of chapter 9's exercises, and the hint with which each must be caught."""

import torch
import torch.nn.functional as F


def bias_on_every_rank(layer, x):
    y = layer.product(x, layer.weight, layer.bias)
    return y if layer.group is None else layer.group.all_reduce(y)


def bias_on_no_rank(layer, x):
    if layer.group is None:
        return layer.product(x, layer.weight, layer.bias)
    return layer.group.all_reduce(layer.product(x, layer.weight, None))


def columns_without_bias(layer, x):
    y = layer.product(x, layer.weight, None)
    if layer.group is None:
        return y
    y = layer.group.all_reduce(y)
    return y if layer.bias is None else y + layer.bias


def forgets_the_sum(layer, x):
    return layer.product(x, layer.weight, layer.bias)


def averages(layer, x):
    y = layer.product(x, layer.weight, layer.bias)
    return y if layer.group is None else layer.group.all_reduce(y) / layer.group.size


def sums_columns_too(layer, x):
    bias = layer.bias if layer.group.rank == 0 else None
    return layer.group.all_reduce(layer.product(x, layer.weight, bias))


def cuts_x_again(layer, x):
    if layer.group is None:
        return layer.product(x, layer.weight, layer.bias)
    x = x.chunk(layer.group.size, dim=-1)[layer.group.rank]
    return layer.group.all_reduce(layer.product(x, layer.weight, layer.bias if layer.group.rank == 0 else None))


def adds_up_x(layer, x):
    if layer.group is None:
        return layer.product(x, layer.weight, layer.bias)
    return layer.product(layer.group.all_reduce(x), layer.weight, layer.bias)


def only_rank_0_meets(layer, x):
    if layer.group is None:
        return layer.product(x, layer.weight, layer.bias)
    y = layer.product(x, layer.weight, None)
    if layer.group.rank == 0:
        y = layer.group.all_reduce(y)
        y = y if layer.bias is None else y + layer.bias
    return y


def swaps_rows_and_columns(layer, x):
    """Cuts the outputs of a row-parallel layer, although its weight is cut by inputs."""
    y = layer.product(x, layer.weight, layer.bias)
    return y if layer.group is None else y.chunk(layer.group.size, dim=-1)[layer.group.rank]


def past_the_product(layer, x):
    y = F.linear(x, layer.weight, layer.bias if layer.group is None or layer.group.rank == 0 else None)
    return y if layer.group is None else layer.group.all_reduce(y)


def embed(decoder, input_ids, rows, elsewhere):
    x = F.embedding(rows.masked_fill(elsewhere, 0), decoder.embed_tokens)
    return decoder.group.all_reduce(x.masked_fill(elsewhere[:, None], 0))


def border_one_too_far(decoder, input_ids):
    n = decoder.config.vocab_size
    rows = input_ids - decoder.group.rank * n
    return embed(decoder, input_ids, rows, (rows < 0) | (rows > n))


def first_word_is_lost(decoder, input_ids):
    n = decoder.config.vocab_size
    rows = input_ids - decoder.group.rank * n
    return embed(decoder, input_ids, rows, (rows <= 0) | (rows >= n)) if decoder.group.size > 1 else embed(
        decoder, input_ids, rows, rows < 0
    )  # fmt: skip


def forgets_the_offset(decoder, input_ids):
    n = decoder.config.vocab_size
    return embed(decoder, input_ids, input_ids, input_ids >= n)


def strangers_get_a_row(decoder, input_ids):
    n = decoder.config.vocab_size
    rows = (input_ids - decoder.group.rank * n).clamp(0, n - 1)
    return decoder.group.all_reduce(F.embedding(rows, decoder.embed_tokens))


def negative_rows_wrap(decoder, input_ids):
    n = decoder.config.vocab_size
    rows = input_ids - decoder.group.rank * n
    x = decoder.embed_tokens[rows.clamp(max=n - 1)].clone()
    x[rows >= n] = 0
    return decoder.group.all_reduce(x)


def keeps_its_part(decoder, input_ids):
    n = decoder.config.vocab_size
    rows = input_ids - decoder.group.rank * n
    elsewhere = (rows < 0) | (rows >= n)
    return F.embedding(rows.masked_fill(elsewhere, 0), decoder.embed_tokens).masked_fill(elsewhere[:, None], 0)


def stays_away_without_words(decoder, input_ids):
    n = decoder.config.vocab_size
    rows = input_ids - decoder.group.rank * n
    elsewhere = (rows < 0) | (rows >= n)
    if bool(elsewhere.all()):
        return torch.zeros(len(input_ids), decoder.embed_tokens.shape[1])
    return embed(decoder, input_ids, rows, elsewhere)


def changes_the_ids(decoder, input_ids):
    input_ids -= decoder.group.rank * decoder.config.vocab_size
    elsewhere = (input_ids < 0) | (input_ids >= decoder.config.vocab_size)
    return embed(decoder, input_ids, input_ids, elsewhere)


COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")


def _cut(num, rank, size):
    return slice(rank * num // size, (rank + 1) * num // size)


def _heads(layer, num_rows, config, rank, size):
    if layer not in ("k_proj", "v_proj"):
        return _cut(num_rows, rank, size)
    num_heads = config.num_key_value_heads
    first = rank * num_heads // size
    return slice(first * config.head_dim, (first + max(1, num_heads // size)) * config.head_dim)


def _read(part, name, config, rank, size, rows=_heads):
    """Right for everything that is not packed, if rows() is."""
    layer, kind = name.split(".")[-2:]
    shape = part.get_shape()
    if layer in ("o_proj", "down_proj") and kind == "weight":
        return part[:, _cut(shape[1], rank, size)]
    return part[rows(layer, shape[0], config, rank, size)] if layer in COLUMNS else part[:]


def rows_and_columns_swapped(part, name, config, rank, size):
    shape = part.get_shape()
    if any(layer in name for layer in ("o_proj.weight", "down_proj.weight")):
        return part[_cut(shape[0], rank, size)]
    if len(shape) == 2 and "embed" not in name and "lm_head" not in name:
        return part[:, _cut(shape[1], rank, size)]
    return _read(part, name, config, rank, size)


def rows_of_everything(part, name, config, rank, size):
    return part[_cut(part.get_shape()[0], rank, size)] if len(part.get_shape()) == 2 else part[:]


def reads_all_then_cuts(part, name, config, rank, size):
    class Memory:
        def __init__(self, tensor):
            self.tensor = tensor

        def get_shape(self):
            return list(self.tensor.shape)

        def __getitem__(self, share):
            return self.tensor[share]

    return _read(Memory(part[:]), name, config, rank, size)


def cuts_in_whole_heads(part, name, config, rank, size):
    """Everything in units of head_dim: what does not fill a head is lost."""

    def rows(layer, num_rows, config, rank, size):
        num_units = num_rows // config.head_dim // size
        return slice(rank * num_units * config.head_dim, (rank + 1) * num_units * config.head_dim)

    return _read(part, name, config, rank, size, rows)


def one_row_too_late(part, name, config, rank, size):
    def rows(layer, num_rows, config, rank, size):
        share = _heads(layer, num_rows, config, rank, size)
        return share if rank == 0 else slice(share.start + 1, share.stop + 1)

    return _read(part, name, config, rank, size, rows)


def rows_overlap(part, name, config, rank, size):
    def rows(layer, num_rows, config, rank, size):
        share = _heads(layer, num_rows, config, rank, size)
        return share if rank == 0 else slice(share.start - 1, share.stop - 1)

    return _read(part, name, config, rank, size, rows)


def forgets_the_rank(part, name, config, rank, size):
    return _read(part, name, config, 0, size)


def row_parallel_bias_is_cut(part, name, config, rank, size):
    if name.endswith(("o_proj.bias", "down_proj.bias")):
        return part[_cut(part.get_shape()[0], rank, size)]
    return _read(part, name, config, rank, size)


def norms_are_cut(part, name, config, rank, size):
    if "norm" in name:
        return part[_cut(part.get_shape()[0], rank, size)]
    return _read(part, name, config, rank, size)


def biases_are_whole(part, name, config, rank, size):
    return part[:] if name.endswith("bias") else _read(part, name, config, rank, size)


def kv_heads_are_not_copied(part, name, config, rank, size):
    return _read(part, name, config, rank, size, lambda layer, num_rows, config, *place: _cut(num_rows, *place))


def kv_heads_in_turn(part, name, config, rank, size):
    def rows(layer, num_rows, config, rank, size):
        if layer in ("k_proj", "v_proj") and size > config.num_key_value_heads:
            head = rank % config.num_key_value_heads
            return slice(head * config.head_dim, (head + 1) * config.head_dim)
        return _heads(layer, num_rows, config, rank, size)

    return _read(part, name, config, rank, size, rows)


def packed_in_equal_parts(part, name, config, rank, size):
    if "qkv_proj" in name or "gate_up_proj" in name:
        return part[_cut(part.get_shape()[0], rank, size)]
    return _read(part, name, config, rank, size)


def _read_packed(part, name, config, rank, size, kv_rows=_heads):
    if "gate_up_proj" in name:
        n = config.intermediate_size
        share = _cut(n, rank, size)
        return torch.cat([part[share], part[n + share.start : n + share.stop]])
    if "qkv_proj" in name:
        shares, first = [], 0
        for layer in ("q_proj", "k_proj", "v_proj"):
            heads = config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads
            share = kv_rows(layer, heads * config.head_dim, config, rank, size)
            shares.append(part[first + share.start : first + share.stop])
            first += heads * config.head_dim
        return torch.cat(shares)
    return _read(part, name, config, rank, size)


def packed_kv_is_not_copied(part, name, config, rank, size):
    return _read_packed(part, name, config, rank, size, lambda layer, num_rows, config, *place: _cut(num_rows, *place))


def packed_is_read_whole(part, name, config, rank, size):
    if "gate_up_proj" in name:
        n, share, whole = config.intermediate_size, _cut(config.intermediate_size, rank, size), part[:]
        return torch.cat([whole[:n][share], whole[n:][share]])
    return _read_packed(part, name, config, rank, size)


WRONG = {
    "linear_forward": [
        (bias_on_every_rank, "the bias is in it 3 times"),
        (bias_on_no_rank, "the bias is missing"),
        (columns_without_bias, "here every rank has a part of its own"),
        (forgets_the_sum, "that is this rank's partial sum"),
        (averages, "added up, not averaged"),
        (sums_columns_too, "layer.group is None in a column-parallel layer"),
        (cuts_x_again, "a row-parallel layer gets its x cut already"),
        (adds_up_x, "x, weight and bias must stay as they are"),
        (only_rank_0_meets, "every rank must call all_reduce"),
        (swaps_rows_and_columns, "rank 0 of 3, a row-parallel layer without a bias"),
        (past_the_product, "call layer.product"),
    ],
    "embed": [
        (border_one_too_far, "words of other ranks need a row that exists"),
        (first_word_is_lost, "nobody has put it in"),
        (forgets_the_offset, "nobody has put it in"),
        (strangers_get_a_row, "who does not hold a word must add zeros"),
        (negative_rows_wrap, "who does not hold a word must add zeros"),
        (keeps_its_part, "calls of all_reduce"),
        (stays_away_without_words, "every rank must call all_reduce"),
        (changes_the_ids, "input_ids and embed_tokens must stay as they are"),
    ],
    "read_share": [
        (rows_and_columns_swapped, "gate_proj is column-parallel: a rank has rows"),
        (rows_of_everything, "o_proj is row-parallel: a rank has the columns"),
        (reads_all_then_cuts, "more numbers read than returned"),
        (cuts_in_whole_heads, "the 2 ranks have 16 of 18 rows together"),
        (one_row_too_late, "one row too late"),
        (rows_overlap, "one row too early"),
        (forgets_the_rank, "rank 1 of 2"),
        (row_parallel_bias_is_cut, "so its bias is not cut"),
        (norms_are_cut, "norms work on whole vectors"),
        (biases_are_whole, "that is all of it"),
        (kv_heads_are_not_copied, "needs a copy of that one, whole"),
        (kv_heads_in_turn, "query head 1 belongs to KV head 0"),
        (packed_in_equal_parts, "across the borders inside it"),
        (packed_kv_is_not_copied, "qkv_proj"),
        (packed_is_read_whole, "more numbers read than returned"),
    ],
}
