"""Wrong solutions of chapter 15."""

from tests.course.wrong_solutions import Edit

ADDS = "out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()"

INNER = "inner = inputs @ weights.a[slot, part, :, : x.shape[1]].float().T  # [rows, max_rank]"
WRITES = "y[rows] = (y[rows].float() + torch.cat(changes, dim=1)).to(y.dtype)"
OLDEST = "oldest = next(other for other in slots if other not in needed)"

WRONG = {
    "add_adapters": [
        Edit("last_slot_for_nobody", "\nif slot < 0:\n    continue\n", "", "-1 is no slot"),
        Edit("all_rows", "(slots == slot).nonzero().squeeze(1)", "torch.arange(len(x))", "stay; -1 is not"),
        Edit(
            "neighbours",
            "(slots == slot).nonzero().squeeze(1)",
            "torch.arange(*((slots == slot).nonzero().squeeze(1)[[0, -1]] + torch.tensor([0, 1])).tolist())",
            "need not be neighbours",
        ),
        Edit("first_slot_only", "weights.a[slot, part", "weights.a[0, part", "stay; -1 is not"),
        Edit("one_a_for_all_parts", "weights.a[slot, part", "weights.a[slot, 0", "part p takes a[slot, p]"),
        Edit("reads_the_padding", ", : x.shape[1]]", "]", "RuntimeError"),
        Edit("columns_from_the_beginning", "start += size", "pass", "part p takes a[slot, p]"),
        Edit("changes_a_copy", WRITES, "y[rows].add_(torch.cat(changes, dim=1).to(y.dtype))", "Did you change a copy"),
        Edit("a_new_y", WRITES, "y = y.index_add(0, rows, torch.cat(changes, dim=1).to(y.dtype))", "another tensor"),
        Edit("instead_of_the_base", WRITES, "y[rows] = torch.cat(changes, dim=1).to(y.dtype)", "one row, rank 1"),
        Edit("rounds_between", INNER + "\n", INNER + "\ninner = inner.to(x.dtype).float()\n", "not before"),
        Edit("computes_in_bf16", "inputs, start = x[rows].float(), 0", "inputs, start = x[rows], 0", "RuntimeError"),
        Edit(
            "dense_change",
            """
                inner = inputs @ weights.a[slot, part, :, : x.shape[1]].float().T  # [rows, max_rank]
                changes.append(inner @ weights.b[slot, :, start : start + size].float())
            """,
            """
                a = weights.a[slot, part, :, : x.shape[1]].float()
                changes.append(inputs @ (a.T @ weights.b[slot, :, start : start + size].float()))
            """,
            "first x with A",
        ),
        Edit(
            "row_by_row",
            """
                for slot in slots.unique().tolist():
                    if slot < 0:
                        continue
                    rows = (slots == slot).nonzero().squeeze(1)
            """,
            """
                for row, slot in enumerate(slots.tolist()):
                    if slot < 0:
                        continue
                    rows = torch.tensor([row])
            """,
            "how many matrix products",
        ),
        Edit("all_slots", "for slot in slots.unique().tolist():", "for slot in range(len(weights.a)):", "how many"),
        Edit("returns_y", WRITES, WRITES + "\nreturn y", "return nothing"),
        Edit("scales_again", "torch.cat(changes, dim=1)", "torch.cat(changes, dim=1) * 2", "one row, rank 1"),
    ],
    "slot_for": [
        Edit(
            "most_recently_used", OLDEST, OLDEST.replace("in slots if", "in reversed(slots) if"), "used least recently"
        ),
        Edit("evicts_the_needed", OLDEST, "oldest = next(iter(slots))", "is needed in this step"),
        Edit("lowest_id", OLDEST, "oldest = min(slots.keys() - needed)", "8 was used least recently"),
        Edit("never_free", "elif free:", "elif False:", "StopIteration"),
        Edit("largest_free_slot", "slot = free[0]", "slot = free[-1]", "nobody is there"),
        Edit("next_number", "slot = free[0]", "slot = len(slots)", "slot 1 is free"),
        Edit("use_is_not_noted", "slot = slots.pop(lora_id)", "slot = slots[lora_id]", "was used just now"),
        Edit("evicted_stays", "slot = slots.pop(oldest)", "slot = slots[oldest]", "who is in memory afterwards"),
        Edit("not_entered", "slots[lora_id] = slot", "pass", "who is in memory afterwards"),
        Edit("returns_the_id", "return slot", "return lora_id", "the slot"),
        Edit("a_second_slot", "if lora_id in slots:", "if lora_id in slots and not free:", "was used just now"),
    ],
    "meet_experts": [
        Edit(
            "always_scales",
            """
                if normalize:
                    weights = weights / weights.sum(-1, keepdim=True)
            """,
            """
                weights = weights / weights.sum(-1, keepdim=True)
            """,
            "what is missing to 1 is missing",
            "An expert for every token",
        ),
        Edit(
            "never_scales", "\nif normalize:\n    weights = weights / weights.sum(-1, keepdim=True)\n", "", "weight 1"
        ),
        Edit(
            "the_worst_experts",
            "topk(num_chosen)",
            "topk(num_chosen, largest=False)",
            "the best expert alone",
            "An expert for every token",
        ),
        Edit("scores_as_weights", "scores.float().softmax(-1)", "scores.float()", "0.625 and 0.375"),
        Edit("sigmoid", "softmax(-1)", "sigmoid()", "0.625 and 0.375"),
        Edit("softmax_over_rows", "softmax(-1)", "softmax(0)", "row 0 of 1"),
        Edit(
            "weighs_the_input",
            ADDS,
            "out[rows] += expert(weights[rows, places, None] * hidden[rows]).float()",
            "weigh its output, not its input",
        ),
        Edit("last_expert_wins", ADDS, ADDS.replace("+=", "="), "experts 1 and 3"),
        Edit("weights_of_others", "weights[rows, places, None]", "weights[rows, 0, None]", "experts 1 and 3"),
        Edit(
            "stays_grouped",
            ADDS,
            ADDS.replace("out[rows]", "out[: len(rows)]"),
            "go back to the places",
            "One batch, many weights",
        ),
        Edit("all_rows", ADDS, ADDS.replace("expert(hidden[rows])", "expert(hidden)[rows]"), "how many does it get"),
        Edit(
            "row_by_row",
            ADDS,
            """
                for row, place in zip(rows, places):
                    out[row] += weights[row, place] * expert(hidden[row : row + 1])[0].float()
            """,
            "how often is it called",
        ),
        Edit("calls_everybody", "if len(rows):", "if True:", "chosen by 0 rows"),
        Edit("changes_hidden", "torch.zeros(hidden.shape)", "hidden.zero_()", "have been changed"),
        Edit("sums_in_bf16", "torch.zeros(hidden.shape)", "torch.zeros_like(hidden)", "so sum up in float32"),
        Edit("experts_in_float32", "expert(hidden[rows])", "expert(hidden[rows].float())", "in the dtype of hidden"),
        Edit("float32_result", "out.to(hidden.dtype)", "out", "dtype of hidden"),
        Edit("probabilities_in_bf16", "scores.float().softmax(-1)", "scores.softmax(-1)", "the same number in bf16"),
    ],
}
