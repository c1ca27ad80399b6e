"""Wrong solutions of chapter 17."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
choose_experts
    always_scales: without normalize
        ~ if normalize: => if True:
    softmax_of_the_chosen: without normalize
        - weights, chosen = scores.float().softmax(-1).topk(num_chosen)
        + weights, chosen = scores.float().topk(num_chosen)
        + weights = weights.softmax(-1)
    one_sum_for_all_rows: whatever the other rows have
        ~ weights.sum(-1, keepdim=True) => weights.sum()
    probabilities_in_bf16: then it is the wrong experts
        ~ scores.float().softmax(-1) => scores.softmax(-1).float()
meet_experts
    weighs_the_input: weigh its output, not its input
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[rows] += expert(weights[rows, places, None] * hidden[rows]).float()
    last_expert_wins: expert 3 0.375
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[rows] = weights[rows, places, None] * expert(hidden[rows]).float()
    scales_again: as they are
        = out = torch.zeros(hidden.shape)
        + weights = weights / weights.sum(-1, keepdim=True)
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
