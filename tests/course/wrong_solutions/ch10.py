"""Wrong solutions of chapter 10."""

import torch

from chapters.ch10_optimization_stack import solution
from tests.course.wrong_solutions import Edit

SUM, ACC = "running_sum * rescale + weights.sum(-1)", "acc * rescale[..., None] + weights @ values"
RESULT = f"return new_max, {SUM}, {ACC}"
SLOT = "block_table[i // block_size] * block_size + i % block_size"
MASK = "torch.tensor(keys) > position"
FOLD = "running_max, running_sum, acc = fold(running_max, running_sum, acc, scores, v.transpose(0, 1))"


def other_groups(q, block_table, num_keys, reader):
    """Query head h uses KV head h % num_kv_heads."""
    order = torch.arange(q.shape[1]).view(-1, reader.num_kv_heads).T.flatten()
    return solution.attend(q[:, order], block_table, num_keys, reader)[:, order.argsort()]


WRONG = {
    "fold": [
        Edit(
            "subtracts_no_maximum",
            """
            base = new_max.masked_fill(new_max == -torch.inf, 0.0)
            rescale = (running_max - base).exp()  # what was summed up under the old maximum, seen from the new one
            weights = (scores - base[..., None]).exp()
            """,
            """
            rescale = torch.ones_like(running_max)
            weights = scores.exp()
            """,
            "subtract the new maximum from every score before exp()",
        ),
        Edit(
            "subtracts_too_late",
            "weights = (scores - base[..., None]).exp()",
            "weights = scores.exp() / base.exp()[..., None]",
            "exp() of a large number is inf",
        ),
        Edit(
            "keeps_the_accumulator",
            ACC,
            "acc + weights @ values",
            "acc (scores 1, then 3 and 1, after tile 2 of 2): what was summed up before",
        ),
        Edit(
            "keeps_the_sum",
            SUM,
            "running_sum + weights.sum(-1)",
            "running_sum (scores 1, then 3 and 1, after tile 2 of 2): what was summed up before",
        ),
        Edit(
            "nan_at_the_beginning",
            "base = new_max.masked_fill(new_max == -torch.inf, 0.0)",
            "base = new_max",
            "-inf - (-inf) is nan",
        ),
        Edit(
            "takes_the_new_maximum",
            "torch.maximum(running_max, scores.amax(-1))",
            "scores.amax(-1)",
            "an earlier one may be larger",
        ),
        Edit(
            "weights_from_their_own_maximum",
            "(scores - base[..., None]).exp()",
            "(scores - scores.amax(-1, keepdim=True)).exp()",
            "not from their own maximum",
        ),
        Edit(
            "grows",
            "(running_max - base).exp()",
            "(base - running_max).exp().nan_to_num(0, 0, 0)",
            "it must shrink: exp(old maximum - new maximum)",
        ),
        Edit("divides", ACC, f"({ACC}) / ({SUM})[..., None]", "divided by running_sum already"),
        Edit("forgets", f"{SUM}, {ACC}", "weights.sum(-1), weights @ values", "the keys before are forgotten"),
        Edit(
            "shrinks_all",
            RESULT,
            """
            rescale = torch.where(running_max == -torch.inf, 1.0, rescale)
            return new_max, (running_sum + weights.sum(-1)) * rescale, (acc + weights @ values) * rescale[..., None]
            """,
            "only what was there before shrinks",
        ),
        Edit("in_place", SUM, "running_sum.mul_(rescale).add_(weights.sum(-1))", "return new tensors"),
    ],
    "attend": [
        Edit("ignores_the_table", SLOT, "i", "that looks like a token's number"),
        Edit(
            "first_block_only", SLOT, "block_table[0] * block_size + i", "none of the sequence's blocks has this slot"
        ),
        Edit(
            "reads_full_tiles",
            "min(first + TILE, num_keys))",
            "min(first + TILE, len(block_table) * block_size))",
            "the slot of token 7 was read, and there are 7 tokens",
        ),
        Edit(
            "drops_the_last_tile",
            "range(0, num_keys, TILE)",
            "range(0, num_keys // TILE * TILE or num_keys, TILE)",
            "some were never read",
        ),
        Edit(
            "reads_everything_at_once",
            "range(first, min(first + TILE, num_keys))",
            "range(num_keys)",
            "a tile has 32 at most",
        ),
        Edit("without_mask", MASK, "torch.tensor(keys) > num_keys", "causal masking is missing"),
        Edit(
            "masks_full_tiles_only",
            "scores = scores.masked_fill(torch.tensor(keys) > position, -torch.inf)",
            "if keys.stop < num_keys:\n    scores = scores.masked_fill(torch.tensor(keys) > position, -torch.inf)",
            "causal masking is missing",
        ),
        Edit("sees_one_too_many", MASK, "torch.tensor(keys) > position + 1", "one key too many"),
        Edit("not_to_itself", MASK, "torch.tensor(keys) > position - int(rows > 1)", "a token attends to itself, too"),
        Edit(
            "rows_from_zero",
            "torch.arange(num_keys - rows, num_keys)",
            "(torch.arange(rows) if rows > 1 else torch.tensor([num_keys - 1]))",
            "row i stands at position num_keys - rows + i",
        ),
        (other_groups, "query head h uses KV head h // group"),
        Edit("unscaled", "(q * head_dim**-0.5)", "q", "no scaling"),
        Edit(
            "keeps_the_sums",
            FOLD,
            """
            new_max = torch.maximum(running_max, scores.amax(-1))
            running_max, running_sum, acc = fold(new_max, running_sum, acc, scores, v.transpose(0, 1))
            """,
            "not over several",
        ),
        Edit(
            "overflows",
            FOLD,
            "running_sum, acc = running_sum + scores.exp().sum(-1), acc + scores.exp() @ v.transpose(0, 1)",
            "does exp() overflow",
        ),
        Edit(
            "last_tile_counts",
            "fold(running_max, running_sum, acc, scores, v.transpose(0, 1))",
            "fold(running_max, running_sum * 0, acc * 0, scores, v.transpose(0, 1))",
            "only the last tile counts",
        ),
        Edit(
            "keeps_every_tile",
            FOLD,
            """
            kept = [(scores, v)] if first == 0 else [*kept, (scores, v)]
            weights = torch.cat([scores for scores, _ in kept], -1).softmax(-1)
            running_sum, acc = weights.sum(-1), weights @ torch.cat([v for _, v in kept]).transpose(0, 1)
            """,
            "what you hold grows with the number of keys",
        ),
        Edit("two_passes", "in range(0, num_keys, TILE)", "in [*range(0, num_keys, TILE)] * 2", "was read twice"),
    ],
    "pad_decode": [
        Edit(
            "writes_to_slot_0", "pad(batch.slot_mapping, -1)", "pad(batch.slot_mapping, 0)", "must not write: slot -1"
        ),
        Edit("sees_no_key", "pad(batch.seqlens_k, 1)", "pad(batch.seqlens_k, 0)", "a softmax over no key is nan"),
        Edit(
            "sees_as_many_as_the_longest",
            "pad(batch.seqlens_k, 1)",
            "pad(batch.seqlens_k, batch.max_key_len)",
            "attends to exactly one key",
        ),
        Edit("wants_the_old_rows", "=torch.arange(size),", "=batch.logits_rows,", "the caller drops the rest"),
        Edit(
            "keeps_the_old_borders",
            "torch.arange(size + 1, dtype=torch.int32)",
            "batch.cu_seqlens_q",
            "every sequence has one row, the padding ones too",
        ),
        Edit(
            "empty_sequences",
            "torch.arange(size + 1, dtype=torch.int32)",
            "torch.arange(size + 1, dtype=torch.int32).clamp(max=len(batch.seqlens_k))",
            "every sequence has one row, the padding ones too",
        ),
        Edit(
            "repeats_the_last",
            "pad(batch.input_ids, 0)",
            "pad(batch.input_ids, int(batch.input_ids[-1]))",
            "the token id of a row that pads is 0",
        ),
        Edit(
            "in_front",
            "pad(batch.input_ids, 0)",
            "F.pad(batch.input_ids, (num_missing, 0))",
            "are those of the real sequences",
        ),
        Edit("one_type_for_all", "pad(batch.seqlens_k, 1)", "pad(batch.seqlens_k, 1).long()", "another dtype"),
        Edit(
            "resizes_in_place",
            "pad(batch.slot_mapping, -1)",
            "batch.slot_mapping.resize_(size).index_fill_(0, torch.arange(size - num_missing, size), -1)",
            "of the batch that you were given has been changed",
        ),
    ],
}
