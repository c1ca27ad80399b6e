"""Wrong solutions of chapter 15."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
add_adapters
    last_slot_for_nobody: -1 is no slot
        ~ if slot < 0: => if False:
    neighbours: need not be neighbours
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
meet_experts
    always_scales: without normalize
        @ An expert for every token
        ~ if normalize: => if True:
    weighs_the_input: weigh its output, not its input
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[rows] += expert(weights[rows, places, None] * hidden[rows]).float()
    last_expert_wins: experts 1 and 3
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[rows] = weights[rows, places, None] * expert(hidden[rows]).float()
    stays_grouped: go back to the places
        @ One batch, many weights
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[: len(rows)] += weights[rows, places, None] * expert(hidden[rows]).float()
    row_by_row: how often is it called
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + for row, place in zip(rows, places):
        +     out[row] += weights[row, place] * expert(hidden[row : row + 1])[0].float()
    changes_hidden: have been changed
        ~ torch.zeros(hidden.shape) => hidden.zero_()
    sums_in_bf16: so sum up in float32
        ~ torch.zeros(hidden.shape) => torch.zeros_like(hidden)
""")
