"""Wrong solutions of chapter 15."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
add_adapters
    last_slot_for_nobody: -1 is no slot
        ~ if slot < 0: => if False:
    neighbors: need not be neighbors
        - (slots == slot).nonzero().squeeze(1)
        + torch.arange(*((slots == slot).nonzero().squeeze(1)[[0, -1]] + torch.tensor([0, 1])).tolist())
    one_a_for_all_parts: part p takes a[slot, p]
        ~ weights.a[slot, part => weights.a[slot, 0
    reads_the_padding: RuntimeError
        ~ , : x.shape[1]] => ]
    changes_a_copy: Did you change a copy
        - y[rows] = (y[rows].float() + torch.cat(changes, dim=1)).to(y.dtype)
        + y[rows].add_(torch.cat(changes, dim=1).to(y.dtype))
    rounds_between: not before
        = inner = inputs @ weights.a[slot, part, :, : x.shape[1]].float().T  # [rows, max_rank]
        + inner = inner.to(x.dtype).float()
    row_by_row: how many matrix products
        - for slot in slots.unique().tolist():
        + for row, slot in enumerate(slots.tolist()):
        =     if slot < 0:
        =         continue
        -     rows = (slots == slot).nonzero().squeeze(1)
        +     rows = torch.tensor([row])
slot_for
    most_recently_used: used least recently
        - oldest = next(other for other in slots if other not in needed)
        + oldest = next(other for other in reversed(slots) if other not in needed)
    evicts_the_needed: is needed in this step
        ~ oldest = next(other for other in slots if other not in needed) => oldest = next(iter(slots))
    next_number: slot 1 is free
        ~ slot = free[0] => slot = len(slots)
    use_is_not_noted: was used just now
        ~ slot = slots.pop(lora_id) => slot = slots[lora_id]
id_of_weights
    number_for_ever: a request may come whose number this is
        ~ max([2**31 - 1, *ids.values()]) + 1 if was_used else number => number
    counts_from_one: a request may come whose number this is
        ~ [2**31 - 1, *ids.values()] => [*ids.values()]
    one_more_for_each_number: other weights have had this id
        ~ max([2**31 - 1, *ids.values()]) + 1 => 2**31
    forgets_what_was: the same id as before
        ~ if (number, digest) not in ids: => if next((d for n, d in reversed(ids) if n == number), None) != digest:
    weights_alone: a number's first weights have the number
        + for (_, other), given in [*ids.items()]:
        +     if other == digest and (number, digest) not in ids:
        +         ids[number, digest] = given
        = if (number, digest) not in ids:
        =     was_used = any(number == other for other, _ in ids)
    always_its_own: a number's first weights have the number
        ~ any(number == other for other, _ in ids) => True
    enters_nothing: ids afterwards
        ~ ids[number, digest] = max => return max
""")
