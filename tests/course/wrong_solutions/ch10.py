"""Wrong solutions of chapter 10."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
fold
    subtracts_too_late: exp() of a large number is inf
        ~ weights = (scores - base[..., None]).exp() => weights = scores.exp() / base.exp()[..., None]
    keeps_the_accumulator: acc (scores 1, then 3 and 1, after tile 2 of 2): what was summed up before
        ~ acc * rescale[..., None] + weights @ values => acc + weights @ values
    nan_at_the_beginning: -inf - (-inf) is nan
        ~ base = new_max.masked_fill(new_max == -torch.inf, 0.0) => base = new_max
    takes_the_new_maximum: an earlier one may be larger
        ~ torch.maximum(running_max, scores.amax(-1)) => scores.amax(-1)
    in_place: return new tensors
        ~ running_sum * rescale + weights.sum(-1) => running_sum.mul_(rescale).add_(weights.sum(-1))
attend
    ignores_the_table: that looks like a token's number
        ~ block_table[i // block_size] * block_size + i % block_size => i
    reads_full_tiles: the slot of token 7 was read, and there are 7 tokens
        ~ min(first + TILE, num_keys)) => min(first + TILE, len(block_table) * block_size))
    reads_everything_at_once: a tile has 32 at most
        ~ range(first, min(first + TILE, num_keys)) => range(num_keys)
    sees_one_too_many: one key too many
        ~ torch.tensor(keys) > position => torch.tensor(keys) > position + 1
    rows_from_zero: row i stands at position num_keys - rows + i
        ~ torch.arange(num_keys - rows, num_keys) => (torch.arange(rows) if rows > 1 else torch.tensor([num_keys - 1]))
    overflows: does exp() overflow
        - running_max, running_sum, acc = fold(running_max, running_sum, acc, scores, v.transpose(0, 1))
        + running_sum, acc = running_sum + scores.exp().sum(-1), acc + scores.exp() @ v.transpose(0, 1)
    last_tile_counts: only the last tile counts
        - fold(running_max, running_sum, acc, scores, v.transpose(0, 1))
        + fold(running_max, running_sum * 0, acc * 0, scores, v.transpose(0, 1))
    other_groups: query heads h * group to
        ~ view(rows, heads, group, head_dim).permute(1, 2, => view(rows, group, heads, head_dim).permute(2, 1,
attend_in_parts
    equal_shares: where a row is cut must not depend on num_workers
        - parts = [(first, min(first + PART, num_keys)) for first in range(0, num_keys, PART)]
        + size = -(-num_keys // num_workers)
        + parts = [(first, min(first + size, num_keys)) for first in range(0, num_keys, size)]
    one_does_it_all: the others wait for it
        ~ run([parts[worker::num_workers] for worker in range(num_workers)]) => run([parts] + [[]] * (num_workers - 1))
    as_they_are_done: add them in the order of the row
        ~ sorted(done, key=lambda part: part.first) => done
    in_double_as_they_are_done: more digits make the difference rarer
        - (_, running_max, running_sum, acc), *others = sorted(done, key=lambda part: part.first)
        + (_, running_max, running_sum, acc), *others = [type(p)(p.first, *(x.double() for x in p[1:])) for p in done]
        = for part in others:
        =     new_max = torch.maximum(running_max, part.running_max)
        =     before, now = (running_max - new_max).exp(), (part.running_max - new_max).exp()
        =     running_sum = running_sum * before + part.running_sum * now
        =     acc = acc * before[..., None] + part.acc * now[..., None]
        =     running_max = new_max
        - return acc / running_sum[..., None]
        + return (acc / running_sum[..., None]).float()
    worker_by_worker: how you group them
        ~ key=lambda part: part.first => key=lambda part: (part.first // PART % num_workers, part.first)
    own_maxima: each part is relative to its own maximum
        - before, now = (running_max - new_max).exp(), (part.running_max - new_max).exp()
        + before = now = torch.ones_like(new_max)
    keeps_acc: running_sum and acc alike
        ~ acc * before[..., None] + part.acc * now[..., None] => acc + part.acc
    not_divided: still to be divided
        ~ return acc / running_sum[..., None] => return acc
pad_decode
    writes_to_slot_0: must not write: slot -1
        ~ pad(batch.slot_mapping, -1) => pad(batch.slot_mapping, 0)
    in_front: are those of the real sequences
        ~ pad(batch.input_ids, 0) => F.pad(batch.input_ids, (num_missing, 0))
    one_type_for_all: a different dtype
        ~ pad(batch.seqlens_k, 1) => pad(batch.seqlens_k, 1).long()
    pads_in_place: of the batch that you were given has been changed
        ~ pad(batch.seqlens_k, 1) => pad(batch.seqlens_k.add_(1), 2) - 1
""")
