"""Wrong solutions of chapter 10, each with a piece of what the student is told."""

from dataclasses import replace

import torch
import torch.nn.functional as F

TILE = 32

# -- fold -------------------------------------------------------------------------------------------------------------


def step(top, scores):
    """(new top, shrink, weights), as they should be."""
    new_top = torch.maximum(top, scores.amax(-1))
    base = new_top.masked_fill(new_top == -torch.inf, 0.0)
    return new_top, (top - base).exp(), (scores - base[..., None]).exp()


def fold_subtracts_no_maximum(top, total, acc, scores, values):
    weights = scores.exp()
    return torch.maximum(top, scores.amax(-1)), total + weights.sum(-1), acc + weights @ values


def fold_subtracts_too_late(top, total, acc, scores, values):
    new_top = torch.maximum(top, scores.amax(-1))
    weights = scores.exp() / new_top.exp()[..., None]
    shrink = (top - new_top).exp()
    return new_top, total * shrink + weights.sum(-1), acc * shrink[..., None] + weights @ values


def fold_keeps_the_accumulator(top, total, acc, scores, values):
    new_top, shrink, weights = step(top, scores)
    return new_top, total * shrink + weights.sum(-1), acc + weights @ values


def fold_keeps_the_sum(top, total, acc, scores, values):
    new_top, shrink, weights = step(top, scores)
    return new_top, total + weights.sum(-1), acc * shrink[..., None] + weights @ values


def fold_nan_at_the_beginning(top, total, acc, scores, values):
    new_top = torch.maximum(top, scores.amax(-1))
    shrink, weights = (top - new_top).exp(), (scores - new_top[..., None]).exp()
    return new_top, total * shrink + weights.sum(-1), acc * shrink[..., None] + weights @ values


def fold_takes_the_new_maximum(top, total, acc, scores, values):
    new_top = scores.amax(-1)
    shrink, weights = (top - new_top).exp(), (scores - new_top[..., None]).exp()
    return new_top, total * shrink + weights.sum(-1), acc * shrink[..., None] + weights @ values


def fold_weights_from_their_own_maximum(top, total, acc, scores, values):
    new_top, shrink, _ = step(top, scores)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return new_top, total * shrink + weights.sum(-1), acc * shrink[..., None] + weights @ values


def fold_grows(top, total, acc, scores, values):
    new_top, _, weights = step(top, scores)
    grow = (new_top - top).exp().nan_to_num(0, 0, 0)
    return new_top, total * grow + weights.sum(-1), acc * grow[..., None] + weights @ values


def fold_divides(top, total, acc, scores, values):
    new_top, shrink, weights = step(top, scores)
    new_total = total * shrink + weights.sum(-1)
    return new_top, new_total, (acc * shrink[..., None] + weights @ values) / new_total[..., None]


def fold_forgets(top, total, acc, scores, values):
    new_top, _, weights = step(top, scores)
    return new_top, weights.sum(-1), weights @ values


def fold_shrinks_all(top, total, acc, scores, values):
    new_top, shrink, weights = step(top, scores)
    shrink = torch.where(top == -torch.inf, 1.0, shrink)
    return new_top, (total + weights.sum(-1)) * shrink, (acc + weights @ values) * shrink[..., None]


def fold_in_place(top, total, acc, scores, values):
    new_top, shrink, weights = step(top, scores)
    total.mul_(shrink).add_(weights.sum(-1))
    acc.mul_(shrink[..., None]).add_(weights @ values)
    return new_top, total, acc


# -- attend -----------------------------------------------------------------------------------------------------------


def tiled(
    q, block_table, num_keys, reader, *, tile=TILE, slot=None, end=None, ahead=0, shift=0, spread=False, scale=None,
    masked=None, fold=None,
):  # fmt: skip
    """attend(), right if nothing else is given."""
    rows, num_heads, head_dim = q.shape
    heads, size = reader.num_kv_heads, reader.block_size
    group = num_heads // heads
    q = q * (head_dim**-0.5 if scale is None else scale)
    q = q.view(rows, group, heads, head_dim).transpose(1, 2) if spread else q.view(rows, heads, group, head_dim)
    q = q.permute(1, 2, 0, 3).reshape(heads, -1, head_dim)
    position = torch.arange(num_keys - rows, num_keys).repeat(group)[:, None] + ahead + shift * (rows - num_keys)
    top, total, acc = torch.full(q.shape[:2], -torch.inf), torch.zeros(q.shape[:2]), torch.zeros_like(q)
    find = slot or (lambda i: block_table[i // size] * size + i % size)
    last = num_keys if end is None else end(num_keys)
    for first in range(0, last, tile):
        keys = range(first, min(first + tile, last))
        k, v = reader.read([find(i) for i in keys])
        scores = q @ k.permute(1, 2, 0)
        if masked is None or masked(keys, num_keys):
            scores = scores.masked_fill(torch.tensor(keys) > position, -torch.inf)
        new_top, shrink, weights = step(top, scores)
        if fold == "unscaled":
            shrink = torch.ones_like(shrink)
        if fold == "no maximum":
            new_top, shrink, weights = top, torch.ones_like(shrink), scores.exp()
        if fold == "last":
            total, acc = total * 0, acc * 0
        top, total = new_top, total * shrink + weights.sum(-1)
        acc = acc * shrink[..., None] + weights @ v.transpose(0, 1)
    out = (acc / total[..., None]).view(heads, group, rows, head_dim)
    return (out.permute(2, 1, 0, 3) if spread else out.permute(2, 0, 1, 3)).reshape(rows, num_heads, head_dim)


def attend_ignores_the_table(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, slot=lambda i: i)


def attend_first_block_only(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, slot=lambda i: block_table[0] * reader.block_size + i)


def attend_reads_full_tiles(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, end=lambda n: len(block_table) * reader.block_size)


def attend_drops_the_last_tile(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, end=lambda n: n // TILE * TILE or n)


def attend_reads_everything_at_once(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, tile=1 << 20)


def attend_without_mask(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, ahead=1 << 20)


def attend_masks_full_tiles_only(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, masked=lambda keys, n: keys.stop < n)


def attend_sees_one_too_many(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, ahead=1)


def attend_not_to_itself(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, ahead=-1) if len(q) > 1 else tiled(q, block_table, num_keys, reader)


def attend_rows_from_zero(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, shift=len(q) > 1)


def attend_other_groups(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, spread=True)


def attend_unscaled(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, scale=1.0)


def attend_keeps_the_sums(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, fold="unscaled")


def attend_overflows(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, fold="no maximum")


def attend_last_tile_counts(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, reader, fold="last")


class Hoard:
    """Reads in tiles and keeps them all, then computes with the whole row."""

    def __init__(self, block_table, num_keys, reader):
        size, self.num_kv_heads, self.block_size = reader.block_size, reader.num_kv_heads, reader.block_size
        self.parts = [
            reader.read([block_table[i // size] * size + i % size for i in range(at, min(at + TILE, num_keys))])
            for at in range(0, num_keys, TILE)
        ]

    def read(self, slots):
        k, v = zip(*self.parts, strict=True)
        return torch.cat(k), torch.cat(v)


def attend_whole_row(q, block_table, num_keys, reader):
    return tiled(q, block_table, num_keys, Hoard(block_table, num_keys, reader), tile=1 << 20)


def attend_two_passes(q, block_table, num_keys, reader):
    tiled(q, block_table, num_keys, reader)
    return tiled(q, block_table, num_keys, reader)


# -- pad_decode -------------------------------------------------------------------------------------------------------


def padded(batch, size, slot=-1, num_keys=1, rows=True):
    n = size - len(batch.seqlens_k)
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, n)),
        positions=F.pad(batch.positions, (0, n)),
        slot_mapping=F.pad(batch.slot_mapping, (0, n), value=slot),
        cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32),
        seqlens_k=F.pad(batch.seqlens_k, (0, n), value=num_keys),
        block_tables=F.pad(batch.block_tables, (0, 0, 0, n)),
        logits_rows=torch.arange(size) if rows else batch.logits_rows,
    )


def pad_writes_to_slot_0(batch, size):
    return padded(batch, size, slot=0)


def pad_sees_no_key(batch, size):
    return padded(batch, size, num_keys=0)


def pad_sees_as_many_as_the_longest(batch, size):
    return padded(batch, size, num_keys=batch.max_key_len)


def pad_wants_the_old_rows(batch, size):
    return padded(batch, size, rows=False)


def pad_keeps_the_old_borders(batch, size):
    return replace(padded(batch, size), cu_seqlens_q=batch.cu_seqlens_q)


def pad_empty_sequences(batch, size):
    last = len(batch.seqlens_k)
    return replace(padded(batch, size), cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32).clamp(max=last))


def pad_repeats_the_last(batch, size):
    index = torch.arange(size).clamp(max=len(batch.seqlens_k) - 1)
    names = ("input_ids", "positions", "slot_mapping", "seqlens_k", "block_tables")
    return replace(padded(batch, size), **{name: getattr(batch, name)[index] for name in names})


def pad_in_front(batch, size):
    n = size - len(batch.seqlens_k)
    return replace(padded(batch, size), input_ids=F.pad(batch.input_ids, (n, 0)))


def pad_one_type_for_all(batch, size):
    return replace(padded(batch, size), seqlens_k=padded(batch, size).seqlens_k.long())


def pad_marks_all_slots(batch, size):
    result = padded(batch, size)
    batch.slot_mapping.fill_(-1)
    return result


WRONG = {
    "fold": [
        (fold_subtracts_no_maximum, "subtract the new top from every score before exp()"),
        (fold_subtracts_too_late, "exp() of a large number is inf"),
        (fold_keeps_the_accumulator, "acc (scores 1, then 3 and 1, after tile 2 of 2): what was summed up before"),
        (fold_keeps_the_sum, "total (scores 1, then 3 and 1, after tile 2 of 2): what was summed up before"),
        (fold_nan_at_the_beginning, "-inf - (-inf) is nan"),
        (fold_takes_the_new_maximum, "an earlier one may be larger"),
        (fold_weights_from_their_own_maximum, "not from their own maximum"),
        (fold_grows, "it must shrink, by exp(old top - new top)"),
        (fold_divides, "divided by total already"),
        (fold_forgets, "the keys before are forgotten"),
        (fold_shrinks_all, "only what was there before shrinks"),
        (fold_in_place, "return new tensors"),
    ],
    "attend": [
        (attend_ignores_the_table, "that looks like a token's number"),
        (attend_first_block_only, "none of the sequence's blocks has this slot"),
        (attend_reads_full_tiles, "the slot of token 7 was read, and there are 7 tokens"),
        (attend_drops_the_last_tile, "some were never read"),
        (attend_reads_everything_at_once, "a tile has 32 at most"),
        (attend_without_mask, "causal masking is missing"),
        (attend_masks_full_tiles_only, "causal masking is missing"),
        (attend_sees_one_too_many, "one key too many"),
        (attend_not_to_itself, "a token attends to itself, too"),
        (attend_rows_from_zero, "row i stands at position num_keys - rows + i"),
        (attend_other_groups, "query head h uses KV head h // group"),
        (attend_unscaled, "no scaling"),
        (attend_keeps_the_sums, "not over several"),
        (attend_overflows, "does exp() overflow"),
        (attend_last_tile_counts, "only the last tile counts"),
        (attend_whole_row, "what you hold grows with the number of keys"),
        (attend_two_passes, "was read twice"),
    ],
    "pad_decode": [
        (pad_writes_to_slot_0, "must not write: slot -1"),
        (pad_sees_no_key, "a softmax over no key is nan"),
        (pad_sees_as_many_as_the_longest, "attends to exactly one key"),
        (pad_wants_the_old_rows, "the caller drops the rest"),
        (pad_keeps_the_old_borders, "every sequence has one row, the padding ones too"),
        (pad_empty_sequences, "every sequence has one row, the padding ones too"),
        (pad_repeats_the_last, "the token id of a row that pads is 0"),
        (pad_in_front, "are those of the real sequences"),
        (pad_one_type_for_all, "another dtype"),
        (pad_marks_all_slots, "of the batch that you were given has been changed"),
    ],
}
