"""Wrong solutions of chapter 10."""

import torch

from chapters.ch10_optimization_stack import solution
from tests.course.wrong_solutions import edits


def other_groups(q, block_table, num_keys, reader):
    """Query head h uses KV head h % num_kv_heads."""
    order = torch.arange(q.shape[1]).view(-1, reader.num_kv_heads).T.flatten()
    return solution.attend(q[:, order], block_table, num_keys, reader)[:, order.argsort()]


WRONG = edits("""
fold
    subtracts_no_maximum: subtract the new maximum from every score before exp()
        + weights, rescale = scores.exp(), torch.ones_like(rescale)
        = return new_max,
    subtracts_too_late: exp() of a large number is inf
        ~ weights = (scores - base[..., None]).exp() => weights = scores.exp() / base.exp()[..., None]
    keeps_the_accumulator: acc (scores 1, then 3 and 1, after tile 2 of 2): what was summed up before
        ~ acc * rescale[..., None] + weights @ values => acc + weights @ values
    nan_at_the_beginning: -inf - (-inf) is nan
        ~ base = new_max.masked_fill(new_max == -torch.inf, 0.0) => base = new_max
    takes_the_new_maximum: an earlier one may be larger
        ~ torch.maximum(running_max, scores.amax(-1)) => scores.amax(-1)
    weights_from_their_own_maximum: not from their own maximum
        ~ (scores - base[..., None]).exp() => (scores - scores.amax(-1, keepdim=True)).exp()
    grows: it must shrink: exp(old maximum - new maximum)
        ~ (running_max - base).exp() => (base - running_max).exp().nan_to_num(0, 0, 0)
    divides: divided by running_sum already
        - acc * rescale[..., None] + weights @ values
        + (acc * rescale[..., None] + weights @ values) / (running_sum * rescale + weights.sum(-1))[..., None]
    forgets: the keys before are forgotten
        - running_sum * rescale + weights.sum(-1), acc * rescale[..., None] + weights @ values
        + weights.sum(-1), weights @ values
    shrinks_all: only what was there before shrinks
        - return new_max, running_sum * rescale + weights.sum(-1), acc * rescale[..., None] + weights @ values
        + rescale = torch.where(running_max == -torch.inf, 1.0, rescale)
        + return new_max, (running_sum + weights.sum(-1)) * rescale, (acc + weights @ values) * rescale[..., None]
    in_place: return new tensors
        ~ running_sum * rescale + weights.sum(-1) => running_sum.mul_(rescale).add_(weights.sum(-1))
attend
    ignores_the_table: that looks like a token's number
        ~ block_table[i // block_size] * block_size + i % block_size => i
    first_block_only: none of the sequence's blocks has this slot
        ~ block_table[i // block_size] * block_size + i % block_size => block_table[0] * block_size + i
    reads_full_tiles: the slot of token 7 was read, and there are 7 tokens
        ~ min(first + TILE, num_keys)) => min(first + TILE, len(block_table) * block_size))
    drops_the_last_tile: some were never read
        ~ range(0, num_keys, TILE) => range(0, num_keys // TILE * TILE or num_keys, TILE)
    reads_everything_at_once: a tile has 32 at most
        ~ range(first, min(first + TILE, num_keys)) => range(num_keys)
    without_mask: causal masking is missing
        ~ torch.tensor(keys) > position => torch.tensor(keys) > num_keys
    sees_one_too_many: one key too many
        ~ torch.tensor(keys) > position => torch.tensor(keys) > position + 1
    not_to_itself: a token attends to itself, too
        ~ torch.tensor(keys) > position => torch.tensor(keys) > position - int(rows > 1)
    rows_from_zero: row i stands at position num_keys - rows + i
        ~ torch.arange(num_keys - rows, num_keys) => (torch.arange(rows) if rows > 1 else torch.tensor([num_keys - 1]))
    unscaled: no scaling
        ~ (q * head_dim**-0.5) => q
    keeps_the_sums: not over several
        - running_max, running_sum, acc = fold(running_max, running_sum, acc, scores, v.transpose(0, 1))
        + new_max = torch.maximum(running_max, scores.amax(-1))
        + running_max, running_sum, acc = fold(new_max, running_sum, acc, scores, v.transpose(0, 1))
    overflows: does exp() overflow
        - running_max, running_sum, acc = fold(running_max, running_sum, acc, scores, v.transpose(0, 1))
        + running_sum, acc = running_sum + scores.exp().sum(-1), acc + scores.exp() @ v.transpose(0, 1)
    last_tile_counts: only the last tile counts
        - fold(running_max, running_sum, acc, scores, v.transpose(0, 1))
        + fold(running_max, running_sum * 0, acc * 0, scores, v.transpose(0, 1))
    keeps_every_tile: what you hold grows with the number of keys
        - running_max, running_sum, acc = fold(running_max, running_sum, acc, scores, v.transpose(0, 1))
        + kept = [(scores, v)] if first == 0 else [*kept, (scores, v)]
        + weights = torch.cat([scores for scores, _ in kept], -1).softmax(-1)
        + running_sum, acc = weights.sum(-1), weights @ torch.cat([v for _, v in kept]).transpose(0, 1)
    two_passes: was read twice
        ~ in range(0, num_keys, TILE) => in [*range(0, num_keys, TILE)] * 2
pad_decode
    writes_to_slot_0: must not write: slot -1
        ~ pad(batch.slot_mapping, -1) => pad(batch.slot_mapping, 0)
    sees_no_key: a softmax over no key is nan
        ~ pad(batch.seqlens_k, 1) => pad(batch.seqlens_k, 0)
    wants_the_old_rows: the caller drops the rest
        ~ =torch.arange(size), => =batch.logits_rows,
    empty_sequences: every sequence has one row, the padding ones too
        - torch.arange(size + 1, dtype=torch.int32)
        + torch.arange(size + 1, dtype=torch.int32).clamp(max=len(batch.seqlens_k))
    repeats_the_last: the token id of a row that pads is 0
        ~ pad(batch.input_ids, 0) => pad(batch.input_ids, int(batch.input_ids[-1]))
    in_front: are those of the real sequences
        ~ pad(batch.input_ids, 0) => F.pad(batch.input_ids, (num_missing, 0))
    one_type_for_all: another dtype
        ~ pad(batch.seqlens_k, 1) => pad(batch.seqlens_k, 1).long()
    resizes_in_place: of the batch that you were given has been changed
        - pad(batch.slot_mapping, -1)
        + batch.slot_mapping.resize_(size).index_fill_(0, torch.arange(size - num_missing, size), -1)
""")
WRONG["attend"].append((other_groups, "query head h uses KV head h // group"))
