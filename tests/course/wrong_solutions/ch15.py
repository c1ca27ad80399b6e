"""Wrong solutions of chapter 15."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
add_adapters
    last_slot_for_nobody: -1 is no slot
        ~ if slot < 0: => if False:
    all_rows: stay; -1 is not
        ~ (slots == slot).nonzero().squeeze(1) => torch.arange(len(x))
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
    instead_of_the_base: one row, rank 1
        - y[rows] = (y[rows].float() + torch.cat(changes, dim=1)).to(y.dtype)
        + y[rows] = torch.cat(changes, dim=1).to(y.dtype)
    rounds_between: not before
        = inner = inputs @ weights.a[slot, part, :, : x.shape[1]].float().T  # [rows, max_rank]
        + inner = inner.to(x.dtype).float()
    dense_change: first x with A
        - inner = inputs @ weights.a[slot, part, :, : x.shape[1]].float().T  # [rows, max_rank]
        - changes.append(inner @ weights.b[slot, :, start : start + size].float())
        + a = weights.a[slot, part, :, : x.shape[1]].float()
        + changes.append(inputs @ (a.T @ weights.b[slot, :, start : start + size].float()))
    row_by_row: how many matrix products
        - for slot in slots.unique().tolist():
        + for row, slot in enumerate(slots.tolist()):
        =     if slot < 0:
        =         continue
        -     rows = (slots == slot).nonzero().squeeze(1)
        +     rows = torch.tensor([row])
    returns_y: return nothing
        = y[rows] = (y[rows].float() + torch.cat(changes, dim=1)).to(y.dtype)
        + return y
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
    evicted_stays: who is in memory afterwards
        ~ slot = slots.pop(oldest) => slot = slots[oldest]
    a_second_slot: was used just now
        ~ if lora_id in slots: => if lora_id in slots and not free:
meet_experts
    always_scales: without normalize
        @ An expert for every token
        ~ if normalize: => if True:
    the_worst_experts: the best expert alone
        @ An expert for every token
        ~ topk(num_chosen) => topk(num_chosen, largest=False)
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
    all_rows: how many does it get
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[rows] += weights[rows, places, None] * expert(hidden)[rows].float()
    row_by_row: how often is it called
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + for row, place in zip(rows, places):
        +     out[row] += weights[row, place] * expert(hidden[row : row + 1])[0].float()
    changes_hidden: have been changed
        ~ torch.zeros(hidden.shape) => hidden.zero_()
    sums_in_bf16: so sum up in float32
        ~ torch.zeros(hidden.shape) => torch.zeros_like(hidden)
    experts_in_float32: in the dtype of hidden
        ~ expert(hidden[rows]) => expert(hidden[rows].float())
    float32_result: dtype of hidden
        ~ out.to(hidden.dtype) => out
    probabilities_in_bf16: the same number in bf16
        ~ scores.float().softmax(-1) => scores.softmax(-1)
""")
